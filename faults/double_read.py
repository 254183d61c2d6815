"""Consumed parameters are used again: a second load reads blocks that P has given back already.

Recipe S03 of docs/incidents.md (vllm-project/vllm#52234, vllm-project/vllm#43509, sgl-project/sglang#26486). The
parameters of the load wait at the proxy until another load has been read and P has freed its blocks; then they are
replaced by that other load's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from engine.seams import BlocksFreed, Change, Hold, KVFinal, ParamsLeave, ParamsPass, Seams
from faults.base import Fault, FaultParams, When, digest
from faults.levers import CLOCK, COMPETITORS
from faults.moments import MOMENTS
from faults.params import params_digest


class DoubleReadWhen(When):
    at: Literal["params_pass"] = Field("params_pass", description="The proxy forwards the parameters.")


class DoubleReadParams(FaultParams):
    kind: Literal["double_read"]
    when: DoubleReadWhen
    how: Literal["before_reuse", "after_reuse", "another_prompt"] = Field(
        "before_reuse",
        description="before_reuse, after_reuse: P has not, or has, given the blocks to a competitor; both loads are "
        "of one prompt (workload.identical_prompts). another_prompt: before reuse, for another prompt of equal "
        "length (GAP-5).",
    )
    other_load: int = Field(ge=1, description="Whose parameters are used a second time.")


class DoubleRead(Fault[DoubleReadParams]):
    """Lets a load read with parameters that another load has consumed."""

    kind = "double_read"
    params_model = DoubleReadParams

    @classmethod
    def needs(cls, params: FaultParams) -> frozenset[str]:
        reuse = {"producer.kv_final", CLOCK, COMPETITORS} if getattr(params, "how", None) == "after_reuse" else set()
        return frozenset({"producer.params_leave", "blocks.freed", MOMENTS[params.when.at], *reuse})

    def attach(self, seams: Seams) -> None:
        self._other = self.context.requests[self.params.other_load]
        self._producer: str | None = None
        self._consumed: Mapping[str, Any] | None = None
        self._freed = False
        self._competitor: str | None = None
        self._final: KVFinal | None = None
        self._final_digest = ""
        if self.params.how == "after_reuse":
            seams.on("producer.kv_final", self._see_final)
        seams.on("producer.params_leave", self._remember)
        seams.on("blocks.freed", self._see_freed)
        seams.on(MOMENTS[self.params.when.at], self._pass)

    def _remember(self, event: ParamsLeave) -> None:
        if event.request_id == self._other:
            self._producer, self._consumed = event.engine, event.params

    def _see_freed(self, event: BlocksFreed) -> None:
        if event.engine == self._producer and event.request_id == self._other:
            self._freed = True

    def _pass(self, event: ParamsPass) -> Change[ParamsPass] | Hold | None:
        if event.request_id != self.context.request_id:
            return None
        if not self._freed or self._consumed is None:
            return Hold(lambda: self._freed, f"{self.kind}: the blocks of {self._other} have not been read and freed")
        if self.params.how == "after_reuse" and self._competitor is None:
            return self._let_reuse()
        self._prove(params_digest(event.params), params_digest(self._consumed))
        return Change(ParamsPass(event.request_id, self._consumed))

    def _see_final(self, event: KVFinal) -> None:
        if event.request_id == self._other:
            self._final, self._final_digest = event, kv_digest(event)

    def _prove(self, own: str, consumed: str) -> None:
        """Evidence: other parameters go on; after reuse also that P's blocks hold other bytes than were summed."""
        seam = MOMENTS[self.params.when.at]
        if self.params.how == "after_reuse":
            now = "" if self._final is None else kv_digest(self._final)
            if now == self._final_digest:
                return
            self.record(
                seam, f"{self._competitor} has overwritten P's blocks of {self._other}", self._final_digest, now
            )
        if own != consumed:
            what = f"the parameters are those of {self._other}, whose blocks were read and freed before"
            self.record(seam, what, own, consumed)

    def _let_reuse(self) -> Hold | None:
        """A competitor takes all of P's blocks; those that wait for this very load would never come free."""
        clock, competitors = self.context.levers.clock, self.context.levers.competitors
        if clock is None or competitors is None:
            return None
        name = self._competitor = competitors.release()
        if name is None:
            return None
        clock.end_lease(self.context.request_id)
        return Hold(lambda: competitors.has_finished(name), f"{self.kind}: {name} has not finished its prefill")


def kv_digest(event: KVFinal) -> str:
    """Of the bytes that a request's blocks hold now."""
    return digest(b"".join(event.memory.tokens(blocks).tobytes() for blocks in event.groups.values()))
