"""partition, reset_connection and slow_link: what they ask of the link, and what they take as proof."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from engine.seams import LoadFinished, RequestEnded
from faults.levers import Levers
from faults.registry import FAULTS
from harness.plan import plan_cells
from harness.targets import TARGETS
from scenarios.loader import load_scenarios
from scenarios.words import Policy


@dataclass
class FakeNetwork:
    packets: int = 3
    asked: list[str] = field(default_factory=list)

    def cut(self) -> str:
        self.asked.append("cut")
        return "scissors"

    def reset(self) -> str:
        self.asked.append("reset")
        return "scissors"

    def slow(self, kbit_s: int) -> str:
        self.asked.append(f"slow {kbit_s}")
        return "treacle"

    def touched(self) -> int:
        return self.packets

    def heal(self) -> None:
        raise AssertionError("the run heals, not the fault")


HALFWAY = [("partition", "cut", "lost"), ("reset_connection", "reset", "reset")]
SLOW = {"kind": "slow_link", "when": {"load": 2, "at": "before_read"}}


def halfway(kind: str) -> dict[str, Any]:
    return {"kind": kind, "when": {"load": 2, "at": "mid_read"}}


@pytest.mark.parametrize(("kind", "asked", "word"), HALFWAY)
def test_the_link_is_changed_once_the_operations_before_have_landed(read_of, kind: str, asked: str, word: str) -> None:
    read = read_of(halfway(kind), Levers(network=(network := FakeNetwork())))
    index, hold = read.until_struck()
    assert network.asked == []
    assert hold.until()
    assert hold.until()
    assert network.asked == [asked]
    read.seams.emit(RequestEnded("producer", "r2", "length"))
    read.seams.emit(RequestEnded("consumer", "r1", "length"))
    assert read.context.evidence == []
    read.seams.emit(RequestEnded("consumer", "r2", "error"))
    (evidence,) = read.context.evidence
    assert f"(scissors) after {index} of 24 copy operations had landed" in evidence.what
    assert (evidence.before, evidence.after) == (f"0 packets {word}", f"3 packets {word}")


@pytest.mark.parametrize("kind", [kind for kind, _, _ in HALFWAY])
def test_a_link_over_which_nothing_went_is_no_evidence(read_of, kind: str) -> None:
    read = read_of(halfway(kind), Levers(network=FakeNetwork(packets=0)))
    _, hold = read.until_struck()
    assert hold.until()
    read.seams.emit(RequestEnded("consumer", "r2", "error"))
    assert read.context.evidence == []


@pytest.mark.parametrize("kind", [kind for kind, _, _ in HALFWAY])
def test_a_read_that_is_not_reached_changes_nothing(read_of, kind: str) -> None:
    read = read_of(halfway(kind), Levers(network=(network := FakeNetwork())))
    assert not any(read.post(op, "r1").holds for op in read.ops)
    read.seams.emit(RequestEnded("consumer", "r2", "error"))
    assert (network.asked, read.context.evidence) == ([], [])


def test_the_link_is_slowed_before_the_first_operation_and_nothing_is_held(read_of) -> None:
    read = read_of(SLOW | {"kbit_s": 64}, Levers(network=(network := FakeNetwork())))
    assert not any(read.post(op, "r1").holds for op in read.ops)
    assert network.asked == []
    assert not any(read.post(op).holds for op in read.ops)
    assert network.asked == ["slow 64"]
    read.seams.emit(LoadFinished("consumer", "r1", {0: read.blocks}, read.consumer))
    assert read.context.evidence == []
    read.seams.emit(LoadFinished("consumer", "r2", {0: read.blocks}, read.consumer))
    (evidence,) = read.context.evidence
    assert evidence.what == "what P sent to D passed at 64 kbit/s (treacle)"
    assert (evidence.before, evidence.after) == ("0 packets waited", "3 packets waited")


def test_a_link_on_which_nothing_waited_was_not_slow(read_of) -> None:
    read = read_of(SLOW, Levers(network=FakeNetwork(packets=0)))
    read.post(read.ops[0])
    read.seams.emit(LoadFinished("consumer", "r2", {0: read.blocks}, read.consumer))
    assert read.context.evidence == []


@pytest.mark.parametrize("params", [halfway("partition"), halfway("reset_connection"), SLOW])
def test_without_the_lever_nothing_happens(read_of, params: dict[str, Any]) -> None:
    read = read_of(params)
    assert not any(read.post(op).holds for op in read.ops)
    read.seams.emit(LoadFinished("consumer", "r2", {0: read.blocks}, read.consumer))
    assert read.context.evidence == []


@pytest.mark.parametrize("kbit_s", [0, 7, "fast"])
def test_a_link_cannot_be_of_any_speed(kbit_s: Any) -> None:
    with pytest.raises(ValidationError):
        FAULTS["slow_link"].params_model.model_validate(SLOW | {"kbit_s": kbit_s})


def test_where_there_are_no_links_to_change_the_cells_do_not_apply(root: Path) -> None:
    scenarios = load_scenarios([root / "scenarios/network"])
    assert len(scenarios) >= 3
    for name in ("sim", "local"):
        cells = plan_cells(scenarios, list(Policy), 0, TARGETS[name].provides)
        assert all("lever.network" in cell.missing for cell in cells)


def test_only_a_partition_needs_a_consumer_that_gives_up_soon() -> None:
    needs = {
        kind: FAULTS[kind].needs(FAULTS[kind].params_model.model_validate(params))
        for kind, params in (("partition", halfway("partition")), ("reset_connection", halfway("reset_connection")))
    }
    assert needs["partition"] - needs["reset_connection"] == {"lever.load_timeout"}
