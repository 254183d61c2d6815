from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from engine.checksum.records import GroupBlocks
from engine.seams import Completion, KVFinal, LoadFinished
from faults.consumer_reuse import ConsumerReuse, ConsumerReuseParams
from scenarios.words import Result, VerdictStatus

WHAT = re.compile(r"tokens (\d+) on of (r\d) landed late in D's block (\d+) \(block position (\d+)\)")


def late(at: str = "before_verify", other: int = 1, load: int = 2) -> dict[str, Any]:
    return {"kind": "consumer_reuse", "when": {"load": load, "at": at}, "other_load": other}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("load", [1, 2])
def test_before_verify_one_block_holds_the_other_requests_kv(sim, seed: int, load: int) -> None:
    pair = sim(late(load=load, other=3 - load), seed=seed, prompt_tokens=80)
    ran = pair.fault
    (item,) = ran.evidence
    first, other, _, position = WHAT.fullmatch(item.what).groups()
    mine, theirs = ran.load(load), ran.load(3 - load)
    assert other == theirs.request_id
    assert mine.load_finished.differing(mine.kv_final) == (int(position),)
    assert mine.load_finished.digest(int(position)) == theirs.kv_final.digest(int(first) // 16)
    assert {token // 16 for token in mine.foreign if token < 79} == {int(position)}
    assert theirs.foreign == ()
    assert pair.twin.result.result is Result.PASS


@pytest.mark.parametrize("seed", range(4))
def test_after_verify_what_was_delivered_is_right_and_what_is_read_is_not(sim, seed: int) -> None:
    pair = sim(late("after_verify"), policy="fail_closed_fail", seed=seed)
    load = pair.fault.load()
    (item,) = pair.fault.evidence
    position = int(WHAT.fullmatch(item.what)[4])
    assert load.verdict is VerdictStatus.VERIFIED
    assert load.load_finished.differing(load.kv_final) == ()
    read = {token for token in load.foreign if token < load.num_prompt_tokens - 1}
    assert read
    assert {token // 16 for token in read} == {position}
    assert pair.fault.load(1).foreign == pair.twin.load().foreign == ()


def test_a_last_block_with_nothing_but_the_last_token_is_never_hit(sim) -> None:
    """D computes the last prompt token again before it reads it."""
    for seed in range(6):
        ran = sim(late("after_verify"), seed=seed, prompt_tokens=33).fault
        assert int(WHAT.fullmatch(ran.evidence[0].what)[4]) in (0, 1)
        assert ran.load().foreign


def test_a_prompt_of_one_token_has_nothing_to_hit(sim) -> None:
    ran = sim(late(), prompt_tokens=1).fault
    assert ran.evidence == ()
    assert ran.result.result is Result.UNKNOWN


def test_the_load_waits_until_the_other_kv_exists(memory_of, attach) -> None:
    memory = memory_of()
    seams, context = attach(late(other=3))
    assert seams.emit(Completion("consumer", "r1", False)).holds == ()
    assert seams.emit(Completion("consumer", "r2", True)).holds == ()
    (hold,) = seams.emit(Completion("consumer", "r2", False)).holds
    assert not hold.until()
    blocks = GroupBlocks(0, 16, 0, (5, 3), 20)
    before = memory.slots((5, 3))
    seams.emit(LoadFinished("consumer", "r2", {0: blocks}, memory))
    assert (memory.slots((5, 3)) == before).all()
    seams.emit(KVFinal("producer", "r3", {0: GroupBlocks(0, 16, 0, (8, 9), 32)}, memory))
    assert hold.until()
    seams.emit(LoadFinished("consumer", "r1", {0: blocks}, memory))
    assert context.evidence == []
    seams.emit(LoadFinished("consumer", "r2", {0: blocks}, memory))
    (item,) = context.evidence
    first, _, block, _ = WHAT.fullmatch(item.what).groups()
    assert (memory.slots((int(block),)) == memory.slots((8 + int(first) // 16,))).all()


def test_needs() -> None:
    needs = ConsumerReuse.needs(ConsumerReuseParams.model_validate(late("after_verify")))
    assert needs == {"producer.kv_final", "transfer.completion", "consumer.verified"}


@pytest.mark.parametrize("wrong", [{"other_load": 2}, {"other_load": 0}, {"when": {"load": 2, "at": "in_flight"}}])
def test_parameters_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ConsumerReuseParams.model_validate(late() | wrong)
