"""The torch path against the definition: layouts, strides, dtypes, kernel blocks, tails, chunks (DEF-7, PRO-10)."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import definition
from kernels.torch_path import POISON_BYTE, LayerCache, as_uint64, block_checksums, paged_cache

VECTORS = sorted((Path(__file__).parents[1] / "vectors").glob("*.npz"))
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
LAYOUTS = ("token_major", "head_major", "packed", "misaligned", "strided_width", "block_last", "heads_of_more")


def empty_parts(layout, shape, widths, dtype):
    """Uninitialised cache parts [kernel_blocks, kernel_block_tokens, heads, width] in a memory layout."""
    blocks, tokens, heads = shape
    if layout == "packed":  # K and V, one odd element apart, in one tensor
        whole = torch.empty((blocks, tokens, heads, sum(widths) + len(widths)), dtype=dtype)
        starts = itertools.accumulate(widths, lambda at, width: at + width + 1, initial=1)
        return [whole[..., start : start + width] for start, width in zip(starts, widths, strict=False)]
    parts = []
    for width in widths:
        if layout == "head_major":
            part = torch.empty((blocks, heads, tokens, width), dtype=dtype).transpose(1, 2)
        elif layout == "misaligned":
            buffer = torch.empty(blocks * tokens * heads * width + 1, dtype=dtype)
            part = buffer[1:].view(blocks, tokens, heads, width)
        elif layout == "strided_width":
            part = torch.empty((blocks, tokens, heads, 2 * width), dtype=dtype)[..., ::2]
        elif layout == "block_last":
            part = torch.empty((tokens, heads, width, blocks), dtype=dtype).permute(3, 0, 1, 2)
        elif layout == "heads_of_more":
            part = torch.empty((blocks, tokens, heads + 2, width), dtype=dtype)[:, :, 1:-1]
        else:
            part = torch.empty((blocks, tokens, heads, width), dtype=dtype)
        parts.append(part)
    return parts


def fill(kv, block_ids, block_size, kernel_block_tokens, piece_split, dtype, layout, spare_blocks=2):
    """Write kv uint8 [heads, tokens, bytes] token by token into a poisoned cache of one layer."""
    heads, tokens, _ = kv.shape
    k = block_size // kernel_block_tokens
    size = torch.empty(0, dtype=dtype).element_size()
    integer = INTEGERS[size]
    widths = [pieces * 8 // size for pieces in piece_split]
    shape = ((max(block_ids) + spare_blocks) * k, kernel_block_tokens, heads)
    parts = empty_parts(layout, shape, widths, integer)
    for part in parts:
        part.fill_(POISON_BYTE if size == 1 else 0x5A5A)
    cuts = list(itertools.accumulate(piece_split, initial=0))
    for t in range(tokens):
        slot = block_ids[t // block_size] * block_size + t % block_size
        for part, first, last in zip(parts, cuts, cuts[1:], strict=False):
            row = torch.from_numpy(np.ascontiguousarray(kv[:, t, 8 * first : 8 * last])).view(integer)
            part[slot // kernel_block_tokens, slot % kernel_block_tokens] = row
    return tuple(part.view(dtype) for part in parts)


@st.composite
def cases(draw):
    kernel_block_tokens = draw(st.integers(1, 4))
    block_size = kernel_block_tokens * draw(st.integers(1, 3))
    blocks = draw(st.integers(1, 4))
    first_token = block_size * draw(st.sampled_from([0, 1, 5, 2**20, 2**59]))
    return {
        "seed": draw(st.integers(0, 2**32)),
        "layers": draw(st.lists(st.sampled_from([0, 1, 2, 31, 127, 2**20]), min_size=1, max_size=3, unique=True)),
        "heads": draw(st.integers(1, 4)),
        "first_head": draw(st.sampled_from([0, 3, 2**16 - 4])),
        "piece_split": draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)),
        "kernel_block_tokens": kernel_block_tokens,
        "block_size": block_size,
        "block_ids": draw(st.permutations(range(blocks + 2)))[:blocks],
        "first_token": first_token,
        "num_tokens": max(0, first_token + draw(st.integers(-1, blocks * block_size + 1))),
        "dtype": draw(
            st.sampled_from([torch.uint8, torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn])
        ),
        "layout": draw(st.sampled_from(LAYOUTS)),
        "max_gather_bytes": draw(st.sampled_from([1, 16, 40, 200, 1000, 4 << 20])),
    }


@pytest.mark.req("DEF-1", "DEF-2", "DEF-4", "DEF-7", "DEF-8", "PRO-10")
@settings(max_examples=250, deadline=None)
@given(case=cases())
def test_any_cache_gives_the_definition(case):
    block_size, first_token = case["block_size"], case["first_token"]
    tokens = len(case["block_ids"]) * block_size
    shape = (len(case["layers"]), case["heads"], tokens, 8 * sum(case["piece_split"]))
    kv = np.random.default_rng(case["seed"]).integers(0, 256, shape, dtype=np.uint8)
    layout = (block_size, case["kernel_block_tokens"], case["piece_split"], case["dtype"], case["layout"])
    layers = [
        LayerCache(number, case["first_head"], fill(rows, case["block_ids"], *layout))
        for number, rows in zip(case["layers"], kv, strict=True)
    ]
    got = block_checksums(
        layers,
        case["block_ids"],
        block_size=block_size,
        start=first_token // block_size,
        num_tokens=case["num_tokens"],
        max_gather_bytes=case["max_gather_bytes"],
    )
    expected = definition.block_checksums(
        kv, case["layers"], case["first_head"], block_size, first_token, case["num_tokens"]
    )
    assert got.dtype == torch.int64
    assert as_uint64(got).tolist() == expected.tolist()


@pytest.mark.req("DEF-1", "DEF-3", "DEF-4", "DEF-8")
@pytest.mark.parametrize("path", VECTORS, ids=lambda path: path.stem)
def test_shared_vectors(path):
    with np.load(path, allow_pickle=False) as case:
        block_size = int(case["block_size"])
        ids = np.random.default_rng(0).permutation(case["kv"].shape[2] // block_size).tolist()
        layers = paged_cache(case["kv"], case["layer_numbers"].tolist(), int(case["first_head"]), block_size, ids)
        got = block_checksums(
            layers,
            ids,
            block_size=block_size,
            start=int(case["first_token"]) // block_size,
            num_tokens=int(case["num_tokens"]),
        )
        assert as_uint64(got).tolist() == case["checksums"].tolist()


def random_layers(seed=0, *, numbers=(0, 1), heads=4, blocks=6, kernel_block_tokens=4, width=8):
    generator = torch.Generator().manual_seed(seed)
    shape = (blocks, kernel_block_tokens, heads, width)
    return [
        LayerCache(n, 0, tuple(torch.randn(shape, generator=generator).to(torch.bfloat16) for _ in "kv"))
        for n in numbers
    ]


def sums(layers, ids=(3, 0, 5), **changes):
    return as_uint64(block_checksums(layers, ids, **({"block_size": 4, "start": 2, "num_tokens": 19} | changes)))


@pytest.mark.req("DEF-7")
def test_parts_of_workers_sum_to_the_whole():
    layers = random_layers()
    parts = [
        sums([LayerCache(n, at, tuple(part[:, :, at : at + 2] for part in layers[n].parts))])
        for n in (0, 1)
        for at in (0, 2)
    ]
    assert sum(parts).tolist() == sums(layers).tolist()


@pytest.mark.req("DEF-6")
def test_a_larger_block_is_the_sum_of_its_smaller_ones():
    layers = random_layers()
    small = sums(layers, ids=(2, 3, 4, 5), start=4, num_tokens=30)
    large = sums(layers, ids=(1, 2), block_size=8, start=2, num_tokens=30)
    assert (small[::2] + small[1::2]).tolist() == large.tolist()


@pytest.mark.req("DEF-7")
def test_layers_may_have_different_kernel_blocks():
    layers = random_layers()
    first = LayerCache(0, 0, tuple(part.view(12, 2, 4, 8) for part in layers[0].parts))
    assert sums([first, layers[1]]).tolist() == sums(layers).tolist()


def test_k_and_v_may_have_different_widths():
    layers = random_layers()
    k, v = layers[0].parts
    joined = torch.cat((k, v[..., :4]), dim=3)
    assert sums([LayerCache(0, 0, (k, v[..., :4]))]).tolist() == sums([LayerCache(0, 0, (joined,))]).tolist()
    assert sums([LayerCache(0, 0, (k, v[..., :4]))]).tolist() != sums([LayerCache(0, 0, (v[..., :4], k))]).tolist()


@pytest.mark.req("DEF-8")
def test_slots_past_the_tokens_are_not_read():
    layers = random_layers()
    clean = sums(layers)
    for layer in layers:
        for part in layer.parts:
            part[5, 3:] = 7  # request position 19 in block position 4
            part[[1, 2, 4]] = 7
    assert sums(layers).tolist() == clean.tolist()
    layers[0].parts[1][5, 2, 0, 0] += 1
    assert (sums(layers) != clean).tolist() == [False, False, True]
    assert sums(layers, num_tokens=8).tolist() == [0, 0, 0]


def test_the_caches_stay_as_they_are():
    layers = random_layers()
    before = [part.clone() for layer in layers for part in layer.parts]
    sums(layers)
    assert all(torch.equal(a, b) for a, b in zip(before, (p for c in layers for p in c.parts), strict=True))


def test_no_blocks_have_no_checksums():
    assert sums(random_layers(), ids=()).tolist() == []


def test_block_ids_as_a_tensor_are_the_same():
    layers = random_layers()
    assert sums(layers, ids=torch.tensor([3, 0, 5])).tolist() == sums(layers).tolist()
    with pytest.raises(ValueError, match="must be int64"):
        sums(layers, ids=torch.tensor([3, 0, 5], dtype=torch.int32))


@pytest.mark.req("PRO-3")
def test_nothing_waits_for_a_value():
    """A meta tensor has no values: whatever would bring one to the host raises."""
    layers = [LayerCache(c.layer_number, 0, tuple(p.to("meta") for p in c.parts)) for c in random_layers()]
    got = block_checksums(layers, [3, 0, 5], block_size=4, start=2, num_tokens=19)
    assert (got.device.type, got.dtype, got.shape) == ("meta", torch.int64, (3,))


class Outputs(TorchDispatchMode):
    """Keeps the size in bytes of the largest tensor that any operation made."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.largest = max(self.largest, result.numel() * result.element_size())
        return result


@pytest.mark.req("PRO-10")
@pytest.mark.parametrize("max_gather_bytes", [1, 64, 100, 128, 1000, 1024, 4096])
def test_gathers_are_bounded(max_gather_bytes):
    layers = random_layers(blocks=64, kernel_block_tokens=16)
    ids = [40, 3, 63, 2, 17, 5, 60]
    arguments = {"block_size": 16, "start": 0, "num_tokens": 107}
    with Outputs() as outputs:
        got = block_checksums(layers, ids, max_gather_bytes=max_gather_bytes, **arguments)
    # A token of 4 heads of 8 bf16 is 64 bytes, a block 1 KiB, a part of the cache 64 KiB; 7 ids are 56 bytes.
    assert outputs.largest <= max(max_gather_bytes, 64)
    assert as_uint64(got).tolist() == sums(layers, ids=ids, **arguments).tolist()


@pytest.mark.req("PRO-3", "DEF-7")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_gives_the_same_without_a_sync():
    layers = random_layers()
    on_device = [LayerCache(c.layer_number, 0, tuple(p.cuda() for p in c.parts)) for c in layers]
    sums(on_device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = block_checksums(on_device, [3, 0, 5], block_size=4, start=2, num_tokens=19)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert as_uint64(got).tolist() == sums(layers).tolist()


def one_layer(*parts, number=0, first_head=0):
    return [LayerCache(number, first_head, parts)]


GOOD = torch.zeros((6, 4, 2, 8), dtype=torch.bfloat16)


@pytest.mark.req("FPR-2")
@pytest.mark.parametrize(
    ("layers", "changes", "says"),
    [
        ([], {}, "at least one"),
        (one_layer(GOOD) * 2, {}, "distinct"),
        (one_layer(GOOD, number=-1), {}, "distinct numbers >= 0"),
        (one_layer(), {}, "must be K and V"),
        (one_layer(GOOD[0]), {}, "must be K and V"),
        (one_layer(GOOD, GOOD[:, :, :1]), {}, "must agree"),
        (one_layer(GOOD, GOOD.to("meta")), {}, "must agree"),
        (one_layer(GOOD[..., :3]), {}, "3 elements of torch.bfloat16"),
        (one_layer(GOOD[..., :0]), {}, "0 elements"),
        (one_layer(GOOD.to(torch.complex128)), {}, "8 elements of torch.complex128"),
        (one_layer(GOOD[:, :, :0]), {}, "0 heads"),
        (one_layer(GOOD, first_head=2**16 - 1), {}, "2 heads from 65535"),
        (one_layer(GOOD, first_head=-1), {}, "2 heads from -1"),
        (one_layer(GOOD), {"block_size": 6}, "do not tile blocks of 6"),
        (one_layer(GOOD), {"block_size": 2}, "do not tile blocks of 2"),
        (one_layer(GOOD), {"block_size": 0}, "block_size 0"),
        (one_layer(GOOD), {"start": -1}, "start -1"),
        (one_layer(GOOD), {"num_tokens": -1}, "num_tokens -1"),
        (one_layer(GOOD), {"max_gather_bytes": 0}, "max_gather_bytes 0"),
        (one_layer(GOOD), {"ids": (0, 6)}, "block id 6 is outside"),
        (one_layer(GOOD), {"ids": (-1,)}, "block id -1 is outside"),
        (one_layer(GOOD), {"ids": (3,), "block_size": 8}, "block id 3 is outside"),
    ],
)
def test_refuses_what_it_cannot_checksum(layers, changes, says):
    with pytest.raises(ValueError, match=says):
        sums(layers, **changes)


@pytest.mark.parametrize(
    ("block_size", "ids", "says"),
    [
        (0, [0], "whole"),
        (3, [0], "whole"),
        (2, [0], "2 distinct"),
        (2, [1, 1], "2 distinct"),
        (2, [0, -1], "2 distinct"),
    ],
)
def test_a_paged_cache_needs_whole_blocks_and_an_id_each(block_size, ids, says):
    with pytest.raises(ValueError, match=says):
        paged_cache(np.zeros((1, 1, 4, 16), np.uint8), [0], 0, block_size, ids)


def test_a_paged_cache_is_poisoned_where_nothing_was_put():
    (layer,) = paged_cache(np.zeros((1, 2, 4, 16), np.uint8), [9], 5, 2, [4, 1])
    assert [part.shape for part in layer.parts] == [(5, 2, 2, 8)] * 2
    assert (layer.layer_number, layer.first_head) == (9, 5)
    for part in layer.parts:
        assert sorted({int(v) for b in (0, 2, 3) for v in part[b].flatten()}) == [POISON_BYTE]
        assert not part[[1, 4]].any()
