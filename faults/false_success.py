"""A transfer that did not succeed is reported as a success: it failed, was cancelled, or ran out of time.

Recipe S05 of docs/incidents.md (ai-dynamo/dynamo#15079, NVIDIA/TensorRT-LLM#12660, ai-dynamo/nixl#2067). Unlike
short_transfer it ends between two copy operations, not between blocks. What did not arrive holds poison, never zeros.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from engine.cache import KVMemory
from engine.seams import Drop, FirstUse, LoadFinished, LoadScheduled, OpPosted, Seams, StepEnd
from faults.base import Fault, FaultParams, When, digest
from faults.blocks import Bytes, write_block
from faults.delivery import Delivery, moved
from faults.redirect import FINISHED
from faults.short_transfer import POISON


class FalseSuccessWhen(When):
    at: Literal["in_flight"] = Field("in_flight", description="Copy operations are dropped as they are posted.")


class FalseSuccessParams(FaultParams):
    kind: Literal["false_success"]
    when: FalseSuccessWhen
    how: Literal["failed", "cancelled", "timed_out"] = Field(
        "failed",
        description="failed: nothing is moved. cancelled: it stops in the middle of a block. timed_out: the second "
        "half lands only after D has read the blocks for the first time.",
    )


class FalseSuccess(Fault[FalseSuccessParams]):
    """Poisons the blocks of a load, and drops copy operations from some point on."""

    kind = "false_success"
    params_model = FalseSuccessParams

    @classmethod
    def needs(cls, params: FaultParams) -> frozenset[str]:
        late = {"consumer.first_use", "step.end"} if getattr(params, "how", None) == "timed_out" else set()
        return frozenset({"consumer.load_scheduled", "transfer.op_posted", FINISHED, *late})

    def attach(self, seams: Seams) -> None:
        self._delivery = Delivery()
        self._first_missing: int | None = None
        self._missing: list[OpPosted] = []
        self._use: FirstUse | None = None
        seams.on("consumer.load_scheduled", self._poison)
        seams.on("transfer.op_posted", self._drop)
        seams.on(FINISHED, self._prove)
        if self.params.how == "timed_out":
            seams.on("consumer.first_use", self._used)
            seams.on("step.end", self._land)

    def _poison(self, event: LoadScheduled) -> None:
        if event.request_id == self.context.request_id:
            for blocks in event.groups.values():
                event.memory.group(blocks.group_id).fill(blocks.block_ids, POISON)

    def _drop(self, event: OpPosted) -> Drop | None:
        if event.request_id != self.context.request_id:
            return None
        self._delivery.plan(event)
        if self._first_missing is None:
            self._first_missing = self._end(event)
        if event.op.index < self._first_missing:
            return None
        self._missing.append(event)
        return Drop()

    def _end(self, event: OpPosted) -> int:
        """Index of the first operation that does not land."""
        if self.params.how == "failed":
            return 0
        if self.params.how == "timed_out":
            return event.num_ops // 2
        # All layers, heads, and K and V of some slots follow each other; those of a block are one such row or more.
        into = event.target.group(event.op.group)
        row = into.num_layers * into.num_kv_heads * into.num_parts * into.num_replicas
        return self.context.rng.randrange(event.num_ops // row) * row + self.context.rng.randrange(1, row)

    def _prove(self, event: LoadFinished) -> None:
        if event.request_id != self.context.request_id or not self._missing:
            return
        lost: dict[int, int] = {}
        for missing in self._missing:
            lost[missing.op.position] = lost.get(missing.op.position, 0) + 1
        for block in self._delivery.changed(event.groups, event.memory):
            what = (
                f"{lost.get(block.position, 0)} operations of D's block {block.block_id} (block position "
                f"{block.position}) had not landed when the load was reported as finished"
            )
            self.record(FINISHED, what, block.before, block.after)

    def _used(self, event: FirstUse) -> None:
        if event.request_id == self.context.request_id:
            self._use = event

    def _land(self, event: StepEnd) -> None:
        """The step that first read the blocks is over: now the rest lands, with what P holds by now."""
        use = self._use
        if use is None or event.engine != use.engine:
            return
        self._use = None
        for group, block_id in sorted({(missing.op.group, missing.op.target_block) for missing in self._missing}):
            for number, replica in enumerate(use.memory.group(group).replicas):
                self._land_in(block_id, replica, number)

    def _land_in(self, block_id: int, memory: KVMemory, replica: int) -> None:
        """The operations that are missing in a block of one replica."""
        kv = memory.slots((block_id,))
        before = digest(kv)
        sources: dict[tuple[int, int], Bytes] = {}
        for op, source in ((m.op, m.source) for m in self._missing):
            if (op.group, op.target_block, op.target_replica) != (memory.group_id, block_id, replica):
                continue
            place = op.source_replica, op.source_block
            if place not in sources:
                sources[place] = source.group(op.group).replica(op.source_replica).slots((op.source_block,))
            moved(kv, op, op.target_slot, memory.num_parts)[:] = moved(
                sources[place], op, op.source_slot, memory.num_parts
            )
        write_block(memory, block_id, kv)
        after = digest(memory.slots((block_id,)))
        self.record("step.end", f"the rest of D's block {block_id} landed after its first read", before, after)
