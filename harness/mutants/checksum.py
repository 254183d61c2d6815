"""Broken checksums: what is summed, with which factors, and when. Both engines are broken alike, so they agree.

A checksum that is only wrong in its own way still finds what changes between P and D. What it lost shows in a
scenario that changes just that, or against the definition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from engine.checksum.pending import PendingRecord
from engine.ranks import Ranks
from engine.step import RankOutput, StepPlan
from harness.mutants.base import Function, Mutant
from harness.mutants.checks import sums_are_those_of_the_definition
from kernels.torch_path import LayerCache

BLOCK_CHECKSUMS = "kernels.paths.block_checksums"
Sums = Callable[..., torch.Tensor]
Layers = Sequence[LayerCache]
Outputs = tuple[RankOutput, ...]


def _constant(original: Sums) -> Sums:
    def block_checksums(layers: Layers, block_ids: Sequence[int], **how: Any) -> torch.Tensor:
        return torch.full((len(block_ids),), 0x5EED, dtype=torch.int64)

    return block_checksums


def _orderless(original: Sums) -> Sums:
    """Each token as if it were the first one, each piece as if it were a cache of its own."""

    def block_checksums(layers: Layers, block_ids: Sequence[int], **how: Any) -> torch.Tensor:
        first, tokens = how["start"] * how["block_size"], how["num_tokens"]
        sums = torch.zeros(len(block_ids), dtype=torch.int64)
        for layer in layers:
            for part in layer.parts:
                kv = part[list(block_ids)].contiguous().view(torch.int64)  # [blocks, slots, heads, pieces]
                counted = torch.arange(kv.shape[0] * kv.shape[1]).reshape(kv.shape[:2]) + first < tokens
                factors = 2 * (torch.arange(kv.shape[2]) + layer.first_head + (layer.layer_number << 16)) + 1
                sums += (kv * counted[:, :, None, None] * factors[:, None]).sum((1, 2, 3))
        return sums

    return block_checksums


def _each_layer(change: Callable[[LayerCache], list[LayerCache]]) -> Callable[[Sums], Sums]:
    """The sum over what `change` makes of each layer, each part on its own."""

    def make(original: Sums) -> Sums:
        def block_checksums(layers: Layers, block_ids: Sequence[int], **how: Any) -> torch.Tensor:
            parts = [original([part], block_ids, **how) for layer in layers for part in change(layer)]
            return torch.stack(parts).sum(0)

        return block_checksums

    return make


def _head_by_head(layer: LayerCache) -> list[LayerCache]:
    heads = range(layer.parts[0].shape[2])
    return [replace(layer, first_head=0, parts=tuple(p[:, :, h : h + 1] for p in layer.parts)) for h in heads]


def _each_block_from_zero(original: Sums) -> Sums:
    def block_checksums(
        layers: Layers, block_ids: Sequence[int], *, block_size: int, start: int, num_tokens: int, **how: Any
    ) -> torch.Tensor:
        parts = []
        for position, block_id in enumerate(block_ids, start):
            tokens = max(0, min(block_size, num_tokens - position * block_size))
            parts.append(original(layers, [block_id], block_size=block_size, start=0, num_tokens=tokens, **how))
        return torch.cat(parts)

    return block_checksums


def _with(change: Callable[[int, int, int, int], tuple[int, int]]) -> Callable[[Sums], Sums]:
    """Other `start` and `num_tokens`, of (block_size, start, num_tokens, blocks)."""

    def make(original: Sums) -> Sums:
        def block_checksums(
            layers: Layers, block_ids: Sequence[int], *, block_size: int, start: int, num_tokens: int, **how: Any
        ) -> torch.Tensor:
            start, num_tokens = change(block_size, start, num_tokens, len(block_ids))
            return original(layers, block_ids, block_size=block_size, start=start, num_tokens=num_tokens, **how)

        return block_checksums

    return make


def _low_half(original: Sums) -> Sums:
    return lambda *args, **how: original(*args, **how) & 0xFFFFFFFF


def _without_last_layer(original: Sums) -> Sums:
    return lambda layers, *args, **how: original(layers[:-1], *args, **how)


def _early(outputs: Outputs, early: Sequence[dict[str, PendingRecord]]) -> Outputs:
    """What each rank returns, with records of another time in the place of its own."""
    return tuple(
        replace(output, records=tuple(own.pop(record.request_id, record) for record in output.records))
        for output, own in zip(outputs, early, strict=True)
    )


def _before_the_forward(original: Function) -> Function:
    """P sums when the step begins: what earlier chunks wrote is there, what this step writes is not."""

    def execute(ranks: Ranks, plan: StepPlan) -> Outputs:
        sends = plan.checksum_sends.items()
        early = [{r: worker.checksum_prompt(r, groups) for r, groups in sends} for worker in ranks.workers]
        return _early(original(ranks, plan), early)

    return execute


def _before_the_load(original: Function) -> Function:
    """D sums when a load is posted, not when it has finished."""
    early: dict[Ranks, list[dict[str, PendingRecord]]] = {}

    def execute(ranks: Ranks, plan: StepPlan) -> Outputs:
        kept = early.setdefault(ranks, [{} for _ in ranks.workers])
        for load in plan.loads:
            for worker, own in zip(ranks.workers, kept, strict=True):
                if load.request_id in plan.checksum_loads:
                    own[load.request_id] = worker.checksums.checksum(load.request_id, load.groups, received=True)
        return _early(original(ranks, plan), kept)

    return execute


MUTANTS = (
    Mutant(
        name="constant-sum",
        area="checksum",
        what="Every block has the same checksum.",
        target=BLOCK_CHECKSUMS,
        replace=_constant,
        killers=("flip-before-verify", "short-transfer--fail_open"),
        control="clean-transfer--fail_closed_fail",
    ),
    Mutant(
        name="orderless-sum",
        area="checksum",
        what="Pieces are added up without their positions.",
        target=BLOCK_CHECKSUMS,
        replace=_orderless,
        killers=("tokens-swapped-in-one-block",),
        control="layers-swapped--fail_open",
    ),
    Mutant(
        name="layers-alike",
        area="checksum",
        what="The layer is not in the factor of a slice.",
        target=BLOCK_CHECKSUMS,
        replace=_each_layer(lambda layer: [replace(layer, layer_number=0)]),
        killers=("layers-swapped",),
        control="heads-swapped--fail_open",
    ),
    Mutant(
        name="heads-alike",
        area="checksum",
        what="The KV head is not in the factor of a slice.",
        target=BLOCK_CHECKSUMS,
        replace=_each_layer(_head_by_head),
        killers=("heads-swapped",),
        control="tokens-swapped-in-one-block--fail_open",
    ),
    Mutant(
        name="positions-in-the-block",
        area="checksum",
        what="Tokens are numbered within their block, not within the request.",
        target=BLOCK_CHECKSUMS,
        replace=_each_block_from_zero,
        killers=(sums_are_those_of_the_definition,),
        control="clean-shared-prefix--fail_closed_fail",
    ),
    Mutant(
        name="positions-in-the-load",
        area="checksum",
        what="Tokens are numbered from the first block that is summed: 0 on P, after the local prefix on D.",
        target=BLOCK_CHECKSUMS,
        replace=_with(lambda size, start, tokens, blocks: (0, tokens - start * size)),
        killers=("clean-shared-prefix",),
        control="clean-transfer--fail_closed_fail",
    ),
    Mutant(
        name="whole-last-block",
        area="checksum",
        what="The last block is summed whole, with the slots that no prompt token has.",
        target=BLOCK_CHECKSUMS,
        replace=_with(lambda size, start, tokens, blocks: (start, (start + blocks) * size)),
        killers=("flip-past-num-tokens",),
        control="flip-before-verify--fail_open",
    ),
    Mutant(
        name="no-partial-block",
        area="checksum",
        what="A last block that is not full is left out of the sums.",
        target=BLOCK_CHECKSUMS,
        replace=_with(lambda size, start, tokens, blocks: (start, tokens // size * size)),
        killers=("flips-at-the-corners",),
        control="short-transfer--fail_open",
    ),
    Mutant(
        name="low-half",
        area="checksum",
        what="The upper 32 bits of a checksum are dropped.",
        target=BLOCK_CHECKSUMS,
        replace=_low_half,
        killers=("flips-at-the-corners",),
        control="tokens-swapped-in-one-block--fail_open",
    ),
    Mutant(
        name="keys-only",
        area="checksum",
        what="V is not summed.",
        target=BLOCK_CHECKSUMS,
        replace=_each_layer(lambda layer: [replace(layer, parts=layer.parts[:1])]),
        killers=("flips-at-the-corners",),
        control="heads-swapped--fail_open",
    ),
    Mutant(
        name="last-layer-left-out",
        area="checksum",
        what="The last layer is not summed.",
        target=BLOCK_CHECKSUMS,
        replace=_without_last_layer,
        killers=("flips-at-the-corners",),
        control="heads-swapped--fail_open",
    ),
    Mutant(
        name="summed-before-the-forward",
        area="checksum",
        what="P sums a prompt's blocks before the forward of the step that finishes it has written them.",
        target="engine.ranks.Ranks.execute",
        replace=_before_the_forward,
        killers=("clean-transfer",),
        control="clean-transfer--off",
    ),
    Mutant(
        name="summed-before-the-load",
        area="checksum",
        what="D sums a load's blocks when the load is posted, not when it has finished.",
        target="engine.ranks.Ranks.execute",
        replace=_before_the_load,
        killers=("clean-transfer",),
        control="clean-transfer--off",
    ),
)
