"""The producer's lease ends and a competing prefill takes the blocks: before, in the middle of, or after the read.

Recipe S02 of docs/incidents.md (vllm-project/vllm#52234, NVIDIA/TensorRT-LLM#12540, vllm-project/aibrix#1772).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from engine.cache import KVMemory
from engine.seams import Completion, Groups, Hold, KVFinal, OpPosted, Seams
from faults.base import Fault, FaultParams, When, digest
from faults.levers import CLOCK, COMPETITORS
from faults.moments import MOMENTS, is_moment


class EarlyReuseWhen(When):
    at: Literal["before_read", "mid_read", "after_read"] = Field(
        description="When the competitor's KV is written: before the first copy operation, halfway, after the last."
    )


class EarlyReuseParams(FaultParams):
    kind: Literal["early_reuse"]
    when: EarlyReuseWhen


class EarlyReuse(Fault[EarlyReuseParams]):
    """Ends the lease, lets a competitor in, and holds the transfer until the competitor is done."""

    kind = "early_reuse"
    params_model = EarlyReuseParams

    @classmethod
    def needs(cls, params: FaultParams) -> frozenset[str]:
        return frozenset({"producer.kv_final", MOMENTS[params.when.at], CLOCK, COMPETITORS})

    def attach(self, seams: Seams) -> None:
        self._groups: Groups = {}
        self._memory: KVMemory | None = None
        self._started = False
        seams.on("producer.kv_final", self._remember)
        seams.on(MOMENTS[self.params.when.at], self._strike)

    def _remember(self, event: KVFinal) -> None:
        if event.request_id == self.context.request_id:
            self._groups, self._memory = event.groups, event.memory

    def _strike(self, event: OpPosted | Completion) -> Hold | None:
        if self._started or not is_moment(self.params.when.at, event, self.context.request_id):
            return None
        clock, competitors = self.context.levers.clock, self.context.levers.competitors
        if clock is None or competitors is None or self._memory is None:
            return None
        self._started = True
        before = self._digests(self._memory)
        if not clock.end_lease(self.context.request_id):
            return None
        competitor = competitors.release()
        if competitor is None:
            return None

        def competitor_wrote() -> bool:
            if not competitors.has_finished(competitor):
                return False
            self._prove(competitor, before)
            return True

        return Hold(competitor_wrote, f"{self.kind}: {competitor} has not finished its prefill")

    def _digests(self, memory: KVMemory) -> list[tuple[int, int, str]]:
        return [
            (position, block_id, digest(memory.group(blocks.group_id).slots((block_id,))))
            for blocks in self._groups.values()
            for position, block_id in zip(blocks.positions, blocks.block_ids, strict=True)
        ]

    def _prove(self, competitor: str, before: list[tuple[int, int, str]]) -> None:
        """Evidence: every block of the request whose content is no longer what it was. Recorded once."""
        if self.context.evidence or self._memory is None:
            return
        after = self._digests(self._memory)
        for (position, block_id, old), (_, _, new) in zip(before, after, strict=True):
            if old != new:
                what = f"{competitor} overwrote P's block {block_id} (block position {position}) after the lease ended"
                self.record(MOMENTS[self.params.when.at], what, old, new)
