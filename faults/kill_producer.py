"""The producer is killed (SIGKILL) in the middle of the read of one load.

What had not landed holds poison, never zeros: it must never be used.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from engine.seams import CopyOp, Groups, Hold, LoadScheduled, OpLanded, OpPosted, Seams
from faults.base import Fault, FaultParams, When, digest
from faults.delivery import moved
from faults.levers import PROCESS
from faults.moments import MOMENTS
from faults.short_transfer import POISON


class KillProducerWhen(When):
    at: Literal["mid_read"] = Field(
        "mid_read",
        description="After some copy operations have landed, and before the next is posted. The seed says how many.",
    )


class KillProducerParams(FaultParams):
    kind: Literal["kill_producer"]
    when: KillProducerWhen


class KillProducer(Fault[KillProducerParams]):
    """Poisons D's blocks, holds a copy operation until all before it have landed, kills P, and lets D go on."""

    kind = "kill_producer"
    params_model = KillProducerParams

    @classmethod
    def needs(cls, params: FaultParams) -> frozenset[str]:
        return frozenset({"consumer.load_scheduled", MOMENTS[params.when.at], "transfer.op_landed", PROCESS})

    def attach(self, seams: Seams) -> None:
        self._groups: Groups = {}
        self._landed: dict[int, CopyOp] = {}
        self._last: int | None = None
        self._killed = False
        seams.on("consumer.load_scheduled", self._poison)
        seams.on(MOMENTS[self.params.when.at], self._hold)
        seams.on("transfer.op_landed", self._note)

    def _poison(self, event: LoadScheduled) -> None:
        if event.request_id == self.context.request_id:
            self._groups = event.groups
            for blocks in event.groups.values():
                event.memory.fill(blocks.block_ids, POISON)

    def _note(self, event: OpLanded) -> None:
        if event.request_id == self.context.request_id:
            self._landed[event.op.index] = event.op

    def _hold(self, event: OpPosted) -> Hold | None:
        process = self.context.levers.process
        if event.request_id != self.context.request_id or process is None or event.num_ops < 2:
            return None
        if self._last is None:
            self._last = self.context.rng.randrange(1, event.num_ops)
        if event.op.index != self._last:
            return None

        def dead() -> bool:
            if not self._killed and len(self._landed) == event.op.index:
                what, before, after = self._delivered(event)
                self._killed = process.kill("producer")
                if self._killed:
                    self.record(MOMENTS[self.params.when.at], what, before, after)
            return self._killed

        return Hold(dead, f"{self.kind}: the operations before number {event.op.index} have not landed")

    def _delivered(self, event: OpPosted) -> tuple[str, str, str]:
        """What is to be said, and digests of the places that were read into: as poisoned, and as they are."""
        here, there, arrived = [], [], 0
        targets = {op.target_block: event.target.slots((op.target_block,)) for op in self._landed.values()}
        sources = {op.source_block: event.source.slots((op.source_block,)) for op in self._landed.values()}
        for _, op in sorted(self._landed.items()):
            got = moved(targets[op.target_block], op, op.target_slot).tobytes()
            here.append(got)
            there.append((POISON * len(got))[: len(got)])
            if got == moved(sources[op.source_block], op, op.source_slot).tobytes():
                arrived += len(got)
        what = (
            f"P was killed after {len(self._landed)} of {event.num_ops} copy operations had landed "
            f"({arrived} bytes, as P held them), before number {event.op.index} was posted"
        )
        return what, digest(b"".join(there)), digest(b"".join(here))
