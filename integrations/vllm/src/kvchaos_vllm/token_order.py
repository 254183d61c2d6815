"""Where an attention backend puts the elements of a token in a block, found by letting it write numbers into one.

vLLM's CPU backend stores K and V of a head in two regions of a block, and K, depending on the instruction set, column
by column or in tiles: no stride describes that, and a later version may choose another tiling. So the backend itself
is asked: it writes numbers that say which element they are, and what is found where gives the order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_BASE = 64
"""Every integer up to this one is exact in bfloat16, float16 and float32."""

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def token_order(write: Write, dtype: torch.dtype, tokens: int, head_size: int) -> torch.Tensor | None:
    """Find where the elements of each token lie in a block of one head.

    Args:
        write: lets the backend store key [tokens, 1, head_size] and value (the same) of consecutive tokens into a
            cache [1, 1, tokens, 2*head_size].
        dtype: of keys, values and the cache, which stores them as they are.
        tokens: of a block.

    Returns:
        int64 [tokens, 2*head_size]: places in the flattened block, of a token's K and then of its V; None if the
        backend does not store every element in a place of its own.
    """
    width = 2 * head_size
    count = tokens * width
    ids = torch.arange(count).view(tokens, 1, width)
    found = torch.zeros(count, dtype=torch.int64)
    scale = 1
    while scale < count:
        digits = (ids // scale % _BASE + 1).to(dtype)
        cache = torch.zeros(1, 1, tokens, width, dtype=dtype)
        write(digits[..., :head_size].contiguous(), digits[..., head_size:].contiguous(), cache)
        read = cache.view(-1).to(torch.int64) - 1
        if int(read.min()) < 0 or int(read.max()) >= _BASE:
            return None
        found += read * scale
        scale *= _BASE
    places = torch.full((count,), -1, dtype=torch.int64)
    if int(found.max()) >= count:
        return None
    places[found] = torch.arange(count)
    return None if int(places.min()) < 0 else places.view(tokens, width)
