"""Version 2's loop of the CPU path, compiled by numba when this module is imported.

It reads the tables of `kernels/cpu_compiled.py`. Each piece is loaded once and mixed with a key that is computed, not
loaded; LLVM turns the loop over the pieces of a token into vector code. Bits must equal `kernels/definition_v2.py`'s.

numba's cache looks at the time of this file alone: the constants and helpers that come from other modules are not
meant to change (another `mix` would be another version).
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from kernels.cpu_compiled import ADD_SUMS, compiled, first_outside, piece_at, pointer_to
from kernels.definition_v2 import GAMMA, MULTIPLIERS, SHIFTS

_GAMMA = np.uint64(GAMMA)
_S0, _S1, _S2, _S3 = (np.uint64(shift) for shift in SHIFTS)
_M0, _M1, _M2 = (np.uint64(multiplier) for multiplier in MULTIPLIERS)


@numba.njit(inline="always")
def _mix(y: Any) -> Any:
    y = (y ^ (y >> _S0)) * _M0
    y = (y ^ (y >> _S1)) * _M1
    y = (y ^ (y >> _S2)) * _M2
    return y ^ (y >> _S3)


@numba.njit(inline="always")
def _row_sum(address: Any, pieces: Any, first_key: Any) -> Any:
    """Sum `mix(x ^ key)` over the pieces of one token and head."""
    row, total = pointer_to(address), np.uint64(0)
    for p in range(pieces):
        total += _mix(piece_at(row, p) ^ (first_key + np.uint64(p) * _GAMMA))
    return total


@numba.njit(inline="always")
def _block_sum(layer: Any, parts: Any, block_id: Any, tokens: Any, position: Any) -> Any:
    """Sum the first tokens of a kernel block that begins at position in the request, over the parts and heads."""
    sums = np.uint64(0)
    pieces_per_token, first_row = np.uint64(layer[2]), np.uint64(layer[6])
    for part in range(layer[4], layer[5]):
        address, block_stride, token_stride, head_stride, pieces, first_piece = parts[part]
        heads_inside = head_stride < token_stride  # in the order of memory
        outers, inners = (tokens, layer[1]) if heads_inside else (layer[1], tokens)
        for outer in range(outers):
            for inner in range(inners):
                token, head = (outer, inner) if heads_inside else (inner, outer)
                row_key = _mix(first_row + np.uint64(head) + np.uint64(1))
                j = (position + np.uint64(token)) * pieces_per_token + np.uint64(first_piece)
                at = address + block_id * block_stride + token * token_stride + head * head_stride
                sums += _row_sum(at, pieces, row_key + j * _GAMMA)
    return sums


@compiled(ADD_SUMS)
def add_sums(
    layers: Any, parts: Any, ids: Any, blocks: Any, block_size: Any, first_token: Any, covered: Any, sums: Any
) -> Any:
    """Add version 2's checksums of blocks of one request to sums; arguments and result as `cpu_compiled.add_sums`."""
    outside = first_outside(ids, blocks)
    if outside >= 0:
        return outside
    for row in range(len(layers)):
        layer = layers[row]
        kernel_tokens = layer[0]
        per_block = block_size // kernel_tokens
        for at in range((covered + kernel_tokens - 1) // kernel_tokens):
            block_id = ids[at // per_block] * per_block + at % per_block
            tokens = min(kernel_tokens, covered - at * kernel_tokens)
            position = np.uint64(first_token) + np.uint64(at * kernel_tokens)
            sums[at // per_block] += _block_sum(layer, parts, block_id, tokens, position)
    return -1
