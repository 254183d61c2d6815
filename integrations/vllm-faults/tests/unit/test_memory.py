"""Bytes by layer, head, block and slot, from every layout of caches that is known."""

from __future__ import annotations

import pytest
import torch
from kvchaos_vllm_faults.blocks import Blocks
from kvchaos_vllm_faults.memory import CacheShape, EngineMemory, LayoutError

SHAPE = CacheShape(num_blocks=6, block_size=4, num_heads=2, head_size=8)
PACKED = (6, 2, 4, 16)
NHD, HND = (2, 6, 4, 2, 8), (6, 2, 2, 4, 8)


def caches(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {f"model.layers.{n}.self_attn.attn": torch.randn(shape, generator=generator).to(dtype) for n in range(3)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_packed_cache_is_read_row_by_row(dtype: torch.dtype) -> None:
    held = caches(PACKED, dtype)
    memory = EngineMemory(held, SHAPE)
    assert (memory.packed, memory.num_layers, memory.bytes_per_token) == (True, 3, 16 * dtype.itemsize)
    kv = memory.read([5, 2])
    row = held["model.layers.1.self_attn.attn"][2, 1, 3].view(torch.uint8).numpy()
    assert (kv[1, 1, 1, 3] == row).all()


@pytest.mark.parametrize("shape", [NHD, HND])
def test_k_and_v_apart_come_one_after_the_other(shape: tuple[int, ...]) -> None:
    held = caches(shape)
    memory = EngineMemory(held, SHAPE)
    cache = held["model.layers.2.self_attn.attn"]
    k, v = (cache[0, 4, 3, 1], cache[1, 4, 3, 1]) if shape == NHD else (cache[4, 0, 1, 3], cache[4, 1, 1, 3])
    assert (memory.read([4])[2, 1, 0, 3] == torch.cat((k, v)).view(torch.uint8).numpy()).all()


def test_a_view_with_other_strides_is_written_in_place() -> None:
    """vLLM shows an HND cache as NHD: the same axes, other strides."""
    held = {name: cache.transpose(2, 3) for name, cache in caches((2, 6, 2, 4, 8)).items()}
    memory = EngineMemory(held, SHAPE)
    kv = memory.read([1])
    kv[0, 1, 0, 2] ^= 255
    memory.write([1], kv)
    assert (memory.read([1]) == kv).all()
    untouched = EngineMemory({name: cache.transpose(2, 3) for name, cache in caches((2, 6, 2, 4, 8)).items()}, SHAPE)
    assert (memory.read([0, 2, 3, 4, 5]) == untouched.read([0, 2, 3, 4, 5])).all()


def test_an_order_says_where_a_token_lies_and_is_kept_when_it_is_written() -> None:
    """As on a CPU: K column by column in the first half of a block, V row by row in the second."""
    places = torch.arange(4 * 8)
    order = torch.cat((places.view(8, 4).T, places.view(4, 8) + 32), dim=1)
    held = caches(PACKED)
    memory = EngineMemory(held, SHAPE, order)
    flat = held["model.layers.1.self_attn.attn"][3, 1].flatten()
    token = torch.cat((flat[2 : 2 + 32 : 4][:8], flat[32 + 16 : 32 + 24]))
    assert (memory.read([3])[1, 1, 0, 2] == token.view(torch.uint8).numpy()).all()
    before = held["model.layers.1.self_attn.attn"].clone()
    memory.write([3], memory.read([3]))
    assert (held["model.layers.1.self_attn.attn"] == before).all()
    kv = memory.read([3])
    kv[1, 1, 0, 2, :4] ^= 255
    memory.write([3], kv)
    (place,) = (held["model.layers.1.self_attn.attn"] != before).nonzero().tolist()
    assert place == [3, 1, 0, 2]  # element 2 of the flattened block


def test_an_order_of_another_block_is_refused() -> None:
    with pytest.raises(LayoutError, match="is not that of a block"):
        EngineMemory(caches(PACKED), SHAPE, torch.arange(8).view(4, 2))


def test_layers_come_in_the_order_of_their_numbers() -> None:
    held = {f"model.layers.{n}.attn": torch.full(PACKED, float(n)) for n in (10, 2)}
    memory = EngineMemory(held, SHAPE)
    assert memory.layer_numbers == (2, 10)
    assert memory.read([0])[0].tobytes() == torch.full(PACKED[1:], 2.0).numpy().tobytes()


def test_tokens_leave_out_what_is_behind_the_last() -> None:
    memory = EngineMemory(caches(PACKED), SHAPE)
    tokens = memory.tokens(Blocks(1, (3, 5), 4, 10))
    assert tokens.shape == (3, 2, 6, 64)
    assert (tokens[:, :, 4:] == memory.read([5])[:, :, 0, :2]).all()


def test_a_pattern_fills_every_slot() -> None:
    memory = EngineMemory(caches(PACKED), SHAPE)
    memory.fill([2], b"POISONED")
    assert memory.read([2]).tobytes() == b"POISONED" * (3 * 2 * 4 * 8)
    assert b"POISONED" not in memory.read([1, 3]).tobytes()


@pytest.mark.parametrize(
    ("shape", "told"),
    [
        ((6, 4, 2, 7), "is not known"),
        ((2, 2, 4, 2, 8), "is not known"),
        ((6, 2, 3, 16), "cannot be told"),
    ],
)
def test_a_cache_that_says_nothing_is_refused(shape: tuple[int, ...], told: str) -> None:
    with pytest.raises(LayoutError, match=told):
        EngineMemory(caches(shape), SHAPE)


def test_as_many_heads_as_slots_cannot_be_told_apart() -> None:
    with pytest.raises(LayoutError, match="cannot be told"):
        EngineMemory(caches((6, 4, 4, 16)), CacheShape(6, 4, 4, 8))


def test_a_layer_without_a_number_is_refused() -> None:
    with pytest.raises(LayoutError, match="which layer"):
        EngineMemory({"model.attn": torch.zeros(PACKED)}, SHAPE)
