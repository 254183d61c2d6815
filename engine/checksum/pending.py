"""A worker's sums on their way to the host: the step hands them on, and only the finaliser waits (PRO-3, CON-6)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.checksum.host_copy import Ready
from engine.checksum.records import GroupBlocks, GroupSums, WorkerRecord
from engine.checksum.times import ChecksumTimes
from kernels.torch_path import as_uint64


@dataclass(frozen=True, slots=True)
class PendingSums:
    """One group's part of a pending record: `values` int64 [blocks], None for a replica that is not summed."""

    blocks: GroupBlocks
    fingerprint: int
    values: torch.Tensor | None
    replica: int = 0
    num_replicas: int = 1

    def finalise(self) -> GroupSums:
        """The sums on the host, once they have arrived there."""
        summed = self.values is not None
        values = np.zeros(0, dtype=np.uint64) if self.values is None else as_uint64(self.values)
        return GroupSums(self.blocks, self.fingerprint, values, self.replica, self.num_replicas, summed)


@dataclass(frozen=True, slots=True)
class PendingRecord:
    """A record whose sums may still be on their way to the host. Only `finalise` waits for them."""

    request_id: str
    tp_rank: int
    pp_rank: int
    groups: Mapping[int, PendingSums]
    ready: Ready | None
    times: ChecksumTimes = field(default_factory=ChecksumTimes)

    def finalise(self) -> WorkerRecord:
        """The record, once the device is done."""
        began = time.perf_counter()
        if self.ready is not None:
            self.ready.synchronize()
        sums = {group_id: pending.finalise() for group_id, pending in self.groups.items()}
        self.times.wait_s += time.perf_counter() - began
        return WorkerRecord(self.request_id, self.tp_rank, self.pp_rank, sums)
