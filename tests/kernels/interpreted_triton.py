"""The Triton kernel against the definition, in Triton's interpreter.

TRITON_INTERPRET must be set before the kernel is decorated, so test_triton_path.py runs this file in a pytest process
of its own. A program takes about 40 ms here: the grids are tiny.
"""

import itertools
import os

import numpy as np
import pytest
import torch

from kernels import definition, torch_path
from kernels.torch_path import LayerCache, as_uint64, paged_cache
from kernels.triton_path import block_checksums, can_read, describe, rows_of, sum_rows


def test_this_is_the_interpreter():
    assert os.environ["TRITON_INTERPRET"] == "1"


def a_cache(layout, kernel_tokens, heads, widths, seed, dtype=torch.bfloat16):
    """K and V [4 kernel blocks, kernel_tokens, heads, width] of random bits."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for width in widths:
        shape = (4, heads, kernel_tokens, width) if layout == "HND" else (4, kernel_tokens, heads, width)
        bits = torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int16).view(dtype)
        parts.append(bits.transpose(1, 2) if layout == "HND" else bits)
    return tuple(parts)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize(
    ("kernel_tokens", "block_size", "heads", "widths"),
    [
        (4, 4, 2, (8, 8)),
        (4, 8, 3, (8, 4)),  # a V of another width, one piece: nothing to load in pairs
        (24, 24, 1, (16, 16)),  # two tiles of tokens, the second in part
        (3, 6, 2, (264,)),  # a latent cache of more pieces than a tile
        (2, 4, 2, (256, 256)),
    ],
)
def test_layouts_and_sizes(layout, kernel_tokens, block_size, heads, widths):
    layers = [LayerCache(n, 5, a_cache(layout, kernel_tokens, heads, widths, n)) for n in (0, 31)]
    ids = [1, 0] if block_size == 2 * kernel_tokens else [2, 0]
    for start, missing in ((0, 0), (3, 1), (2**40, block_size)):
        how = {"block_size": block_size, "start": start, "num_tokens": (start + 2) * block_size - missing}
        wanted = torch_path.block_checksums(layers, ids, **how)
        assert block_checksums(layers, ids, **how).tolist() == wanted.tolist()


def test_against_the_definition_without_torch():
    kv = np.random.default_rng(1).integers(0, 256, (2, 2, 8, 48), dtype=np.uint8)
    layers = paged_cache(kv, [7, 2], 3, 4, [2, 0])
    got = block_checksums(layers, [2, 0], block_size=4, start=6, num_tokens=30)
    assert as_uint64(got).tolist() == definition.block_checksums(kv, [7, 2], 3, 4, 24, 30).tolist()


def test_rows_of_several_requests_in_one_launch(monkeypatch):
    import kernels.triton_path as path

    layers = [LayerCache(n, 0, a_cache("HND", 4, 2, (8, 8), n)) for n in (0, 1, 5)]
    requests = [([3, 0], 4, 0, 7), ([1], 4, 9, 10**6), ([2, 2], 4, 1, 4)]
    launches = []

    class Kernel:
        def __getitem__(self, grid):
            launches.append(grid)
            return original[grid]

    original = path.sum_rows_kernel
    monkeypatch.setattr(path, "sum_rows_kernel", Kernel())
    rows = np.concatenate([rows_of(*request) for request in requests])
    got = sum_rows(describe(layers, 4), rows).tolist()
    assert launches == [(5, 3)]
    wanted = [
        torch_path.block_checksums(layers, ids, block_size=size, start=start, num_tokens=num_tokens).tolist()
        for ids, size, start, num_tokens in requests
    ]
    assert got == list(itertools.chain(*wanted))


def test_slots_past_the_tokens_are_not_read():
    parts = a_cache("NHD", 4, 2, (8, 8), 0)
    how = {"block_size": 4, "start": 0, "num_tokens": 6}
    clean = block_checksums([LayerCache(0, 0, parts)], [1, 2], **how).tolist()
    for part in parts:
        part[2, 2:] = 7
        part[[0, 3]] = 7
    assert block_checksums([LayerCache(0, 0, parts)], [1, 2], **how).tolist() == clean
    parts[1][2, 1, 1, 7] += 1
    assert block_checksums([LayerCache(0, 0, parts)], [1, 2], **how).tolist() != clean


def test_no_blocks_have_no_checksums():
    layers = [LayerCache(0, 0, a_cache("NHD", 4, 2, (8, 8), 0))]
    assert block_checksums(layers, [], block_size=4, start=0, num_tokens=0).tolist() == []


def test_alignment_is_looked_at():
    whole = a_cache("NHD", 4, 2, (8, 8), 0)
    assert describe([LayerCache(0, 0, whole)], 4).aligned
    for narrow in (a_cache("NHD", 4, 2, (4, 8), 0), tuple(part[..., 4:] for part in whole)):
        table = describe([LayerCache(0, 0, narrow)], 4)
        assert not table.aligned
        how = {"block_size": 4, "start": 0, "num_tokens": 8}
        wanted = torch_path.block_checksums(table.caches, [3, 1], **how)
        assert block_checksums(table.caches, [3, 1], **how).tolist() == wanted.tolist()


def test_refuses_what_it_cannot_read():
    good = a_cache("NHD", 4, 2, (8, 8), 0)
    every_other = tuple(part[..., ::2] for part in good)
    odd = tuple(part[..., 1:5] for part in good)
    for parts in (every_other, odd):
        assert not can_read(LayerCache(0, 0, parts))
        with pytest.raises(ValueError, match="whole pieces"):
            describe([LayerCache(0, 0, parts)], 4)
    with pytest.raises(ValueError, match="whole pieces"):
        describe([LayerCache(0, 0, good), LayerCache(1, 0, good[:1])], 4)
    layers = [LayerCache(0, 0, good)]
    for ids, how, says in (
        ([4], {}, "block id 4 is outside"),
        ([0, -1], {}, "block id -1 is outside"),
        ([0], {"block_size": 0}, "block_size 0"),
        ([0], {"start": -1}, "start -1"),
        ([0], {"block_size": 6}, "do not tile"),
    ):
        with pytest.raises(ValueError, match=says):
            block_checksums(layers, ids, **({"block_size": 4, "start": 0, "num_tokens": 4} | how))
