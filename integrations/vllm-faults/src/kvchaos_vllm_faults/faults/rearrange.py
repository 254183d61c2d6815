"""Right bytes in the wrong place within a load: what a copy gets wrong about axes, heads, layers or K and V.

The read itself is right; what has arrived is put where a wrong copy would have put it, before it is checked.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import ClassVar

import numpy as np

from kvchaos_vllm_faults.blocks import LOAD_FINISHED, Blocks
from kvchaos_vllm_faults.evidence import Evidence, digest
from kvchaos_vllm_faults.faults.base import Fault, Order, OrderError
from kvchaos_vllm_faults.memory import Bytes, EngineMemory

# All take and give uint8 [layers, heads, blocks, slots, bytes_per_token].
Rearrangement = Callable[["Rearranged", Bytes, Blocks, EngineMemory], Bytes]


class Rearranged(Fault):
    """Gives all blocks of a load other bytes, made of their own."""

    hows: ClassVar[Mapping[str, Rearrangement]]

    def __init__(self, order: Order, record: Callable[[Evidence], None]) -> None:
        super().__init__(order, record)
        how = str(order.params.get("how"))
        if how not in self.hows:
            raise OrderError(f"{self.kind} knows {', '.join(self.hows)}, not how: {how}")
        self.how = how

    def on_kv(self, moment: str, blocks: Blocks, memory: EngineMemory) -> None:
        if moment != LOAD_FINISHED or self.num_evidence:
            return
        old = memory.read(blocks.block_ids)
        memory.write(blocks.block_ids, self.hows[self.how](self, old, blocks, memory))
        new = memory.read(blocks.block_ids)
        for index, (position, block_id) in enumerate(zip(blocks.positions, blocks.block_ids, strict=True)):
            valid = blocks.tokens_at(position)
            before, after = digest(old[:, :, index, :valid]), digest(new[:, :, index, :valid])
            if before != after:
                what = f"{self.how}: D's block {block_id} (block position {position}) was rearranged"
                self.record(what, before, after, LOAD_FINISHED)


def exchanged(kv: Bytes, axis: int, rng: random.Random) -> Bytes:
    """Two of an axis in each other's place."""
    order = list(range(kv.shape[axis]))
    if len(order) > 1:
        one, other = rng.sample(order, 2)
        order[one], order[other] = other, one
    return np.take(kv, order, axis=axis)
