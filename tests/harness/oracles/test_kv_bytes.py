from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
import pytest

from engine.cache import KVMemory, PagedKVCache
from engine.checksum.records import GroupBlocks
from engine.config import EngineConfig
from engine.seams import Checksummed, FirstUse, KVFinal, LoadFinished, Seams, Stage
from harness.history import History, Line
from harness.oracles.kv_bytes import BytesOracle, grid_digests

BLOCK_IDS = (5, 3, 9)


@pytest.fixture
def memory() -> KVMemory:
    """12 blocks of 16 slots, each byte of a token its own function of layer, head, block, slot and place."""
    cache = PagedKVCache(EngineConfig("engine", num_blocks=12, layout="NHD"))
    memory = KVMemory(cache)
    for layer in range(2):
        for head in range(2):
            for block in range(12):
                for slot in range(16):
                    memory.write_slot(layer, head, block, slot, token_bytes(layer, head, block, slot))
    return memory


def token_bytes(layer: int, head: int, block: int, slot: int) -> npt.NDArray[np.uint8]:
    digest = hashlib.blake2b(bytes([layer, head, block, slot]), digest_size=64).digest()
    return np.frombuffer(digest, dtype=np.uint8)


def expected_digest(blocks: list[tuple[int, int]]) -> str:
    """Of a grid block that holds these (block, slot), in order: 8 digits a (layer, head)."""
    parts = []
    for layer in range(2):
        for head in range(2):
            raw = b"".join(token_bytes(layer, head, block, slot).tobytes() for block, slot in blocks)
            parts.append(hashlib.blake2b(raw, digest_size=4).hexdigest())
    return "".join(parts)


def expected_sum(tokens: list[tuple[int, int]], first_token: int) -> str:
    """DEF-3 and DEF-4, said once more: 8 pieces a token."""
    total = 0
    for layer in range(2):
        for head in range(2):
            m = 2 * (layer * 2**16 + head) + 1
            for t, (block, slot) in enumerate(tokens, start=first_token):
                pieces = token_bytes(layer, head, block, slot).view("<u8")
                total += m * sum(int(x) * (2 * (t * 8 + p) + 1) for p, x in enumerate(pieces))
    return f"{total % 2**64:016x}"


def see(memory: KVMemory, event: object, grid: int = 16) -> list[Line]:
    history, seams = History(), Seams()
    BytesOracle(history, grid).attach(seams)
    seams.emit(event)
    return history.lines


@pytest.mark.req("GAP-8", "HRD-1")
def test_its_sums_are_of_the_version_that_the_cell_uses(memory: KVMemory) -> None:
    """So that a pair of flips that only version 1 misses explains no corruption under version 2."""
    sums: dict[int, list[object]] = {1: [], 2: []}
    event = LoadFinished("d", "r1", {0: GroupBlocks(0, 16, 0, BLOCK_IDS, 45)}, memory)
    for flips in range(2):
        for version, seen in sums.items():
            history, seams = History(), Seams()
            BytesOracle(history, 16, version).attach(seams)
            seams.emit(event)
            seen.append(history.lines[0]["sums"])
        if not flips:
            for slot in (3, 7):
                changed = token_bytes(0, 1, BLOCK_IDS[1], slot).copy()
                changed[7] ^= 0x80
                memory.write_slot(0, 1, BLOCK_IDS[1], slot, changed)
    assert sums[1][0] == sums[1][1]
    assert sums[2][0] != sums[2][1]
    assert sums[1][0] != sums[2][0]


def test_it_sees_each_block_as_it_is_in_memory(memory: KVMemory) -> None:
    (line,) = see(memory, LoadFinished("d", "r1", {0: GroupBlocks(0, 16, 0, BLOCK_IDS, 45)}, memory))
    tokens = [(block, slot) for block in BLOCK_IDS for slot in range(16)][:45]
    assert (line["at"], line["request"], line["group"], line["grid"], line["start"]) == (
        "load_finished",
        "r1",
        0,
        16,
        0,
    )
    assert line["digests"] == [expected_digest(tokens[i : i + 16]) for i in (0, 16, 32)]
    assert line["sums"] == [expected_sum(tokens[i : i + 16], i) for i in (0, 16, 32)]


def test_positions_count_from_the_start_of_the_request(memory: KVMemory) -> None:
    (line,) = see(memory, LoadFinished("d", "r1", {0: GroupBlocks(0, 16, 4, (7, 2), 90)}, memory))
    tokens = [(block, slot) for block in (7, 2) for slot in range(16)][:26]
    assert line["start"] == 4
    assert line["digests"] == [expected_digest(tokens[:16]), expected_digest(tokens[16:])]
    assert line["sums"] == [expected_sum(tokens[:16], 64), expected_sum(tokens[16:], 80)]


def test_a_finer_grid_than_the_blocks(memory: KVMemory) -> None:
    (line,) = see(memory, LoadFinished("d", "r1", {0: GroupBlocks(0, 16, 1, (7,), 30)}, memory), grid=8)
    tokens = [(7, slot) for slot in range(14)]
    assert (line["grid"], line["start"]) == (8, 2)
    assert line["digests"] == [expected_digest(tokens[:8]), expected_digest(tokens[8:])]
    assert line["sums"] == [expected_sum(tokens[:8], 16), expected_sum(tokens[8:], 24)]


@pytest.mark.req("DEF-8")
@pytest.mark.parametrize("slot", [12, 13])
def test_only_tokens_of_the_prompt_count(memory: KVMemory, slot: int) -> None:
    event = LoadFinished("d", "r1", {0: GroupBlocks(0, 16, 0, BLOCK_IDS, 45)}, memory)
    before = see(memory, event)
    memory.write_slot(1, 1, 9, slot, np.zeros(64, np.uint8))
    assert (see(memory, event) != before) is (slot < 13)


def test_p_is_seen_whole_and_without_what_d_computes_again(memory: KVMemory) -> None:
    groups = {0: GroupBlocks(0, 16, 0, BLOCK_IDS, 34)}
    final, to_be_read = see(memory, KVFinal("p", "r1", groups, memory))
    (first_use,) = see(memory, FirstUse("d", "r1", groups, memory))
    assert [line["at"] for line in (final, to_be_read, first_use)] == ["kv_final", "to_be_read", "first_use"]
    assert final["digests"][2] == expected_digest([(9, 0), (9, 1)])
    assert to_be_read["digests"][2] == first_use["digests"][2] == expected_digest([(9, 0)])
    assert final["digests"][:2] == to_be_read["digests"][:2] == first_use["digests"][:2]


@pytest.mark.parametrize(("start", "num_tokens"), [(0, 1), (4, 65)])
def test_of_a_load_of_one_token_nothing_is_read(memory: KVMemory, start: int, num_tokens: int) -> None:
    """D computes the last prompt token again: here the only one."""
    groups = {0: GroupBlocks(0, 16, start, (7,), num_tokens)}
    final, to_be_read = see(memory, KVFinal("p", "r1", groups, memory))
    (first_use,) = see(memory, FirstUse("d", "r1", groups, memory))
    assert final["digests"] == [expected_digest([(7, 0)])]
    assert to_be_read["digests"] == to_be_read["sums"] == first_use["digests"] == first_use["sums"] == []


@pytest.mark.parametrize("start", [0, 1])
def test_a_block_of_which_only_the_last_token_is_a_prompts_is_not_read(memory: KVMemory, start: int) -> None:
    """With the token that is computed again left out, that block has none."""
    groups = {0: GroupBlocks(0, 16, start, (5, 3), 16 * start + 17)}
    final, to_be_read = see(memory, KVFinal("p", "r1", groups, memory))
    assert (len(final["digests"]), len(to_be_read["digests"])) == (2, 1)


def test_it_looks_before_a_fault_at_the_producer_and_after_it_at_the_consumer(memory: KVMemory) -> None:
    groups = {0: GroupBlocks(0, 16, 0, BLOCK_IDS, 45)}

    def changes(seam: str, event: object) -> bool:
        def fault(event: object) -> None:
            memory.write_slot(0, 0, 5, 0, np.zeros(64, np.uint8))

        memory.write_slot(0, 0, 5, 0, token_bytes(0, 0, 5, 0))
        untouched = see(memory, event)
        history, seams = History(), Seams()
        seams.on(seam, fault, Stage.FAULT)
        BytesOracle(history, 16).attach(seams)
        seams.emit(event)
        return history.lines != untouched

    assert not changes("producer.kv_final", KVFinal("p", "r1", groups, memory))
    assert not changes("producer.checksummed", Checksummed("p", "r1", groups, memory))
    assert changes("consumer.load_finished", LoadFinished("d", "r1", groups, memory))
    assert changes("consumer.first_use", FirstUse("d", "r1", groups, memory))


def test_every_part_of_a_block_counts() -> None:
    """A single byte of any layer, head and token changes the digest of its (layer, head, block), and no other."""
    rng = np.random.default_rng(0)
    kv = rng.integers(0, 256, (2, 3, 20, 16), dtype=np.uint8)
    before = grid_digests(kv, 8)
    assert [len(digest) for digest in before] == [2 * 3 * 8] * 3
    for layer, head, token in np.ndindex(2, 3, 20):
        changed = kv.copy()
        changed[layer, head, token, rng.integers(16)] ^= 1 << int(rng.integers(8))
        for position, (old, new) in enumerate(zip(before, grid_digests(changed, 8), strict=True)):
            parts = [i // 8 for i in range(0, len(old), 8) if old[i : i + 8] != new[i : i + 8]]
            assert parts == ([layer * 3 + head] if position == token // 8 else [])


def test_looking_changes_nothing(memory: KVMemory) -> None:
    before = memory.slots(tuple(range(12)))
    see(memory, KVFinal("p", "r1", {0: GroupBlocks(0, 16, 0, BLOCK_IDS, 45)}, memory))
    assert np.array_equal(before, memory.slots(tuple(range(12))))
