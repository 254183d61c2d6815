"""Only the first k blocks of a load are moved, and the transfer is reported as finished.

Recipe S05 of docs/incidents.md (ai-dynamo/dynamo#12463, vllm-project/vllm-ascend#10561). What did not arrive holds
a poison pattern, never zeros: zeros would look like an empty cache.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from engine.checksum.records import GroupBlocks
from engine.seams import Drop, LoadFinished, LoadScheduled, OpPosted, Seams
from faults.base import Fault, FaultParams, When, digest
from faults.moments import MOMENTS

POISON = b"POISONED"


class ShortTransferWhen(When):
    at: Literal["in_flight"] = Field("in_flight", description="Copy operations are dropped as they are posted.")


class ShortTransferParams(FaultParams):
    kind: Literal["short_transfer"]
    when: ShortTransferWhen
    moved_blocks: Annotated[int, Field(ge=0, description="How many blocks of the load arrive; the rest do not.")] = 1


class ShortTransfer(Fault[ShortTransferParams]):
    """Poisons the blocks that will not arrive, and drops their copy operations."""

    kind = "short_transfer"
    params_model = ShortTransferParams

    @classmethod
    def needs(cls, params: FaultParams) -> frozenset[str]:
        return frozenset({"consumer.load_scheduled", MOMENTS[params.when.at], "consumer.load_finished"})

    def attach(self, seams: Seams) -> None:
        self._poisoned: dict[tuple[int, int], tuple[int, str]] = {}
        self._first_missing: dict[int, int] = {}
        self._dropped = 0
        seams.on("consumer.load_scheduled", self._poison)
        seams.on(MOMENTS[self.params.when.at], self._drop)
        seams.on("consumer.load_finished", self._prove)

    def _missing(self, blocks: GroupBlocks) -> list[tuple[int, int]]:
        """(position, block) of the blocks that will not arrive."""
        return list(zip(blocks.positions, blocks.block_ids, strict=True))[self.params.moved_blocks :]

    def _poison(self, event: LoadScheduled) -> None:
        if event.request_id != self.context.request_id:
            return
        for blocks in event.groups.values():
            memory = event.memory.group(blocks.group_id)
            self._first_missing[blocks.group_id] = blocks.start + self.params.moved_blocks
            for position, block_id in self._missing(blocks):
                memory.fill((block_id,), POISON)
                self._poisoned[blocks.group_id, position] = block_id, digest(memory.slots((block_id,)))

    def _drop(self, event: OpPosted) -> Drop | None:
        op = event.op
        if event.request_id != self.context.request_id or op.position < self._first_missing.get(op.group, 0):
            return None
        self._dropped += 1
        return Drop()

    def _prove(self, event: LoadFinished) -> None:
        if event.request_id != self.context.request_id or not self._dropped:
            return
        for (group, position), (block_id, poison) in self._poisoned.items():
            now = digest(event.memory.group(group).slots((block_id,)))
            if now == poison:
                what = f"D's block {block_id} (block position {position}) was reported as read and still holds poison"
                self.record("consumer.load_finished", what, poison, now)
