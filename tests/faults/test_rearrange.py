"""Each rearrangement against a loop that says, for every byte, where it comes from."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch

from faults.blocks import Bytes
from faults.rearrange import (
    hnd_as_nhd,
    kernel_block_order,
    other_dtype,
    packed_as_separate,
    swap_heads,
    swap_kv,
    swap_layers,
    swap_tokens,
)

LAYERS, HEADS, BLOCKS, SLOTS, WIDTH = SHAPE = 3, 4, 2, 6, 16
HALF = WIDTH // 2
KV: Bytes = np.random.default_rng(0).integers(0, 256, SHAPE, dtype=np.uint8)

Place = tuple[int, int, int, int, int, int]  # layer, head, block, slot, K|V, byte


def from_places(source: Callable[[Place], Place]) -> Bytes:
    """What is at every place if it is taken from `source(place)`."""
    made = np.empty_like(KV)
    for place in product(range(LAYERS), range(HEADS), range(BLOCKS), range(SLOTS), range(2), range(HALF)):
        layer, head, block, slot, part, byte = source(place)
        value = KV[layer, head, block, slot, part * HALF + byte]
        layer, head, block, slot, part, byte = place
        made[layer, head, block, slot, part * HALF + byte] = value
    return made


def test_hnd_as_nhd() -> None:
    def source(place: Place) -> Place:
        layer, head, block, slot, part, byte = place
        row = slot * HEADS + head  # where a reader of slots looks, in a block that lies head by head
        return layer, row // SLOTS, block, row % SLOTS, part, byte

    assert (hnd_as_nhd(KV) == from_places(source)).all()


def test_packed_as_separate() -> None:
    def source(place: Place) -> Place:
        layer, head, block, slot, part, byte = place
        row = part * SLOTS + slot  # where a reader of a block of K and a block of V looks
        return layer, head, block, row // 2, row % 2, byte

    assert (packed_as_separate(KV) == from_places(source)).all()


def test_kernel_block_order() -> None:
    def source(place: Place) -> Place:
        layer, head, block, slot, part, byte = place
        return layer, head, block, (slot + SLOTS // 2) % SLOTS, part, byte

    assert (kernel_block_order(KV) == from_places(source)).all()


def test_swap_kv() -> None:
    assert (swap_kv(KV) == from_places(lambda p: (p[0], p[1], p[2], p[3], 1 - p[4], p[5]))).all()


@pytest.mark.parametrize(("swap", "axis"), [(swap_layers, 0), (swap_heads, 1)])
@pytest.mark.parametrize("seed", range(5))
def test_two_layers_or_heads_change_places_and_the_rest_stays(swap, axis: int, seed: int) -> None:
    swapped = swap(KV, rng=random.Random(seed))
    rows, others = np.moveaxis(swapped, axis, 0), np.moveaxis(KV, axis, 0)
    moved = [n for n in range(len(rows)) if (rows[n] != others[n]).any()]
    assert len(moved) == 2
    one, other = moved
    assert (rows[one] == others[other]).all()
    assert (rows[other] == others[one]).all()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_tokens", [2, 7, BLOCKS * SLOTS])
def test_two_valid_tokens_change_places_in_every_layer_and_head(num_tokens: int, seed: int) -> None:
    swapped = swap_tokens(KV, num_tokens, random.Random(seed)).reshape(LAYERS, HEADS, -1, WIDTH)
    tokens = KV.reshape(LAYERS, HEADS, -1, WIDTH)
    one, other = (t for t in range(BLOCKS * SLOTS) if (swapped[:, :, t] != tokens[:, :, t]).any())
    assert max(one, other) < num_tokens
    assert (swapped[:, :, one] == tokens[:, :, other]).all()
    assert (swapped[:, :, other] == tokens[:, :, one]).all()


def test_nothing_to_exchange_leaves_everything() -> None:
    rng = random.Random(0)
    assert (swap_tokens(KV, 1, rng) == KV).all()
    assert (swap_heads(KV[:, :1], rng) == KV[:, :1]).all()
    assert (swap_layers(KV[:1], rng) == KV[:1]).all()
    assert (hnd_as_nhd(KV[:, :1]) == KV[:, :1]).all()


@pytest.mark.parametrize(
    ("dtype", "other", "value"), [(torch.bfloat16, torch.float16, 1.5), (torch.float16, torch.bfloat16, -0.375)]
)
def test_other_dtype_keeps_the_value_and_changes_its_bits(dtype: torch.dtype, other: torch.dtype, value: float) -> None:
    kv = torch.full((*SHAPE[:-1], HALF), value, dtype=dtype).view(torch.uint8).numpy()
    cast = other_dtype(kv, dtype)
    assert cast.shape == kv.shape
    assert (torch.from_numpy(cast).view(other) == value).all()
    assert (cast != kv).any()
