from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from pydantic import ValidationError

from engine.cache import KVMemory
from engine.checksum.records import GroupBlocks
from engine.checksum.verdict import Verdict, VerdictStatus
from engine.seams import Checksummed, Event, KVFinal, LoadFinished, Verified
from faults.base import Evidence
from faults.bit_flip import BitFlip, BitFlipParams
from kernels import definition

BLOCKS = GroupBlocks(0, 16, 0, (5, 3, 9), 45)
AFTER_PREFIX = GroupBlocks(0, 16, 2, (7, 4), 61)
WHAT = re.compile(r"bit (\d) of byte (\d+) \(([KV])\), layer (\d+), head (\d+), token (\d+), block (\d+)")

Bit = tuple[int, int, int, int, int, int]  # layer, head, block, slot, byte, bit


def flip(at: str = "before_verify", **params: Any) -> dict[str, Any]:
    return {"kind": "bit_flip", "when": {"load": 2, "at": at}, **params}


def event_at(at: str, memory: KVMemory, blocks: GroupBlocks = BLOCKS, request: str = "r2") -> Event:
    groups = {0: blocks}
    if at == "after_verify":
        return Verified("consumer", request, Verdict(VerdictStatus.VERIFIED), groups, memory)
    kinds = {"before_checksum": KVFinal, "after_checksum": Checksummed, "before_verify": LoadFinished}
    return kinds[at]("engine", request, groups, memory)


def all_bytes(memory: KVMemory) -> npt.NDArray[np.uint8]:
    """uint8 [layers, heads, blocks, slots, bytes]."""
    kv = memory.slots(tuple(range(memory.num_blocks)))
    return kv.reshape(*kv.shape[:2], memory.num_blocks, memory.block_size, -1)


def differing_bits(before: npt.NDArray[np.uint8], after: npt.NDArray[np.uint8]) -> set[Bit]:
    bits = np.unpackbits((before ^ after)[..., None], axis=-1, bitorder="little")
    return {tuple(int(i) for i in where) for where in np.argwhere(bits)}


def named_bits(evidence: list[Evidence], blocks: GroupBlocks = BLOCKS) -> list[Bit]:
    """The bits that the evidence names; also that it says K or V, and which block, as they are."""
    found = []
    for item in evidence:
        match = WHAT.fullmatch(item.what)
        assert match is not None, item.what
        bit, byte, layer, head, token, block = (int(match[i]) for i in (1, 2, 4, 5, 6, 7))
        assert match[3] == ("K" if byte < 32 else "V")
        assert block == blocks.block_ids[token // 16 - blocks.start]
        found.append((layer, head, block, token % 16, byte, bit))
    return found


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("blocks", [BLOCKS, AFTER_PREFIX])
@pytest.mark.parametrize("at", ["before_checksum", "after_checksum", "before_verify", "after_verify"])
def test_exactly_the_named_bits_flip(memory_of, attach, at: str, blocks, layout: str, kv_dtype: str) -> None:
    memory = memory_of(layout, kv_dtype)
    seams, context = attach(flip(at, flips=5))
    before = all_bytes(memory)
    seams.emit(event_at(at, memory, blocks))
    named = named_bits(context.evidence, blocks)
    assert len(named) == len(set(named)) == 5
    assert differing_bits(before, all_bytes(memory)) == set(named)


def test_the_digests_of_the_evidence_are_those_of_the_token(memory_of, attach) -> None:
    memory = memory_of()
    seams, context = attach(flip())
    before = all_bytes(memory)
    seams.emit(event_at("before_verify", memory))
    (layer, head, block, slot, _, _), (item,) = named_bits(context.evidence)[0], context.evidence
    for found, kv in ((item.before, before), (item.after, all_bytes(memory))):
        assert found == hashlib.blake2b(kv[layer, head, block, slot].tobytes(), digest_size=8).hexdigest()
    assert item.before != item.after
    assert (item.fault, item.seam, item.request_id) == ("bit_flip", "consumer.load_finished", "r2")


@pytest.mark.parametrize(
    "fixed",
    [
        {"layer": 1},
        {"head": 0},
        {"token": 44},
        {"byte": 63},
        {"bit": 7},
        {"layer": 0, "head": 1, "token": 17},
        {"layer": 1, "head": 1, "token": 0, "byte": 31, "bit": 0},
    ],
)
def test_a_flip_is_where_the_scenario_says(memory_of, attach, fixed: dict[str, int]) -> None:
    drawn = set()
    for seed in range(25):
        memory = memory_of()
        seams, context = attach(flip(**fixed), seed)
        before = all_bytes(memory)
        seams.emit(event_at("before_verify", memory))
        ((layer, head, block, slot, byte, bit),) = differing_bits(before, all_bytes(memory))
        token = BLOCKS.block_ids.index(block) * 16 + slot
        found = {"layer": layer, "head": head, "token": token, "byte": byte, "bit": bit}
        assert {name: found[name] for name in fixed} == fixed
        assert token < 45
        assert len(context.evidence) == 1
        drawn.add((layer, head, token, byte, bit))
    assert len(drawn) == 1 if len(fixed) == 5 else len(drawn) > 5


@pytest.mark.parametrize(("flips", "flipped"), [(8, 8), (9, 0), (100, 0)])
def test_more_bits_than_there_are_flips_none(memory_of, attach, flips: int, flipped: int) -> None:
    memory = memory_of()
    seams, context = attach(flip(flips=flips, layer=0, head=0, token=3, byte=5))
    before = all_bytes(memory)
    seams.emit(event_at("before_verify", memory))
    assert len(context.evidence) == len(differing_bits(before, all_bytes(memory))) == flipped


@pytest.mark.parametrize("blocks", [BLOCKS, AFTER_PREFIX])
def test_past_end_hits_only_slots_without_a_prompt_token(memory_of, attach, blocks: GroupBlocks) -> None:
    slots = set()
    for seed in range(40):
        memory = memory_of()
        seams, _ = attach(flip(where="past_end"), seed)
        before = all_bytes(memory)
        seams.emit(event_at("before_verify", memory, blocks))
        ((_, _, block, slot, _, _),) = differing_bits(before, all_bytes(memory))
        assert block == blocks.block_ids[-1]
        slots.add(slot)
    assert slots == {13, 14, 15}


def test_after_verify_leaves_the_last_prompt_token_which_is_computed_again(memory_of, attach) -> None:
    last_block = GroupBlocks(0, 16, 2, (9,), 34)
    for seed in range(10):
        memory = memory_of()
        seams, _ = attach(flip("after_verify"), seed)
        before = all_bytes(memory)
        seams.emit(event_at("after_verify", memory, last_block))
        assert {where[3] for where in differing_bits(before, all_bytes(memory))} == {0}


@pytest.mark.parametrize(
    ("params", "at", "blocks"),
    [
        ({"layer": 2}, "before_verify", BLOCKS),
        ({"head": 2}, "before_verify", BLOCKS),
        ({"byte": 64}, "before_verify", BLOCKS),
        ({"token": 45}, "before_verify", BLOCKS),
        ({"token": 10_000}, "before_verify", BLOCKS),
        ({"token": 31}, "before_verify", AFTER_PREFIX),
        ({"token": 44}, "after_verify", BLOCKS),
        ({"where": "past_end"}, "before_verify", GroupBlocks(0, 16, 0, (5, 3), 32)),
        ({}, "after_verify", GroupBlocks(0, 16, 2, (5,), 33)),
    ],
)
def test_what_is_not_there_does_not_flip_and_leaves_no_evidence(memory_of, attach, params, at: str, blocks) -> None:
    memory = memory_of()
    seams, context = attach(flip(at, **params))
    before = all_bytes(memory)
    seams.emit(event_at(at, memory, blocks))
    assert context.evidence == []
    assert np.array_equal(before, all_bytes(memory))


@pytest.mark.req("DEF-5")
@pytest.mark.parametrize("blocks", [BLOCKS, AFTER_PREFIX, GroupBlocks(0, 16, 0, (2,), 1)])
def test_a_bit63_pair_never_changes_a_sum(memory_of, attach, blocks: GroupBlocks) -> None:
    """And half of such a pair always does."""
    pairs = set()
    for seed in range(40):
        memory = memory_of(seed=seed)
        seams, context = attach(flip(pattern="bit63_pair"), seed)
        before, sums = all_bytes(memory), block_sums(memory, blocks)
        seams.emit(event_at("before_verify", memory, blocks))
        first, second = sorted(differing_bits(before, all_bytes(memory)))
        assert first[2] == second[2]
        assert all(byte % 8 == 7 and bit == 7 for *_, byte, bit in (first, second))
        assert sums == block_sums(memory, blocks)
        assert set(named_bits(context.evidence, blocks)) == {first, second}
        layer, head, block, slot, byte, bit = first
        token = memory.slots((block,))[layer, head, slot].copy()
        token[byte] ^= 1 << bit
        memory.write_slot(layer, head, block, slot, token)
        assert sums != block_sums(memory, blocks)
        pairs.add((first, second))
    assert len(pairs) > 30


def block_sums(memory: KVMemory, blocks: GroupBlocks) -> list[int]:
    kv = memory.slots(blocks.block_ids)
    return list(definition.block_checksums(kv, range(2), 0, 16, blocks.start * 16, blocks.num_tokens))


@pytest.mark.parametrize("params", [{}, {"flips": 7}, {"pattern": "bit63_pair"}, {"where": "past_end"}])
def test_the_seed_decides(memory_of, attach, params: dict[str, Any]) -> None:
    def drawn(seed: int) -> tuple[str, ...]:
        seams, context = attach(flip(**params), seed)
        seams.emit(event_at("before_verify", memory_of()))
        return tuple(item.what for item in context.evidence)

    assert drawn(1) == drawn(1)
    assert len({drawn(seed) for seed in range(8)}) > 1


def test_it_acts_once_and_on_its_request_only(memory_of, attach) -> None:
    memory = memory_of()
    seams, context = attach(flip())
    before = all_bytes(memory)
    seams.emit(event_at("before_verify", memory, request="r1"))
    seams.emit(event_at("before_checksum", memory))
    assert np.array_equal(before, all_bytes(memory))
    seams.emit(event_at("before_verify", memory))
    after = all_bytes(memory)
    seams.emit(event_at("before_verify", memory))
    assert np.array_equal(after, all_bytes(memory))
    assert len(context.evidence) == 1


@pytest.mark.parametrize(
    ("at", "seam"),
    [
        ("before_checksum", "producer.kv_final"),
        ("after_checksum", "producer.checksummed"),
        ("before_verify", "consumer.load_finished"),
        ("after_verify", "consumer.verified"),
    ],
)
def test_it_needs_the_seam_of_its_moment(at: str, seam: str) -> None:
    assert BitFlip.needs(BitFlipParams.model_validate(flip(at))) == {seam}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"flips": 0}, "greater than or equal to 1"),
        ({"flips": 4097}, "less than or equal to 4096"),
        ({"bit": 8}, "less than or equal to 7"),
        ({"layer": -1}, "greater than or equal to 0"),
        ({"pattern": "bit62_pair"}, "bit63_pair"),
        ({"where": "nowhere"}, "past_end"),
        ({"pattern": "bit63_pair", "flips": 2}, "draws its own two bits"),
        ({"pattern": "bit63_pair", "layer": 0}, "draws its own two bits"),
        ({"pattern": "bit63_pair", "where": "past_end"}, "draws its own two bits"),
        ({"flips": 2, "layer": 0, "head": 0, "token": 0, "byte": 0, "bit": 0}, "name a single bit"),
        ({"where": "past_end", "token": 3}, "leave out token"),
        ({"blocks": 3}, "Extra inputs are not permitted"),
        ({"when": {"load": 0, "at": "before_verify"}}, "greater than or equal to 1"),
        ({"when": {"load": 2, "at": "before_read"}}, "before_checksum"),
        ({"when": {"load": 2}}, "Field required"),
    ],
)
def test_parameters_that_make_no_sense_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        BitFlipParams.model_validate(flip() | params)


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize(
    ("at", "before", "after", "same"),
    [
        ("before_checksum", "kv_final", "checksummed", ("checksummed", "load_finished")),
        ("after_checksum", "checksummed", "load_finished", ("kv_final", "checksummed")),
        ("before_verify", "kv_final", "load_finished", ("kv_final", "checksummed")),
        ("after_verify", "to_be_read", "first_use", ("kv_final", "load_finished")),
    ],
)
def test_the_bytes_oracle_sees_the_flips_where_they_happened(
    sim: Callable[..., Any], changed, at: str, before: str, after: str, same: tuple[str, str], seed: int
) -> None:
    """Between the two moments that the flip lies between, at exactly the places that the evidence names."""
    ran = sim(flip(at, flips=3), seed=seed).fault
    load = ran.load()
    named = set()
    for item in ran.evidence:
        _, _, _, layer, head, token, _ = WHAT.fullmatch(item.what).groups()
        named.add((int(layer), int(head), int(token) // 16))
    assert changed(getattr(load, before), getattr(load, after)) == named
    assert changed(*(getattr(load, name) for name in same)) == set()
    assert changed(ran.load(1).kv_final, ran.load(1).load_finished) == set()
