"""Broken ranks, replicas and connectors: what is right on one rank, or in one place, and wrong between two."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from engine.cache import KVMemory
from engine.checksum.records import GroupSums, Merge, WorldShape
from engine.connectors.base import LoadSpec
from engine.paged import PagedKVCache
from engine.seams import CopyOp
from harness.mutants.base import Function, Mutant
from harness.mutants.checks import nothing_in_common_is_unverified
from harness.mutants.engine_checks import (
    checksums_are_not_switched_off_by_a_request,
    each_trigger_sends_the_same_sums,
    pull_loads_exactly_its_blocks,
)
from kernels.torch_path import LayerCache

SUMMED = "engine.checksum.worker._Summed.__init__"
COPY_OPERATIONS = "engine.connectors.pull.copy_operations"
MANY_RANKS, ONE_RANK = "clean-one-rank-to-tp4-pp2", "clean-transfer--fail_closed_fail"
Ops = list[CopyOp]


def _every_worker_counts(original: Function) -> Function:
    def fingerprint(sums: Mapping[tuple[int, int], GroupSums], world: WorldShape) -> int | None:
        if original(sums, world) is None:
            return None
        return sum(part.fingerprint for part in sums.values()) % 2**64

    return fingerprint


def _renumbered(change: Callable[[PagedKVCache, int, LayerCache], LayerCache]) -> Callable[[Function], Function]:
    """A worker's caches under other numbers: of (the group's caches, which of them, the cache)."""

    def make(original: Function) -> Function:
        def init(summed: Any, cache: PagedKVCache) -> None:
            original(summed, cache)
            for first_head, layers in summed._layers.items():
                summed._layers[first_head] = [change(cache, index, layer) for index, layer in enumerate(layers)]

        return init

    return make


def _from_the_first_block(original: Function) -> Function:
    return lambda kv, request, first_token, num_tokens: original(kv, request, 0, num_tokens)


def _first_replica_only(original: Function) -> Function:
    def merge_records(*args: Any) -> Merge:
        merge: Merge = original(*args)
        groups = {group_id: replace(group, replicas=()) for group_id, group in merge.groups.items()}
        return replace(merge, groups=groups, unchecked_replicas=frozenset())

    return merge_records


def _no_carrier(original: Function) -> Function:
    return lambda scheduler, request, receiving: None


def _with_operations(change: Callable[[Ops, KVMemory], Ops]) -> Callable[[Function], Function]:
    def make(original: Function) -> Function:
        def copy_operations(load: LoadSpec, memory: KVMemory, peer: Any) -> Ops | None:
            ops = original(load, memory, peer)
            return None if ops is None else [replace(op, index=n) for n, op in enumerate(change(ops, memory))]

        return copy_operations

    return make


def _without_the_last(ops: Ops, memory: KVMemory) -> Ops:
    last = max((op.position for op in ops), default=0)
    return [op for op in ops if op.position < last]


def _and_one_more(ops: Ops, memory: KVMemory) -> Ops:
    """Into the block whose id follows that of the load's last, too, as far as there is one."""
    last = max((op.position for op in ops), default=0)
    more = [op for op in ops if op.position == last and op.target_block + 1 < memory.num_blocks]
    return [*ops, *(replace(op, target_block=op.target_block + 1) for op in more)]


def _kept(original: Function) -> Function:
    return lambda sums, block_ids: None


def _anybody(original: Function) -> Function:
    return lambda policy, asked: None


MUTANTS = (
    Mutant(
        name="fingerprints-of-every-worker",
        area="checksum",
        what="Fingerprints are summed over all workers, not over one TP rank a stage.",
        target="engine.checksum.records._fingerprint",
        replace=_every_worker_counts,
        killers=(MANY_RANKS, "clean-tp4-pp2-to-one-rank--fail_open"),
        control=ONE_RANK,
    ),
    Mutant(
        name="heads-of-the-rank",
        area="checksum",
        what="Each rank numbers its KV heads from 0.",
        target=SUMMED,
        replace=_renumbered(
            lambda cache, index, layer: replace(layer, first_head=layer.first_head - cache.heads.start)
        ),
        killers=(MANY_RANKS, "clean-tp4-pp2-to-one-rank--fail_open"),
        control=ONE_RANK,
    ),
    Mutant(
        name="layers-of-the-rank",
        area="checksum",
        what="A layer's number is its place among those of its rank, not the one in its name.",
        target=SUMMED,
        replace=_renumbered(lambda cache, index, layer: replace(layer, layer_number=index)),
        killers=(MANY_RANKS, "clean-tp2-to-pp4--fail_open"),
        control=ONE_RANK,
    ),
    Mutant(
        name="loads-from-the-first-block",
        area="engine",
        what="D loads and sums a prompt from its first block on, also where it holds a prefix.",
        target="engine.kv_manager.KVManager.blocks",
        replace=_from_the_first_block,
        killers=("cached-prefix-flipped--fail_open", pull_loads_exactly_its_blocks),
        control=ONE_RANK,
    ),
    Mutant(
        name="first-replica-only",
        area="verifier",
        what="Of the replicas of a head only the first is checked.",
        target="engine.checksum.records.merge_records",
        replace=_first_replica_only,
        killers=("flip-in-second-replica--fail_open", "flip-in-latent-replica--fail_closed_fail"),
        control="flip-before-verify--fail_open",
    ),
    Mutant(
        name="no-carrier-declared",
        area="engine",
        what="The pull connector says of no request that it carries its checksums.",
        target="engine.connectors.pull.PullScheduler.kv_checksum_carrier",
        replace=_no_carrier,
        killers=("clean-transfer--fail_open", "flip-before-verify--fail_closed_fail"),
        control="clean-transfer--off",
    ),
    Mutant(
        name="one-block-fewer",
        area="engine",
        what="The pull connector leaves out the last block of a load.",
        target=COPY_OPERATIONS,
        replace=_with_operations(_without_the_last),
        killers=("clean-transfer--fail_open", pull_loads_exactly_its_blocks),
        control=nothing_in_common_is_unverified,
    ),
    Mutant(
        name="one-block-more",
        area="engine",
        what="The pull connector writes the block behind the last of a load as well.",
        target=COPY_OPERATIONS,
        replace=_with_operations(_and_one_more),
        killers=(pull_loads_exactly_its_blocks,),
        control=nothing_in_common_is_unverified,
    ),
    Mutant(
        name="kept-sums-outlive-their-blocks",
        area="checksum",
        what="A sum that P keeps of a block is still used after the block was written again.",
        target="engine.checksum.when.KeptSums.forget",
        replace=_kept,
        killers=(each_trigger_sends_the_same_sums,),
        control=pull_loads_exactly_its_blocks,
    ),
    Mutant(
        name="switched-off-by-anybody",
        area="policy",
        what="A request may switch its checksums off, whatever the engine was started with.",
        target="engine.checksum.policy.ChecksumPolicy.check_switch",
        replace=_anybody,
        killers=(checksums_are_not_switched_off_by_a_request,),
        control="clean-transfer--fail_closed_fail",
    ),
)
