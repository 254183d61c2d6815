"""Which way a checksum is computed, by where the cache is: what engines call.

In host memory that is the compiled path if numba is there, else torch, which is also the path of every device. The
compiled path is imported late: compiling it anew takes seconds, from numba's cache a fraction of one.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernels import torch_path
from kernels.torch_path import LayerCache


def block_checksums(
    layers: Sequence[LayerCache],
    block_ids: Sequence[int] | torch.Tensor,
    *,
    block_size: int,
    start: int,
    num_tokens: int,
    version: int = 1,
) -> torch.Tensor:
    """Sum as `kernels.torch_path.block_checksums` does, by the fastest path that is there for these layers.

    Args:
        layers, block_ids, block_size, start, num_tokens, version: as there.

    Returns:
        int64 [blocks] on the cache's device: the bits of uint64.

    Raises:
        ValueError: as there.
    """
    in_host_memory = bool(layers) and bool(layers[0].parts) and layers[0].parts[0].device.type == "cpu"
    compiled = _compiled(version) if in_host_memory else None
    if compiled is not None:
        sums: torch.Tensor = compiled(layers, block_ids, block_size=block_size, start=start, num_tokens=num_tokens)
        return sums
    return torch_path.block_checksums(
        layers, block_ids, block_size=block_size, start=start, num_tokens=num_tokens, version=version
    )


def prepare(device: torch.device) -> None:
    """Import, and where needed compile, what sums on this device need, so that no step has to wait for it.

    For every version: which one a consumer sums by, its producers decide.
    """
    if device.type == "cpu":
        for version in torch_path.VERSIONS:
            _compiled(version)


def why_not_compiled(version: int = 1) -> str | None:
    """Why sums in host memory go through torch; None where they do not."""
    try:
        importlib.import_module("kernels.cpu_path").loops(version)
    except (ImportError, OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


@functools.cache
def _compiled(version: int) -> Callable[..., Any] | None:
    if why_not_compiled(version) is not None:
        return None
    return functools.partial(importlib.import_module("kernels.cpu_path").block_checksums, version=version)
