"""The loops of the CPU path, compiled by numba when this module is imported.

A sum at the speed of memory cannot afford a multiplication for each piece, nor weights from memory. The factors of a
block checksum are affine in the token, in the head and in the piece, so four rows at equal distances (of tokens, or
of heads) are added up with additions only: adding a running total to a second total gives `sum_r r * x_r`. What is
left is one multiplication for four pieces. `_four_rows` is that, and LLVM turns its one loop into vector code.

Addresses come as integers: a cache may have any strides of whole pieces and need not be aligned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

ROWS = 4
TILE_TOKENS = 16
FAR_TOKENS = 256
PREFETCH_BYTES = 6 * 1024
_LINE_BYTES = 64

# Columns of the tables that `add_sums` takes.
_WEIGHTS = ("first_factor", "first_part", "last_part", "first_row")
LAYER_COLUMNS = ("kernel_block_tokens", "heads", "pieces_per_token", *_WEIGHTS)
PART_COLUMNS = ("address", "block_stride", "token_stride", "head_stride", "pieces", "first_piece")

_POINTER: Any = types.CPointer(types.uint64)  # type: ignore[no-untyped-call]
_TABLE = types.Array(types.int64, 2, "C", readonly=True)
_IDS = types.Array(types.int64, 1, "C", readonly=True)
ADD_SUMS = types.int64(
    _TABLE, _TABLE, _IDS, types.int64, types.int64, types.uint64, types.int64, types.uint64[::1]
)  # of `add_sums`, here and in cpu_compiled_v2


def _make_pointer(typing_context: Any, address: Any) -> Any:
    """Take an address (int64) as a pointer to pieces."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())

    return _POINTER(types.int64), generate


def _make_piece(typing_context: Any, pointer: Any, index: Any) -> Any:
    """Load a piece, from an address that need not be aligned."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(builder.gep(arguments[0], [arguments[1]]), align=1)

    return types.uint64(_POINTER, types.int64), generate


def _make_prefetch(typing_context: Any, address: Any) -> Any:
    """Ask for the cache line at an address that will be read soon. It need not exist."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte_pointer, i32 = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte_pointer, i32, i32, i32])
        function = builder.module.declare_intrinsic("llvm.prefetch", [byte_pointer], kind)
        builder.call(function, [builder.inttoptr(arguments[0], byte_pointer), i32(0), i32(3), i32(1)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


pointer_to: Any = intrinsic(_make_pointer)
piece_at: Any = intrinsic(_make_piece)
_prefetch: Any = intrinsic(_make_prefetch)


def compiled(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile now, or take from numba's cache. Where it can write no cache, do without."""

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return numba.njit(signature, cache=True, nogil=True, error_model="numpy")(function)
        except (RuntimeError, OSError):
            return numba.njit(signature, nogil=True, error_model="numpy")(function)

    return decorate


@numba.njit(inline="always")
def _four_rows(address: Any, step: Any, pieces: Any, first_factor: Any) -> Any:
    """Sum four rows `r` of pieces `p`, `step` bytes apart: x, r * x, k * x and r * k * x, k = 2*p + first_factor."""
    row_0, row_1 = pointer_to(address), pointer_to(address + step)
    row_2, row_3 = pointer_to(address + 2 * step), pointer_to(address + 3 * step)
    plain, by_row, by_piece, by_both = np.uint64(0), np.uint64(0), np.uint64(0), np.uint64(0)
    for p in range(pieces):
        factor = np.uint64(2) * np.uint64(p) + first_factor
        total = piece_at(row_3, p)
        ranked = total
        total += piece_at(row_2, p)
        ranked += total
        total += piece_at(row_1, p)
        ranked += total
        total += piece_at(row_0, p)
        plain += total
        by_row += ranked
        by_piece += total * factor
        by_both += ranked * factor
    return plain, by_row, by_piece, by_both


@numba.njit(inline="always")
def _one_row(address: Any, pieces: Any, first_factor: Any) -> Any:
    row = pointer_to(address)
    plain, by_piece = np.uint64(0), np.uint64(0)
    for p in range(pieces):
        x = piece_at(row, p)
        plain += x
        by_piece += x * (np.uint64(2) * np.uint64(p) + first_factor)
    return plain, by_piece


@numba.njit(inline="always")
def _prefetch_rows(address: Any, step: Any, pieces: Any) -> Any:
    for row in range(ROWS):
        for line in range(0, 8 * pieces, _LINE_BYTES):
            _prefetch(address + row * step + line)


@numba.njit(inline="always")
def _tile(part: Any, base: Any, next_base: Any, offsets: Any, ahead: Any, loops: Any, weights: Any) -> Any:
    """Sum m * s of a tile of tokens of one part, four rows at a time.

    Args:
        base, next_base: addresses of this tile, and of what is summed next.
        offsets: where each four rows begin, in bytes from base, in the order of memory.
        ahead: how many fours to prefetch ahead; 0 prefetches nothing.
        loops: (across heads, outer loop, inner loop, tokens from one row to the next)
        weights: (position in the request of the first token, 2 * pieces a token, factor of the first head)
    """
    across_heads, outers, inners, distance = loops
    position, two_pieces, first_factor = weights
    step = part[3] if across_heads else distance * part[2]
    pieces, first_piece_factor = part[4], np.uint64(2 * part[5] + 1)
    units = outers * inners
    sums, q = np.uint64(0), 0
    for outer in range(outers):
        for inner in range(inners):
            if ahead:
                z = q + ahead
                _prefetch_rows((base if z < units else next_base) + offsets[np.uint64(z)], step, pieces)
            plain, by_row, by_piece, by_both = _four_rows(
                base + offsets[np.uint64(q)], step, pieces, first_piece_factor
            )
            q += 1
            if across_heads:
                by_token = two_pieces * (position + np.uint64(outer))
                sums += (by_token * plain + by_piece) * (first_factor + np.uint64(2 * ROWS * inner))
                sums += np.uint64(2) * (by_token * by_row + by_both)
            else:
                token = position + np.uint64(inner if distance > 1 else inner * ROWS)
                share = two_pieces * (token * plain + np.uint64(distance) * by_row) + by_piece
                sums += share * (first_factor + np.uint64(2 * outer))
    return sums


@numba.njit(inline="always")
def _rest_of_block(layer: Any, parts: Any, block_id: Any, first: Any, last: Any, position: Any) -> Any:
    """Sum m * s of the tokens from first to last of a kernel block that begins at position, a row at a time."""
    sums = np.uint64(0)
    two_pieces = np.uint64(2 * layer[2])
    for row in range(layer[4], layer[5]):
        address, block_stride, token_stride, head_stride, pieces, first_piece = parts[row]
        for token in range(first, last):
            for head in range(layer[1]):
                at = address + block_id * block_stride + token * token_stride + head * head_stride
                plain, by_piece = _one_row(at, pieces, np.uint64(2 * first_piece + 1))
                share = two_pieces * (position + np.uint64(token)) * plain + by_piece
                sums += share * (np.uint64(layer[3]) + np.uint64(2 * head))
    return sums


@numba.njit(inline="always")
def _offsets(part: Any, across_heads: Any, outers: Any, inners: Any, inner_tokens: Any, ahead: Any) -> Any:
    """Where each four rows of a tile begin, and again those that follow in the next tile: int64 [units + ahead]."""
    offsets = np.empty(outers * inners + ahead, np.int64)
    for q in range(len(offsets)):
        outer, inner = q // inners % outers, q % inners
        if across_heads:
            offsets[q] = outer * part[2] + inner * ROWS * part[3]
        else:
            offsets[q] = outer * part[3] + inner * inner_tokens * part[2]
    return offsets


@numba.njit(inline="always")
def _add_layer(layer: Any, parts: Any, ids: Any, per_block: Any, first_token: Any, covered: Any, sums: Any) -> Any:
    kernel_tokens, heads, first, last = layer[0], layer[1], layer[4], layer[5]
    weights_1, weights_2 = np.uint64(2 * layer[2]), np.uint64(layer[3])
    tile = min(TILE_TOKENS, kernel_tokens) // ROWS * ROWS
    lead = parts[first]
    across_heads = lead[3] < lead[2] and heads % ROWS == 0
    far = not across_heads and kernel_tokens >= FAR_TOKENS
    outers, inners = (tile, heads // ROWS) if across_heads else (heads, tile // ROWS)
    ahead = 0 if far else min(outers * inners, PREFETCH_BYTES // (ROWS * 8 * lead[4]))
    offsets = _offsets(lead, across_heads, outers, inners, 1 if far else ROWS, ahead)
    blocks = (covered + kernel_tokens - 1) // kernel_tokens
    for at in range(blocks):
        block_id = ids[at // per_block] * per_block + at % per_block
        after = min(at + 1, blocks - 1)
        next_id = ids[after // per_block] * per_block + after % per_block
        tokens = min(kernel_tokens, covered - at * kernel_tokens)
        tiles = tokens // tile if tile else 0
        position = np.uint64(first_token) + np.uint64(at * kernel_tokens)
        # Four rows of one head are neighbours, or in a long block a quarter of it apart: four streams of reads.
        distance = tiles * tile // ROWS if far else 1
        advance = tile // ROWS if far else tile
        total = np.uint64(0)
        for t in range(tiles):
            weights = (position + np.uint64(t * advance), weights_1, weights_2)
            for row in range(first, last):
                part = parts[row]
                base = part[0] + block_id * part[1] + t * advance * part[2]
                if row + 1 < last:
                    next_base = base + parts[row + 1, 0] - part[0]
                elif t + 1 < tiles:
                    next_base = base + advance * lead[2]
                else:
                    next_base = lead[0] + next_id * lead[1]
                if across_heads:
                    total += _tile(part, base, next_base, offsets, ahead, (True, outers, inners, 1), weights)
                else:
                    total += _tile(part, base, next_base, offsets, ahead, (False, outers, inners, distance), weights)
        sums[at // per_block] += total + _rest_of_block(layer, parts, block_id, tiles * tile, tokens, position)


@numba.njit(inline="always")
def first_outside(ids: Any, blocks: Any) -> Any:
    """The index of the first id that is not one of these blocks; -1 if there is none."""
    for at in range(len(ids)):
        if ids[at] < 0 or ids[at] >= blocks:
            return at
    return -1


@compiled(ADD_SUMS)
def add_sums(
    layers: Any, parts: Any, ids: Any, blocks: Any, block_size: Any, first_token: Any, covered: Any, sums: Any
) -> Any:
    """Add the checksums of blocks of one request to sums.

    Args:
        layers, parts: int64 [layers, LAYER_COLUMNS], [parts, PART_COLUMNS]; strides in bytes, all whole pieces, and
            the factor of the layer's first head with the bits of uint64 (version 2: its row, layer * H + head).
        ids: int64 [blocks of the request]: logical block ids.
        blocks: how many logical blocks every cache has.
        block_size, first_token, covered: tokens a block; position of the first in the request; tokens that count.
        sums: uint64 [blocks of the request].

    Returns:
        -1; or, before anything is read, the index of the first id outside the caches.
    """
    outside = first_outside(ids, blocks)
    if outside >= 0:
        return outside
    for row in range(len(layers)):
        _add_layer(layers[row], parts, ids, block_size // layers[row, 0], first_token, covered, sums)
    return -1
