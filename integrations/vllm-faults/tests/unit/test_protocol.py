"""Lines in, lines out: commands, events, waits, and what is no command."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from kvchaos_vllm_faults.protocol import Channel, CommandError, serve


def served(*messages: Any, commands: dict[str, Any]) -> list[dict[str, Any]]:
    lines = "".join(message if isinstance(message, str) else json.dumps(message) + "\n" for message in messages)
    answers = io.StringIO()
    serve(Channel(io.StringIO(lines), answers), commands)
    return [json.loads(line) for line in answers.getvalue().splitlines()]


def test_a_command_gets_its_arguments_and_is_answered() -> None:
    said = served({"id": 4, "command": "add", "a": 1, "b": 2}, commands={"add": lambda a, b: a + b})
    assert said == [{"id": 4, "result": 3}]


def test_an_error_is_answered_and_the_next_command_is_done() -> None:
    def fail() -> None:
        raise CommandError("no")

    said = served(
        {"id": 1, "command": "fail"}, {"id": 2, "command": "ok"}, commands={"fail": fail, "ok": lambda: "yes"}
    )
    assert said == [{"id": 1, "error": "CommandError: no"}, {"id": 2, "result": "yes"}]


def test_an_unknown_command_names_those_that_exist() -> None:
    (said,) = served({"id": 1, "command": "gnerate"}, commands={"generate": None})
    assert "there is no command 'gnerate': there are generate, stop" in said["error"]


def test_stop_is_answered_and_ends_it() -> None:
    said = served({"id": 1, "command": "stop"}, {"id": 2, "command": "ok"}, commands={"ok": lambda: 1})
    assert said == [{"id": 1, "result": None}]


@pytest.mark.parametrize("line", ["nonsense\n", "[1]\n"])
def test_what_is_no_message_ends_the_process_with_an_error(line: str) -> None:
    with pytest.raises(CommandError, match="not"):
        served(line, commands={})


def test_a_wait_returns_when_it_may_go_on() -> None:
    answers = io.StringIO()
    Channel(io.StringIO('{"go": true}\n'), answers).wait("r2", "held")
    assert json.loads(answers.getvalue()) == {"wait": "r2", "why": "held"}


@pytest.mark.parametrize("answer", ['{"go": false}\n', ""])
def test_a_wait_that_is_not_let_go_is_an_error(answer: str) -> None:
    with pytest.raises(CommandError, match="waited for a go"):
        Channel(io.StringIO(answer), io.StringIO()).wait("r2", "held")
