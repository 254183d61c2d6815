"""Says of every corrupted load what is wrong and what would explain it, while the bytes are at hand.

A history holds digests only, so this cannot be done later from a stored one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.cache import KVMemory
from engine.checksum.records import GroupBlocks
from engine.seams import BlocksAllocated, FirstUse, KVFinal, LoadFinished, Seams, Stage
from harness.diagnosis import KVBlocks, diagnose
from harness.history import History

EVENT = "diagnosis"


class DiagnosisOracle:
    """Keeps P's KV of every request at KV final, and compares D's with it when a load has finished."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._final: dict[tuple[int, str], KVBlocks] = {}
        self._blocks: dict[tuple[int, str], tuple[str, GroupBlocks, KVMemory]] = {}
        self._owners: dict[tuple[str, int], str] = {}
        self._diagnosed: set[str] = set()

    def attach(self, seams: Seams) -> None:
        """Before any fault at P's KV final; after every fault on D."""
        seams.on("blocks.allocated", self._own, Stage.BEFORE)
        seams.on("producer.kv_final", self._remember, Stage.BEFORE)
        seams.on("consumer.load_finished", self._load_finished, Stage.AFTER)
        seams.on("consumer.first_use", self._first_use, Stage.AFTER)

    def _own(self, event: BlocksAllocated) -> None:
        self._owners |= {(event.engine, block_id): event.request_id for block_id in event.block_ids}

    def _remember(self, event: KVFinal) -> None:
        for group_id, blocks in event.groups.items():
            memory = event.memory.group(group_id)
            self._final[group_id, event.request_id] = _all_slots(blocks, memory)
            self._blocks[group_id, event.request_id] = event.engine, blocks, memory

    def _load_finished(self, event: LoadFinished) -> None:
        self._diagnose(event, leave_out=0)

    def _first_use(self, event: FirstUse) -> None:
        """What changed between the check and the first read. The last token is computed again before it is read."""
        if event.request_id not in self._diagnosed:
            self._diagnose(event, leave_out=1)

    def _diagnose(self, event: LoadFinished | FirstUse, leave_out: int) -> None:
        """The first group and replica of the heads that differs stands for all (EXT-1)."""
        for group_id, blocks in event.groups.items():
            memory = event.memory.group(group_id)
            less = 0 if memory.spec.is_state else leave_out
            for replica in memory.replicas:
                if self._compare(event.request_id, group_id, _tokens(blocks, replica, less), memory.num_parts):
                    return

    def _compare(self, request_id: str, group_id: int, loaded: KVBlocks | None, num_parts: int) -> bool:
        """Whether there was a difference to diagnose."""
        final = self._final.get((group_id, request_id))
        if loaded is None or final is None:
            return False
        first = loaded.first_token - final.first_token
        wanted = final.kv[:, :, max(first, 0) : first + loaded.kv.shape[2]]
        if wanted.shape == loaded.kv.shape and (wanted == loaded.kv).all():
            return False
        self._diagnosed.add(request_id)
        if num_parts == 2 and wanted.shape == loaded.kv.shape:
            others = {name: kv for (group, name), kv in self._final.items() if group == group_id and name != request_id}
            for group, other in self._blocks:
                others |= self._reused(other, group) if group == group_id else {}
            found = diagnose(final, loaded, others)
            damage, texts = found.damage, list(found.texts)
        else:
            # What a diagnosis knows of is K and V.
            damage, texts = "the bytes differ", []
        where = f"KV cache group {group_id}: " if group_id and damage else ""
        self._history.add(EVENT, request=request_id, damage=damage and f"{where}{damage}", hypotheses=texts)
        return True

    def _reused(self, request_id: str, group_id: int) -> dict[str, KVBlocks]:
        """What P's blocks of the request hold by now, if others have taken some of them, under the others' names."""
        engine, blocks, memory = self._blocks[group_id, request_id]
        now = _all_slots(blocks, memory)
        owners = {self._owners.get((engine, block_id), request_id) for block_id in blocks.block_ids} - {request_id}
        if not owners or (now.kv == self._final[group_id, request_id].kv).all():
            return {}
        return {f"{' and '.join(sorted(owners))} (in blocks that {request_id} had on P)": now}


def _all_slots(blocks: GroupBlocks, memory: KVMemory) -> KVBlocks:
    """Whole blocks, slots behind the last token included: a copy of a block takes those along."""
    return _kv(memory.slots(blocks.block_ids), blocks, memory)


def _tokens(blocks: GroupBlocks, memory: KVMemory, leave_out: int) -> KVBlocks | None:
    """The tokens that count, less the last `leave_out`; None if there are none."""
    kv = memory.tokens(blocks)
    count = kv.shape[2] - leave_out
    return _kv(kv[:, :, :count], blocks, memory) if count > 0 else None


def _kv(kv: npt.NDArray[np.uint8], blocks: GroupBlocks, memory: KVMemory) -> KVBlocks:
    element_bytes = getattr(memory.spec, "element_bytes", 2)  # kvchaos' own engines have bf16 and fp16
    return KVBlocks(kv, blocks.block_size, blocks.start * blocks.block_size, element_bytes=element_bytes)
