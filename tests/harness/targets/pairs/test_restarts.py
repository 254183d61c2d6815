"""The lever `Restart` over a pair that is none."""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Any

import pytest

from engine.config import EngineConfig
from faults.levers import LeverError
from harness.targets.pairs.pair import PairError
from harness.targets.pairs.restarts import Restarts

CONFIGS = {side: EngineConfig(side, block_size=16, layout="HND") for side in ("producer", "consumer")}


class FakePair:
    """`may_start` lets a start come to its end. Everything that happens is noted in order."""

    def __init__(self, killed: Collection[str] = ("consumer",)) -> None:
        self.killed = frozenset(killed)
        self.may_start = threading.Event()
        self.happened: list[Any] = []
        self.dispatcher = self
        self.broken = False

    def revive(self, names: Collection[str]) -> None:
        self.may_start.wait()
        if self.broken:
            raise PairError("no room")
        self.happened.append(("revive", *names))

    def configure(self, config: EngineConfig) -> None:
        self.happened.append(("configure", config.engine_id, config.block_size, config.layout))

    def subscribe(self, engine: str) -> None:
        self.happened.append(("subscribe", engine))


def restarts_of(pair: FakePair) -> Restarts:
    return Restarts(pair, CONFIGS, lambda config: pair.happened.append(("came back", config.engine_id)))  # type: ignore[arg-type]


def test_it_is_ready_when_the_new_engine_is_configured_and_listened_to() -> None:
    restarts = restarts_of(pair := FakePair())
    assert restarts.start("consumer", 32, "NHD") == "block size 32, layout NHD"
    assert not restarts.ready("consumer")
    pair.may_start.set()
    restarts.join()
    assert restarts.ready("consumer")
    assert pair.happened == [
        ("revive", "consumer"),
        ("configure", "consumer", 32, "NHD"),
        ("came back", "consumer"),
        ("subscribe", "consumer"),
    ]


def test_without_a_shape_it_is_as_it_was() -> None:
    restarts = restarts_of(pair := FakePair())
    pair.may_start.set()
    assert restarts.start("consumer") == "block size 16, layout HND"
    restarts.join()
    assert ("configure", "consumer", 16, "HND") in pair.happened


def test_one_that_runs_or_is_being_started_is_not_started() -> None:
    restarts = restarts_of(pair := FakePair())
    with pytest.raises(LeverError, match="the producer runs"):
        restarts.start("producer")
    restarts.start("consumer")
    with pytest.raises(LeverError, match="has been started already"):
        restarts.start("consumer")
    pair.may_start.set()
    restarts.join()


def test_nobody_waits_for_what_was_not_started() -> None:
    restarts = restarts_of(FakePair())
    with pytest.raises(LeverError, match="nobody has started the consumer"):
        restarts.ready("consumer")
    restarts.join()


def test_one_that_does_not_come_up_is_an_error_for_whoever_asks() -> None:
    restarts = restarts_of(pair := FakePair())
    pair.broken = True
    restarts.start("consumer")
    pair.may_start.set()
    with pytest.raises(LeverError, match="the consumer does not come up again: no room"):
        restarts.join()
    with pytest.raises(LeverError, match="no room"):
        restarts.ready("consumer")


def test_who_gives_up_waits_for_what_is_being_started_and_not_for_its_error() -> None:
    """Else a pair that is stopped now would not know of the process that comes up next."""
    restarts = restarts_of(pair := FakePair())
    pair.broken = True
    restarts.start("consumer")
    pair.may_start.set()
    restarts.close()
    with pytest.raises(LeverError, match="no room"):
        restarts.ready("consumer")
