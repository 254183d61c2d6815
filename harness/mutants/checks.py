"""Checks that kill mutants which no scenario can see: each says what it noticed, or None.

A check looks at one run from a side that the judge does not have: against the definition, across seeds, at the twin,
or at the verifier alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from engine.checksum import hardened
from engine.checksum.payload import HARDENED, Payload, PayloadGroup
from engine.checksum.records import GroupBlocks, Merge, MergedGroup
from engine.checksum.verdict import Verdict, VerdictStatus, judge_load
from engine.kv_manager import GROUP
from engine.seams import Checksummed, LoadFinished, RecordLeaves, Seams, Stage
from harness.mutants.bench import Bench
from harness.targets.sim_world import SimWorld
from kernels import definition, definition_v2
from scenarios.words import Result, Role

FINGERPRINT, BLOCK_SIZE = 11, 16
_BIT = re.compile(r"(bit \d+ of byte \d+) \([KV]\), (layer \d+, head \d+)")


def sums_are_those_of_the_definition(bench: Bench) -> str | None:
    """What the workers of both engines report is what `kernels/definition.py` gives for the same bytes."""
    return _other_sums(bench, "clean-shared-prefix--fail_open", definition.block_checksums)


def hardened_sums_are_those_of_their_definition(bench: Bench) -> str | None:
    """The same for version 2 and `kernels/definition_v2.py`."""
    return _other_sums(bench, "hardened-clean-transfer--fail_open", definition_v2.block_checksums)


def the_last_block_is_compared_as_far_as_both_go(bench: Bench) -> str | None:
    """Version 2: of a block of which P holds eight tokens, D sums eight, and compares it (HRD-4)."""
    blocks = GroupBlocks(GROUP, BLOCK_SIZE, 0, (1, 2), 30)
    groups = hardened.to_sum({GROUP: blocks}, HARDENED, 24)
    merged = MergedGroup(groups[GROUP], FINGERPRINT, np.array([5, 7], dtype=np.uint64))
    merge = hardened.as_summed(Merge({GROUP: merged}, False, frozenset(), frozenset(), frozenset()))
    sent = PayloadGroup(GROUP, FINGERPRINT, BLOCK_SIZE, 0, np.array([5, 7], dtype=np.uint64))
    (verdict,) = judge_load(Payload(1, 24, (sent,), HARDENED), groups, merge).groups
    if groups[GROUP].tokens_to_sum != 24:
        return f"of P's 24 tokens, D sums {groups[GROUP].tokens_to_sum}"
    return None if verdict.compared == (0, 1) else f"compared: {verdict.compared}"


def _other_sums(bench: Bench, cell: str, define_sums: Callable[..., npt.NDArray[np.uint64]]) -> str | None:
    seams = Seams()
    defined: dict[tuple[str, str], list[int]] = {}
    wrong: list[str] = []
    seen: set[tuple[str, str]] = set()

    def define(event: Checksummed | LoadFinished) -> None:
        blocks = event.groups[GROUP]
        first = blocks.start * blocks.block_size
        kv = event.memory.tokens(blocks)
        layers, _, tokens, _ = kv.shape
        whole = np.pad(kv, ((0, 0), (0, 0), (0, -tokens % blocks.block_size), (0, 0)))
        sums = define_sums(whole, range(layers), 0, blocks.block_size, first, blocks.num_tokens)
        defined[event.engine, event.request_id] = sums.tolist()

    def compare(event: RecordLeaves) -> None:
        key = event.engine, event.record.request_id
        seen.add(key)
        if event.record.groups[GROUP].values.tolist() != defined[key]:
            wrong.append(f"{key[1]} on the {key[0]}")

    seams.on("producer.checksummed", define, Stage.BEFORE)
    seams.on("consumer.load_finished", define, Stage.AFTER)
    seams.on("worker.record_leaves", compare)
    SimWorld(bench.plan(cell)[0], seams, lambda engine, output: None).run()
    if not seen:
        return "no worker reported a checksum"
    return f"other sums than those of the definition: {', '.join(sorted(wrong))}" if wrong else None


def checksums_of_zero_are_compared(bench: Bench) -> str | None:
    """A checksum of 0 on one side only is a mismatch: an empty block may well sum up to 0."""
    for sent, mine in (([5, 0], [5, 7]), ([5, 7], [5, 0]), ([0, 0], [5, 7])):
        status = _verdict(sent, mine).status
        if status is not VerdictStatus.MISMATCH:
            return f"P sent {sent}, D has {mine}: {status}"
    return None


def nothing_in_common_is_unverified(bench: Bench) -> str | None:
    """A load of which no position was compared is never verified (VER-6)."""
    status = _verdict([5, 7], [5, 7], start=4).status
    return None if status is VerdictStatus.UNVERIFIED else f"no position in common: {status}"


def seeds_choose_differently(bench: Bench) -> str | None:
    """Across seeds a fault touches different bits."""
    drawn = set()
    for seed in range(bench.seed, bench.seed + 3):
        run = bench.run("flip-before-verify--fail_open", seed=seed)
        drawn |= {match.groups() for item in run.cells[0].evidence if (match := _BIT.search(item.what))}
    return None if len(drawn) > 1 else f"the same choice for three seeds: {', '.join(*drawn) if drawn else 'none'}"


def a_twin_is_clean(bench: Bench) -> str | None:
    """The twin of a faulted cell passes."""
    run = bench.run("flip-before-verify--fail_open", twins=True)
    twins = [cell for cell in run.cells if cell.role is Role.TWIN]
    bad = [f"{cell.id} is {cell.result}" for cell in twins if cell.result is not Result.PASS]
    return ", ".join(bad) if bad else None if twins else "there is no twin"


def _verdict(sent: list[int], mine: list[int], start: int = 0) -> Verdict:
    """Of a load of D's blocks from position 0 on, when P sends checksums from `start` on; all blocks are full."""
    blocks = GroupBlocks(GROUP, BLOCK_SIZE, 0, tuple(range(1, len(mine) + 1)), len(mine) * BLOCK_SIZE)
    group = MergedGroup(blocks, FINGERPRINT, np.array(mine, dtype=np.uint64))
    merge = Merge({GROUP: group}, False, frozenset(), frozenset(), frozenset())
    values = np.array(sent, dtype=np.uint64)
    tokens = (start + len(sent)) * BLOCK_SIZE
    payload = Payload(1, tokens, (PayloadGroup(GROUP, FINGERPRINT, BLOCK_SIZE, start, values),))
    return judge_load(payload, {GROUP: blocks}, merge)
