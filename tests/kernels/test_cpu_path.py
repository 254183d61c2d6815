"""The compiled path against the definition: strides, dtypes, kernel blocks, tails, threads (DEF-7, DEF-8)."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kernels import cpu_compiled, cpu_path, definition, definition_v2
from kernels.cpu_path import block_checksums
from kernels.torch_path import LayerCache, as_uint64, paged_cache

ROOT = Path(__file__).parents[2]
VECTORS = sorted((ROOT / "tests" / "vectors").glob("*.npz"))
LAYOUTS = ("HND", "NHD", "K_then_V", "packed", "misaligned", "every_other_element", "block_last")
DEFINITIONS = {1: definition, 2: definition_v2}
DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.int64)


def views(raw, layout, blocks, tokens, heads, widths, size):
    """Parts uint8 [blocks, tokens, heads, width * size] of one layer over `raw`, as bytes, in a memory layout."""
    width = max(widths) * size
    if layout == "packed":  # K and V of a token beside each other, and one odd element
        whole = raw[: blocks * tokens * heads * (sum(widths) + 1) * size].view(blocks, tokens, heads, -1)
        return [whole[..., ::1][..., at : at + w * size] for at, w in zip((0, widths[0] * size), widths, strict=False)]
    count = blocks * tokens * heads * width
    parts = []
    for n, w in enumerate(widths):
        at = n * 2 * count
        if layout == "HND":
            part = raw[at : at + count].view(blocks, heads, tokens, width).transpose(1, 2)
        elif layout == "K_then_V":  # the parts of a block beside each other
            part = raw[: count * len(widths)].view(blocks, len(widths), tokens, heads, width)[:, n]
        elif layout == "misaligned":
            part = raw[at + size : at + size + count].view(blocks, tokens, heads, width)
        elif layout == "block_last":
            part = raw[at : at + count].view(tokens, heads, blocks, width).permute(2, 0, 1, 3)
        else:
            part = raw[at : at + count].view(blocks, tokens, heads, width)
        parts.append(part[..., : w * size])
    return parts


def a_layer(case, number, seed):
    """A cache of random bytes, and uint8 [blocks * tokens, heads, bytes]: the same in the order of its blocks."""
    size = torch.empty(0, dtype=case["dtype"]).element_size()
    widths = [pieces * 8 // size for pieces in case["pieces"]]
    blocks, tokens, heads = case["blocks"] * case["split"], case["kernel_tokens"], case["heads"]
    needed = 4 * blocks * tokens * heads * (sum(widths) + 2) * size + 64
    raw = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, needed, dtype=np.uint8))
    parts = views(raw, case["layout"], blocks, tokens, heads, widths, size)
    kv = torch.cat([part.reshape(blocks * tokens, heads, -1) for part in parts], dim=2).numpy()
    if case["layout"] == "every_other_element":
        typed = [torch.empty((*p.shape[:3], 2 * w), dtype=case["dtype"]) for p, w in zip(parts, widths, strict=True)]
        for target, part in zip(typed, parts, strict=True):
            target.view(torch.uint8).view(*target.shape, size)[..., ::2, :] = part.reshape(*part.shape[:3], -1, size)
        parts = [part[..., ::2] for part in typed]
    else:
        parts = [
            part.view(case["dtype"]) if part.stride(3) == 1 and size == 1 else retyped(part, case) for part in parts
        ]
    return LayerCache(number, case["first_head"], tuple(parts)), kv


def retyped(part, case):
    """The same memory in the case's dtype."""
    size = torch.empty(0, dtype=case["dtype"]).element_size()
    storage = torch.empty(0, dtype=case["dtype"]).set_(part.untyped_storage())
    shape = (*part.shape[:3], part.shape[3] // size)
    strides = tuple(stride // size for stride in part.stride()[:3])
    return storage.as_strided(shape, (*strides, 1), part.storage_offset() // size)


@st.composite
def cases(draw):
    blocks = draw(st.integers(1, 5))
    block_tokens = draw(st.sampled_from([1, 2, 3, 4, 7, 8, 16, 20, 33]))
    split = draw(st.integers(1, 3))
    first = draw(st.sampled_from([0, 1, 5, 2**20, 2**58]))
    return {
        "blocks": blocks,
        "kernel_tokens": block_tokens,
        "split": split,
        "heads": draw(st.sampled_from([1, 2, 4, 5, 8])),
        "first_head": draw(st.sampled_from([0, 3, 2**16 - 8])),
        "pieces": draw(st.lists(st.sampled_from([1, 2, 7, 8, 16, 33]), min_size=1, max_size=2)),
        "dtype": draw(st.sampled_from(DTYPES)),
        "layout": draw(st.sampled_from(LAYOUTS)),
        "numbers": draw(st.lists(st.sampled_from([0, 1, 31, 2**20]), min_size=1, max_size=2, unique=True)),
        "ids": draw(st.permutations(range(blocks)))[: draw(st.integers(1, blocks))],
        "start": first,
        "missing": draw(st.integers(-1, block_tokens * split + 1)),
        "max_threads": draw(st.sampled_from([1, 1, 2])),
        "version": draw(st.sampled_from([1, 2])),
    }


LONG = {
    "blocks": 2,
    "kernel_tokens": 301,
    "split": 1,
    "heads": 2,
    "first_head": 0,
    "pieces": [3, 8],
    "dtype": torch.bfloat16,
    "layout": "HND",
    "numbers": [2],
    "ids": [1, 0],
    "start": 1,
    "missing": 7,
    "max_threads": 1,
    "version": 1,
}


@pytest.mark.req("DEF-1", "DEF-2", "DEF-4", "DEF-7", "DEF-8", "HRD-1")
@settings(max_examples=200, deadline=None)
@given(case=cases(), seed=st.integers(0, 2**32))
@example(case=LONG, seed=0)
@example(case=LONG | {"layout": "NHD", "heads": 4, "kernel_tokens": 256, "missing": 0}, seed=1)
@example(case=LONG | {"layout": "packed", "kernel_tokens": 272, "missing": 290}, seed=2)
@example(case=LONG | {"version": 2}, seed=3)
def test_any_cache_gives_the_definition(case, seed):
    block_size = case["kernel_tokens"] * case["split"]
    first_token = case["start"] * block_size
    num_tokens = max(0, first_token + len(case["ids"]) * block_size - case["missing"])
    made = [a_layer(case, number, seed + n) for n, number in enumerate(case["numbers"])]
    got = block_checksums(
        [layer for layer, _ in made],
        case["ids"],
        block_size=block_size,
        start=case["start"],
        num_tokens=num_tokens,
        max_threads=case["max_threads"],
        version=case["version"],
    )
    slots = [block * block_size + slot for block in case["ids"] for slot in range(block_size)]
    kv = np.stack([np.ascontiguousarray(kv[slots].transpose(1, 0, 2)) for _, kv in made])
    how = (case["numbers"], case["first_head"], block_size, first_token, num_tokens)
    wanted = DEFINITIONS[case["version"]].block_checksums(kv, *how)
    assert got.dtype == torch.int64
    assert as_uint64(got).tolist() == wanted.tolist()


def test_the_long_blocks_of_these_tests_are_long():
    assert cpu_compiled.FAR_TOKENS <= 256
    assert cpu_compiled.TILE_TOKENS % cpu_compiled.ROWS == 0


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


def random_layers(numbers=(0, 1), shape=(6, 4, 4, 8)):
    generator = torch.Generator().manual_seed(0)
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


@pytest.mark.req("DEF-8")
def test_slots_past_the_tokens_never_count():
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


def test_no_blocks_have_no_checksums():
    assert sums(random_layers(), ids=()).tolist() == []


def test_block_ids_as_a_tensor_are_the_same_and_are_checked():
    layers = random_layers()
    assert sums(layers, ids=torch.tensor([3, 9, 0, 9, 5])[::2]).tolist() == sums(layers).tolist()
    for ids, says in ((torch.tensor([3], dtype=torch.int32), "must be int64"), (torch.tensor([6]), "id 6 is outside")):
        with pytest.raises(ValueError, match=says):
            sums(layers, ids=ids)


def test_a_table_serves_many_calls():
    layers = random_layers()
    table = cpu_path.describe(layers, 4)
    for ids, start, num_tokens in (((3, 0, 5), 2, 19), ((1,), 0, 3)):
        got = cpu_path.sum_blocks(table, np.array(ids), start=start, num_tokens=num_tokens)
        assert got.tolist() == sums(layers, ids, start=start, num_tokens=num_tokens).tolist()
    layers[0].parts[0][3] += 1
    assert (
        cpu_path.sum_blocks(table, np.array([3]), start=0, num_tokens=4).tolist()
        == sums(layers, (3,), start=0).tolist()
    )


def test_layers_that_torch_must_read_are_beside_those_that_it_need_not():
    plain, other = random_layers((0,)), random_layers((1,), (6, 4, 4, 16))
    strided = [LayerCache(1, 0, tuple(part[..., ::2] for part in other[0].parts))]
    copied = [LayerCache(1, 0, tuple(part.contiguous() for part in strided[0].parts))]
    assert sums(plain + strided).tolist() == sums(plain + copied).tolist()
    assert len(cpu_path.describe(plain + strided, 4).others) == 1


def test_threads_are_bounded(monkeypatch):
    """By what is asked for, by the layers, and by torch's own number of threads."""
    layers, made = random_layers(range(5)), []

    class Pool(cpu_path.ThreadPoolExecutor):
        def __init__(self, threads):
            made.append(threads)
            super().__init__(threads)

    monkeypatch.setattr(cpu_path, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    one = sums(layers)
    assert made == []
    for asked in (2, 3, 64):
        assert sums(layers, max_threads=asked).tolist() == one.tolist()
    sums(layers[:2], max_threads=64)
    assert made == [2, 3, 3, 2]


@pytest.mark.req("FPR-2")
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layers": []}, "at least one"),
        ({"layers": random_layers((1, 1))}, "distinct"),
        ({"layers": random_layers(shape=(6, 4, 4, 3))}, "3 elements of torch.bfloat16"),
        ({"block_size": 6}, "do not tile blocks of 6"),
        ({"block_size": 0}, "block_size 0"),
        ({"start": -1}, "start -1"),
        ({"num_tokens": -1}, "num_tokens -1"),
        ({"max_threads": 0}, "max_threads 0"),
        ({"version": 0}, "version is 0: there are definitions 1 and 2"),
        ({"ids": (0, 6)}, "block id 6 is outside"),
        ({"ids": (-1,)}, "block id -1 is outside"),
        ({"ids": (2**62,), "version": 2, "block_size": 16}, "block id 4611686018427387904 is outside"),
        ({"layers": [LayerCache(0, 0, (torch.zeros((6, 4, 2, 8), device="meta"),))]}, "host memory only"),
    ],
)
def test_refuses_what_it_cannot_checksum(changes, says):
    with pytest.raises(ValueError, match=says):
        sums(**({"layers": random_layers()} | changes))


def run_python(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_works_where_numba_can_write_no_cache():
    """With nowhere to keep compiled code numba refuses to cache: the path is then compiled for this process alone."""
    code = """
        from numba.core.caching import CacheImpl
        CacheImpl._locator_classes = []
        import torch
        from kernels import cpu_compiled, paths
        from kernels.torch_path import LayerCache, block_checksums
        layers = [LayerCache(0, 0, (torch.arange(256).view(2, 4, 4, 8),))]
        for version in (1, 2):
            how = dict(block_size=4, start=0, num_tokens=7, version=version)
            assert paths.why_not_compiled(version) is None
            wanted = block_checksums(layers, [1, 0], **how).tolist()
            assert paths.block_checksums(layers, [1, 0], **how).tolist() == wanted
        from kernels import cpu_compiled_v2
        print(*(type(module.add_sums._cache).__name__ for module in (cpu_compiled, cpu_compiled_v2)))
    """
    assert run_python("\n".join(line[8:] for line in code.splitlines())).split() == ["NullCache", "NullCache"]
