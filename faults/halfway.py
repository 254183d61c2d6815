"""Strikes in the middle of a load's read: what came before has landed, what comes after is not posted yet.

What had not landed holds poison, never zeros: it must never be used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from engine.seams import CopyOp, Hold, LoadScheduled, OpLanded, OpPosted, Seams
from faults.base import FaultContext, When, digest
from faults.delivery import moved
from faults.moments import MOMENTS
from faults.short_transfer import POISON

SEAMS_OF_A_READ = frozenset({"consumer.load_scheduled", MOMENTS["mid_read"], "transfer.op_landed"})


class HalfwayWhen(When):
    at: Literal["mid_read"] = Field(
        "mid_read",
        description="After some copy operations have landed, and before the next is posted. The seed says how many.",
    )


@dataclass(frozen=True, slots=True)
class Landed:
    """How far a read has come. `arrived` counts bytes that D holds as P holds them now.

    `poison` and `found` are digests of the places that were read into: before the read, and now.
    """

    ops: int
    num_ops: int
    arrived: int
    poison: str
    found: str

    def __str__(self) -> str:
        return f"{self.ops} of {self.num_ops} copy operations had landed ({self.arrived} bytes, as P held them)"


class Halfway:
    """Poisons D's blocks, and holds a copy operation until all before it have landed and `strike` returns true.

    `strike` is called until it does, with the operation that is held. From then on the read is left alone.
    """

    def __init__(self, context: FaultContext, strike: Callable[[OpPosted], bool], why: str) -> None:
        self._context = context
        self._strike = strike
        self._why = why
        self._landed: dict[int, CopyOp] = {}
        self._at: int | None = None
        self._struck = False

    def attach(self, seams: Seams) -> None:
        seams.on("consumer.load_scheduled", self._poison)
        seams.on(MOMENTS["mid_read"], self._hold)
        seams.on("transfer.op_landed", self._note)

    def _poison(self, event: LoadScheduled) -> None:
        if event.request_id == self._context.request_id and not self._struck:
            for blocks in event.groups.values():
                event.memory.fill(blocks.block_ids, POISON)

    def _note(self, event: OpLanded) -> None:
        if event.request_id == self._context.request_id:
            self._landed[event.op.index] = event.op

    def _hold(self, event: OpPosted) -> Hold | None:
        if event.request_id != self._context.request_id or event.num_ops < 2:
            return None
        if self._at is None:
            self._at = self._context.rng.randrange(1, event.num_ops)
        if event.op.index != self._at:
            return None

        def struck() -> bool:
            if not self._struck and len(self._landed) == event.op.index:
                self._struck = self._strike(event)
            return self._struck

        return Hold(struck, f"{self._why}: the operations before number {event.op.index} have not landed")

    def landed(self, event: OpPosted) -> Landed:
        """How far the read has come that `event` belongs to. Reads both engines' memory."""
        here, there, arrived = [], [], 0
        targets = {op.target_block: event.target.slots((op.target_block,)) for op in self._landed.values()}
        sources = {op.source_block: event.source.slots((op.source_block,)) for op in self._landed.values()}
        for _, op in sorted(self._landed.items()):
            got = moved(targets[op.target_block], op, op.target_slot).tobytes()
            here.append(got)
            there.append((POISON * len(got))[: len(got)])
            if got == moved(sources[op.source_block], op, op.source_slot).tobytes():
                arrived += len(got)
        return Landed(len(self._landed), event.num_ops, arrived, digest(b"".join(there)), digest(b"".join(here)))
