"""Says of every corrupted load what is wrong and what would explain it, while the bytes are at hand.

A history holds digests only, so this cannot be done later from a stored one.
"""

from __future__ import annotations

from engine.cache import KVMemory
from engine.checksum.records import GroupBlocks
from engine.seams import BlocksAllocated, KVFinal, LoadFinished, Seams, Stage
from harness.diagnosis import KVBlocks, diagnose
from harness.history import History

EVENT = "diagnosis"


class DiagnosisOracle:
    """Keeps P's KV of every request at KV final, and compares D's with it when a load has finished."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._final: dict[str, KVBlocks] = {}
        self._blocks: dict[str, tuple[str, GroupBlocks, KVMemory]] = {}
        self._owners: dict[tuple[str, int], str] = {}

    def attach(self, seams: Seams) -> None:
        """Before any fault at P's KV final; after every fault on D."""
        seams.on("blocks.allocated", self._own, Stage.BEFORE)
        seams.on("producer.kv_final", self._remember, Stage.BEFORE)
        seams.on("consumer.load_finished", self._compare, Stage.AFTER)

    def _own(self, event: BlocksAllocated) -> None:
        self._owners |= {(event.engine, block_id): event.request_id for block_id in event.block_ids}

    def _remember(self, event: KVFinal) -> None:
        for blocks in event.groups.values():
            self._final[event.request_id] = _kv(blocks, event.memory)
            self._blocks[event.request_id] = event.engine, blocks, event.memory

    def _compare(self, event: LoadFinished) -> None:
        final = self._final.get(event.request_id)
        if final is None:
            return
        for blocks in event.groups.values():
            loaded = _kv(blocks, event.memory)
            first = loaded.first_token
            if (final.kv[:, :, first : first + loaded.kv.shape[2]] == loaded.kv).all():
                continue
            others = {name: kv for name, kv in self._final.items() if name != event.request_id}
            for request_id in self._blocks:
                others |= self._reused(request_id)
            found = diagnose(final, loaded, others)
            self._history.add(EVENT, request=event.request_id, damage=found.damage, hypotheses=list(found.texts))

    def _reused(self, request_id: str) -> dict[str, KVBlocks]:
        """What P's blocks of the request hold by now, if others have taken some of them, under the others' names."""
        engine, blocks, memory = self._blocks[request_id]
        owners = {self._owners.get((engine, block_id), request_id) for block_id in blocks.block_ids} - {request_id}
        if not owners:
            return {}
        name = f"{' and '.join(sorted(owners))} (in blocks that {request_id} had on P)"
        return {name: _kv(blocks, memory)}


def _kv(blocks: GroupBlocks, memory: KVMemory) -> KVBlocks:
    return KVBlocks(memory.tokens(blocks), blocks.block_size, blocks.start * blocks.block_size)
