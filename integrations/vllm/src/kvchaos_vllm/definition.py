"""What a KV checksum is, as plainly as numpy can say it. `paged_sums.py` computes the same from vLLM's caches.

A copy of kvchaos' own definition, version 1, so that this distribution can be installed alone; kvchaos' tests hold the
two equal. All arithmetic is unsigned, modulo 2**64.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

MAX_KV_HEADS_PER_LAYER = 2**16
PIECE_BYTES = 8


def slice_checksum(kv: npt.NDArray[np.uint8], first_token: int) -> int:
    """Checksum of one layer's KV of one head: `sum_j x_j * (2*j + 1)`, `j = t*P + p`.

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
    j = np.arange(x.size, dtype=np.uint64) + np.uint64(first_token * x.shape[1] % 2**64)
    return int((x.reshape(-1) * (2 * j + 1)).sum(dtype=np.uint64))


def block_checksums(
    kv: npt.NDArray[np.uint8],
    layer_numbers: Sequence[int],
    first_head: int,
    block_size: int,
    first_token: int,
    num_tokens: int,
) -> npt.NDArray[np.uint64]:
    """Checksums of consecutive blocks: `sum_{layer, head} m * s`, `m = 2*(layer*H + head) + 1`.

    Given only some of the model's layers or heads, these are their part of the checksums.

    Args:
        kv: uint8 [layers, heads, tokens, bytes_per_token], whole blocks of tokens.
        layer_numbers: the number of each layer, as in its name.
        first_head: the number, over the unsharded model, of the first of these heads.
        block_size: tokens a block.
        first_token: position in the request of the first of these tokens, at the start of a block.
        num_tokens: tokens of the request that count, from its first token: later slots never do.

    Returns:
        uint64 [tokens // block_size].

    Raises:
        ValueError: kv is not whole blocks and pieces, or a number is out of range.
    """
    if kv.dtype != np.uint8 or kv.ndim != 4 or 0 in kv.shape or len(layer_numbers) != kv.shape[0]:
        raise ValueError(
            f"kv is {kv.dtype} {list(kv.shape)} for {len(layer_numbers)} layers: it must be uint8 "
            "[layers, heads, tokens, bytes_per_token], none 0"
        )
    _, heads, tokens, _ = kv.shape
    if block_size < 1 or tokens % block_size or first_token < 0 or first_token % block_size or num_tokens < 0:
        raise ValueError(f"{tokens} tokens from token {first_token} are not whole blocks of {block_size}")
    if len(set(layer_numbers)) != len(layer_numbers) or min(layer_numbers) < 0:
        raise ValueError(f"layer_numbers {list(layer_numbers)} must be distinct and not negative")
    if first_head < 0 or first_head + heads > MAX_KV_HEADS_PER_LAYER:
        raise ValueError(f"heads from {first_head} on are not within 0 to {MAX_KV_HEADS_PER_LAYER - 1}")
    checksums = []
    for start in range(0, tokens, block_size):
        stop = max(start, min(start + block_size, num_tokens - first_token))
        total = 0
        for row, layer in enumerate(layer_numbers):
            for column in range(heads):
                m = 2 * (layer * MAX_KV_HEADS_PER_LAYER + first_head + column) + 1
                total += m * slice_checksum(kv[row, column, start:stop], first_token + start)
        checksums.append(total % 2**64)
    return np.array(checksums, dtype=np.uint64)
