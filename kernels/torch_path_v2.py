"""Version 2's terms (`kernels/definition_v2.py`) in torch, for `kernels/torch_path.py`, which gathers the KV.

torch shifts int64 with the sign, so each shift is masked to be that of uint64.
"""

from __future__ import annotations

import numpy as np
import torch

from kernels.definition import MAX_KV_HEADS_PER_LAYER
from kernels.definition_v2 import GAMMA, MULTIPLIERS, SHIFTS, mix


def signed(value: int) -> int:
    """The int64 with the bits of value modulo 2**64."""
    return (value + 2**63) % 2**64 - 2**63


def row_keys(layer: int, first_head: int, heads: int, device: torch.device) -> torch.Tensor:
    """The first keys of heads of one layer: int64 [heads] on device, without waiting for it."""
    rows = np.arange(heads, dtype=np.uint64) + np.uint64(layer * MAX_KV_HEADS_PER_LAYER + first_head + 1)
    keys = torch.from_numpy(mix(rows).view(np.int64))
    return (keys.pin_memory() if device.type == "cuda" else keys).to(device, non_blocking=True)


def sum_terms(x: torch.Tensor, keys: torch.Tensor, first_piece: torch.Tensor) -> torch.Tensor:
    """Sum `mix(x ^ key)` over a token's pieces and heads. Overwrites x.

    Args:
        x: int64 [rows, columns, heads, pieces], the bits of uint64.
        keys: int64 [heads], of `row_keys`.
        first_piece: int64 [rows, columns]: `j` of each token's first piece here.

    Returns:
        int64 [rows].
    """
    j = first_piece[:, :, None] + torch.arange(x.shape[3], device=x.device)
    x ^= keys[:, None] + (j * signed(GAMMA))[:, :, None, :]
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        x ^= (x >> shift) & (2 ** (64 - shift) - 1)
        x *= signed(multiplier)
    x ^= (x >> SHIFTS[-1]) & (2 ** (64 - SHIFTS[-1]) - 1)
    return x.sum((1, 2, 3))
