"""Right bytes, read as if they lay otherwise: what a copy between two caches gets wrong about axes and order.

All take and give uint8 [layers, kv_heads, blocks, slots, bytes_per_token] (`faults.blocks.Rearrange`); a token's bytes
are its K bytes and then its V bytes.
"""

from __future__ import annotations

import random

import numpy as np
import torch

from faults.blocks import Bytes


def swap_tokens(kv: Bytes, num_tokens: int, rng: random.Random) -> Bytes:
    """Exchange two of the first `num_tokens` tokens, in every layer and head."""
    layers, heads, blocks, slots, width = kv.shape
    tokens = kv.reshape(layers, heads, blocks * slots, width).copy()
    if num_tokens > 1:
        one, other = rng.sample(range(num_tokens), 2)
        tokens[:, :, [one, other]] = tokens[:, :, [other, one]]
    return tokens.reshape(kv.shape)


def swap_heads(kv: Bytes, rng: random.Random) -> Bytes:
    """Exchange two KV heads, in every layer."""
    return _exchanged(kv, 1, rng)


def swap_layers(kv: Bytes, rng: random.Random) -> Bytes:
    """Exchange two layers."""
    return _exchanged(kv, 0, rng)


def swap_kv(kv: Bytes) -> Bytes:
    """Exchange K and V."""
    half = kv.shape[-1] // 2
    return np.concatenate((kv[..., half:], kv[..., :half]), axis=-1)


def hnd_as_nhd(kv: Bytes) -> Bytes:
    """Each block of K and of V lies head by head, and is read slot by slot."""
    layers, heads, blocks, slots, width = kv.shape
    # As it lies: [layers, K|V, blocks, heads, slots, bytes]; as it is read: slots and heads taken for each other.
    lying = kv.reshape(layers, heads, blocks, slots, 2, width // 2).transpose(0, 4, 2, 1, 3, 5)
    read = np.ascontiguousarray(lying).reshape(layers, 2, blocks, slots, heads, width // 2)
    return read.transpose(0, 4, 2, 3, 1, 5).reshape(kv.shape)


def packed_as_separate(kv: Bytes) -> Bytes:
    """Each slot's K and V lie side by side, and are read as a block of K and a block of V."""
    layers, heads, blocks, slots, width = kv.shape
    read = np.ascontiguousarray(kv).reshape(layers, heads, blocks, 2, slots, width // 2)
    return read.swapaxes(3, 4).reshape(kv.shape)


def kernel_block_order(kv: Bytes) -> Bytes:
    """Each block is two kernel blocks, and they come in the other order."""
    half = kv.shape[3] // 2
    return np.concatenate((kv[:, :, :, half:], kv[:, :, :, :half]), axis=3)


def other_dtype(kv: Bytes, dtype: torch.dtype) -> Bytes:
    """Values are converted to the other 16-bit type on the way, and their bits are read as the cache's own `dtype`."""
    other = torch.float16 if dtype is torch.bfloat16 else torch.bfloat16
    values = torch.from_numpy(np.ascontiguousarray(kv)).view(dtype)
    return values.to(other).view(torch.uint8).numpy().reshape(kv.shape)


def _exchanged(kv: Bytes, axis: int, rng: random.Random) -> Bytes:
    order = list(range(kv.shape[axis]))
    if len(order) > 1:
        one, other = rng.sample(order, 2)
        order[one], order[other] = other, one
    return np.take(kv, order, axis=axis)
