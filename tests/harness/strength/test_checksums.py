"""Each checksum's incremental way against recomputing the whole block, corruption by corruption."""

import zlib

import crc32c
import numpy as np
import pytest
import xxhash

from harness.strength.block import Changes, flipped
from harness.strength.checksums import CHECKSUMS, mix_32
from harness.strength.models import MODELS
from kernels import definition, definition_v2


def as_kv(block, x):
    return np.ascontiguousarray(x).view(np.uint8).reshape(block.layers, block.heads, block.tokens, block.pieces * 8)


def by_definition(module):
    def whole(block, x):
        first = block.first_token
        arguments = (range(block.layers), 0, block.tokens, first, first + block.tokens)
        return module.block_checksums(as_kv(block, x), *arguments).tolist()

    return whole


def sum_of_mixes(block, x):
    words = x.view("<u4")
    return int(mix_32(words, np.arange(words.size, dtype=np.uint32)).sum(dtype=np.uint32))


WHOLE = {
    "version 1": by_definition(definition),
    "version 2": by_definition(definition_v2),
    "Adler-32": lambda block, x: zlib.adler32(x.tobytes()),
    "keyed 32-bit mix": sum_of_mixes,
    "CRC-32C": lambda block, x: crc32c.crc32c(x.tobytes()),
    "xxh3_64": lambda block, x: xxhash.xxh3_64_intdigest(x.tobytes()),
}


def whole_misses(checksum, block, changes, seed):
    """Recompute the whole block before and after each corruption."""
    x = np.random.default_rng(seed).integers(0, 2**64, block.size, dtype=np.uint64)
    missed = []
    for index, before, after in zip(changes.index, changes.before, changes.after, strict=True):
        clean, changed = x.copy(), x.copy()
        for place in range(len(index)):
            clean[index[place]] = before[place]
        changed[:] = clean
        for place in range(len(index)):
            if before[place] != after[place]:
                changed[index[place]] = after[place]
        missed.append(WHOLE[checksum.name](block, clean) == WHOLE[checksum.name](block, changed))
    return missed


@pytest.mark.parametrize("checksum", CHECKSUMS, ids=lambda checksum: checksum.name)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_the_short_way_is_the_long_one(checksum, model, block):
    changes = model.draw(np.random.default_rng(11), block, 40)
    assert checksum.misses(block, changes).tolist() == whole_misses(checksum, block, changes, 5)


@pytest.mark.parametrize("checksum", CHECKSUMS, ids=lambda checksum: checksum.name)
def test_no_change_is_missed_by_every_checksum(checksum, block):
    index = np.array([[0, 3], [5, 5]])
    before = np.array([[7, 8], [9, 9]], dtype=np.uint64)
    assert checksum.misses(block, Changes(index, before, before)).all()


def test_adler_misses_an_exchange_of_pieces_with_equal_byte_sums(block):
    """So its short way is compared where it misses, too."""
    adler = next(c for c in CHECKSUMS if c.name == "Adler-32")
    a, b = 0x0102030405060708, 0x0807060504030201
    pieces = np.array([[a, b]], dtype=np.uint64)
    changes = Changes(np.array([[1, 4]]), pieces, pieces[:, ::-1].copy())
    # The byte sums agree; the sums within a piece by place do too only for palindromes.
    expected = whole_misses(adler, block, changes, 0)
    assert adler.misses(block, changes).tolist() == expected == [True]


def test_flips_of_one_piece_are_joined():
    index = np.array([[4, 4, 2], [1, 2, 1]])
    masks = np.array([[1, 2, 8], [1, 2, 4]], dtype=np.uint64)
    before = np.zeros((2, 3), dtype=np.uint64)
    changes = flipped(index, before, masks)
    assert (changes.before ^ changes.after).tolist() == [[3, 0, 8], [5, 2, 0]]
