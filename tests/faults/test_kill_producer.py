from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from engine.checksum.records import GroupBlocks
from engine.seams import LoadScheduled
from faults.kill_producer import KillProducer, KillProducerParams
from faults.levers import Levers
from harness.history import History
from harness.plan import plan_cells
from harness.targets import TARGETS
from scenarios.loader import parse_scenario
from scenarios.words import Policy

KILL = {"kind": "kill_producer", "when": {"load": 2, "at": "mid_read"}}
NUM_OPS = 24  # 3 blocks, 2 layers, K and V, 2 heads
OP_BYTES = 16 * 32
WHAT = re.compile(
    r"P was killed after (\d+) of (\d+) copy operations had landed \((\d+) bytes, as P held them\), "
    r"before number (\d+) was posted"
)


@dataclass
class FakeProcess:
    alive: bool = True
    killed: list[str] = field(default_factory=list)

    def kill(self, side: str) -> bool:
        self.killed.append(side)
        was, self.alive = self.alive, False
        return was

    def pause(self, side: str) -> None:
        raise AssertionError("nobody asked for this")

    resume = pause


@pytest.mark.parametrize("seed", range(5))
def test_it_kills_once_the_operations_before_have_landed_and_then_lets_go(read_of, seed: int) -> None:
    read = read_of(KILL, Levers(process=(process := FakeProcess())), seed)
    index, hold = read.until_held()
    assert 1 <= index < NUM_OPS
    assert f"before number {index} have not landed" in hold.why
    for op in read.ops[:index]:
        assert not hold.until()
        assert process.killed == []
        read.land(op)
    assert hold.until()
    assert hold.until()
    assert process.killed == ["producer"]
    (evidence,) = read.context.evidence
    match = WHAT.fullmatch(evidence.what)
    assert [int(number) for number in match.groups()] == [index, NUM_OPS, index * OP_BYTES, index]
    assert (evidence.fault, evidence.seam, evidence.request_id) == ("kill_producer", "transfer.op_posted", "r2")
    assert evidence.before != evidence.after


def test_the_seed_says_after_how_many(read_of) -> None:
    found = {read_of(KILL, Levers(process=FakeProcess()), seed).until_held()[0] for seed in range(12)}
    assert len(found) > 4
    assert (
        read_of(KILL, Levers(process=FakeProcess()), 3).until_held()[0]
        == (read_of(KILL, Levers(process=FakeProcess()), 3).until_held()[0])
    )


def test_bytes_that_are_not_what_p_held_are_not_counted(read_of) -> None:
    read = read_of(KILL, Levers(process=FakeProcess()))
    index, hold = read.until_held()
    for op in read.ops[:index]:
        read.land(op)
    read.consumer.fill((5,), b"otherKV!")
    assert hold.until()
    in_block_5 = min(index, 8)
    assert int(WHAT.fullmatch(read.context.evidence[0].what)[3]) == (index - in_block_5) * OP_BYTES


def test_what_has_not_landed_is_poison(read_of) -> None:
    read = read_of(KILL, Levers(process=FakeProcess()))
    for block_id in read.blocks.block_ids:
        assert read.consumer.slots((block_id,)).tobytes() == b"POISONED" * (16 * 64 * 4 // 8)


def test_it_leaves_other_requests_alone(read_of) -> None:
    read = read_of(KILL, Levers(process=(process := FakeProcess())))
    before = read.consumer.slots((7,)).tobytes()
    read.seams.emit(LoadScheduled("consumer", "r1", {0: GroupBlocks(0, 16, 0, (7,), 16)}, read.consumer))
    assert read.consumer.slots((7,)).tobytes() == before
    assert not any(read.post(op, "r1").holds for op in read.ops)
    index, hold = read.until_held()
    for op in read.ops[:index]:
        read.land(op, "r1")
    assert not hold.until()
    assert process.killed == []


def test_a_producer_that_had_gone_already_leaves_no_evidence(read_of) -> None:
    read = read_of(KILL, Levers(process=FakeProcess(alive=False)))
    index, hold = read.until_held()
    for op in read.ops[:index]:
        read.land(op)
    assert not hold.until()
    assert read.context.evidence == []


def test_without_the_lever_nothing_is_held(read_of) -> None:
    read = read_of(KILL)
    assert not any(read.post(op).holds for op in read.ops)


def test_needs() -> None:
    needs = KillProducer.needs(KillProducerParams.model_validate(KILL))
    assert needs == {"consumer.load_scheduled", "transfer.op_posted", "transfer.op_landed", "lever.process"}


def test_it_does_not_apply_where_there_are_no_processes(root: Path) -> None:
    scenario = parse_scenario((root / "scenarios/processes/kill-producer-mid-read.yaml").read_text())
    cells = plan_cells([scenario], list(Policy), 0, TARGETS["sim"].provides)
    assert [cell.missing for cell in cells] == [("lever.process",)] * 4
    assert all(not cell.missing for cell in plan_cells([scenario], list(Policy), 0, TARGETS["local"].provides))
    history = History()
    TARGETS["sim"].run(plan_cells([scenario], [Policy.OFF], 0, TARGETS["sim"].provides)[0], history)
    assert [line["event"] for line in history.lines] == ["cell"]


@pytest.mark.parametrize(
    "wrong", [{"when": {"load": 2, "at": "before_read"}}, {"when": {"at": "mid_read"}}, {"how": 1}]
)
def test_parameters_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        KillProducerParams.model_validate(KILL | wrong)
