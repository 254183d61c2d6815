"""What a load should bring, operation by operation, and what D holds in the end: evidence for lost or misled copies."""

from __future__ import annotations

import torch

from engine.cache import KVMemory
from engine.seams import CopyOp, Groups, OpPosted
from faults.base import digest
from faults.blocks import Bytes, ChangedBlock, tokens_in


class Delivery:
    """Follows one load from the operations that were planned to the blocks that came of them."""

    def __init__(self) -> None:
        self._planned: list[tuple[CopyOp, Bytes]] = []

    def plan(self, event: OpPosted) -> None:
        """Remember what an operation would bring. To be called before the operation is changed or dropped."""
        op = event.op
        self._planned.append((op, op_bytes(event.source, op, op.source_block, op.source_slot)))

    def changed(self, groups: Groups, memory: KVMemory) -> list[ChangedBlock]:
        """D's blocks that do not hold what was planned, by position."""
        found: list[ChangedBlock] = []
        for blocks in groups.values():
            for position, block_id in zip(blocks.positions, blocks.block_ids, strict=True):
                wanted, got = [], []
                for op, planned in self._planned:
                    if op.position == position:
                        count = max(0, min(op.num_slots, tokens_in(blocks, position) - op.target_slot))
                        now = op_bytes(memory, op, op.target_block, op.target_slot)
                        wanted.append(planned[:count].tobytes())
                        got.append(now[:count].tobytes())
                before, after = digest(b"".join(wanted)), digest(b"".join(got))
                if before != after:
                    found.append(ChangedBlock(position, block_id, before, after))
        return found


def op_bytes(memory: KVMemory, op: CopyOp, block_id: int, slot: int) -> Bytes:
    """A copy of the K or V bytes that an operation moves, at this place: uint8 [num_slots, bytes]."""
    region = memory.region(op.layer, block_id, op.part, op.head, slot, op.num_slots)
    copied: Bytes = region.contiguous().view(torch.uint8).cpu().numpy().copy()
    return copied
