"""Arithmetic whose result cannot depend on the order of a reduction.

Every activation is rounded to a multiple of 2**-16 with magnitude at most 32, every weight to a multiple of 2**-8
below 2. Then each product that is summed, and each partial sum, fits into the 53 bits of a float64, so sums are
exact: batch, chunk, tensor-parallel split, BLAS kernel and device cannot change a bit of the result. What is not
a sum (square root, division) is one correctly rounded IEEE operation per element, and exp is a table.

The widest sum is attention's, weight (18 bits) * V (21 bits) over at most 8192 tokens (13 bits): 52 bits.
KV bytes that a fault changed may leave these ranges; results then are still what this hardware computes.
"""

from __future__ import annotations

import numpy as np
import torch

ACTIVATION_SCALE = 2.0**16
ACTIVATION_LIMIT = 32.0
WEIGHT_SCALE = 2.0**8
WEIGHT_LIMIT = 2.0 - 2.0**-8
MAX_CONTEXT = 8192
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_EXP_STEPS = 2.0**12
_EXP_SIZE = 2**16
_EXP_SCALE = 2.0**18


def quantize_(x: torch.Tensor) -> torch.Tensor:
    """Round float64 `x` to the activation grid, in place. NaN becomes 0, infinities saturate."""
    x.mul_(ACTIVATION_SCALE).round_().mul_(1.0 / ACTIVATION_SCALE).clamp_(-ACTIVATION_LIMIT, ACTIVATION_LIMIT)
    return x.nan_to_num_(nan=0.0)


def quantize_weights(w: np.ndarray, device: str) -> torch.Tensor:
    """Round weights to their grid: float64, same shape."""
    grid = np.clip(np.rint(w * WEIGHT_SCALE) / WEIGHT_SCALE, -WEIGHT_LIMIT, WEIGHT_LIMIT)
    return torch.from_numpy(np.ascontiguousarray(grid, dtype=np.float64)).to(device)


def exp_table(device: str) -> torch.Tensor:
    """exp(-i / 2**12) for i in [0, 2**16), on the grid 2**-18: float64 [65536]."""
    steps = np.arange(_EXP_SIZE, dtype=np.float64) / _EXP_STEPS
    return torch.from_numpy(np.rint(np.exp(-steps) * _EXP_SCALE) / _EXP_SCALE).to(device)


def exp_negative(t: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """exp(-t) for t >= 0 by table; +inf and NaN give the smallest entry."""
    index = (t * _EXP_STEPS).nan_to_num_(nan=_EXP_SIZE, posinf=_EXP_SIZE).round_().clamp_(0, _EXP_SIZE - 1)
    return table[index.long()]


def rms_norm(x: torch.Tensor) -> torch.Tensor:
    """x / rms(x) over the last dimension, on the activation grid."""
    mean_square = (x * x).sum(-1, keepdim=True).div_(x.shape[-1])
    return quantize_(x / mean_square.add_(2.0**-20).sqrt_())
