"""Blocks read in another order than they were written in: each built as memory, element by element."""

import itertools

import numpy as np
import pytest
import torch

from engine.cache import KVMemory, PagedKVCache
from engine.checksum.records import GroupBlocks
from engine.config import EngineConfig


def reread(kv, block_size, written, read):
    """Write each block of each layer into flat memory in one order of axes p, h, s, and read it in another."""
    layers, heads, tokens, size = kv.shape
    sizes = {"p": 2, "h": heads, "s": block_size}
    out = np.empty_like(kv)
    half = size // 2

    def places(order):
        for at in itertools.product(*(range(sizes[axis]) for axis in order)):
            found = dict(zip(order, at, strict=True))
            yield found["h"], found["s"], slice(found["p"] * half, found["p"] * half + half)

    for layer in range(layers):
        for start in range(0, tokens, block_size):
            pairs = zip(places(written), places(read), strict=True)
            for (head, slot, part), (to_head, to_slot, to_part) in pairs:
                out[layer, to_head, start + to_slot, to_part] = kv[layer, head, start + slot, part]
    return out


HND_AS_NHD = "Each block was written as [K|V][heads][slots] (HND) and read as [K|V][slots][heads] (NHD)"


@pytest.mark.parametrize(
    ("written", "read", "kind", "text"),
    [
        ("phs", "psh", "hnd_as_nhd", HND_AS_NHD),
        (
            "psh",
            "phs",
            "nhd_as_hnd",
            "Each block was written as [K|V][slots][heads] (NHD) and read as [K|V][heads][slots] (HND)",
        ),
        (
            "hsp",
            "hps",
            "packed_as_separate",
            "Each block was written as [heads][slots][K|V] (packed HND) and read as [heads][K|V][slots]",
        ),
        (
            "hps",
            "hsp",
            "separate_as_packed",
            "Each block was written as [heads][K|V][slots] and read as [heads][slots][K|V] (packed HND)",
        ),
        (
            "shp",
            "psh",
            "packed_as_separate",
            "Each block was written as [slots][heads][K|V] (packed NHD) and read as [K|V][slots][heads] (NHD)",
        ),
    ],
)
@pytest.mark.parametrize(("heads", "block_size"), [(2, 8), (3, 16), (4, 32)])
def test_orders_of_memory(random_kv, best, written, read, kind, text, heads, block_size):
    p = random_kv(heads=heads, tokens=4 * block_size, size=16)
    assert best(p, reread(p, block_size, written, read), block_size) == (kind, f"{text}.")


def test_the_engine_s_own_memory_of_one_layout_read_as_the_other(best):
    hnd, nhd = (PagedKVCache(EngineConfig("e", layout=layout, num_blocks=5)) for layout in ("HND", "NHD"))
    size = hnd.block_size
    blocks = GroupBlocks(group_id=0, block_size=size, start=0, block_ids=(3, 1, 2), num_tokens=3 * size)
    generator = torch.Generator().manual_seed(0)
    for ours, theirs in zip(hnd.layers, nhd.layers, strict=True):
        ours.copy_(torch.randn(ours.shape, generator=generator))
        stored = ours.permute(0, 1, 3, 2, 4)
        assert stored.is_contiguous()
        theirs.copy_(stored.reshape(theirs.shape))
    p, d = (KVMemory(cache).tokens(blocks) for cache in (hnd, nhd))
    assert best(p, d, size) == ("hnd_as_nhd", f"{HND_AS_NHD}.")


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_a_last_block_that_is_not_full(random_kv, run, block_size):
    p = random_kv(tokens=3 * block_size, size=16)
    d = reread(p, block_size, "phs", "psh")
    tokens = 2 * block_size + block_size // 2 + 1
    found = run(p[:, :, :tokens].copy(), d[:, :, :tokens].copy(), block_size).hypotheses[0]
    assert found.kind == "hnd_as_nhd"
    assert 0.5 < found.explained < 1
    assert found.text.startswith(f"{HND_AS_NHD}; what token")
    assert found.text.endswith(" in no dump.")


def test_a_last_block_of_which_nothing_is_known(random_kv, run):
    p = random_kv(tokens=48)
    d = p.reshape(2, 2, 3, 2, 8, 64)[:, :, :, ::-1].reshape(p.shape)
    assert run(p[:, :, :40].copy(), d[:, :, :40].copy()).texts[0] == (
        "The two halves of each block are exchanged (kernel blocks of 8 tokens); what tokens 32 to 39 then hold is in "
        "no dump."
    )


def test_where(random_kv, best):
    p = random_kv(layers=3, tokens=64, size=16)
    d = p.copy()
    d[1] = reread(p, 16, "phs", "psh")[1]
    assert best(p, d)[1] == f"{HND_AS_NHD} in layer 1."
    d = p.copy()
    d[:, :, 16:48] = reread(p[:, :, 16:48], 16, "phs", "psh")
    assert best(p, d)[1] == f"{HND_AS_NHD} in tokens 16 to 47."
    d = p.copy()
    d[:, 1] = reread(p, 16, "hsp", "hps")[:, 1]
    assert best(p, d)[1].endswith(" and read as [heads][K|V][slots] in head 1.")


@pytest.mark.parametrize(("d_size", "p_size"), [(16, 32), (32, 16)])
def test_at_either_side_s_block_size(random_kv, best, d_size, p_size):
    p = random_kv(tokens=96, size=16)
    for size in (16, 32):
        d = reread(p, size, "phs", "psh")
        assert best(p, d, d_size, producer_block_size=p_size)[0] == "hnd_as_nhd"


@pytest.mark.parametrize(
    ("parts", "order", "text"),
    [
        (2, [1, 0], "The two halves of each block are exchanged (kernel blocks of 8 tokens)."),
        (4, [1, 0, 3, 2], "In each block, neighbouring kernel blocks of 4 tokens are exchanged."),
        (4, [3, 2, 1, 0], "In each block, the 4 kernel blocks of 4 tokens are in reverse order."),
        (4, [2, 3, 0, 1], "The two halves of each block are exchanged (kernel blocks of 8 tokens)."),
    ],
)
def test_kernel_blocks(random_kv, best, parts, order, text):
    p = random_kv(tokens=64)
    d = p.reshape(2, 2, 4, parts, 16 // parts, 64)[:, :, :, order].reshape(p.shape)
    assert best(p, d) == ("kernel_blocks", text)


def test_halves_of_a_single_block_are_tokens_exchanged(random_kv, best):
    p = random_kv()
    d = p.copy()
    d[:, :, 16:24], d[:, :, 24:32] = p[:, :, 24:32], p[:, :, 16:24]
    assert best(p, d) == ("tokens_exchanged", "Tokens 16 to 23 are exchanged with 24 to 31.")
