"""The checksums that are compared, each as "does it miss this corruption?", computed from what changes.

All but xxh3 are sums or linear, so the change of the checksum follows from the pieces that change: ten million samples
then take seconds. Tests hold each against whole recomputations. Adler-32 and a sum of 32-bit mixes are what SGLang's
two proposals of KV checksums use (sgl-project/sglang#39500, #39229); the mix here has that shape, not its constants.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import crc32c as crc32c_library
import numpy as np
import numpy.typing as npt
import xxhash

from harness.strength.block import Block, Changes
from kernels.definition import PIECE_BYTES
from kernels.definition_v2 import mix

Bools = npt.NDArray[np.bool_]
Uint32s = npt.NDArray[np.uint32]
ADLER_MODULUS = 65521
XXH3_SAMPLES = 20_000
_GOLDEN_32 = 0x9E3779B9


@dataclass(frozen=True)
class Checksum:
    """A checksum of a block.

    Attributes:
        bits: how long it is.
        misses: bool [samples]: the checksum before equals the one after. xxh3 looks at the first samples only.
        most: samples that it looks at, at most.
    """

    name: str
    bits: int
    misses: Callable[[Block, Changes], Bools]
    most: int | None = None


def version_1(block: Block, changes: Changes) -> Bools:
    """`sum x * factor` modulo 2**64 (kernels/definition.py)."""
    change = (changes.after - changes.before) * block.factors[changes.index]
    return np.asarray(change.sum(axis=1, dtype=np.uint64) == 0)


def version_2(block: Block, changes: Changes) -> Bools:
    """`sum mix(x ^ key)` modulo 2**64 (kernels/definition_v2.py)."""
    keys = block.keys[changes.index]
    change = mix(changes.after ^ keys) - mix(changes.before ^ keys)
    return np.asarray(change.sum(axis=1, dtype=np.uint64) == 0)


def adler32(block: Block, changes: Changes) -> Bools:
    """Adler-32 (RFC 1950) of the block's bytes: their sum, and the sum of their partial sums, modulo 65521."""
    samples, width = changes.index.shape
    change = _bytes(changes.after).astype(np.int64) - _bytes(changes.before)
    distance = block.num_bytes - (changes.index[:, :, None] * PIECE_BYTES + np.arange(PIECE_BYTES))
    a = change.reshape(samples, width * PIECE_BYTES).sum(axis=1) % ADLER_MODULUS
    b = (change * distance).reshape(samples, width * PIECE_BYTES).sum(axis=1) % ADLER_MODULUS
    return np.asarray((a == 0) & (b == 0))


def mix_32(words: Uint32s, position: Uint32s) -> Uint32s:
    """A 32-bit word mixed with a key of its position: MurmurHash3's finaliser of `word ^ position * golden ratio`."""
    y = words ^ (position + np.uint32(1)) * np.uint32(_GOLDEN_32)
    for shift, multiplier in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        y = (y ^ (y >> np.uint32(shift))) * np.uint32(multiplier)
    return np.asarray(y ^ (y >> np.uint32(16)))


def keyed_mix_32(block: Block, changes: Changes) -> Bools:
    """The sum of `mix_32` over the block's 32-bit words, modulo 2**32."""
    position = (changes.index[:, :, None] * 2 + np.arange(2)).astype(np.uint32)
    change = mix_32(_words(changes.after), position) - mix_32(_words(changes.before), position)
    return np.asarray(change.sum(axis=(1, 2), dtype=np.uint32) == 0)


def crc32c(block: Block, changes: Changes) -> Bools:
    """CRC-32C of the block's bytes. It is linear: the change is the XOR of what each changed byte contributes."""
    table = _crc_table(block.size)
    changed = _bytes(changes.after ^ changes.before)
    change = np.zeros(changes.index.shape, dtype=np.uint32)
    for lane in range(PIECE_BYTES):
        change ^= table[changes.index, lane, changed[:, :, lane]]
    return np.asarray(np.bitwise_xor.reduce(change, axis=1) == 0)


def xxh3(block: Block, changes: Changes) -> Bools:
    """xxh3_64 of the block's bytes, all of them hashed twice a sample."""
    rng = np.random.default_rng(block.size)
    x = rng.integers(0, 2**64, block.size, dtype=np.uint64)
    missed = []
    for index, before, after in zip(changes.index, changes.before, changes.after, strict=True):
        x[index] = before
        clean = xxhash.xxh3_64_intdigest(x.data)
        # From the last to the first: of a piece that a row names twice, only the first change is real.
        x[index[::-1]] = after[::-1]
        missed.append(clean == xxhash.xxh3_64_intdigest(x.data))
    return np.array(missed, dtype=np.bool_)


CHECKSUMS = (
    Checksum("version 1", 64, version_1),
    Checksum("version 2", 64, version_2),
    Checksum("Adler-32", 32, adler32),
    Checksum("keyed 32-bit mix", 32, keyed_mix_32),
    Checksum("CRC-32C", 32, crc32c),
    Checksum("xxh3_64", 64, xxh3, XXH3_SAMPLES),
)


def _bytes(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(values, dtype="<u8").view(np.uint8).reshape(*values.shape, PIECE_BYTES)


def _words(values: npt.NDArray[np.uint64]) -> Uint32s:
    return np.ascontiguousarray(values, dtype="<u8").view("<u4").reshape(*values.shape, 2)


@lru_cache(maxsize=1)
def _crc_table(pieces: int) -> Uint32s:
    """What each value of each byte contributes to the CRC of that many pieces: uint32 [pieces, 8, 256].

    A byte's contribution is that of the same byte 8 places later, advanced over 8 zero bytes.
    """
    zeros = bytes(PIECE_BYTES)
    nothing = crc32c_library.crc32c(zeros)
    last = np.zeros((PIECE_BYTES, 256), dtype=np.uint32)
    for lane in range(PIECE_BYTES):
        for value in range(256):
            last[lane, value] = crc32c_library.crc32c(zeros[:lane] + bytes([value]) + zeros[lane + 1 :]) ^ nothing
    advance = np.zeros((4, 256), dtype=np.uint32)
    for lane in range(4):
        for value in range(256):
            advance[lane, value] = crc32c_library.crc32c(zeros, value << 8 * lane) ^ nothing
    table = np.empty((pieces, PIECE_BYTES, 256), dtype=np.uint32)
    for piece in reversed(range(pieces)):
        table[piece] = last
        last = np.bitwise_xor.reduce([advance[lane, last >> 8 * lane & 255] for lane in range(4)])
    return table
