"""Every contender works on the very bytes that it says, in every layout."""

import zlib

import numpy as np
import pytest

from harness.bench import contenders
from harness.bench.contenders import BLOCK_BYTES, BLOCK_TOKENS, HEADS, flat_contenders, paged_contenders
from kernels import definition
from kernels.torch_path import as_uint64

OURS = {"cpu", "torch"}
HASHES = {"adler32", "xxh3_64", "crc32c", "blake3"}


@pytest.fixture
def buffer():
    return np.random.default_rng(3).integers(0, 256, 3 * BLOCK_BYTES, dtype=np.uint8)


def results(found):
    return {c.name: c.job() for c in found if c.job is not None}


def sums(result):
    return (result if isinstance(result, np.ndarray) else as_uint64(result)).tolist()


def test_flat(buffer):
    found = list(flat_contenders(buffer))
    assert {c.name for c in found} == OURS | HASHES | {"np.sum", "memcpy", "definition"}
    got = results(found)
    wanted = [definition.slice_checksum(buffer.reshape(-1, 256), 0)]
    for name in (*OURS, "definition"):
        assert sums(got[name]) == wanted
    assert got["adler32"] == zlib.adler32(buffer)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_paged(buffer, layout):
    found = list(paged_contenders(buffer, layout, seed=2))
    assert {c.name for c in found} == OURS | HASHES | {"gather alone"}
    got = results(found)
    order = np.random.default_rng(2).permutation(3)
    assert order.tolist() != [0, 1, 2]
    shape = (HEADS, BLOCK_TOKENS) if layout == "HND" else (BLOCK_TOKENS, HEADS)
    blocks = buffer.reshape(3, 2, *shape, 256)[order]
    by_head = blocks.transpose(2, 0, 3, 1, 4) if layout == "HND" else blocks.transpose(3, 0, 2, 1, 4)
    kv = np.ascontiguousarray(by_head).reshape(1, HEADS, 3 * BLOCK_TOKENS, 512)
    wanted = definition.block_checksums(kv, [0], 0, BLOCK_TOKENS, 0, 3 * BLOCK_TOKENS).tolist()
    for name in OURS:
        assert sums(got[name]) == wanted
    assert got["adler32"] == zlib.adler32(np.ascontiguousarray(blocks))


def test_who_is_missing_says_what_to_install(buffer, monkeypatch):
    monkeypatch.setattr(contenders, "_imported", lambda module: None)
    missing = {c.name: c.missing for c in flat_contenders(buffer) if c.job is None}
    assert missing == {
        "xxh3_64": "pip install xxhash (or the extra bench)",
        "crc32c": "pip install crc32c (or the extra bench)",
        "blake3": "pip install blake3 (or the extra bench)",
    }


def test_hashes_are_what_their_names_say():
    """Published check values of 123456789: CRC-32C, and BLAKE3's of nothing, from its test vectors."""
    found = {c.name: c.job for c in flat_contenders(np.zeros(256, dtype=np.uint8))}
    digits = np.frombuffer(b"123456789", dtype=np.uint8)
    by_name = {name: function for name, function, _ in contenders._hashes()}
    assert set(by_name) <= set(found)
    if by_name["crc32c"]:
        assert by_name["crc32c"](digits) == 0xE3069283
    if by_name["blake3"]:
        assert by_name["blake3"](b"").hex().startswith("af1349b9f5f9a1a6a0404dea36dcc949")
