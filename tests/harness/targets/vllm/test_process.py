"""The process of a role from this side: a small script answers as an engine would."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.targets.vllm.process import RoleError, RoleGoneError, RoleProcess

SCRIPT = """
import json, os, sys
out = os.fdopen(int(sys.argv[-1]), "w")
def say(**message):
    print(json.dumps(message), file=out, flush=True)
say(ready={"role": "played"})
for line in sys.stdin:
    message = json.loads(line)
    name, number = message["command"], message["id"]
    if name == "stop":
        say(id=number, result=None)
        break
    if name == "tell":
        say(event="one", n=1)
        say(event="two", n=2)
        say(id=number, result=message["what"])
    elif name == "wait":
        say(wait="r2", why="held")
        say(id=number, result=json.loads(sys.stdin.readline()))
    elif name == "fail":
        say(id=number, error="ValueError: no")
    elif name == "babble":
        print("not json", file=out, flush=True)
    elif name == "large":
        say(id=number, result="x" * 3_000_000)
    elif name == "die":
        print("(EngineCore pid=7) ERROR 11-30 05:07:26 [core.py:1] ValueError: no room", file=sys.stderr)
        print("bye", file=sys.stderr, flush=True)
        os._exit(3)
    elif name == "silence":
        sys.stdin.readline()
        break
"""
Start = Callable[[], RoleProcess]


@pytest.fixture
def process(tmp_path: Path) -> Iterator[RoleProcess]:
    made = RoleProcess("producer", [sys.executable, "-c", SCRIPT], dict(os.environ), tmp_path / "log")
    yield made
    made.stop()


def call(process: RoleProcess, name: str, **arguments: Any) -> Any:
    return process.call(name, timeout_s=30.0, **arguments)


def test_it_says_that_it_is_ready(process: RoleProcess) -> None:
    assert process.ready(30.0) == {"role": "played"}


def test_events_come_before_the_result_and_in_order(process: RoleProcess) -> None:
    process.ready(30.0)
    seen: list[Any] = []
    assert call(process, "tell", what=[1, 2], on_event=seen.append) == [1, 2]
    assert [(event["event"], event["n"]) for event in seen] == [("one", 1), ("two", 2)]


def test_a_wait_goes_on_when_this_side_has_done_its_part(process: RoleProcess) -> None:
    process.ready(30.0)
    waited: list[tuple[str, str]] = []
    assert call(process, "wait", on_wait=lambda request, why: waited.append((request, why))) == {"go": True}
    assert waited == [("r2", "held")]


def test_a_wait_that_nobody_expects_ends_it(process: RoleProcess) -> None:
    process.ready(30.0)
    with pytest.raises(RoleGoneError, match=r"r2 waits \(held\)"):
        call(process, "wait")


def test_an_error_is_told_and_the_process_goes_on(process: RoleProcess) -> None:
    process.ready(30.0)
    with pytest.raises(RoleError, match="producer: fail: ValueError: no"):
        call(process, "fail")
    assert call(process, "tell", what=1) == 1


def test_an_answer_may_be_larger_than_a_pipe(process: RoleProcess) -> None:
    process.ready(30.0)
    assert len(call(process, "large")) == 3_000_000


def test_a_process_that_ends_says_its_last_error_without_time_and_pid(process: RoleProcess) -> None:
    process.ready(30.0)
    said = r"^the process of the producer ended with 3: ERROR \[core.py:1\] ValueError: no room$"
    with pytest.raises(RoleGoneError, match=said):
        call(process, "die")
    with pytest.raises(RoleGoneError):
        call(process, "tell", what=1)


def test_a_process_that_says_nothing_is_given_up(process: RoleProcess) -> None:
    process.ready(30.0)
    with pytest.raises(RoleGoneError, match="says nothing"):
        process.call("silence", timeout_s=0.0)


def test_what_is_no_message_is_refused(process: RoleProcess) -> None:
    process.ready(30.0)
    with pytest.raises(RoleGoneError, match="unknown: b'not json'"):
        call(process, "babble")


def test_stopping_ends_the_process(tmp_path: Path) -> None:
    process = RoleProcess("consumer", [sys.executable, "-c", SCRIPT], dict(os.environ), tmp_path / "log")
    process.ready(30.0)
    process.stop()
    assert process._process.poll() == 0
