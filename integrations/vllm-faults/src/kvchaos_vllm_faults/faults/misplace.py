"""Right KV in the wrong place: blocks read from wrong addresses; tokens, heads, layers, or K and V exchanged.

Blocks: D really reads other blocks of P than it was to. Evidence compares what D holds with what P held there, which
the order tells (`held`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from kvchaos_vllm_faults.blocks import LOAD_FINISHED, PARAMS_PASS, READ_POSTED, Blocks
from kvchaos_vllm_faults.evidence import Evidence, digest
from kvchaos_vllm_faults.faults.base import Fault, Order, OrderError, Read
from kvchaos_vllm_faults.faults.rearrange import Rearranged, Rearrangement, exchanged
from kvchaos_vllm_faults.memory import Bytes, EngineMemory


def _swap(ids: Sequence[int], rng: random.Random) -> list[int]:
    found = list(ids)
    if len(found) > 1:
        one, other = rng.sample(range(len(found)), 2)
        found[one], found[other] = found[other], found[one]
    return found


def _duplicate(ids: Sequence[int], rng: random.Random) -> list[int]:
    found = list(ids)
    if len(found) > 1:
        one, other = rng.sample(range(len(found)), 2)
        found[one] = found[other]
    return found


def _reverse(ids: Sequence[int], rng: random.Random) -> list[int]:
    return list(reversed(ids))


_READS: Mapping[str, Callable[[Sequence[int], random.Random], list[int]]] = {
    "swap_blocks": _swap,
    "duplicate": _duplicate,
    "reverse": _reverse,
}
_SHIFT, _OTHER_REQUEST, _OUT_OF_RANGE = "shift", "other_request", "out_of_range"


class MisplacedBlocks(Fault):
    """Blocks of a load are read from other blocks of P."""

    kind = "misplace"
    moments: ClassVar[Mapping[str, str]] = {"in_flight": READ_POSTED}

    def __init__(self, order: Order, record: Callable[[Evidence], None]) -> None:
        super().__init__(order, record)
        self._how = str(order.params.get("how"))
        self._other: list[int] = []
        if self._how == _OTHER_REQUEST:
            self._other = _block_ids(order.other)
        self._from: dict[int, int] = {}

    def on_read(self, read: Read) -> Sequence[Read]:
        if self._how == _OTHER_REQUEST:
            ours = list(read.remote)
            behind = self._other[-len(ours) :] if len(self._other) >= len(ours) else self._other
            remote = [*behind, *ours[len(behind) :]]
        elif self._how == _SHIFT:
            before = read.remote[0] if read.preceding is None else read.preceding
            remote = [before, *read.remote[:-1]]
        else:
            remote = _READS[self._how](read.remote, self.rng)
        pairs = zip(read.local, read.remote, remote, strict=True)
        self._from = {local: new for local, old, new in pairs if old != new}
        return (replace(read, remote=tuple(remote)),)

    def on_kv(self, moment: str, blocks: Blocks, memory: EngineMemory) -> None:
        if moment != LOAD_FINISHED or self.num_evidence:
            return
        kv = memory.read(blocks.block_ids)
        for index, (position, block_id) in enumerate(zip(blocks.positions, blocks.block_ids, strict=True)):
            before = self.order.held.get(position)
            after = digest(kv[:, :, index, : blocks.tokens_at(position)])
            if block_id in self._from and before != after:
                what = f"{self._how}: D's block {block_id} (block position {position}) was read from P's block "
                self.record(f"{what}{self._from[block_id]}", before, after, LOAD_FINISHED)


class OutOfRange(Fault):
    """One of the block ids that reach D is none of P's, whose pool is taken to be as large as D's."""

    kind = "misplace"
    moments: ClassVar[Mapping[str, str]] = {"params_pass": PARAMS_PASS}

    def on_params(self, params: Mapping[str, Any], num_blocks: int) -> Mapping[str, Any]:
        ids = _block_ids(params)
        index = self.rng.randrange(len(ids))
        outside = num_blocks + self.rng.randrange(num_blocks)
        spoiled = [*ids[:index], outside, *ids[index + 1 :]]
        what = f"block id {ids[index]} of P (block position {index}) is {outside}, of {num_blocks} blocks"
        self.record(what, digest(str(ids).encode()), digest(str(spoiled).encode()))
        return {**params, "remote_block_ids": [spoiled]}


def _block_ids(params: Mapping[str, Any] | None) -> list[int]:
    groups = (params or {}).get("remote_block_ids")
    if not isinstance(groups, list | tuple) or len(groups) != 1:
        raise OrderError("no parameters of a load with blocks in one group: other_request needs the other load's")
    return [int(block_id) for block_id in groups[0]]


def _tokens(fault: Rearranged, kv: Bytes, blocks: Blocks, memory: EngineMemory) -> Bytes:
    """Two prompt tokens of the load exchanged, in every layer and head."""
    tokens = kv.reshape(*kv.shape[:2], -1, kv.shape[-1]).copy()
    count = blocks.num_tokens - blocks.first_token
    if count > 1:
        one, other = fault.rng.sample(range(count), 2)
        tokens[:, :, [one, other]] = tokens[:, :, [other, one]]
    return tokens.reshape(kv.shape)


def _heads(fault: Rearranged, kv: Bytes, blocks: Blocks, memory: EngineMemory) -> Bytes:
    return exchanged(kv, 1, fault.rng)


def _layers(fault: Rearranged, kv: Bytes, blocks: Blocks, memory: EngineMemory) -> Bytes:
    return exchanged(kv, 0, fault.rng)


def _k_and_v(fault: Rearranged, kv: Bytes, blocks: Blocks, memory: EngineMemory) -> Bytes:
    half = kv.shape[-1] // 2
    return np.concatenate((kv[..., half:], kv[..., :half]), axis=-1)


class MisplacedParts(Rearranged):
    """Tokens, heads, layers, or K and V of a load exchanged."""

    kind = "misplace"
    moments: ClassVar[Mapping[str, str]] = {"in_flight": READ_POSTED}
    hows: ClassVar[Mapping[str, Rearrangement]] = {
        "swap_tokens": _tokens,
        "swap_heads": _heads,
        "swap_layers": _layers,
        "swap_kv": _k_and_v,
    }


def misplace(order: Order, record: Callable[[Evidence], None]) -> Fault:
    """The fault of an order of kind `misplace`. Raises OrderError if there is none."""
    how = order.params.get("how")
    if how in MisplacedParts.hows:
        return MisplacedParts(order, record)
    if how in (*_READS, _SHIFT, _OTHER_REQUEST):
        return MisplacedBlocks(order, record)
    if how == _OUT_OF_RANGE:
        return OutOfRange(order, record)
    known = (*_READS, _SHIFT, _OTHER_REQUEST, _OUT_OF_RANGE, *MisplacedParts.hows)
    raise OrderError(f"misplace knows {', '.join(known)}, not how: {how}")
