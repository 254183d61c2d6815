"""The producer is stopped (SIGSTOP, or a paused container) in the middle of the read of one load, for too long.

A process that was stopped does not know it: when it goes on, its lease has ended or D has given up, and what either
does with the blocks must still be right. What had not landed holds poison.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from engine.cache import KVMemory
from engine.seams import BlocksFreed, Groups, KVFinal, OpPosted, RequestEnded, Seams
from faults.base import Fault, FaultParams, digest
from faults.halfway import SEAMS_OF_A_READ, Halfway, HalfwayWhen, Landed
from faults.levers import CLOCK, COMPETITORS, LOAD_TIMEOUT, PROCESS, Levers

How = Literal["lease_ends", "blocks_reused", "load_times_out"]


class PauseProducerParams(FaultParams):
    kind: Literal["pause_producer"]
    when: HalfwayWhen
    how: How = Field(
        "lease_ends",
        description="lease_ends: P's lease ends while it is stopped; it goes on and gives the blocks back, and then D "
        "reads on. blocks_reused: a competitor has written them before D reads on. load_times_out: D reads on at once, "
        "and P is stopped until D has given up.",
    )


class PauseProducer(Fault[PauseProducerParams]):
    """Poisons D's blocks, holds a copy operation until all before it have landed, and stops P."""

    kind = "pause_producer"
    params_model = PauseProducerParams

    @classmethod
    def needs(cls, params: FaultParams) -> frozenset[str]:
        own = {
            "lease_ends": {CLOCK, "blocks.freed"},
            "blocks_reused": {CLOCK, COMPETITORS, "blocks.freed", "producer.kv_final"},
            "load_times_out": {LOAD_TIMEOUT, "request.ended"},
        }
        how = params.how if isinstance(params, PauseProducerParams) else "lease_ends"
        return SEAMS_OF_A_READ | own[how] | {PROCESS}

    def attach(self, seams: Seams) -> None:
        self._landed: Landed | None = None
        self._freed: tuple[int, ...] | None = None
        self._competitor: str | None = None
        self._groups: Groups = {}
        self._memory: KVMemory | None = None
        self._before = ""
        if not self._usable(self.context.levers):
            return
        self._read = Halfway(self.context, self._strike, self.kind)
        self._read.attach(seams)
        if self.params.how == "load_times_out":
            seams.on("request.ended", self._gave_up)
            return
        seams.on("blocks.freed", self._note_freed)
        if self.params.how == "blocks_reused":
            seams.on("producer.kv_final", self._remember)

    def _usable(self, levers: Levers) -> bool:
        if levers.process is None:
            return False
        if self.params.how == "load_times_out":
            return True
        return levers.clock is not None and (self.params.how == "lease_ends" or levers.competitors is not None)

    def _remember(self, event: KVFinal) -> None:
        if event.request_id == self.context.request_id:
            self._groups, self._memory = event.groups, event.memory

    def _strike(self, event: OpPosted) -> bool:
        if self._landed is None:
            # All that is asked of P comes before: one that is stopped answers nothing.
            self._landed, self._before = self._read.landed(event), self._digest()
            self._stop()
        if self.params.how == "load_times_out":
            return True
        if self._freed is None:
            return False
        return self.params.how == "lease_ends" or self._reused()

    def _stop(self) -> None:
        process, clock = self.context.levers.process, self.context.levers.clock
        if process is None:
            return
        process.pause("producer")
        if self.params.how != "load_times_out" and clock is not None:
            clock.end_lease(self.context.request_id)
            process.resume("producer")

    def _note_freed(self, event: BlocksFreed) -> None:
        if self._landed is None or self._freed is not None or event.engine == "consumer":
            return
        if event.request_id == self.context.request_id:
            self._freed = event.block_ids
            blocks = f"blocks {list(event.block_ids)}"
            what = f"P was stopped after {self._landed}; when it went on its lease had ended, and it gave back {blocks}"
            self.record("blocks.freed", what, f"{len(event.block_ids)} blocks held", "none held")

    def _reused(self) -> bool:
        """Let a competitor in; whether it has written P's blocks."""
        competitors = self.context.levers.competitors
        if competitors is None:
            return False
        if self._competitor is None:
            self._competitor = competitors.release()
        if self._competitor is None or not competitors.has_finished(self._competitor):
            return False
        after = self._digest()
        if after != self._before:
            self.record("transfer.op_posted", f"{self._competitor} overwrote blocks of P", self._before, after)
        return True

    def _digest(self) -> str:
        """Of all of P's blocks that the load is to read."""
        blocks = [block_id for group in self._groups.values() for block_id in group.block_ids]
        return "" if self._memory is None else digest(self._memory.slots(tuple(blocks)))

    def _gave_up(self, event: RequestEnded) -> None:
        if self._landed is None or event.engine != "consumer" or event.request_id != self.context.request_id:
            return
        what = f"P was stopped after {self._landed}, and still was when the request ended on D ({event.finish_reason})"
        self.record("request.ended", what, self._landed.poison, self._landed.found)
