"""What a load should bring, operation by operation, and what D holds in the end: evidence for lost or misled copies."""

from __future__ import annotations

from engine.cache import KVMemory
from engine.seams import CopyOp, Groups, OpPosted
from faults.base import digest
from faults.blocks import Bytes, ChangedBlock, tokens_in


class Delivery:
    """Follows one load from the operations that were planned to the blocks that came of them."""

    def __init__(self) -> None:
        self._planned: list[CopyOp] = []
        self._sources: dict[tuple[int, int, int], Bytes] = {}

    def plan(self, event: OpPosted) -> None:
        """Remember what an operation would bring. To be called before the operation is changed or dropped.

        A block of P counts as it is when the first operation from it is planned.
        """
        self._planned.append(event.op)
        op = event.op
        place = op.group, op.source_replica, op.source_block
        if place not in self._sources:
            source = event.source.group(op.group).replica(op.source_replica)
            self._sources[place] = source.slots((op.source_block,))

    def changed(self, groups: Groups, memory: KVMemory) -> list[ChangedBlock]:
        """D's blocks that do not hold what was planned, by position."""
        found: list[ChangedBlock] = []
        for blocks in groups.values():
            held = memory.group(blocks.group_id)
            for position, block_id in zip(blocks.positions, blocks.block_ids, strict=True):
                now = [replica.slots((block_id,)) for replica in held.replicas]
                valid = tokens_in(blocks, position)
                wanted, got = [], []
                for op in self._planned:
                    if (op.group, op.position) == (blocks.group_id, position):
                        count = max(0, min(op.num_slots, valid - op.target_slot))
                        wanted.append(moved(self._source(op), op, op.source_slot, held.num_parts)[:count].tobytes())
                        got.append(moved(now[op.target_replica], op, op.target_slot, held.num_parts)[:count].tobytes())
                before, after = digest(b"".join(wanted)), digest(b"".join(got))
                if before != after:
                    found.append(ChangedBlock(position, block_id, before, after, blocks.group_id))
        return found

    def _source(self, op: CopyOp) -> Bytes:
        return self._sources[op.group, op.source_replica, op.source_block]


def moved(kv: Bytes, op: CopyOp, slot: int, num_parts: int = 2) -> Bytes:
    """The bytes that an operation moves of a part, such as K or V, from this slot of a block on.

    A view uint8 [num_slots, bytes] of the block's uint8 [layers, kv_heads, slots, bytes_per_token].
    """
    part = kv.shape[-1] // num_parts
    return kv[op.layer, op.head, slot : slot + op.num_slots, op.part * part : (op.part + 1) * part]
