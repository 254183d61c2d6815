"""What the scheduler tells the workers each step, and what they answer. Both are pickled on their way.

vLLM's own classes that carry them are in `metadata.py`: this module needs no vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from kvchaos_vllm.records import GroupBlocks, GroupSums, WorkerRecord


@dataclass(frozen=True, slots=True)
class Orders:
    """One step's orders to every worker.

    Attributes:
        step_id: counts the scheduler's steps.
        sends: requests whose prompts this step finishes, with the blocks to sum after its forward (PRO-1).
        loads: requests whose loads start with this step, with the blocks to sum when they have finished (CON-1).
        failed: requests whose loads are to be reported as failed: they were judged and not acceptable.
    """

    step_id: int
    sends: Mapping[str, Mapping[int, GroupBlocks]] = field(default_factory=dict)
    loads: Mapping[str, Mapping[int, GroupBlocks]] = field(default_factory=dict)
    failed: frozenset[str] = frozenset()


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
        values = np.zeros(0, dtype=np.uint64) if self.values is None else self.values.cpu().numpy().view(np.uint64)
        return GroupSums(self.blocks, self.fingerprint, values, self.replica, self.num_replicas, summed)


@dataclass(frozen=True, slots=True)
class PendingRecord:
    """A record whose sums may still be on their way to the host. Only `finalise` waits for them, with `wait`."""

    step_id: int
    request_id: str
    tp_rank: int
    pp_rank: int
    groups: Mapping[int, PendingSums]
    wait: Callable[[], None] | None = None

    def finalise(self) -> WorkerRecord:
        """The record, once the device is done."""
        if self.wait is not None:
            self.wait()
        sums = {group_id: pending.finalise() for group_id, pending in self.groups.items()}
        return WorkerRecord(self.request_id, self.tp_rank, self.pp_rank, sums)


class Answer:
    """What workers report of one step: records of sends and of loads, each with the step that ordered it.

    Records wait for the device only when they are read, or pickled for another process (PRO-3, CON-6).
    """

    def __init__(self) -> None:
        self._sends: list[PendingRecord] = []
        self._loads: list[PendingRecord] = []
        self._final_sends: list[tuple[int, WorkerRecord]] = []
        self._final_loads: list[tuple[int, WorkerRecord]] = []

    def add_send(self, record: PendingRecord) -> None:
        self._sends.append(record)

    def add_load(self, record: PendingRecord) -> None:
        self._loads.append(record)

    def sends(self) -> list[tuple[int, WorkerRecord]]:
        """The step and the record of each send. Waits for the device."""
        self._finalise()
        return self._final_sends

    def loads(self) -> list[tuple[int, WorkerRecord]]:
        """The step and the record of each load. Waits for the device."""
        self._finalise()
        return self._final_loads

    def join(self, other: Answer) -> None:
        """Take over another worker's records of the same step."""
        self._sends += other._sends
        self._loads += other._loads
        self._final_sends += other._final_sends
        self._final_loads += other._final_loads

    def _finalise(self) -> None:
        self._final_sends += [(record.step_id, record.finalise()) for record in self._sends]
        self._final_loads += [(record.step_id, record.finalise()) for record in self._loads]
        self._sends, self._loads = [], []

    def __bool__(self) -> bool:
        return bool(self._sends or self._loads or self._final_sends or self._final_loads)

    def __getstate__(self) -> dict[str, object]:
        self._finalise()
        return dict(vars(self))
