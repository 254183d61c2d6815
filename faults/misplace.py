"""Right KV in the wrong place: blocks, tokens, heads, layers, or K and V exchanged on their way into D.

Recipes S12 and S06 of docs/incidents.md (vllm-project/vllm#50558, xLLM-AI/xllm#2040), another request's blocks
(sgl-project/sglang#38099), and the out-of-range ids of vllm-project/vllm#52234. Where a copy operation can say it, its
source is changed. Tokens, heads, layers and K|V are exchanged in what has arrived: an operation names them once, for
both sides.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, Self

from pydantic import Field, model_validator

from engine.checksum.records import GroupBlocks
from engine.seams import Change, Hold, KVFinal, LoadFinished, OpPosted, ParamsPass, Seams
from faults.base import Fault, FaultParams, When
from faults.blocks import Bytes, place_of, rearrange_load
from faults.moments import MOMENTS
from faults.params import BLOCK_IDS_PARAM, params_digest
from faults.rearrange import swap_heads, swap_kv, swap_layers, swap_tokens
from faults.redirect import FINISHED, Redirect, Source


def _duplicate(positions: Sequence[int], rng: random.Random) -> Mapping[int, int]:
    one, other = rng.sample(positions, 2) if len(positions) > 1 else (0, 0)
    return {one: other}


def _swap_blocks(positions: Sequence[int], rng: random.Random) -> Mapping[int, int]:
    ((one, other),) = _duplicate(positions, rng).items()
    return {one: other, other: one}


def _shift(positions: Sequence[int], rng: random.Random) -> Mapping[int, int]:
    return {position: position - 1 for position in positions}


def _reverse(positions: Sequence[int], rng: random.Random) -> Mapping[int, int]:
    return dict(zip(positions, reversed(positions), strict=True))


def _in_place(positions: Sequence[int], rng: random.Random) -> Mapping[int, int]:
    return {position: position for position in positions}


# How -> the block position that each block of the load is read from; one that is not named is read as planned.
_SOURCES: dict[str, Callable[[Sequence[int], random.Random], Mapping[int, int]]] = {
    "swap_blocks": _swap_blocks,
    "shift": _shift,
    "duplicate": _duplicate,
    "reverse": _reverse,
    "other_request": _in_place,
}


class MisplaceWhen(When):
    at: Literal["in_flight", "params_pass"] = Field(
        "in_flight", description="in_flight: on the way into D. params_pass: in the parameters (how: out_of_range)."
    )


class MisplaceParams(FaultParams):
    kind: Literal["misplace"]
    when: MisplaceWhen
    how: Literal[
        "swap_blocks", "shift", "duplicate", "reverse", "other_request", "out_of_range", "swap_tokens", "swap_heads",
        "swap_layers", "swap_kv",
    ] = Field(
        "swap_blocks",
        description="swap_blocks, swap_tokens, swap_heads, swap_layers: two of them exchanged. swap_kv: K and V "
        "exchanged. shift: each block gets the one before it (the request's first stays). duplicate: one block "
        "arrives twice, instead of another. reverse: the blocks in reverse order. other_request: the blocks of "
        "other_load. out_of_range: a block id that P does not have; the connector refuses the load.",
    )  # fmt: skip
    other_load: int | None = Field(None, ge=1, description="The load whose blocks are read (how: other_request).")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        at = "params_pass" if self.how == "out_of_range" else "in_flight"
        if self.when.at != at:
            raise ValueError(f"how: {self.how} acts at {at}, not at {self.when.at}")
        if (self.other_load is None) == (self.how == "other_request"):
            raise ValueError("other_load goes with how: other_request, and only with it")
        return self


class Misplace(Fault[MisplaceParams]):
    """Lets blocks, tokens, heads, layers or K and V of a load arrive in the place of others."""

    kind = "misplace"
    params_model = MisplaceParams

    @classmethod
    def needs(cls, params: FaultParams) -> frozenset[str]:
        how = getattr(params, "how", None)
        if how == "out_of_range":
            return frozenset({"producer.kv_final", "proxy.params_pass"})
        if how not in _SOURCES:
            return frozenset({FINISHED})
        return Redirect.needs | ({"proxy.params_pass"} if how == "other_request" else set())

    def attach(self, seams: Seams) -> None:
        how, request_id = self.params.how, self.context.request_id
        if how == "out_of_range":
            self._pool_size: int | None = None
            seams.on("producer.kv_final", self._see_pool)
            seams.on("proxy.params_pass", self._spoil_ids)
        elif how in _SOURCES:
            other = self.params.other_load
            owner = request_id if other is None else self.context.requests[other]
            self._redirect = Redirect(request_id, owner, self._choose, self.record)
            self._redirect.attach(seams)
            if other is not None:
                seams.on("proxy.params_pass", self._await_owner)
        else:
            seams.on(FINISHED, self._exchange)

    def _choose(self, load: GroupBlocks, owner: GroupBlocks) -> Source:
        sources = _SOURCES[self.params.how](load.positions, self.context.rng)

        def source(event: OpPosted) -> tuple[int, int] | None:
            position = sources.get(event.op.position)
            if position is None:
                return None
            return place_of(owner, position * load.block_size + event.op.target_slot)

        return source

    def _await_owner(self, event: ParamsPass) -> Hold | None:
        """Another request's blocks can only be read once they have been written."""
        if event.request_id != self.context.request_id or self._redirect.owner_is_final():
            return None
        why = f"{self.kind}: P has not written the KV of load {self.params.other_load}"
        return Hold(self._redirect.owner_is_final, why)

    def _exchange(self, event: LoadFinished) -> None:
        if event.request_id != self.context.request_id or self.context.evidence:
            return
        rng = self.context.rng
        num_tokens = sum(blocks.num_tokens - blocks.start * blocks.block_size for blocks in event.groups.values())
        exchange: dict[str, Callable[[Bytes], Bytes]] = {
            "swap_tokens": partial(swap_tokens, num_tokens=num_tokens, rng=rng),
            "swap_heads": partial(swap_heads, rng=rng),
            "swap_layers": partial(swap_layers, rng=rng),
            "swap_kv": swap_kv,
        }
        for block in rearrange_load(event, exchange[self.params.how]):
            what = f"{self.params.how}: D's block {block.block_id} (block position {block.position}) was rearranged"
            self.record(FINISHED, what, block.before, block.after)

    def _see_pool(self, event: KVFinal) -> None:
        self._pool_size = event.memory.num_blocks

    def _spoil_ids(self, event: ParamsPass) -> Change[ParamsPass] | None:
        groups = event.params.get(BLOCK_IDS_PARAM)
        if event.request_id != self.context.request_id or self._pool_size is None or not groups or not groups[0]:
            return None
        index = self.context.rng.randrange(len(groups[0]))
        outside = self._pool_size + self.context.rng.randrange(self._pool_size)
        spoiled = [*groups[0][:index], outside, *groups[0][index + 1 :]]
        params = {**event.params, BLOCK_IDS_PARAM: [spoiled, *groups[1:]]}
        what = f"block id {groups[0][index]} of P (block position {index}) is {outside}, of {self._pool_size} blocks"
        self.record(MOMENTS["params_pass"], what, params_digest(event.params), params_digest(params))
        return Change(ParamsPass(event.request_id, params))
