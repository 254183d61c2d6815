"""A late write on D: bytes of another request's load land in blocks that now belong to this load.

Recipe S04 of docs/incidents.md (sgl-project/sglang#24527, sgl-project/sglang#24578, ai-dynamo/nixl#2067,
vllm-project/vllm#56104): the other load was given up and its blocks went to this one, while a copy was still on its
way. The bytes are those that P holds of the other request.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from engine.seams import Completion, Hold, KVFinal, LoadFinished, Seams, Verified
from faults.base import Fault, FaultParams, When, digest
from faults.blocks import Bytes, tokens_in, write_block
from faults.moments import MOMENTS


class ConsumerReuseWhen(When):
    at: Literal["before_verify", "after_verify"] = Field(
        description="When the late bytes land. after_verify: nothing looks again (GAP-2)."
    )


class ConsumerReuseParams(FaultParams):
    kind: Literal["consumer_reuse"]
    when: ConsumerReuseWhen
    other_load: int = Field(ge=1, description="Whose bytes land late.")


class ConsumerReuse(Fault[ConsumerReuseParams]):
    """Lets a block of another request's KV land late in a block of this load."""

    kind = "consumer_reuse"
    params_model = ConsumerReuseParams

    @classmethod
    def needs(cls, params: FaultParams) -> frozenset[str]:
        return frozenset({"producer.kv_final", "transfer.completion", MOMENTS[params.when.at]})

    def attach(self, seams: Seams) -> None:
        self._other = self.context.requests[self.params.other_load]
        self._late: dict[int, Bytes] = {}
        seams.on("producer.kv_final", self._capture)
        seams.on("transfer.completion", self._await_other)
        seams.on(MOMENTS[self.params.when.at], self._land)

    def _capture(self, event: KVFinal) -> None:
        if event.request_id == self._other:
            for blocks in event.groups.values():
                self._late[blocks.group_id] = event.memory.tokens(blocks)

    def _await_other(self, event: Completion) -> Hold | None:
        if event.request_id != self.context.request_id or event.to_producer:
            return None
        return Hold(lambda: bool(self._late), f"{self.kind}: P has not written the KV of {self._other}")

    def _land(self, event: LoadFinished | Verified) -> None:
        if event.request_id != self.context.request_id or not self._late or self.context.evidence:
            return
        for blocks in event.groups.values():
            # D computes the last prompt token again before it reads it: a block with nothing else is never read.
            hit = [p for p in blocks.positions if p * blocks.block_size < blocks.num_tokens - 1]
            if not hit:
                continue
            position = self.context.rng.choice(hit)
            block_id = blocks.block_ids[position - blocks.start]
            valid = slice(tokens_in(blocks, position))
            memory, late = event.memory.group(blocks.group_id), self._late[blocks.group_id]
            kv = memory.slots((block_id,))
            before = digest(kv[:, :, valid])
            # Where the late block begins in the other request: a block of D's size.
            first = self.context.rng.randrange(0, late.shape[2], blocks.block_size)
            landing = late[:, :, first : first + blocks.block_size]
            kv[:, :, : landing.shape[2]] = landing
            write_block(memory, block_id, kv)
            after = digest(memory.slots((block_id,))[:, :, valid])
            if before != after:
                where = f"D's block {block_id} (block position {position})"
                what = f"tokens {first} on of {self._other} landed late in {where}"
                self.record(MOMENTS[self.params.when.at], what, before, after)
