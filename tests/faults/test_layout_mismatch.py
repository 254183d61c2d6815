from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from engine.checksum.records import GroupBlocks
from engine.seams import LoadFinished
from faults.layout_mismatch import LayoutMismatch, LayoutMismatchParams
from scenarios.words import Result

WHAT = re.compile(r"D's block (\d+) \(block position (\d+)\) was (misread|read from P's block (\d+))$")
REDIRECTED = ("other_block_size", "offset_overflow")
MISREAD = ("hnd_as_nhd", "packed_as_separate", "kernel_block_order", "other_dtype")


def mismatch(how: str, load: int = 2) -> dict[str, Any]:
    return {"kind": "layout_mismatch", "when": {"load": load, "at": "in_flight"}, "how": how}


def named(ran) -> list[re.Match[str]]:
    return [WHAT.search(item.what) for item in ran.evidence]


@pytest.mark.parametrize("how", [*REDIRECTED, *MISREAD])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16"])
def test_evidence_names_what_the_oracles_saw_and_the_twin_is_clean(sim, how: str, kv_dtype: str) -> None:
    topology = {"producer": {"layout": "HND"}, "consumer": {"layout": "NHD"}, "kv_dtype": kv_dtype}
    pair = sim(mismatch(how) | {"kv_dtype": kv_dtype}, topology=topology)
    load = pair.fault.load()
    wrong = load.load_finished.differing(load.kv_final)
    assert wrong
    assert [int(match[2]) for match in named(pair.fault)] == list(wrong)
    assert {token // 16 for token in load.foreign if token < load.num_prompt_tokens - 1} == set(wrong)
    assert pair.fault.load(1).foreign == pair.twin.load().foreign == ()
    assert pair.twin.result.result is Result.PASS


@pytest.mark.parametrize("how", [*MISREAD, "other_block_size"])
def test_it_concerns_every_block_of_the_load(sim, how: str) -> None:
    load = sim(mismatch(how)).fault.load()
    assert load.load_finished.differing(load.kv_final) == tuple(load.kv_final.positions())


@pytest.mark.parametrize("seed", range(3))
def test_the_addresses_that_are_read(sim, seed: int) -> None:
    ran = sim(mismatch("other_block_size"), seed=seed).fault
    (final,) = ran.all("producer.kv_final")
    blocks = final["groups"][0]["blocks"]
    assert [int(match[4]) for match in named(ran)] == [2 * blocks[int(match[2])] % 64 for match in named(ran)]
    ran = sim(mismatch("offset_overflow"), seed=seed).fault
    (final,) = ran.all("producer.kv_final")
    blocks = final["groups"][0]["blocks"]
    wrapped = [(blocks[int(match[2])], int(match[4])) for match in named(ran)]
    (limit,) = {planned - read for planned, read in wrapped}
    assert limit in blocks
    assert [planned for planned, _ in wrapped] == [block for block in blocks if block >= limit]


@pytest.mark.parametrize(("how", "where"), [("kernel_block_order", "slots"), ("packed_as_separate", "parts")])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_it_misreads_all_blocks_of_its_load_and_no_other(memory_of, attach, how: str, where: str, layout: str) -> None:
    memory = memory_of(layout)
    before = memory.slots((5, 3))
    untouched = memory.slots((4,))
    seams, context = attach(mismatch(how))
    blocks = GroupBlocks(0, 16, 2, (5, 3), 60)
    seams.emit(LoadFinished("consumer", "r1", {0: blocks}, memory))
    assert context.evidence == []
    seams.emit(LoadFinished("consumer", "r2", {0: blocks}, memory))
    after = memory.slots((5, 3))
    if where == "slots":
        order = [*range(8, 16), *range(8), *range(24, 32), *range(16, 24)]
        assert (after == before[:, :, order]).all()
    else:  # slot 0 gets K of slot 0, and as its V what lies in the middle of the block: K of slot 8
        assert (after[:, :, 0, :32] == before[:, :, 0, :32]).all()
        assert (after[:, :, 0, 32:] == before[:, :, 8, :32]).all()
        assert (after[:, :, 1, :32] == before[:, :, 0, 32:]).all()
    assert (memory.slots((4,)) == untouched).all()
    assert [match[2] for match in map(WHAT.search, (item.what for item in context.evidence))] == ["2", "3"]


def test_what_lies_behind_the_last_token_is_no_evidence(memory_of, attach) -> None:
    """The last block holds one token, and its first half is all one value."""
    memory = memory_of()
    memory.fill((7,), b"same all")
    seams, context = attach(mismatch("kernel_block_order"))
    tail = memory.slots((7,))[0, 0, 0].copy()
    tail[0] ^= 1
    memory.write_slot(0, 0, 7, 3, tail)
    seams.emit(LoadFinished("consumer", "r2", {0: GroupBlocks(0, 16, 0, (7,), 1)}, memory))
    assert np.array_equal(memory.slots((7,))[0, 0, 11], tail)
    assert context.evidence == []


def test_a_load_that_never_finishes_leaves_no_evidence(sim) -> None:
    spoilt = {"kind": "misplace", "when": {"load": 2, "at": "params_pass"}, "how": "out_of_range"}
    ran = sim(spoilt, mismatch("hnd_as_nhd")).fault
    assert ran.seen.undone == ("layout_mismatch on r2",)
    assert ran.result.result is Result.UNKNOWN


def test_needs() -> None:
    def needs(how: str) -> frozenset[str]:
        return LayoutMismatch.needs(LayoutMismatchParams.model_validate(mismatch(how)))

    assert needs("hnd_as_nhd") == {"consumer.load_finished"}
    assert "transfer.op_posted" in needs("other_block_size")


@pytest.mark.parametrize(
    "wrong", [{"how": "nhd"}, {"kv_dtype": "float8"}, {"when": {"load": 2, "at": "before_verify"}}, {"layer": 1}]
)
def test_parameters_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        LayoutMismatchParams.model_validate(mismatch("hnd_as_nhd") | wrong)
