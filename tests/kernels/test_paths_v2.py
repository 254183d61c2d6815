"""Version 2 by torch and compiled for the CPU, against its definition: layouts, dtypes, kernel blocks, tails."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import cpu_path, definition_v2, torch_path
from kernels.torch_path import LayerCache, as_uint64, paged_cache

VECTORS = sorted((Path(__file__).parents[1] / "vectors").glob("*.npz"))
DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float8_e4m3fn)
LAYOUTS = ("token_major", "head_major", "odd_strides", "apart")


def by_torch(layers, ids, **arguments):
    return as_uint64(torch_path.block_checksums(layers, ids, version=2, **arguments))


def by_cpu(layers, ids, **arguments):
    return as_uint64(cpu_path.block_checksums(layers, ids, version=2, **arguments))


PATHS = pytest.mark.parametrize("path", [by_torch, by_cpu])


def laid_out(part, layout, dtype, kernel_block_tokens):
    """uint8 [blocks, tokens, heads, bytes] as a cache of a dtype, smaller kernel blocks and other strides."""
    blocks, tokens, heads, width = part.shape
    part = part.reshape(blocks * tokens // kernel_block_tokens, kernel_block_tokens, heads, width).view(dtype)
    if layout == "head_major":
        return part.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "odd_strides":
        padded = torch.empty((*part.shape[:3], part.shape[3] + 1), dtype=dtype)[..., 1:]
        return padded.copy_(part)
    if layout == "apart":
        apart = torch.empty((*part.shape[:3], part.shape[3] * 2), dtype=dtype)[..., ::2]
        return apart.copy_(part)
    return part.contiguous()


@PATHS
@settings(max_examples=60, deadline=None)
@given(data=st.data())
@pytest.mark.req("DEF-7", "HRD-1")
def test_any_cache_gives_the_definition(path, data):
    kernel_block_tokens = data.draw(st.integers(1, 3))
    block_size = kernel_block_tokens * data.draw(st.integers(1, 3))
    blocks, heads, pieces = (data.draw(st.integers(1, 3)) for _ in range(3))
    numbers = data.draw(st.lists(st.sampled_from([0, 1, 31, 2**20]), min_size=1, max_size=3, unique=True))
    first_head = data.draw(st.sampled_from([0, 3, 2**16 - 3]))
    first_block = data.draw(st.sampled_from([0, 1, 5, 2**20, 2**59]))
    num_tokens = max(0, first_block * block_size + data.draw(st.integers(-1, blocks * block_size + 1)))
    shape = (len(numbers), heads, blocks * block_size, 8 * pieces)
    kv = np.random.default_rng(data.draw(st.integers(0, 999))).integers(0, 256, shape, dtype=np.uint8)
    ids = data.draw(st.permutations(range(blocks + 1)))[:blocks]
    layout, dtype = data.draw(st.sampled_from(LAYOUTS)), data.draw(st.sampled_from(DTYPES))
    layers = [
        LayerCache(
            cache.layer_number,
            cache.first_head,
            tuple(laid_out(part.contiguous(), layout, dtype, kernel_block_tokens) for part in cache.parts),
        )
        for cache in paged_cache(kv, numbers, first_head, block_size, ids)
    ]
    got = path(layers, ids, block_size=block_size, start=first_block, num_tokens=num_tokens)
    expected = definition_v2.block_checksums(kv, numbers, first_head, block_size, first_block * block_size, num_tokens)
    assert got.tolist() == expected.tolist()


@PATHS
@pytest.mark.parametrize("file", VECTORS, ids=lambda file: file.stem)
def test_the_dumps_of_the_shared_vectors(path, file):
    with np.load(file, allow_pickle=False) as case:
        block_size, num_tokens = int(case["block_size"]), int(case["num_tokens"])
        numbers, first_head = case["layer_numbers"].tolist(), int(case["first_head"])
        ids = list(range(case["kv"].shape[2] // block_size, 0, -1))
        layers = paged_cache(case["kv"], numbers, first_head, block_size, ids)
        start = int(case["first_token"]) // block_size
        got = path(layers, ids, block_size=block_size, start=start, num_tokens=num_tokens)
        arguments = (numbers, first_head, block_size, int(case["first_token"]), num_tokens)
        assert got.tolist() == definition_v2.block_checksums(case["kv"], *arguments).tolist()


@PATHS
@pytest.mark.req("DEF-8")
def test_slots_past_the_tokens_are_not_read(path):
    kv = np.random.default_rng(1).integers(0, 256, (2, 2, 8, 32), dtype=np.uint8)
    layers = paged_cache(kv, [0, 1], 0, 4, [1, 0])
    clean = path(layers, [1, 0], block_size=4, start=0, num_tokens=6).tolist()
    for layer in layers:
        for part in layer.parts:
            part[0, 2:] = 7
    assert path(layers, [1, 0], block_size=4, start=0, num_tokens=6).tolist() == clean
    assert path(layers, [1, 0], block_size=4, start=0, num_tokens=7).tolist() != clean


def test_results_do_not_depend_on_the_chunk():
    kv = np.random.default_rng(2).integers(0, 256, (2, 3, 8, 32), dtype=np.uint8)
    layers = paged_cache(kv, [0, 1], 0, 4, [1, 0])
    results = {
        tuple(by_torch(layers, [1, 0], block_size=4, start=3, num_tokens=19, max_gather_bytes=size).tolist())
        for size in (1, 100, 500, 1 << 20)
    }
    assert len(results) == 1


def test_what_cannot_be_summed_is_refused():
    layers = paged_cache(np.zeros((1, 1, 4, 16), dtype=np.uint8), [0], 0, 4, [0])
    with pytest.raises(ValueError, match="block id 1 is outside"):
        by_cpu(layers, [1], block_size=4, start=0, num_tokens=4)
    for module in (torch_path, cpu_path):
        with pytest.raises(ValueError, match="version is 3: there are definitions 1 and 2"):
            module.block_checksums(layers, [0], block_size=4, start=0, num_tokens=4, version=3)
