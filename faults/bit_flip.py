"""Bits of the KV change: in the producer's cache before or after it is summed, or in the consumer's.

Recipe S01 of docs/incidents.md; also a write of the producer that lands between its checksum and the read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from engine.cache import KVMemory
from engine.checksum.records import GroupBlocks
from engine.seams import Checksummed, KVFinal, LoadFinished, Seams, Verified
from faults.base import Fault, FaultParams, When, digest
from faults.moments import MOMENTS

_PIECE_BYTES = 8


class BitFlipWhen(When):
    at: Literal["before_checksum", "after_checksum", "before_verify", "after_verify"] = Field(
        description="before_checksum, after_checksum: in P's cache. before_verify, after_verify: in D's."
    )


class BitFlipParams(FaultParams):
    """What is not given is drawn from the cell's seed, but for `replica`: all of them flip."""

    kind: Literal["bit_flip"]
    when: BitFlipWhen
    flips: Annotated[int, Field(ge=1, le=4096, description="How many different bits flip.")] = 1
    pattern: Literal["random", "bit63_pair"] = Field(
        "random", description="bit63_pair: bit 63 of two different pieces of one block (GAP-8)."
    )
    where: Literal["valid", "past_end"] = Field(
        "valid", description="past_end: in a slot of the last block that no prompt token has."
    )
    layer: Annotated[int, Field(ge=0, description="Counted from 0.")] | None = None
    head: Annotated[int, Field(ge=0, description="KV head, counted from 0.")] | None = None
    token: Annotated[int, Field(ge=0, description="Position in the request.")] | None = None
    byte: Annotated[int, Field(ge=0, description="In the token's K bytes, then V bytes.")] | None = None
    bit: Annotated[int, Field(ge=0, le=7, description="Of the byte; 7 is the highest.")] | None = None
    group: Annotated[int, Field(ge=0, description="KV cache group, counted from 0.")] = 0
    replica: Annotated[int, Field(ge=0, description="Which replica of a head, where there are several.")] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        fixed = [name for name in ("layer", "head", "token", "byte", "bit") if getattr(self, name) is not None]
        if self.pattern == "bit63_pair" and (fixed or self.flips != 1 or self.where != "valid"):
            raise ValueError("pattern bit63_pair draws its own two bits: leave out flips, where, layer to bit")
        if self.flips > 1 and len(fixed) == 5:
            raise ValueError("flips is more than 1 but layer, head, token, byte and bit name a single bit")
        if self.where == "past_end" and self.token is not None:
            raise ValueError("where: past_end draws a slot after the last token: leave out token")
        return self


@dataclass(frozen=True, slots=True)
class _Bit:
    layer: int
    head: int
    slot: int  # counted from the first slot of the blocks
    byte: int
    bit: int


class BitFlip(Fault[BitFlipParams]):
    """Flips bits once, at its moment."""

    kind = "bit_flip"
    params_model = BitFlipParams

    @classmethod
    def needs(cls, params: FaultParams) -> frozenset[str]:
        return frozenset({MOMENTS[params.when.at]})

    def attach(self, seams: Seams) -> None:
        seams.on(MOMENTS[self.params.when.at], self._flip)

    def _flip(self, event: KVFinal | Checksummed | LoadFinished | Verified) -> None:
        if event.request_id != self.context.request_id or self.context.evidence:
            return
        blocks, replica = event.groups.get(self.params.group), self.params.replica
        if blocks is None:
            return
        memory = event.memory.group(self.params.group)
        if replica is not None:
            if replica >= memory.num_replicas:
                return
            memory = memory.replica(replica)
        for bit in self._choose(blocks, memory):
            self._flip_one(bit, blocks, memory)

    def _flip_one(self, bit: _Bit, blocks: GroupBlocks, memory: KVMemory) -> None:
        block_id, slot = blocks.block_ids[bit.slot // blocks.block_size], bit.slot % blocks.block_size
        token = memory.slots((block_id,))[bit.layer, bit.head, slot].copy()
        before = digest(token)
        token[bit.byte] ^= 1 << bit.bit
        memory.write_slot(bit.layer, bit.head, block_id, slot, token)
        after = digest(memory.slots((block_id,))[bit.layer, bit.head, slot])
        part = "KV"[bit.byte * 2 // memory.bytes_per_token] if memory.num_parts == 2 else memory.spec.spec_type
        self.record(
            MOMENTS[self.params.when.at],
            f"bit {bit.bit} of byte {bit.byte} ({part}), layer {bit.layer}, head {bit.head}, "
            f"token {blocks.start * blocks.block_size + bit.slot}, block {block_id}",
            before,
            after,
        )

    def _choose(self, blocks: GroupBlocks, memory: KVMemory) -> list[_Bit]:
        """The bits to flip; none if there are not as many as the scenario asks for."""
        if self.params.pattern == "bit63_pair":
            return list(self._bit63_pair(blocks, memory))
        slots = self._slots(blocks, memory)
        chosen: dict[_Bit, None] = {}
        for _ in range(100 * self.params.flips if slots else 0):
            bit = self._draw(slots, memory)
            if bit is None:
                return []
            chosen[bit] = None
            if len(chosen) == self.params.flips:
                return list(chosen)
        return []

    def _slots(self, blocks: GroupBlocks, memory: KVMemory) -> range:
        """The slots that may be hit, counted from the first slot of the blocks; empty if there are none."""
        first, valid = 0, blocks.num_tokens - blocks.start * blocks.block_size
        if self.params.where == "past_end":
            return range(valid, len(blocks.block_ids) * blocks.block_size)
        if self.params.when.at == "after_verify" and not memory.spec.is_state:
            # D computes the last prompt token again before it reads it: a flip there would never be read, nor one in
            # what lies before the window of that token.
            first = max(0, valid - memory.spec.window) if memory.spec.window is not None else 0
            valid -= 1
        if self.params.token is None:
            return range(first, valid)
        slot = self.params.token - blocks.start * blocks.block_size
        return range(slot, slot + 1) if first <= slot < valid else range(0)

    def _draw(self, slots: range, memory: KVMemory) -> _Bit | None:
        """A random bit within what the scenario fixes, or None if that is outside the cache."""
        rng, params = self.context.rng, self.params
        layer = rng.randrange(memory.num_layers) if params.layer is None else params.layer
        head = rng.randrange(memory.num_kv_heads) if params.head is None else params.head
        slot = rng.choice(slots)
        byte = rng.randrange(memory.bytes_per_token) if params.byte is None else params.byte
        bit = rng.randrange(8) if params.bit is None else params.bit
        inside = layer < memory.num_layers and head < memory.num_kv_heads and byte < memory.bytes_per_token
        return _Bit(layer, head, slot, byte, bit) if inside else None

    def _bit63_pair(self, blocks: GroupBlocks, memory: KVMemory) -> Iterator[_Bit]:
        """Bit 63 of two different pieces of one block: little-endian, so bit 7 of a piece's last byte."""
        rng = self.context.rng
        valid = blocks.num_tokens - blocks.start * blocks.block_size
        block = rng.randrange(-(-valid // blocks.block_size))
        first = block * blocks.block_size
        slots = range(first, min(first + blocks.block_size, valid))
        pieces = [
            (layer, head, slot, piece)
            for layer in range(memory.num_layers)
            for head in range(memory.num_kv_heads)
            for slot in slots
            for piece in range(memory.bytes_per_token // _PIECE_BYTES)
        ]
        for layer, head, slot, piece in rng.sample(pieces, 2):
            yield _Bit(layer, head, slot, piece * _PIECE_BYTES + _PIECE_BYTES - 1, 7)
