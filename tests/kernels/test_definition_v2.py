"""Version 2 against plain Python integers, its properties, and what version 1 misses (DEF-5 to 7, GAP-8, 10, 11)."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import definition, definition_v2
from kernels.definition_v2 import GAMMA, block_checksums, mix, row_key

MOD = 2**64
VECTORS = sorted((Path(__file__).parents[1] / "vectors").glob("*.npz"))


def mix_by_hand(y):
    for shift, factor in ((32, 0xBF58476D1CE4E5B9), (29, 0x94D049BB133111EB), (32, 0x3C79AC492BA7B653)):
        y = (y ^ (y >> shift)) * factor % MOD
    return y ^ (y >> 29)


def unmix(y):
    """The inverse of mix: it shows that mix is a bijection."""
    y ^= (y >> 29) ^ (y >> 58)
    for shift, factor in ((32, 0x3C79AC492BA7B653), (29, 0x94D049BB133111EB), (32, 0xBF58476D1CE4E5B9)):
        y = y * pow(factor, -1, MOD) % MOD
        y ^= (y >> shift) ^ (y >> 2 * shift if 2 * shift < 64 else 0)
    return y


def by_hand(kv, layer_numbers, first_head, block_size, first_token, num_tokens):
    _, heads, tokens, width = kv.shape
    pieces = width // 8
    sums = [0] * (tokens // block_size)
    for row, layer in enumerate(layer_numbers):
        for head in range(heads):
            for token in range(min(tokens, num_tokens - first_token)):
                for piece in range(pieces):
                    x = int.from_bytes(kv[row, head, token, 8 * piece : 8 * piece + 8].tobytes(), "little")
                    j = (first_token + token) * pieces + piece
                    key = (mix_by_hand(layer * 2**16 + first_head + head + 1) + j * 0x9E3779B97F4A7C15) % MOD
                    sums[token // block_size] += mix_by_hand(x ^ key)
    return [s % MOD for s in sums]


def random_kv(seed, *shape):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def whole(kv, module=definition_v2):
    """One block that holds all of kv, from the first token on."""
    return int(module.block_checksums(kv, range(kv.shape[0]), 0, kv.shape[2], 0, kv.shape[2])[0])


@given(value=st.integers(0, MOD - 1))
@pytest.mark.req("DEF-5")
def test_mix_is_a_bijection(value):
    mixed = int(mix(np.array([value], dtype=np.uint64))[0])
    assert mixed == mix_by_hand(value)
    assert unmix(mixed) == value


@pytest.mark.req("HRD-1", "DEF-8")
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


def test_what_is_no_block_is_refused_as_in_version_1():
    with pytest.raises(ValueError, match="must be a multiple of 8"):
        block_checksums(random_kv(1, 1, 1, 4, 12), [0], 0, 4, 0, 4)


@pytest.mark.req("DEF-5")
@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), data=st.data(), change=st.integers(1, MOD - 1))
def test_any_change_of_one_piece_changes_the_checksum(seed, data, change):
    kv = random_kv(seed, 2, 2, 3, 16)
    where = tuple(data.draw(st.integers(0, n - 1)) for n in (2, 2, 3, 2))
    changed = kv.copy()
    changed.view("<u8")[where] ^= np.uint64(change)
    assert whole(kv) != whole(changed)


@pytest.mark.req("DEF-6")
def test_consecutive_blocks_add_up():
    kv = random_kv(3, 2, 2, 12, 16)
    small = block_checksums(kv, [0, 5], 3, 2, 24, 33)
    large = block_checksums(kv, [0, 5], 3, 4, 24, 33)
    assert (small[::2] + small[1::2]).tolist() == large.tolist()


@pytest.mark.req("DEF-7")
def test_parts_of_workers_add_up():
    kv = random_kv(4, 4, 6, 8, 16)
    parts = [
        block_checksums(kv[layers, heads], [0, 1, 2, 3][layers], heads.start, 4, 0, 8)
        for layers in (slice(0, 1), slice(1, 4))
        for heads in (slice(0, 2), slice(2, 6))
    ]
    assert sum(parts).tolist() == block_checksums(kv, [0, 1, 2, 3], 0, 4, 0, 8).tolist()


@pytest.mark.req("GAP-8", "HRD-1")
def test_pairs_of_bit_63_pass_version_1_and_no_pair_passes_version_2():
    kv = random_kv(5, 2, 4, 16, 64)
    x = kv.view("<u8").reshape(-1)
    clean = whole(kv), whole(kv, definition)
    differences = []
    for i in range(x.size):
        x[i] ^= np.uint64(1 << 63)
        differences.append(((whole(kv) - clean[0]) % MOD, (whole(kv, definition) - clean[1]) % MOD))
        x[i] ^= np.uint64(1 << 63)
    assert all((a[1] + b[1]) % MOD == 0 for a, b in itertools.combinations(differences, 2))
    assert not any((a[0] + b[0]) % MOD == 0 for a, b in itertools.combinations(differences, 2))


@pytest.mark.req("GAP-10", "HRD-1")
def test_exchanged_pieces_of_equal_factor_pass_version_1_only():
    """Layer 0, head 0, piece 1 and layer 0, head 1, piece 0: both have factor 3."""
    kv = random_kv(6, 1, 2, 4, 16)
    changed = kv.copy()
    x = changed.view("<u8")
    x[0, 0, 0, 1], x[0, 1, 0, 0] = x[0, 1, 0, 0].copy(), x[0, 0, 0, 1].copy()
    assert not np.array_equal(kv, changed)
    assert whole(kv, definition) == whole(changed, definition)
    assert whole(kv) != whole(changed)


@pytest.mark.req("GAP-11", "HRD-1")
@settings(max_examples=50, deadline=None)
@given(change=st.integers(1, MOD - 1), at=st.integers(0, 5))
def test_linear_cancellations_pass_version_1_only(change, at):
    kv = random_kv(7, 1, 1, 4, 16)
    changed = kv.copy()
    x = changed.view("<u8").reshape(-1)
    x[at : at + 3] += np.array([times * change % MOD for times in (1, -2, 1)], dtype=np.uint64)
    assert whole(kv, definition) == whole(changed, definition)
    assert whole(kv) != whole(changed)


def test_no_two_pieces_of_a_large_model_share_a_key():
    """Keys of a row are GAMMA apart: rows whose keys are d * GAMMA apart meet after d pieces."""
    rows = np.array([layer * 2**16 + head + 1 for layer in range(128) for head in range(128)], dtype=np.uint64)
    keys = mix(rows)
    assert int(keys[5]) == row_key(0, 5)
    positions = np.sort(keys * np.uint64(pow(GAMMA, -1, MOD)))
    assert np.diff(positions, append=positions[:1]).min() > 2**31  # pieces of a request a head


@pytest.mark.parametrize("path", VECTORS[:4], ids=lambda path: path.stem)
def test_it_is_another_checksum_than_version_1(path):
    with np.load(path, allow_pickle=False) as case:
        arguments = [case[k].tolist() for k in ("layer_numbers", "first_head", "block_size", "first_token")]
        num_tokens = int(case["first_token"]) + case["kv"].shape[2]
        got = block_checksums(case["kv"], *arguments, num_tokens)
        assert not set(got.tolist()) & set(definition.block_checksums(case["kv"], *arguments, num_tokens).tolist())
