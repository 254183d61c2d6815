"""Changes of D's bytes that cancel in the sum: nothing is random about them, and no checksum of this kind sees them.

GAP-10 and GAP-11 of docs/spec.md. The sum of a block is linear, `sum m * (2*j + 1) * x_j` modulo 2**64 (DEF-3, DEF-4):
pieces with equal factors can change places, and a change of (+d, -2d, +d) in three consecutive pieces adds up to zero.
"""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from engine.checksum.records import GroupBlocks
from engine.seams import LoadFinished, Seams
from faults.base import Fault, FaultParams, When, digest
from faults.blocks import tokens_in, write_block
from faults.moments import MOMENTS
from kernels.definition import MAX_KV_HEADS_PER_LAYER

Piece = tuple[int, int, int, int]
"""Layer, head, slot in the block, piece of the token."""

Pieces = npt.NDArray[np.uint64]
"""uint64 [layers, kv_heads, slots, pieces a token]: the bytes of a block as the sum reads them."""


class CancellingWhen(When):
    at: Literal["before_verify"] = Field("before_verify", description="In D's cache, once the load has arrived.")


class CancellingParams(FaultParams):
    kind: Literal["cancelling"]
    when: CancellingWhen
    how: Literal["equal_factors", "linear"] = Field(
        "equal_factors",
        description="equal_factors: two pieces whose factors are equal change places (GAP-10); in small blocks and "
        "few heads only block 0 has such pieces. linear: +d, -2d, +d in three consecutive pieces (GAP-11).",
    )


class Cancelling(Fault[CancellingParams]):
    """Changes a few pieces of one block so that its checksum stays what it was."""

    kind = "cancelling"
    params_model = CancellingParams

    @classmethod
    def needs(cls, params: FaultParams) -> frozenset[str]:
        return frozenset({MOMENTS[params.when.at]})

    def attach(self, seams: Seams) -> None:
        seams.on(MOMENTS[self.params.when.at], self._change)

    def _change(self, event: LoadFinished) -> None:
        if event.request_id != self.context.request_id or self.context.evidence:
            return
        for blocks in event.groups.values():
            for position in self.context.rng.sample(blocks.positions, len(blocks.positions)):
                if self._change_block(event, blocks, position):
                    break

    def _change_block(self, event: LoadFinished, blocks: GroupBlocks, position: int) -> bool:
        """Whether there was something to change in this block."""
        block_id = blocks.block_ids[position - blocks.start]
        memory = event.memory.group(blocks.group_id)
        kv = memory.slots((block_id,))
        valid = slice(tokens_in(blocks, position))
        # D computes the last prompt token again before it reads it: a change there would never be read.
        read = slice(min(tokens_in(blocks, position), blocks.num_tokens - 1 - position * blocks.block_size))
        change = _exchange_equal if self.params.how == "equal_factors" else _add_linear
        said = change(kv.view("<u8")[:, :, read], position * blocks.block_size, self.context.rng)
        if said is None:
            return False
        before = digest(memory.slots((block_id,))[:, :, valid])
        write_block(memory, block_id, kv)
        after = digest(memory.slots((block_id,))[:, :, valid])
        what = f"{said} in D's block {block_id} (block position {position})"
        self.record(MOMENTS[self.params.when.at], what, before, after)
        return before != after


def factor(layer: int, head: int, token: int, piece: int, pieces_per_token: int) -> int:
    """What a piece is multiplied with in the sum (DEF-3, DEF-4)."""
    j = token * pieces_per_token + piece
    return (2 * (layer * MAX_KV_HEADS_PER_LAYER + head) + 1) * (2 * j + 1) % 2**64


def _exchange_equal(pieces: Pieces, first_token: int, rng: random.Random) -> str | None:
    """Exchange two pieces of equal factor and unlike content, in place. None: there are none."""
    by_factor: defaultdict[int, list[Piece]] = defaultdict(list)
    for place in np.ndindex(*pieces.shape):
        layer, head, slot, piece = place
        by_factor[factor(layer, head, first_token + slot, piece, pieces.shape[3])].append((layer, head, slot, piece))
    pairs = [
        (one, other)
        for places in by_factor.values()
        for index, one in enumerate(places)
        for other in places[index + 1 :]
        if pieces[one] != pieces[other]
    ]
    if not pairs:
        return None
    one, other = rng.choice(pairs)
    pieces[one], pieces[other] = pieces[other], pieces[one]
    return f"{_named(one, first_token)} and {_named(other, first_token)} changed places"


def _add_linear(pieces: Pieces, first_token: int, rng: random.Random) -> str | None:
    """Add d, -2d and d to three consecutive pieces of one layer and head, in place. None: there are not three."""
    layers, heads, slots, per_token = pieces.shape
    if slots * per_token < 3:
        return None
    layer, head, first = rng.randrange(layers), rng.randrange(heads), rng.randrange(slots * per_token - 2)
    d = rng.randrange(1, 2**64)
    for offset, times in enumerate((1, -2, 1)):
        slot, piece = divmod(first + offset, per_token)
        value = int(pieces[layer, head, slot, piece]) + times * d
        pieces[layer, head, slot, piece] = np.uint64(value % 2**64)
    slot, piece = divmod(first, per_token)
    return f"d, -2d, d added to three pieces from {_named((layer, head, slot, piece), first_token)} on"


def _named(place: Piece, first_token: int) -> str:
    layer, head, slot, piece = place
    return f"piece {piece} of token {first_token + slot}, layer {layer}, head {head}"
