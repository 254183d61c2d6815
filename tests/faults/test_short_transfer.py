from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from engine.checksum.records import GroupBlocks
from engine.seams import CopyOp, LoadFinished, LoadScheduled, OpPosted
from faults.base import digest
from faults.short_transfer import POISON, ShortTransfer, ShortTransferParams
from scenarios.words import Result

WHAT = re.compile(r"D's block (\d+) \(block position (\d+)\) was reported as read and still holds poison")
BLOCKS = GroupBlocks(0, 16, 2, (5, 3, 9), 77)


def short(moved: int = 1, load: int = 2) -> dict[str, Any]:
    return {"kind": "short_transfer", "when": {"load": load, "at": "in_flight"}, "moved_blocks": moved}


def named_blocks(ran) -> dict[int, int]:
    matches = [WHAT.fullmatch(item.what) for item in ran.evidence]
    return {int(match[2]): int(match[1]) for match in matches}


@pytest.mark.parametrize("moved", [0, 1, 2])
@pytest.mark.parametrize(("producer", "consumer"), [(16, 16), (32, 16), (16, 32), (8, 64)])
def test_exactly_the_blocks_after_the_first_k_are_missing(sim, moved: int, producer: int, consumer: int) -> None:
    topology = {"producer": {"block_size": producer}, "consumer": {"block_size": consumer}}
    ran = sim(short(moved), topology=topology, prompt_tokens=[130, 150]).fault
    load = ran.load()
    (scheduled,) = ran.all("consumer.load_scheduled")
    blocks = scheduled["groups"][0]["blocks"]
    per_block = consumer // min(producer, consumer)
    wrong = {position // per_block for position in load.load_finished.differing(load.kv_final)}
    assert wrong == set(range(moved, len(blocks)))
    assert named_blocks(ran) == {position: blocks[position] for position in wrong}
    assert load.load_finished.differing(load.kv_final)[0] == moved * per_block
    assert ran.load(1).load_finished.differing(ran.load(1).kv_final) == ()


def test_the_missing_blocks_hold_the_poison(sim) -> None:
    ran = sim(short(1)).fault
    poisoned = digest(POISON * (2 * 2 * 16 * 64 // len(POISON)))
    assert [(item.before, item.after) for item in ran.evidence] == [(poisoned, poisoned)] * len(ran.evidence)
    assert 0 not in POISON


def test_behind_a_local_prefix_it_counts_the_blocks_of_the_load(sim) -> None:
    one_at_a_time = {"consumer": {"max_num_seqs": 1}}
    ran = sim(short(1, load=3), topology=one_at_a_time, requests=3, prompt_tokens=[100, 120], shared_prefix_tokens=64)
    load = ran.fault.load(3)
    positions = load.load_finished.positions()
    assert positions.start == 4
    assert set(load.load_finished.differing(load.kv_final)) == set(positions[1:]) == set(named_blocks(ran.fault))


@pytest.mark.parametrize("moved", [4, 100])
def test_a_load_that_is_not_longer_loses_nothing_and_leaves_no_evidence(sim, moved: int) -> None:
    ran = sim(short(moved), prompt_tokens=64).fault
    assert ran.evidence == ()
    assert ran.load().load_finished.differing(ran.load().kv_final) == ()
    assert ran.result.result is Result.UNKNOWN


def posted(memory, position: int, request: str = "r2") -> OpPosted:
    return OpPosted("consumer", request, CopyOp(0, position, 0, 0, 0, 1, 0, 1, 0, 16), 24, memory, memory)


def test_it_drops_the_operations_of_its_request_from_block_k_on(memory_of, attach) -> None:
    memory = memory_of()
    seams, context = attach(short(1))
    before = memory.slots((5,)).copy()
    seams.emit(LoadScheduled("consumer", "r1", {0: GroupBlocks(0, 16, 0, (1,), 16)}, memory))
    seams.emit(LoadScheduled("consumer", "r2", {0: BLOCKS}, memory))
    dropped = [seams.emit(posted(memory, position)).dropped for position in (2, 3, 4)]
    assert dropped == [False, True, True]
    assert not seams.emit(posted(memory, 4, "r1")).dropped
    assert (memory.slots((5,)) == before).all()
    assert {memory.slots((block,)).tobytes() for block in (3, 9)} == {POISON * (2 * 2 * 16 * 64 // 8)}
    assert context.evidence == []
    seams.emit(LoadFinished("consumer", "r1", {}, memory))
    assert context.evidence == []
    memory.fill((9,), b"arrived!")
    seams.emit(LoadFinished("consumer", "r2", {0: BLOCKS}, memory))
    assert [WHAT.fullmatch(item.what).groups() for item in context.evidence] == [("3", "3")]


def test_poison_that_nobody_would_have_overwritten_is_no_evidence(memory_of, attach) -> None:
    """Without a dropped operation nothing was kept from arriving."""
    memory = memory_of()
    seams, context = attach(short(1))
    seams.emit(LoadScheduled("consumer", "r2", {0: BLOCKS}, memory))
    seams.emit(LoadFinished("consumer", "r2", {0: BLOCKS}, memory))
    assert context.evidence == []


def test_needs() -> None:
    needs = ShortTransfer.needs(ShortTransferParams.model_validate(short()))
    assert needs == {"consumer.load_scheduled", "transfer.op_posted", "consumer.load_finished"}


@pytest.mark.parametrize("wrong", [{"moved_blocks": -1}, {"when": {"load": 2, "at": "mid_read"}}, {"blocks": 1}])
def test_parameters_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ShortTransferParams.model_validate(short() | wrong)
