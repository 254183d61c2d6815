from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from engine.checksum.verdict import Verdict, VerdictStatus
from engine.seams import ParamsPass, Verified
from faults.levers import Levers
from faults.restart_consumer import RestartConsumer, RestartConsumerParams
from harness.plan import plan_cells
from harness.targets import TARGETS
from scenarios.loader import load_scenarios
from scenarios.words import Policy


@dataclass
class FakeConsumer:
    """Process and restart of D."""

    alive: bool = True
    back: bool = False
    asked: list[Any] = field(default_factory=list)

    def kill(self, side: str) -> bool:
        self.asked.append(f"kill {side}")
        was, self.alive = self.alive, False
        return was

    def pause(self, side: str) -> None:
        raise AssertionError("nobody asked for this")

    resume = pause

    def start(self, side: str, block_size: int | None = None, layout: str | None = None) -> str:
        self.asked.append((side, block_size, layout))
        return f"block size {block_size}, layout {layout}"

    def ready(self, side: str) -> bool:
        return self.back


def restart(at: str = "mid_read", **shape: Any) -> dict[str, Any]:
    return {"kind": "restart_consumer", "when": {"load": 2, "at": at}} | shape


def levers(consumer: FakeConsumer) -> Levers:
    return Levers(process=consumer, restart=consumer)


def test_d_dies_in_the_middle_of_the_read_and_others_wait_until_it_is_back(read_of) -> None:
    read = read_of(restart(block_size=32, layout="NHD"), levers(consumer := FakeConsumer()))
    assert not read.seams.emit(ParamsPass("r2", {})).holds
    (waiting,) = read.seams.emit(ParamsPass("r1", {})).holds
    assert not waiting.until()
    index, hold = read.until_struck()
    assert consumer.asked == []
    assert hold.until()
    assert consumer.asked == ["kill consumer", ("consumer", 32, "NHD")]
    assert not waiting.until()
    assert read.context.evidence == []
    consumer.back = True
    assert waiting.until()
    assert waiting.until()
    (evidence,) = read.context.evidence
    assert evidence.what.startswith(f"D was killed after {index} of 24 copy operations had landed")
    assert (evidence.before, evidence.after) == ("old D", "block size 32, layout NHD")
    assert not read.seams.emit(ParamsPass("r3", {})).holds


def test_d_dies_when_the_load_was_judged(read_of) -> None:
    read = read_of(restart("after_verify"), levers(consumer := FakeConsumer()))
    assert not any(read.post(op).holds for op in read.ops)
    for request in ("r1", "r2", "r2"):
        verdict = Verdict(VerdictStatus.VERIFIED)
        read.seams.emit(Verified("consumer", request, verdict, {0: read.blocks}, read.consumer))
    assert consumer.asked == ["kill consumer", ("consumer", None, None)]
    (waiting,) = read.seams.emit(ParamsPass("r1", {})).holds
    consumer.back = True
    assert waiting.until()
    assert "when its load was judged (verified)" in read.context.evidence[0].what


def test_one_that_had_gone_already_was_not_killed(read_of) -> None:
    read = read_of(restart(), levers(consumer := FakeConsumer(alive=False)))
    _, hold = read.until_struck()
    assert not hold.until()
    assert consumer.asked == ["kill consumer"]
    (waiting,) = read.seams.emit(ParamsPass("r1", {})).holds
    assert not waiting.until()
    assert read.context.evidence == []


def test_without_the_levers_nothing_is_held(read_of) -> None:
    read = read_of(restart(), Levers(process=FakeConsumer()))
    assert not any(read.post(op).holds for op in read.ops)
    assert not read.seams.emit(ParamsPass("r1", {})).holds


def test_needs() -> None:
    needs = RestartConsumer.needs(RestartConsumerParams.model_validate(restart("after_verify")))
    assert needs == {"consumer.verified", "proxy.params_pass", "lever.process", "lever.restart"}


@pytest.mark.parametrize("wrong", [{"block_size": 0}, {"layout": "other"}, {"when": {"load": 2, "at": "before_read"}}])
def test_parameters_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        RestartConsumerParams.model_validate(restart() | wrong)


def test_what_needs_processes_applies_on_local_and_not_in_the_simulator(root: Path) -> None:
    scenarios = load_scenarios([root / "scenarios/processes"])
    cells = plan_cells(scenarios, list(Policy), 0, TARGETS["sim"].provides)
    assert all("lever.process" in cell.missing for cell in cells)
    assert not any(cell.missing for cell in plan_cells(scenarios, list(Policy), 0, TARGETS["local"].provides))
