"""A worker's part: checksum the blocks it was told to, and report without making the step wait (PRO-3, CON-6)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.checksum.host_copy import CudaHostCopy, HostCopy, Ready
from engine.checksum.payload import fingerprint, layer_number
from engine.checksum.records import GroupBlocks, GroupSums, WorkerRecord
from engine.checksum.when import KeptSums, Trigger, written_blocks
from engine.paged import PagedKVCache
from kernels.paths import block_checksums, prepare
from kernels.torch_path import LayerCache, as_uint64

if TYPE_CHECKING:
    from engine.step import StepPlan


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A layer of a KV cache group as its fingerprint sees it (FPR-1)."""

    name: str
    spec_type: str
    dtype: str


@dataclass(slots=True, eq=False)
class ChecksumTimes:
    """What checksums cost the thread that runs the engine: seconds on the host's clock, which nobody waits to read.

    Where sums run on the host, `start_s` is all of it. Where they run on a device, `start_s` is the time to launch
    them, and `wait_s` how long the finaliser then waited for what the step had not hidden; the device's own time is
    in neither. `tokens_read` counts tokens whose KV was read in order to sum it, `tokens_kept` those whose block's sum
    was still known (EXT-8).
    """

    records: int = 0
    tokens_read: int = 0
    tokens_kept: int = 0
    start_s: float = 0.0
    wait_s: float = 0.0


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


class ChecksumWorker:
    """Sums blocks of one worker's caches. One full-attention group holds all layers.

    The worker may hold a replica of heads that others hold as well: P's workers sum replica 0 alone, D's all of them
    unless `check_replicas` says otherwise (EXT-1).

    On a device whose results arrive later, `host_copy` brings them to the host; for CUDA it is there by default.
    With another `trigger` than `prompt_end`, the sums of prompts' full blocks are kept (EXT-8).
    """

    def __init__(
        self,
        cache: PagedKVCache,
        layers: list[LayerSpec],
        tp_rank: int,
        pp_rank: int,
        first_head: int,
        host_copy: HostCopy | None = None,
        trigger: Trigger = "prompt_end",
        replica: int = 0,
        num_replicas: int = 1,
        check_replicas: bool = True,
    ) -> None:
        self._tp_rank = tp_rank
        self._pp_rank = pp_rank
        self._fingerprint = fingerprint((spec.name, spec.spec_type, spec.dtype) for spec in layers)
        self._layers = []
        for spec, tensor in zip(layers, cache.layers, strict=True):
            number = layer_number(spec.name)
            if number is None:
                raise ValueError(f"layer name {spec.name!r} holds no single layer number")
            self._layers.append(LayerCache(number, first_head, (tensor[:, 0], tensor[:, 1])))
        self._replica = replica
        self._num_replicas = num_replicas
        self._check_replicas = check_replicas
        self.times = ChecksumTimes()
        self._block_size = cache.block_size
        self._kept = None if trigger == "prompt_end" else KeptSums(cache.num_blocks, cache.layers[0].device)
        prepare(cache.layers[0].device)
        self._host_copy = CudaHostCopy() if host_copy is None and cache.layers[0].is_cuda else host_copy

    def begin_step(self, plan: StepPlan) -> None:
        """Before a step writes anything: no sum of what its blocks held may be used any more."""
        if self._kept is not None:
            began = time.perf_counter()
            self._kept.forget(written_blocks(plan, self._block_size))
            self.times.start_s += time.perf_counter() - began

    def keep(self, groups: Mapping[int, GroupBlocks]) -> None:
        """Sum full blocks ahead of their prompt's end, as soon as they are written. Of replicas the first does."""
        if self._replica != 0:
            return
        began = time.perf_counter()
        for blocks in groups.values():
            self._sums(blocks, received=False)
        self.times.start_s += time.perf_counter() - began

    def checksum(self, request_id: str, groups: Mapping[int, GroupBlocks], received: bool = False) -> PendingRecord:
        """Start summing these blocks as they are now; returns without waiting for the device.

        `received` says that they hold a load, not a prompt that was computed here: of that, nothing can be known yet.
        """
        began = time.perf_counter()
        summed = self._replica == 0 or (received and self._check_replicas)
        values = {group_id: self._sums(blocks, received) for group_id, blocks in groups.items()} if summed else {}
        ready = None
        if self._host_copy is not None:
            values, ready = self._host_copy.start(values)
        pending = {
            group_id: PendingSums(blocks, self._fingerprint, values.get(group_id), self._replica, self._num_replicas)
            for group_id, blocks in groups.items()
        }
        self.times.records += 1
        self.times.start_s += time.perf_counter() - began
        return PendingRecord(request_id, self._tp_rank, self._pp_rank, pending, ready, self.times)

    def _sums(self, blocks: GroupBlocks, received: bool) -> torch.Tensor:
        before = self.times.tokens_read
        sums = self._read(blocks) if self._kept is None or received else self._kept.sums(blocks, self._read)
        self.times.tokens_kept += blocks.num_tokens_to_sum - (self.times.tokens_read - before)
        return sums

    def _read(self, blocks: GroupBlocks) -> torch.Tensor:
        self.times.tokens_read += blocks.num_tokens_to_sum
        return block_checksums(
            self._layers,
            blocks.block_ids,
            block_size=blocks.block_size,
            start=blocks.start,
            num_tokens=blocks.tokens_to_sum,
            version=blocks.version,
        )
