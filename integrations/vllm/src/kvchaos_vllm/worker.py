"""A worker's half of the protection: it sums the blocks that the scheduler names, and reports (PRO-2, CON-2).

`caches.py` says which of vLLM's caches can be summed, and how to read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from kvchaos_vllm.host_copy import CudaHostCopy
from kvchaos_vllm.orders import Answer, Orders, PendingRecord, PendingSums
from kvchaos_vllm.paged_sums import LayerCache, block_checksums
from kvchaos_vllm.records import GroupBlocks


@dataclass(frozen=True)
class SummedGroup:
    """A KV cache group that is checksummed, as one worker holds it.

    Attributes:
        layers: the worker's own, none on a pipeline stage that has no layer of the group.
        fingerprint: of these layers.
        replica: which replica of its KV heads the worker holds, of `num_replicas` (EXT-1).
    """

    layers: Sequence[LayerCache]
    fingerprint: int
    replica: int = 0
    num_replicas: int = 1

    def sums(self, blocks: GroupBlocks) -> torch.Tensor:
        """This worker's part: int64 [blocks] on the caches' device, without waiting for it."""
        if not self.layers:
            return torch.zeros(len(blocks.block_ids), dtype=torch.int64)
        return block_checksums(
            self.layers,
            blocks.block_ids,
            block_size=blocks.block_size,
            start=blocks.start,
            num_tokens=blocks.num_tokens,
        )


class WorkerChecksums:
    """All that one worker knows of checksums. Groups that it cannot sum are not among `groups` (FPR-2)."""

    def __init__(self, groups: Mapping[int, SummedGroup], tp_rank: int, pp_rank: int) -> None:
        self._groups = groups
        self._ranks = tp_rank, pp_rank
        self._loads: dict[str, tuple[int, Mapping[int, GroupBlocks]]] = {}
        self._answer = Answer()
        on_cuda = any(layer.cache.is_cuda for group in groups.values() for layer in group.layers)
        self._host_copy = CudaHostCopy() if on_cuda else None

    def expect(self, orders: Orders) -> None:
        """Loads of this step start: remember what to sum when they have finished."""
        self._loads.update({request_id: (orders.step_id, groups) for request_id, groups in orders.loads.items()})

    def sum_sends(self, orders: Orders) -> None:
        """The forward of this step has written the last of these prompts' KV: sum it (PRO-2, PRO-4).

        A worker that holds a further replica of its heads leaves them to the first (EXT-1).
        """
        for request_id, groups in orders.sends.items():
            self._answer.add_send(self._record(orders.step_id, request_id, groups, replicas=False))

    def sum_loads(self, finished: Iterable[str], failed: Iterable[str]) -> None:
        """These loads have finished on this worker: sum what they wrote, before any later forward can write it.

        Those that failed are left out (CON-2).
        """
        broken = set(failed)
        for request_id in finished:
            ordered = self._loads.pop(request_id, None)
            if ordered is not None and request_id not in broken:
                step_id, groups = ordered
                self._answer.add_load(self._record(step_id, request_id, groups, replicas=True))

    def take_answer(self) -> Answer | None:
        """What was summed since the last call; None: nothing."""
        answer, self._answer = self._answer, Answer()
        return answer if answer else None

    @property
    def num_expected(self) -> int:
        """How many loads have started and not finished."""
        return len(self._loads)

    def _record(
        self, step_id: int, request_id: str, groups: Mapping[int, GroupBlocks], *, replicas: bool
    ) -> PendingRecord:
        known = {group_id: self._groups[group_id] for group_id in groups if group_id in self._groups}
        values = {
            group_id: group.sums(groups[group_id])
            for group_id, group in known.items()
            if group.replica == 0 or replicas
        }
        wait = None
        if self._host_copy is not None:
            values, wait = self._host_copy.start(values)
        pending = {
            group_id: PendingSums(
                groups[group_id], group.fingerprint, values.get(group_id), group.replica, group.num_replicas
            )
            for group_id, group in known.items()
        }
        return PendingRecord(step_id, request_id, *self._ranks, pending, wait)
