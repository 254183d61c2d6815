"""Broken faults: they do nothing, too much, too late or elsewhere, and write evidence all the same."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from engine.checksum.records import GroupBlocks
from engine.kv_manager import GROUP
from engine.seams import Seams
from faults.base import FaultContext
from faults.bit_flip import BitFlip
from faults.drop_checksums import DropChecksums
from faults.early_reuse import EarlyReuse
from faults.noop import Noop
from harness.mutants.base import Function, Mutant
from harness.mutants.checks import a_twin_is_clean, seeds_choose_differently

FLIP = "faults.bit_flip.BitFlip._flip"
FLIP_ONE = "faults.bit_flip.BitFlip._flip_one"


def _claimed(original: Function) -> Function:
    def flip_one(fault: BitFlip, *where: Any) -> None:
        fault.record("consumer.load_finished", "a bit of the load", "0" * 16, "1" * 16)

    return flip_one


def _twice(original: Function) -> Function:
    def flip_one(fault: BitFlip, *where: Any) -> None:
        original(fault, *where)
        original(fault, *where)

    return flip_one


def _in_the_null_block(original: Function) -> Function:
    """A block that no request has."""

    def flip_one(fault: BitFlip, bit: Any, blocks: GroupBlocks, memory: Any) -> None:
        original(fault, bit, replace(blocks, block_ids=(0,) * len(blocks.block_ids)), memory)

    return flip_one


def _another_request(original: Function) -> Function:
    def flip(fault: BitFlip, event: Any) -> None:
        if event.request_id != fault.context.request_id:
            original(fault, replace(event, request_id=fault.context.request_id))

    return flip


def _every_request(original: Function) -> Function:
    def flip(fault: BitFlip, event: Any) -> None:
        own = replace(fault.context, request_id=event.request_id, evidence=[])
        original(BitFlip(fault.params, own), event)
        fault.context.evidence += own.evidence

    return flip


def _after_the_sum(original: Function) -> Function:
    def attach(fault: BitFlip, seams: Seams) -> None:
        seams.on("producer.checksummed", fault._flip)

    return attach


def _always_seed_0(original: Function) -> Function:
    def init(context: FaultContext, request_id: str, rng: random.Random, *rest: Any, **named: Any) -> None:
        original(context, request_id, random.Random(0), *rest, **named)

    return init


def _kept(original: Function) -> Function:
    def pass_on(fault: DropChecksums, event: Any) -> None:
        original(fault, event)

    return pass_on


def _nothing_dropped(original: Function) -> Function:
    return lambda fault, event: None


def _not_held(original: Function) -> Function:
    def strike(fault: EarlyReuse, event: Any) -> None:
        original(fault, event)

    return strike


def _poisons(original: Function) -> Function:
    def reached(fault: Noop, event: Any) -> None:
        original(fault, event)
        if event.request_id == fault.context.request_id:
            event.memory.fill(event.groups[GROUP].block_ids[:1], b"POISONED")

    return reached


MUTANTS = (
    Mutant(
        name="flip-does-nothing",
        area="injector",
        what="No bit flips, and the fault writes evidence that one did.",
        target=FLIP_ONE,
        replace=_claimed,
        killers=("flip-before-verify", "flip-after-checksum--fail_open", "double-bit-63--fail_closed_fail"),
        control="short-transfer--fail_open",
    ),
    Mutant(
        name="flip-cancels",
        area="injector",
        what="Every bit flips twice.",
        target=FLIP_ONE,
        replace=_twice,
        killers=("flip-before-verify--fail_open", "flip-before-checksum--fail_closed_fail"),
        control="short-transfer--fail_open",
    ),
    Mutant(
        name="flip-in-no-load",
        area="injector",
        what="The bit flips in a block that no request has.",
        target=FLIP_ONE,
        replace=_in_the_null_block,
        killers=("flip-before-verify--fail_open", "flip-before-checksum--off"),
        control="flip-past-num-tokens--fail_open",
    ),
    Mutant(
        name="flip-in-another-request",
        area="injector",
        what="The bit flips in the load of another request than the evidence says.",
        target=FLIP,
        replace=_another_request,
        killers=("flip-before-verify--fail_open", "flip-after-verify--off"),
        control="short-transfer--fail_open",
    ),
    Mutant(
        name="flip-in-every-request",
        area="injector",
        what="A bit flips in every load, not only in the one that the scenario names.",
        target=FLIP,
        replace=_every_request,
        killers=("flip-before-verify--fail_open", "flip-before-checksum--off"),
        control="short-transfer--fail_open",
    ),
    Mutant(
        name="flip-too-late",
        area="injector",
        what="The bit that must flip before P sums its blocks flips after.",
        target="faults.bit_flip.BitFlip.attach",
        replace=_after_the_sum,
        killers=("flip-before-checksum",),
        control="flip-after-checksum--fail_open",
    ),
    Mutant(
        name="seed-ignored",
        area="injector",
        what="A fault draws the same choices for every seed.",
        target="faults.base.FaultContext.__init__",
        replace=_always_seed_0,
        killers=(seeds_choose_differently,),
        control="flip-before-verify--fail_open",
    ),
    Mutant(
        name="checksums-kept",
        area="injector",
        what="The checksums pass as they are, and the fault writes evidence that they were lost or altered.",
        target="faults.drop_checksums.DropChecksums._pass",
        replace=_kept,
        killers=("checksums-lost--fail_open", "checksums-cut--fail_open", "checksums-altered--fail_closed_fail"),
        control="flip-before-verify--fail_open",
    ),
    Mutant(
        name="nothing-is-missing",
        area="injector",
        what="A short transfer drops no copy operation.",
        target="faults.short_transfer.ShortTransfer._drop",
        replace=_nothing_dropped,
        killers=("short-transfer--off", "empty-transfer--fail_open"),
        control="flip-before-verify--fail_open",
    ),
    Mutant(
        name="reuse-not-awaited",
        area="injector",
        what="The read does not wait for the competitor that takes P's blocks.",
        target="faults.early_reuse.EarlyReuse._strike",
        replace=_not_held,
        killers=("stale-read-after-reuse--off", "torn-read-during-reuse--fail_open"),
        control="flip-before-verify--fail_open",
    ),
    Mutant(
        name="noop-poisons",
        area="injector",
        what="The fault of the clean twin is not clean.",
        target="faults.noop.Noop._reached",
        replace=_poisons,
        killers=(a_twin_is_clean,),
        control="flip-before-verify--fail_open",
    ),
)
