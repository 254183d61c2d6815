"""The definition against the shared vectors, against plain Python integers, and its properties (DEF, GAP-8, 10, 11)."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.definition import MAX_KV_HEADS_PER_LAYER, block_checksums, check_blocks, slice_checksum

VECTORS = sorted((Path(__file__).parents[1] / "vectors").glob("*.npz"))
MOD = 2**64


def by_hand(kv, layer_numbers, first_head, block_size, first_token, num_tokens):
    """DEF-2 to DEF-4 and DEF-8 with Python's integers, a piece at a time."""
    _, heads, tokens, width = kv.shape
    pieces = width // 8
    sums = [0] * (tokens // block_size)
    for row, layer in enumerate(layer_numbers):
        for head in range(heads):
            m = 2 * (layer * 2**16 + first_head + head) + 1
            for token in range(min(tokens, num_tokens - first_token)):
                for piece in range(pieces):
                    x = int.from_bytes(kv[row, head, token, 8 * piece : 8 * piece + 8].tobytes(), "little")
                    j = (first_token + token) * pieces + piece
                    sums[token // block_size] += m * x * (2 * j + 1)
    return [s % MOD for s in sums]


def random_kv(seed, *shape):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def whole(kv, **changes):
    """One block that holds all of kv, from the first token on."""
    arguments = {
        "layer_numbers": list(range(kv.shape[0])),
        "first_head": 0,
        "block_size": kv.shape[2],
        "first_token": 0,
        "num_tokens": kv.shape[2],
    }
    return block_checksums(kv, **(arguments | changes))


def as_pieces(kv):
    return kv.view("<u8")


@pytest.mark.req("DEF-1", "DEF-2", "DEF-3", "DEF-4", "DEF-8")
@pytest.mark.parametrize("path", VECTORS, ids=lambda path: path.stem)
def test_shared_vectors(path):
    with np.load(path, allow_pickle=False) as case:
        arguments = [case[k] for k in ("layer_numbers", "first_head", "block_size", "first_token", "num_tokens")]
        got = block_checksums(case["kv"], *(a.tolist() for a in arguments))
        assert got.dtype == np.uint64
        assert got.tolist() == case["checksums"].tolist()


def test_all_the_vectors_are_here():
    assert len(VECTORS) == 32


@pytest.mark.req("DEF-2", "DEF-3", "DEF-4", "DEF-8")
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    shape=st.tuples(*(st.integers(1, 3) for _ in range(5))),
    first_block=st.sampled_from([0, 1, 7, 2**31, 2**60]),
    first_head=st.sampled_from([0, 5, 2**16 - 3]),
    missing=st.integers(0, 4),
)
def test_against_python_integers(seed, shape, first_block, first_head, missing):
    layers, heads, blocks, block_size, pieces = shape
    kv = random_kv(seed, layers, heads, blocks * block_size, 8 * pieces)
    first_token = first_block * block_size
    num_tokens = max(0, first_token + blocks * block_size - missing)
    arguments = ([3 * i + 1 for i in range(layers)], first_head, block_size, first_token, num_tokens)
    assert block_checksums(kv, *arguments).tolist() == by_hand(kv, *arguments)


@pytest.mark.req("DEF-3")
def test_a_slice_depends_on_the_position_in_the_request():
    kv = random_kv(1, 4, 16)
    x = [int(v) for v in as_pieces(kv).ravel()]
    assert slice_checksum(kv, 0) == sum(v * (2 * j + 1) for j, v in enumerate(x)) % MOD
    assert slice_checksum(kv, 5) == sum(v * (2 * (10 + j) + 1) for j, v in enumerate(x)) % MOD
    assert slice_checksum(kv[:0], 5) == 0


@pytest.mark.req("DEF-4")
def test_factors_of_layers_and_heads():
    kv = np.zeros((1, 1, 1, 8), np.uint8)
    kv[..., 0] = 1
    assert MAX_KV_HEADS_PER_LAYER == 65536
    assert whole(kv, layer_numbers=[3], first_head=7).tolist() == [2 * (3 * 65536 + 7) + 1]


@pytest.mark.req("DEF-5")
@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), data=st.data(), change=st.integers(1, MOD - 1))
def test_any_change_of_one_piece_changes_the_checksum(seed, data, change):
    kv = random_kv(seed, 2, 2, 3, 16)
    where = tuple(data.draw(st.integers(0, n - 1)) for n in (2, 2, 3, 2))
    changed = kv.copy()
    as_pieces(changed)[where] ^= np.uint64(change)
    assert whole(kv) != whole(changed)


@pytest.mark.req("DEF-5")
@pytest.mark.parametrize("bit", [0, 31, 63])
def test_every_single_bit_flip_of_these_is_seen(bit):
    kv = random_kv(2, 2, 3, 4, 16)
    flat = as_pieces(kv).reshape(-1)
    clean = whole(kv)
    for i in range(flat.size):
        flat[i] ^= np.uint64(1 << bit)
        assert whole(kv) != clean
        flat[i] ^= np.uint64(1 << bit)


@pytest.mark.req("DEF-5")
@pytest.mark.parametrize("axis", [0, 1, 2], ids=["layers", "heads", "tokens"])
def test_swaps_of_random_contents_are_seen(axis):
    for seed in range(50):
        kv = random_kv(seed, 4, 4, 4, 16)
        for a, b in ((0, 1), (0, 2), (1, 3)):
            order = np.arange(4)
            order[[a, b]] = b, a
            assert whole(kv) != whole(np.take(kv, order, axis))


@pytest.mark.req("DEF-5")
def test_the_rate_of_unseen_token_swaps():
    """Two tokens that differ in one piece by 2**60, a and b tokens of 2 pieces apart: 2**60 * 2*P*(a-b) vanishes
    when v(P*(a-b)) >= 3, as the formula 2**-(63 - v) says for a difference with 60 low bits zero."""
    for distance in range(1, 9):
        kv = random_kv(distance, 1, 1, 9, 16)
        kv[0, 0, distance] = kv[0, 0, 0]
        as_pieces(kv)[0, 0, distance, 1] ^= np.uint64(1 << 60)
        swapped = kv.copy()
        swapped[0, 0, [0, distance]] = kv[0, 0, [distance, 0]]
        assert bool((whole(kv) == whole(swapped)).all()) == (2 * distance % 8 == 0)


@pytest.mark.req("DEF-6")
@pytest.mark.parametrize("num_tokens", [64, 96, 75, 65, 81])
def test_consecutive_blocks_add_up(num_tokens):
    kv = random_kv(3, 2, 2, 32, 24)
    arguments = {"first_token": 64, "num_tokens": num_tokens}
    small = [int(v) for v in whole(kv, block_size=16, **arguments)]
    assert whole(kv, block_size=32, **arguments).tolist() == [sum(small) % MOD]


@pytest.mark.req("DEF-1", "DEF-7")
def test_parts_of_workers_sum_to_the_whole():
    kv = random_kv(4, 4, 6, 8, 16)
    total = whole(kv, block_size=4)
    parts = [
        whole(kv[layers, heads], block_size=4, layer_numbers=range(4)[layers], first_head=heads.start)
        for layers in (slice(0, 1), slice(1, 4))
        for heads in (slice(0, 2), slice(2, 6))
    ]
    assert sum(parts).tolist() == total.tolist()


@pytest.mark.req("DEF-8")
def test_slots_past_the_tokens_never_count():
    kv = random_kv(5, 1, 2, 8, 16)
    other = kv.copy()
    other[:, :, 5:] = 0xA5
    assert whole(kv, num_tokens=5).tolist() == whole(other, num_tokens=5).tolist()
    other[:, :, 4] = 0xA5
    assert whole(kv, num_tokens=5) != whole(other, num_tokens=5)
    assert whole(kv, num_tokens=0).tolist() == [0]
    assert whole(kv, block_size=4, first_token=8, num_tokens=3).tolist() == [0, 0]
    assert whole(kv, num_tokens=10**6).tolist() == whole(kv).tolist()


@pytest.mark.req("GAP-8")
def test_gap_even_numbers_of_top_bit_flips_cancel():
    kv = random_kv(6, 2, 2, 4, 16)
    flat = as_pieces(kv).reshape(-1)
    clean = whole(kv)
    for i, j in ((0, 1), (3, 30), (7, 16)):
        flat[[i, j]] ^= np.uint64(1 << 63)
        assert whole(kv) == clean
        flat[i] ^= np.uint64(1 << 63)
        assert whole(kv) != clean
        flat[j] ^= np.uint64(1 << 63)


@pytest.mark.req("GAP-8")
@pytest.mark.parametrize(("bit", "rate"), [(63, 1), (62, 1 / 2), (61, 1 / 4)])
def test_gap_rate_of_double_flips_of_one_bit(bit, rate):
    rng = np.random.default_rng(bit)
    flips = 600
    passed = 0
    for _ in range(flips):
        kv = rng.integers(0, 256, (1, 1, 8, 64), dtype=np.uint8)
        clean = whole(kv)
        pair = rng.choice(64, 2, replace=False)
        as_pieces(kv).reshape(-1)[pair] ^= np.uint64(1 << bit)
        passed += bool(whole(kv) == clean)
    # Within five standard deviations: the seed is fixed, so this either always holds or never does.
    assert abs(passed - flips * rate) <= 5 * (flips * rate * (1 - rate)) ** 0.5


@pytest.mark.req("GAP-10")
def test_gap_pieces_of_equal_factor_can_change_places():
    kv = random_kv(7, 1, 2, 1, 16)
    changed = kv.copy()
    as_pieces(changed)[0, 0, 0, 1], as_pieces(changed)[0, 1, 0, 0] = (
        as_pieces(kv)[0, 1, 0, 0],
        as_pieces(kv)[0, 0, 0, 1],
    )
    assert (changed != kv).any()
    assert whole(changed) == whole(kv)


@pytest.mark.req("GAP-10")
@pytest.mark.parametrize(("block", "percent"), [(0, 54), (1, 15), (7, 0)])
def test_gap_share_of_pieces_with_a_factor_that_is_not_their_own(block, percent):
    pieces, heads = 512, 8
    factors = [(2 * h + 1) * (2 * j + 1) for h in range(heads) for j in range(block * pieces, (block + 1) * pieces)]
    shared = sum(count for count in Counter(factors).values() if count > 1)
    assert round(100 * shared / len(factors)) == percent


@pytest.mark.req("GAP-11")
def test_gap_second_differences_cancel():
    kv = random_kv(8, 1, 1, 2, 32)
    changed = kv.copy()
    d = 0x0123456789ABCDEF
    as_pieces(changed).reshape(-1)[2:5] += np.array([d, -2 * d % MOD, d], dtype=np.uint64)
    assert (changed != kv).any()
    assert whole(changed) == whole(kv)


@pytest.mark.req("DEF-2", "FPR-2")
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kv": np.zeros((1, 1, 4, 12), np.uint8)}, "bytes_per_token is 12"),
        ({"kv": np.zeros((1, 1, 4, 16), np.int8)}, "kv is int8"),
        ({"kv": np.zeros((1, 4, 16), np.uint8)}, "kv is uint8"),
        ({"kv": np.zeros((1, 0, 4, 16), np.uint8)}, "none 0"),
        ({"layer_numbers": [1, 2]}, "2 for 1 layers"),
        ({"layer_numbers": [-1]}, "negative"),
        ({"first_head": -1}, "heads -1 to -1"),
        ({"first_head": 2**16}, "heads 65536"),
        ({"block_size": 0}, "block_size is 0"),
        ({"block_size": -2}, "block_size is -2"),
        ({"block_size": 3}, "not whole blocks"),
        ({"first_token": 1}, "first_token is 1"),
        ({"first_token": -2}, "first_token is -2"),
        ({"num_tokens": -1}, "num_tokens is -1"),
    ],
)
def test_refuses_what_has_no_checksum(changes, says):
    good = {
        "kv": np.zeros((1, 1, 4, 16), np.uint8),
        "layer_numbers": [0],
        "first_head": 0,
        "block_size": 2,
        "first_token": 0,
        "num_tokens": 4,
    }
    check_blocks(**good)
    with pytest.raises(ValueError, match=says):
        block_checksums(**(good | changes))


def test_refuses_two_layers_of_one_number():
    with pytest.raises(ValueError, match="not distinct"):
        whole(np.zeros((2, 1, 1, 8), np.uint8), layer_numbers=[4, 4])


@pytest.mark.parametrize(
    ("kv", "first_token"),
    [
        (np.zeros((1, 7), np.uint8), 0),
        (np.zeros((1, 0), np.uint8), 0),
        (np.zeros((1, 8)), 0),
        (np.zeros(8, np.uint8), 0),
    ],
)
def test_a_slice_refuses_what_is_not_one(kv, first_token):
    with pytest.raises(ValueError, match="a slice is uint8"):
        slice_checksum(kv, first_token)
