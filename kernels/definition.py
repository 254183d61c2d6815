"""What a KV checksum is (DEF-1 to DEF-8), as plainly as numpy can say it.

Every other way to compute a checksum is tested against this file, and the known gaps are predicates over it. It is
written to be read, not to be fast: all arithmetic is unsigned, modulo 2**64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

MAX_KV_HEADS_PER_LAYER = 2**16
PIECE_BYTES = 8


def slice_checksum(kv: npt.NDArray[np.uint8], first_token: int) -> int:
    """Checksum of one layer's KV of one head (DEF-3): `sum_j x_j * (2*j + 1)`, `j = t*P + p`.

    Args:
        kv: uint8 [tokens, bytes_per_token]: the K bytes of a token, then its V bytes.
        first_token: position in the request of the first of these tokens.

    Raises:
        ValueError: kv is not such an array, is not whole 8-byte pieces, or first_token is negative.
    """
    if kv.dtype != np.uint8 or kv.ndim != 2 or not kv.shape[1] or kv.shape[1] % PIECE_BYTES or first_token < 0:
        raise ValueError(
            f"a slice is uint8 [tokens, bytes_per_token] of whole {PIECE_BYTES}-byte pieces from a token >= 0, "
            f"not {kv.dtype} {list(kv.shape)} from token {first_token}"
        )
    x = np.ascontiguousarray(kv).view("<u8")
    first_piece = first_token * x.shape[1] % 2**64
    j = np.arange(x.size, dtype=np.uint64) + np.uint64(first_piece)
    return int((x.reshape(-1) * (2 * j + 1)).sum(dtype=np.uint64))


def block_checksums(
    kv: npt.NDArray[np.uint8],
    layer_numbers: Sequence[int],
    first_head: int,
    block_size: int,
    first_token: int,
    num_tokens: int,
) -> npt.NDArray[np.uint64]:
    """Checksums of consecutive blocks (DEF-4): `sum_{layer, head} m * s`, `m = 2*(layer*H + head) + 1`.

    Given only some of the model's layers or heads, these are their part of the checksums (DEF-7).

    Args:
        kv: uint8 [layers, heads, tokens, bytes_per_token], whole blocks of tokens.
        layer_numbers: the number of each layer, as in its name.
        first_head: the number, over the unsharded model, of the first of these heads.
        block_size: tokens a block.
        first_token: position in the request of the first of these tokens, at the start of a block.
        num_tokens: tokens of the request that count, from its first token: later slots never do (DEF-8).

    Returns:
        uint64 [tokens // block_size].

    Raises:
        ValueError: as `check_blocks`.
    """

    def summand(kv: npt.NDArray[np.uint8], layer: int, head: int, first_token: int) -> int:
        m = 2 * (layer * MAX_KV_HEADS_PER_LAYER + head) + 1
        return m * slice_checksum(kv, first_token)

    return sum_blocks(summand, kv, layer_numbers, first_head, block_size, first_token, num_tokens)


def sum_blocks(
    summand: Callable[[npt.NDArray[np.uint8], int, int, int], int],
    kv: npt.NDArray[np.uint8],
    layer_numbers: Sequence[int],
    first_head: int,
    block_size: int,
    first_token: int,
    num_tokens: int,
) -> npt.NDArray[np.uint64]:
    """What every version does with the slices of blocks: leave out slots that do not count, and add up.

    Args:
        summand: of a slice (uint8 [tokens, bytes_per_token]), its layer, its head and its first token.

    The other arguments, the result and the errors are those of `block_checksums`.
    """
    check_blocks(kv, layer_numbers, first_head, block_size, first_token, num_tokens)
    checksums = []
    for start in range(0, kv.shape[2], block_size):
        stop = max(start, min(start + block_size, num_tokens - first_token))
        total = 0
        for row, layer in enumerate(layer_numbers):
            for column in range(kv.shape[1]):
                total += summand(kv[row, column, start:stop], layer, first_head + column, first_token + start)
        checksums.append(total % 2**64)
    return np.array(checksums, dtype=np.uint64)


def check_blocks(
    kv: npt.NDArray[np.uint8],
    layer_numbers: Sequence[int],
    first_head: int,
    block_size: int,
    first_token: int,
    num_tokens: int,
) -> None:
    """Refuse what has no block checksums; the arguments are those of `block_checksums`.

    Raises:
        ValueError: what is wrong, and what it would have to be.
    """
    if kv.dtype != np.uint8 or kv.ndim != 4 or 0 in kv.shape:
        raise ValueError(
            f"kv is {kv.dtype} {list(kv.shape)}: it must be uint8 [layers, heads, tokens, bytes_per_token], none 0"
        )
    layers, heads, tokens, bytes_per_token = kv.shape
    problems = {
        f"bytes_per_token is {bytes_per_token}: it must be a multiple of {PIECE_BYTES}": bytes_per_token % PIECE_BYTES,
        f"layer_numbers are {len(layer_numbers)} for {layers} layers of kv": len(layer_numbers) != layers,
        "layer_numbers are not distinct": len(set(layer_numbers)) != len(layer_numbers),
        "layer_numbers has a negative number": min(layer_numbers, default=0) < 0,
        f"heads {first_head} to {first_head + heads - 1} are not within 0 to {MAX_KV_HEADS_PER_LAYER - 1}": (
            first_head < 0 or first_head + heads > MAX_KV_HEADS_PER_LAYER
        ),
        f"block_size is {block_size}: it must be at least 1": block_size < 1,
        f"the {tokens} tokens of kv are not whole blocks of {block_size}": block_size > 0 and tokens % block_size,
        f"first_token is {first_token}: it must be a multiple of block_size {block_size}, and not negative": (
            first_token < 0 or (block_size > 0 and first_token % block_size)
        ),
        f"num_tokens is {num_tokens}: it must not be negative": num_tokens < 0,
    }
    for problem, found in problems.items():
        if found:
            raise ValueError(problem)
