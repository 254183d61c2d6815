"""The hardened checksum, version 2, as plainly as numpy can say it: a sum of bijections instead of a sum of products.

Version 1 (`kernels/definition.py`) multiplies each piece by an odd factor. Factors cannot move a change of the top bit,
and they repeat, so changes of several pieces cancel (GAP-8, GAP-10, GAP-11). Version 2 adds `mix(x ^ key)`: `mix` is a
bijection of 64 bits that spreads every input bit over all of them, and every piece of a request has its own key. What
version 1 promises still holds: a change of one piece is always seen (DEF-5, for a bijection keeps different values
apart), consecutive blocks add up (DEF-6), and so do workers' parts (DEF-7). It is no defence against tampering (DEF-9).
docs/strength.md holds the argument and the measurements. All arithmetic is unsigned, modulo 2**64.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kernels.definition import MAX_KV_HEADS_PER_LAYER, sum_blocks

GAMMA = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio, odd: keys of one layer and head are this far apart."""

SHIFTS = (32, 29, 32, 29)
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x3C79AC492BA7B653)
"""Odd constants of published 64-bit finalisers: Stafford's Mix13, the third of Evensen's moremur."""


def mix(y: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Spread 64 bits over 64 bits; a bijection, for `y ^ (y >> s)` and odd factors are. uint64 of any shape."""
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        y = (y ^ (y >> np.uint64(shift))) * np.uint64(multiplier)
    return y ^ (y >> np.uint64(SHIFTS[-1]))


def row_key(layer: int, head: int) -> int:
    """Key of the first piece of a layer and head: `mix(layer*H + head + 1)`."""
    row = np.array([layer * MAX_KV_HEADS_PER_LAYER + head + 1], dtype=np.uint64)
    return int(mix(row)[0])


def slice_checksum(kv: npt.NDArray[np.uint8], layer: int, head: int, first_token: int) -> int:
    """Sum of one layer's KV of one head: `sum_j mix(x_j ^ (row_key + j*GAMMA))`, `j = t*P + p` as in DEF-3.

    Args:
        kv: uint8 [tokens, bytes_per_token]: the K bytes of a token, then its V bytes.
        first_token: position in the request of the first of these tokens.
    """
    x = np.ascontiguousarray(kv).view("<u8")
    first = (row_key(layer, head) + first_token * x.shape[1] * GAMMA) % 2**64
    keys = np.uint64(first) + np.arange(x.size, dtype=np.uint64) * np.uint64(GAMMA)
    return int(mix(x.reshape(-1).astype(np.uint64) ^ keys).sum(dtype=np.uint64))


def block_checksums(
    kv: npt.NDArray[np.uint8],
    layer_numbers: Sequence[int],
    first_head: int,
    block_size: int,
    first_token: int,
    num_tokens: int,
) -> npt.NDArray[np.uint64]:
    """Checksums of consecutive blocks: the sum over layers and heads of their slices, each with keys of its own.

    Arguments, result and errors are those of `kernels.definition.block_checksums`.
    """
    return sum_blocks(slice_checksum, kv, layer_numbers, first_head, block_size, first_token, num_tokens)
