"""What a cell does with its pair, apart from what tests/local shows on real ones."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from engine.proxy import Prompt
from harness.targets.pairs.pair import Pair, PairError
from harness.targets.pairs.run import _Clock, _Competitors


class Producer:
    """Its control channel: answers once it runs."""

    def __init__(self) -> None:
        self.runs = threading.Event()
        self.asked = threading.Event()

    def call(self, name: str, *arguments: Any) -> bool:
        self.runs.wait()
        assert (name, *arguments) == ("end_lease", "r1")
        self.asked.set()
        return False


def clock_of(paused: set[str]) -> tuple[_Clock, Producer]:
    producer = Producer()
    return _Clock(SimpleNamespace(processes=SimpleNamespace(paused=paused), links={"producer": producer})), producer  # type: ignore[arg-type]


def test_a_stopped_producer_is_told_that_its_lease_has_ended_when_it_goes_on() -> None:
    clock, producer = clock_of({"producer"})
    assert clock.end_lease("r1")
    assert not producer.asked.is_set()
    producer.runs.set()
    assert producer.asked.wait(60)


def test_one_that_runs_says_itself_whether_it_held_a_lease() -> None:
    clock, producer = clock_of(set())
    producer.runs.set()
    assert not clock.end_lease("r1")


def test_a_competitor_that_meets_a_dead_producer_ends_and_has_not_finished() -> None:
    """Quietly: an error that leaves a thread is a warning, and fails this test."""

    def send(prompt: Prompt) -> None:
        raise httpx.ReadError("gone")

    competitors = _Competitors(send, [Prompt("c1", (1, 2), 1)])
    assert competitors.release() == "c1"
    competitors.threads[0].join(60)
    assert not competitors.has_finished("c1")


class Undone:
    def __init__(self) -> None:
        self.done: list[str] = []

    def resume_all(self) -> None:
        self.done.append("resume_all")

    def heal(self) -> None:
        self.done.append("heal")


def test_restoring_undoes_what_either_lever_has_left() -> None:
    pair = Pair.__new__(Pair)
    pair.restore()
    undone = Undone()
    pair.processes = pair.network = undone  # type: ignore[assignment]
    pair.restore()
    assert undone.done == ["resume_all", "heal"]


def test_a_pair_of_somebody_else_is_not_started_again() -> None:
    pair = Pair.__new__(Pair)
    assert (pair.killed, pair.mend()) == (frozenset(), False)
    with pytest.raises(PairError, match="producer: nobody here can start it again"):
        pair.revive({"producer"})
