from __future__ import annotations

import numpy as np
import pytest

from engine.checksum.records import GroupBlocks
from engine.seams import LoadFinished, Seams
from harness.soak import Answer, Flipper, SoakPlan, growth, make_prompts, outcome

BLOCKS = GroupBlocks(0, 16, 0, (5, 3, 9), 45)
RIGHT = (1, 2, 3)


class Memory:
    """Two layers of two heads, in twelve blocks."""

    num_layers, num_kv_heads = 2, 2

    def __init__(self) -> None:
        self.kv = np.random.default_rng(0).integers(0, 256, (12, 2, 2, 16, 64), dtype=np.uint8)

    def slots(self, block_ids: tuple[int, ...]) -> np.ndarray:
        return np.concatenate([self.kv[block_id] for block_id in block_ids], axis=2)

    def write_slot(self, layer: int, head: int, block_id: int, slot: int, data: np.ndarray) -> None:
        self.kv[block_id, layer, head, slot] = data


@pytest.mark.parametrize("seed", range(5))
def test_one_bit_of_a_prompt_token_flips_in_a_load_that_is_to_be_faulted(seed: int) -> None:
    memory, seams = Memory(), Seams()
    before = memory.kv.copy()
    flipper = Flipper(frozenset({"s1"}), seed)
    flipper.attach(seams)
    seams.emit(LoadFinished("consumer", "s0", {0: BLOCKS}, memory))
    assert (memory.kv == before).all()
    seams.emit(LoadFinished("consumer", "s1", {0: BLOCKS}, memory))
    difference = memory.kv ^ before
    assert int(np.unpackbits(difference).sum()) == 1
    block, _, _, slot, _ = (int(axis[0]) for axis in difference.nonzero())
    assert block in (5, 3) or (block == 9 and slot < 13)
    assert flipper.flipped == {"s1"}
    seams.emit(LoadFinished("consumer", "s1", {0: BLOCKS}, memory))
    assert int(np.unpackbits(memory.kv ^ before).sum()) == 1


@pytest.mark.parametrize(
    ("verdict", "recomputed", "tokens", "faulted", "found"),
    [
        ("verified", False, RIGHT, False, ("verified, served", True)),
        ("mismatch", True, RIGHT, True, ("mismatch, recomputed", True)),
        ("verified", False, RIGHT, True, ("verified, served", False)),
        ("mismatch", True, RIGHT, False, ("mismatch, recomputed", False)),
        ("unverified", True, RIGHT, False, ("unverified, recomputed", False)),
        ("not_checked", True, RIGHT, False, ("not_checked, recomputed", False)),
        ("no_load", False, RIGHT, False, ("no_load, served", False)),
        ("verified", False, (1, 2, 4), False, ("verified, served, wrong tokens", False)),
        ("mismatch", True, (1, 2), True, ("mismatch, recomputed, wrong tokens", False)),
        ("verified", False, None, False, ("failed", False)),
    ],
)
def test_what_became_of_a_request(
    verdict: str, recomputed: bool, tokens: tuple[int, ...] | None, faulted: bool, found: tuple[str, bool]
) -> None:
    assert outcome(Answer("s1", verdict, recomputed, tokens), faulted, RIGHT) == found


def test_a_process_may_grow_by_32_mib() -> None:
    assert list(growth({"proxy": (1000, 1000 + 32 * 1024), "producer": (5000, 10)})) == []
    assert list(growth({"consumer": (1000, 1001 + 32 * 1024)})) == [
        "the consumer grew by 32769 KiB after it was warm, more than 32768"
    ]


def test_the_seed_says_what_is_faulted_and_how_many() -> None:
    plan = SoakPlan(requests=200, fault_rate=5)
    assert len(plan.faulted()) == 10
    assert plan.faulted() == SoakPlan(requests=200, fault_rate=5).faulted()
    assert plan.faulted() != SoakPlan(requests=200, fault_rate=5, seed=1).faulted()
    assert SoakPlan(requests=10, fault_rate=0).faulted() == frozenset()
    assert len({prompt.token_ids for prompt in make_prompts(plan)}) == 100
    assert make_prompts(plan) == make_prompts(SoakPlan(requests=200))
