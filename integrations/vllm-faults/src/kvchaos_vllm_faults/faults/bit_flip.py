"""Bits of the KV change: in P's cache before or after it is summed, or in D's before or after the check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kvchaos_vllm_faults.blocks import CHECKSUMMED, KV_FINAL, LOAD_FINISHED, VERIFIED, Blocks
from kvchaos_vllm_faults.evidence import digest
from kvchaos_vllm_faults.faults.base import Fault
from kvchaos_vllm_faults.memory import EngineMemory

_PIECE_BYTES = 8


@dataclass(frozen=True, slots=True)
class _Bit:
    layer: int
    head: int
    slot: int  # counted from the first slot of the blocks
    byte: int
    bit: int


class BitFlip(Fault):
    """Flips bits once, at its moment. What the order leaves open is drawn."""

    kind = "bit_flip"
    moments: ClassVar[Mapping[str, str]] = {
        "before_checksum": KV_FINAL,
        "after_checksum": CHECKSUMMED,
        "before_verify": LOAD_FINISHED,
        "after_verify": VERIFIED,
    }

    def on_kv(self, moment: str, blocks: Blocks, memory: EngineMemory) -> None:
        if moment != self.moment or self.num_evidence:
            return
        for bit in self._choose(blocks, memory):
            self._flip(bit, blocks, memory)

    def _flip(self, bit: _Bit, blocks: Blocks, memory: EngineMemory) -> None:
        block_id, slot = blocks.block_ids[bit.slot // blocks.block_size], bit.slot % blocks.block_size
        kv = memory.read((block_id,))
        token = kv[bit.layer, bit.head, 0, slot]
        before = digest(token)
        token[bit.byte] ^= 1 << bit.bit
        memory.write((block_id,), kv)
        after = digest(memory.read((block_id,))[bit.layer, bit.head, 0, slot])
        part = "KV"[bit.byte * 2 // memory.bytes_per_token]
        self.record(
            f"bit {bit.bit} of byte {bit.byte} ({part}), layer {bit.layer}, head {bit.head}, "
            f"token {blocks.first_token + bit.slot}, block {block_id}",
            before,
            after,
        )

    def _choose(self, blocks: Blocks, memory: EngineMemory) -> list[_Bit]:
        """The bits to flip; none if there are not as many as the order asks for."""
        if self.order.params.get("pattern") == "bit63_pair":
            return self._bit63_pair(blocks, memory)
        slots, count = self._slots(blocks), self.order.params.get("flips") or 1
        chosen: dict[_Bit, None] = {}
        for _ in range(100 * count if slots else 0):
            bit = self._draw(slots, memory)
            if bit is None:
                return []
            chosen[bit] = None
            if len(chosen) == count:
                return list(chosen)
        return []

    def _slots(self, blocks: Blocks) -> range:
        """The slots that may be hit, counted from the first slot of the blocks; empty if there are none."""
        valid = blocks.num_tokens - blocks.first_token
        if self.order.params.get("where") == "past_end":
            return range(valid, len(blocks.block_ids) * blocks.block_size)
        if self.moment == VERIFIED:
            valid -= 1  # D computes the last prompt token again before it reads it: a flip there is never read
        token = self.order.params.get("token")
        if token is None:
            return range(valid)
        slot = token - blocks.first_token
        return range(slot, slot + 1) if 0 <= slot < valid else range(0)

    def _draw(self, slots: range, memory: EngineMemory) -> _Bit | None:
        """A random bit within what the order fixes, or None if that is outside the cache."""
        sizes = {"layer": memory.num_layers, "head": memory.num_heads, "byte": memory.bytes_per_token, "bit": 8}
        found = {}
        for name, size in sizes.items():
            given = self.order.params.get(name)
            found[name] = self.rng.randrange(size) if given is None else given
            if not 0 <= found[name] < size:
                return None
        return _Bit(slot=self.rng.choice(slots), **found)

    def _bit63_pair(self, blocks: Blocks, memory: EngineMemory) -> list[_Bit]:
        """Bit 63 of two different pieces of one block: little-endian, so bit 7 of a piece's last byte."""
        position = self.rng.choice(blocks.positions)
        first = (position - blocks.start) * blocks.block_size
        pieces = [
            (layer, head, slot, piece)
            for layer in range(memory.num_layers)
            for head in range(memory.num_heads)
            for slot in range(first, first + blocks.tokens_at(position))
            for piece in range(memory.bytes_per_token // _PIECE_BYTES)
        ]
        return [
            _Bit(layer, head, slot, piece * _PIECE_BYTES + _PIECE_BYTES - 1, 7)
            for layer, head, slot, piece in self.rng.sample(pieces, 2)
        ]
