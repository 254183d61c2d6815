"""Brings sums to the host without making the step wait: its own stream, pinned memory, a blocking event (PRO-3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

Wait = Callable[[], None]


class CudaHostCopy:
    """Copies on its own stream, behind what the current stream has been given so far."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call] # torch has no types for it

    def start(self, values: Mapping[int, torch.Tensor]) -> tuple[dict[int, torch.Tensor], Wait]:
        """Host tensors that will hold the values, and what waits until they do. Returns at once."""
        self._stream.wait_stream(torch.cuda.current_stream())
        host: dict[int, torch.Tensor] = {}
        with torch.cuda.stream(self._stream):
            for group_id, tensor in values.items():
                if not tensor.is_cuda:  # of a pipeline stage that has no layer of the group
                    host[group_id] = tensor
                    continue
                pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                host[group_id] = pinned.copy_(tensor, non_blocking=True)
                tensor.record_stream(self._stream)
            ready = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call] # torch has no types for it
            ready.record(self._stream)
        return host, ready.synchronize
