"""Brings sums to the host without making the step wait: its own stream, pinned memory, a blocking event (PRO-3)."""

from __future__ import annotations

from typing import Protocol

import torch


class Ready(Protocol):
    """What says that sums have arrived."""

    def synchronize(self) -> None:
        """Wait for them."""
        ...


class HostCopy(Protocol):
    """Starts copying sums to the host."""

    def start(self, values: dict[int, torch.Tensor]) -> tuple[dict[int, torch.Tensor], Ready]:
        """Host tensors that will hold the values, and what says when; returns at once."""
        ...


class CudaHostCopy:
    """Copies on its own stream, behind what the current stream has been given so far."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call] # torch has no types for it

    def start(self, values: dict[int, torch.Tensor]) -> tuple[dict[int, torch.Tensor], Ready]:
        """Start the copies."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            host = {}
            for group_id, tensor in values.items():
                pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                host[group_id] = pinned.copy_(tensor, non_blocking=True)
                tensor.record_stream(self._stream)
            ready = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call] # torch has no types for it
            ready.record(self._stream)
        return host, ready
