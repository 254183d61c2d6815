"""Only the first blocks of a load are read, and the transfer is reported as finished.

What does not arrive holds a poison pattern, never zeros: zeros would look like an empty cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from kvchaos_vllm_faults.blocks import LOAD_FINISHED, LOAD_SCHEDULED, READ_POSTED, Blocks
from kvchaos_vllm_faults.evidence import Evidence, digest
from kvchaos_vllm_faults.faults.base import Fault, Order, Read
from kvchaos_vllm_faults.memory import EngineMemory

POISON = b"POISONED"


class ShortTransfer(Fault):
    """Poisons the blocks that will not arrive, and leaves them out of the read."""

    kind = "short_transfer"
    moments: ClassVar[Mapping[str, str]] = {"in_flight": READ_POSTED}

    def __init__(self, order: Order, record: Callable[[Evidence], None]) -> None:
        super().__init__(order, record)
        self._poison: dict[int, str] = {}

    @property
    def _moved(self) -> int:
        moved = self.order.params.get("moved_blocks")
        return 1 if moved is None else int(moved)

    def on_kv(self, moment: str, blocks: Blocks, memory: EngineMemory) -> None:
        missing = list(zip(blocks.positions, blocks.block_ids, strict=True))[self._moved :]
        if moment == LOAD_SCHEDULED and missing:
            memory.fill([block_id for _, block_id in missing], POISON)
            self._poison = {b: digest(memory.read((b,))[:, :, 0]) for _, b in missing}
        elif moment == LOAD_FINISHED and not self.num_evidence:
            for position, block_id in missing:
                now = digest(memory.read((block_id,))[:, :, 0])
                if now == self._poison.get(block_id):
                    what = f"D's block {block_id} (block position {position}) was reported as read and holds poison"
                    self.record(what, now, now, LOAD_FINISHED)

    def on_read(self, read: Read) -> Sequence[Read]:
        return (read.part(0, self._moved),)
