"""The fault models do what their names say, and stay within the block."""

import numpy as np
import pytest

from harness.strength import models
from harness.strength.block import Block
from harness.strength.models import MODELS

RNG_SEED = 3
BY_NAME = {model.name: model for model in MODELS}


def drawn(name, block, samples=200):
    changes = BY_NAME[name].draw(np.random.default_rng(RNG_SEED), block, samples)
    assert len(changes.index) == samples
    return changes


def popcounts(changes):
    return np.bitwise_count(changes.before ^ changes.after).sum(axis=1)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_pieces_are_of_the_block_and_as_many_as_it_says(model, block):
    changes = drawn(model.name, block)
    assert changes.index.shape == changes.before.shape == changes.after.shape == (200, model.width(block))
    assert changes.index.min() >= 0
    assert changes.index.max() < block.size
    assert changes.real.mean() > 0.9


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_a_seed_gives_the_same_corruptions(model, block):
    once, again = drawn(model.name, block, 5), drawn(model.name, block, 5)
    assert np.array_equal(once.index, again.index)
    assert np.array_equal(once.after, again.after)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_bit_flips_are_of_different_bits(count, block):
    name = f"{count} bit flip{'s' * (count > 1)}"
    assert (popcounts(drawn(name, block, 3000)) == count).all()


def test_sign_flips_are_of_signs(block):
    signs = np.uint64(0x8000800080008000)
    changes = drawn("4 sign flips, bf16 or fp16", block)
    assert not ((changes.before ^ changes.after) & ~signs).any()
    assert (popcounts(changes) == 4).all()


def test_a_burst_is_one_run_of_at_most_64_bits(block):
    changes = drawn("burst of 2 to 64 bits", block, 3000)
    masks = changes.before ^ changes.after
    lengths = set()
    for index, mask in zip(changes.index.tolist(), masks.tolist(), strict=True):
        bits = [64 * i + b for i, m in zip(index, mask, strict=True) for b in range(64) if m >> b & 1]
        lengths.add(max(bits) - min(bits) + 1)
    assert min(lengths) == 2
    assert max(lengths) == 64
    assert (changes.index[:, 1] - changes.index[:, 0] <= 1).all()
    assert masks[:, 1].any()


def test_stuck_bits(block):
    changes = drawn("bit 63 stuck at 1", block)
    assert (changes.after >> np.uint64(63) == 1).all()
    assert not ((changes.before ^ changes.after) << np.uint64(1)).any()
    low = drawn("a bit stuck at 0", block)
    assert (np.bitwise_count(np.bitwise_or.reduce(low.before ^ low.after, axis=1)) <= 1).all()
    assert (low.after <= low.before).all()


def test_swaps_exchange_rows_that_lie_apart_by_the_axis(block):
    at = {0: "two layers swapped", 1: "two heads swapped", 2: "two tokens swapped"}
    for axis, name in at.items():
        if block.shape[axis] < 2:
            continue
        changes = drawn(name, block, 30)
        half = changes.index.shape[1] // 2
        first = np.unravel_index(changes.index[:, :half], block.shape)
        second = np.unravel_index(changes.index[:, half:], block.shape)
        for other in range(4):
            assert np.array_equal(first[other], second[other]) == (other != axis)
        assert np.array_equal(changes.before[:, :half], changes.after[:, half:])
        assert np.array_equal(changes.before[:, half:], changes.after[:, :half])


def test_a_shift_moves_every_token_by_one():
    block = Block(1, 2, 3, 2)
    changes = drawn("tokens shifted by one", block, 4)
    before, after = (x.reshape(4, 2, 3, 2) for x in (changes.before, changes.after))
    assert np.array_equal(after[:, :, 1:], before[:, :, :-1])
    assert not (after[:, :, 0] == before[:, :, 0]).any()


def test_equal_factors_are_equal_and_pieces_are_not(block):
    changes = drawn("two pieces of equal factor exchanged", block)
    assert (block.factors[changes.index[:, 0]] == block.factors[changes.index[:, 1]]).all()
    assert (changes.index[:, 0] != changes.index[:, 1]).all()


def test_cancelling_changes_sum_to_nothing(block):
    changes = drawn("+d, -2d, +d on three pieces", block)
    change = changes.after - changes.before
    assert not change.sum(axis=1, dtype=np.uint64).any()
    assert (np.diff(changes.index, axis=1) == 1).all()


def test_k_and_v_are_halves_of_a_token():
    block = Block(1, 1, 2, 4)
    assert models.k_and_v_swapped(np.random.default_rng(0), block, 1).index.tolist() == [[0, 1, 4, 5, 2, 3, 6, 7]]
