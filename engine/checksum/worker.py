"""A worker's part: checksum the blocks it was told to, and report without making the step wait (PRO-3, CON-6)."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

import torch

from engine.checksum.host_copy import CudaHostCopy, HostCopy
from engine.checksum.layers import factors, rows_fingerprint, why_skipped
from engine.checksum.pending import PendingRecord, PendingSums
from engine.checksum.policy import ChecksumSettings
from engine.checksum.records import GroupBlocks
from engine.checksum.times import ChecksumTimes
from engine.checksum.when import KeptSums, written_blocks
from engine.paged import PagedKVCache
from engine.step import StepPlan
from kernels.paths import block_checksums, prepare
from kernels.torch_path import LayerCache

logger = logging.getLogger(__name__)


class ChecksumWorker:
    """Sums blocks of one worker's caches, given a group each. Groups that it cannot sum it leaves out (FPR-2).

    The worker may hold a replica of heads that others hold as well: P's workers sum replica 0 alone, D's all of them
    unless EXT-1 is off.

    On a device whose results arrive later, `host_copy` brings them to the host; for CUDA it is there by default.
    With another `trigger` than `prompt_end`, the sums of prompts' full blocks are kept (EXT-8).
    """

    def __init__(
        self,
        caches: Sequence[PagedKVCache],
        tp_rank: int = 0,
        pp_rank: int = 0,
        settings: ChecksumSettings | None = None,
        host_copy: HostCopy | None = None,
    ) -> None:
        self._tp_rank = tp_rank
        self._pp_rank = pp_rank
        self._settings = settings or ChecksumSettings()
        self._groups: dict[int, _Summed] = {}
        for cache in caches:
            why = _why_skipped(cache, self._settings)
            if why is None:
                self._groups[cache.group.group_id] = _Summed(cache)
            elif (tp_rank, pp_rank) == (0, 0):
                logger.info("KV cache group %d is not checksummed: %s", cache.group.group_id, why)
        self.times = ChecksumTimes()
        self._kept: dict[int, KeptSums] = {}
        if self._settings.kv_checksum_trigger != "prompt_end":
            # A recurrent state changes with every step: there is nothing to keep.
            self._kept = {
                group_id: KeptSums(group.cache.num_blocks, group.cache.layers[0].device)
                for group_id, group in self._groups.items()
                if group.cache.layers and not group.cache.group.is_state
            }
        for device in {layer.device for cache in caches for layer in cache.layers}:
            prepare(device)
        on_cuda = any(layer.is_cuda for cache in caches for layer in cache.layers)
        self._host_copy = CudaHostCopy() if host_copy is None and on_cuda else host_copy

    def begin_step(self, plan: StepPlan) -> None:
        """Before a step writes anything: no sum of what its blocks held may be used any more."""
        if not self._kept:
            return
        began = time.perf_counter()
        for group_id, kept in self._kept.items():
            kept.forget(written_blocks(plan, group_id, self._groups[group_id].cache.block_size))
        self.times.start_s += time.perf_counter() - began

    def keep(self, groups: Mapping[int, GroupBlocks]) -> None:
        """Sum full blocks ahead of their prompt's end, as soon as they are written. Of replicas the first does."""
        began = time.perf_counter()
        for group_id, blocks in groups.items():
            if group_id in self._kept and self._groups[group_id].cache.replica == 0:
                self._sums(blocks, received=False)
        self.times.start_s += time.perf_counter() - began

    def checksum(self, request_id: str, groups: Mapping[int, GroupBlocks], received: bool = False) -> PendingRecord:
        """Start summing these blocks as they are now; returns without waiting for the device.

        `received` says that they hold a load, not a prompt that was computed here: of that, nothing can be known yet.
        """
        began = time.perf_counter()
        replicas = received and self._settings.check_replicas
        known = {group_id: self._groups[group_id] for group_id in groups if group_id in self._groups}
        values = {
            group_id: self._sums(groups[group_id], received)
            for group_id, group in known.items()
            if group.cache.replica == 0 or replicas
        }
        ready = None
        if self._host_copy is not None:
            values, ready = self._host_copy.start(values)
        pending = {
            group_id: PendingSums(
                groups[group_id],
                group.fingerprint,
                values.get(group_id),
                group.cache.replica,
                group.cache.num_replicas,
            )
            for group_id, group in known.items()
        }
        self.times.records += 1
        self.times.start_s += time.perf_counter() - began
        return PendingRecord(request_id, self._tp_rank, self._pp_rank, pending, ready, self.times)

    def _sums(self, blocks: GroupBlocks, received: bool) -> torch.Tensor:
        kept = None if received else self._kept.get(blocks.group_id)
        before = self.times.tokens_read
        sums = self._read(blocks) if kept is None else kept.sums(blocks, self._read)
        self.times.tokens_kept += blocks.num_tokens_to_sum - (self.times.tokens_read - before)
        return sums

    def _read(self, blocks: GroupBlocks) -> torch.Tensor:
        self.times.tokens_read += blocks.num_tokens_to_sum
        return self._groups[blocks.group_id].sums(blocks)


class _Summed:
    """A group that is checksummed: this worker's caches of it, each under its factor."""

    def __init__(self, cache: PagedKVCache) -> None:
        self.cache = cache
        self.fingerprint = rows_fingerprint(cache.group, cache.rows, cache.kv_dtype)
        # The second cache of a layer is summed by itself: it has the same layer number (EXT-9).
        self._layers: dict[int, list[LayerCache]] = {}
        numbers = factors(cache.group)
        for row, tensor in zip(cache.rows, cache.layers, strict=True):
            number, first_head = numbers[row]
            layer = LayerCache(number, first_head + cache.heads.start, tuple(tensor.unbind(1)))
            self._layers.setdefault(first_head, []).append(layer)

    def sums(self, blocks: GroupBlocks) -> torch.Tensor:
        """This worker's part: int64 [blocks]. A stage without a layer of the group adds nothing."""
        total = torch.zeros(len(blocks.block_ids), dtype=torch.int64)
        for layers in self._layers.values():
            part = block_checksums(
                layers,
                blocks.block_ids,
                block_size=blocks.block_size,
                start=blocks.start,
                num_tokens=blocks.tokens_to_sum,
                version=blocks.version,
            )
            total = part if len(self._layers) == 1 else total.to(part.device, non_blocking=True) + part
        return total


def _why_skipped(cache: PagedKVCache, settings: ChecksumSettings) -> str | None:
    sizes = cache.block_size, cache.kernel_block_size
    return why_skipped(cache.group, cache.shard.tp_size, sizes, cache.dtype.itemsize, settings)
