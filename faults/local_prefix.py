"""D's prefix cache changes while nobody uses it, and the next request takes the block as its local prefix.

GAP-4 of docs/spec.md: with a local prefix hit only what is loaded is compared (CON-1). The load waits at the proxy
until another request with the same beginning has ended on D and its blocks are free; then its first block changes.
Near sgl-project/sglang#23392, where a cancelled request leaves wrong bytes in a shared prefix.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from engine.cache import KVMemory
from engine.seams import BlocksFreed, Hold, LoadScheduled, ParamsPass, RequestEnded, Seams, Verified
from faults.base import Fault, FaultParams, When, digest
from faults.moments import MOMENTS
from faults.short_transfer import POISON


class LocalPrefixWhen(When):
    at: Literal["params_pass"] = Field("params_pass", description="Before D sees the request.")


class LocalPrefixParams(FaultParams):
    kind: Literal["local_prefix"]
    when: LocalPrefixWhen
    how: Literal["flip", "poison"] = Field(
        "flip", description="flip: one bit of the cached block changes. poison: all of it is overwritten."
    )
    other_load: int = Field(ge=1, description="The load that leaves the block in D's prefix cache.")


class LocalPrefix(Fault[LocalPrefixParams]):
    """Changes the first block of a shared prefix in D's prefix cache, between two requests that use it."""

    kind = "local_prefix"
    params_model = LocalPrefixParams

    @classmethod
    def needs(cls, params: FaultParams) -> frozenset[str]:
        return frozenset(
            {"consumer.verified", "request.ended", "blocks.freed", MOMENTS[params.when.at], "consumer.load_scheduled"}
        )

    def attach(self, seams: Seams) -> None:
        self._other = self.context.requests[self.params.other_load]
        self._engine: str | None = None
        self._memory: KVMemory | None = None
        self._block: int | None = None
        self._ended = self._freed = False
        self._changed: tuple[str, str, str] | None = None
        seams.on("consumer.verified", self._remember)
        seams.on("request.ended", self._end)
        seams.on("blocks.freed", self._free)
        seams.on(MOMENTS[self.params.when.at], self._change)
        seams.on("consumer.load_scheduled", self._prove)

    def _remember(self, event: Verified) -> None:
        if event.request_id == self._other:
            self._engine, self._memory = event.engine, event.memory
            first = [blocks.block_ids[0] for blocks in event.groups.values() if blocks.start == 0]
            self._block = first[0] if first else None

    def _end(self, event: RequestEnded) -> None:
        self._ended = self._ended or (event.engine, event.request_id) == (self._engine, self._other)

    def _free(self, event: BlocksFreed) -> None:
        """Behind the fence: no step in flight reads the blocks any more."""
        mine = self._ended and (event.engine, event.request_id) == (self._engine, self._other)
        self._freed = self._freed or mine

    def _change(self, event: ParamsPass) -> Hold | None:
        if event.request_id != self.context.request_id:
            return None
        if not self._freed:
            return Hold(lambda: self._freed, f"{self.kind}: {self._other} has not ended and given its blocks back")
        if self._memory is not None and self._block is not None and self._changed is None:
            self._changed = self._change_block(self._memory, self._block)
        return None

    def _change_block(self, memory: KVMemory, block_id: int) -> tuple[str, str, str]:
        """What was changed, and digests of the block before and after."""
        kv = memory.slots((block_id,))
        before = digest(kv)
        if self.params.how == "poison":
            memory.fill((block_id,), POISON)
            return "poison", before, digest(memory.slots((block_id,)))
        rng = self.context.rng
        layer, head, slot, byte = (rng.randrange(size) for size in kv.shape)
        bit = rng.randrange(8)
        token = kv[layer, head, slot]
        token[byte] ^= 1 << bit
        memory.write_slot(layer, head, block_id, slot, token)
        what = f"bit {bit} of byte {byte}, layer {layer}, head {head}, token {slot}"
        return what, before, digest(memory.slots((block_id,)))

    def _prove(self, event: LoadScheduled) -> None:
        """Evidence once the load begins behind the changed block: D took that from its own cache."""
        if event.request_id != self.context.request_id or self._changed is None:
            return
        if all(blocks.start > 0 for blocks in event.groups.values()):
            what, before, after = self._changed
            said = f"D's cached block {self._block} (block position 0) of {self._other} was changed ({what}) and used"
            self.record("consumer.load_scheduled", said, before, after)
