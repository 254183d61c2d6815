"""Known gaps as predicates: what the checksums cannot see, decided from the oracles alone.

A load that is verified and yet corrupted must satisfy one of these, or it is a violation. Without that, "none
outside the known gaps" would mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps

from engine.checksum.verdict import NotCheckedReason, VerdictStatus
from harness.observe import KVView, RequestObservation

Others = Sequence[RequestObservation]
Predicate = Callable[[RequestObservation, Others], bool]


def corrupted_grid(load: RequestObservation) -> tuple[int, ...]:
    """Grid positions where D's bytes, when the load finished, are not P's at KV final."""
    if load.kv_final is None or load.load_finished is None:
        return ()
    return load.load_finished.differing(load.kv_final)


def corrupted_positions(load: RequestObservation) -> tuple[int, ...]:
    """D's block positions with corrupted bytes, in any group, when the load finished."""
    if load.more:
        return tuple(sorted({position for group in load.per_group for position in corrupted_positions(group)}))
    grid = corrupted_grid(load)
    if load.load_finished is None or not grid:
        return ()
    size = load.block_size // load.load_finished.grid
    return tuple(sorted({position // size for position in grid}))


def foreign_positions(load: RequestObservation) -> tuple[int, ...]:
    """D's block positions in which an attention read met a slot that was not the request's own, or had changed.

    A request that read something foreign is itself foreign from then on: what it computed (the last prompt token and
    its output) counts only where nothing before it does. Where nobody watched the reads: those whose bytes had changed
    at the first read.
    """
    if load.foreign is not None:
        received = [token for token in load.foreign if token < load.num_prompt_tokens - 1]
        return tuple(sorted({token // load.block_size for token in received or load.foreign}))
    if load.first_use is None or load.to_be_read is None:
        return ()
    size = load.block_size // load.first_use.grid
    return tuple(sorted({position // size for position in load.first_use.differing(load.to_be_read)}))


def compared_positions(load: RequestObservation) -> set[int]:
    """D's block positions whose checksums were compared."""
    return {position for group in load.groups for position in group.compared}


def wrong_groups(load: RequestObservation) -> set[int]:
    """The KV cache groups in which D holds other bytes than P, or read something foreign.

    A request that read something foreign in one group writes what is foreign in all: that counts only where nothing
    that it received does.
    """
    groups = dict(enumerate(load.per_group))
    last = load.num_prompt_tokens - 1
    received = {
        number
        for number, group in groups.items()
        if corrupted_grid(group) or any(token < last for token in group.foreign or ())
    }
    return received or {number for number, group in groups.items() if foreign_positions(group)}


def in_each_group(predicate: Predicate) -> Predicate:
    """Holds if it does in every KV cache group in which something is wrong."""

    @wraps(predicate)
    def holds(load: RequestObservation, others: Others) -> bool:
        if not load.more:
            return predicate(load, others)
        wrong = wrong_groups(load)
        rest = [other for other in others if other is not load]
        return bool(wrong) and all(
            predicate(load.of_group(number), [other.of_group(number) for other in rest]) for number in wrong
        )

    return holds


@in_each_group
def producer_was_wrong(load: RequestObservation, others: Others) -> bool:
    """GAP-1: P summed bytes that were wrong already, and D holds exactly those."""
    wrong = corrupted_grid(load)
    if load.checksummed is None or load.load_finished is None or not wrong:
        return False
    return all(load.load_finished.digest(p) == load.checksummed.digest(p) for p in wrong)


@in_each_group
def changed_after_verification(load: RequestObservation, others: Others) -> bool:
    """GAP-2: the right bytes arrived and were compared, others were read."""
    return not corrupted_grid(load) and bool(compared_positions(load) & set(foreign_positions(load)))


@in_each_group
def position_not_compared(load: RequestObservation, others: Others) -> bool:
    """GAP-4: every corrupted position is one that was not compared (a tail, a local prefix, outside the overlap)."""
    wrong = {*corrupted_positions(load), *foreign_positions(load)}
    return bool(wrong) and not compared_positions(load) & wrong


@in_each_group
def of_another_request(load: RequestObservation, others: Others) -> bool:
    """GAP-5: what D holds is, throughout, what P held of another request: parameters and checksums came together."""
    if load.load_finished is None or not corrupted_grid(load):
        return False
    return any(_holds(load.load_finished, other.kv_final) for other in others if other is not load)


def _holds(loaded: KVView, final: KVView | None) -> bool:
    return final is not None and not loaded.differing(final)


@in_each_group
def sums_collide(load: RequestObservation, others: Others) -> bool:
    """GAP-8, GAP-10, GAP-11: the definition gives equal sums for what P held and what D holds."""
    wrong = corrupted_grid(load)
    if load.kv_final is None or load.load_finished is None or not wrong:
        return False
    return all(load.kv_final.sum(p) == load.load_finished.sum(p) for p in wrong)


@in_each_group
def payload_was_altered(load: RequestObservation, others: Others) -> bool:
    """GAP-9: other checksums arrived than left, and what is corrupted is not compared any more."""
    return load.checksums_altered and position_not_compared(load, others)


@in_each_group
def never_sent(load: RequestObservation, others: Others) -> bool:
    """GAP-12: D computes over rows that P neither sent nor checksummed: no copy of them landed, none was compared."""
    wrong = {*corrupted_positions(load), *foreign_positions(load)}
    return position_not_compared(load, others) and not wrong & set(load.landed)


def skipped_on_both_sides(load: RequestObservation, others: Others) -> bool:
    """GAP-3: something is wrong only in groups that neither side checksums, while another group was compared."""
    judged = {group.group_id for group in load.groups}
    wrong = wrong_groups(load)
    return bool(wrong) and not wrong & judged and bool(compared_positions(load))


def served_unchecked(load: RequestObservation, others: Others) -> bool:
    """GAP-7, GAP-13: checksums are on, but nothing carried any for a load that was used: nobody looked at it.

    Also where the engine has turned its checksums off by itself (CAR-5).
    """
    unchecked = (NotCheckedReason.NO_CARRIER, NotCheckedReason.OFF)
    served = load.verdict is VerdictStatus.NOT_CHECKED and load.reason in unchecked
    return served and bool(corrupted_positions(load) or foreign_positions(load))


PREDICATES: dict[str, Predicate] = {
    "GAP-1": producer_was_wrong,
    "GAP-2": changed_after_verification,
    "GAP-3": skipped_on_both_sides,
    "GAP-4": position_not_compared,
    "GAP-5": of_another_request,
    "GAP-7": served_unchecked,
    "GAP-8": sums_collide,
    "GAP-9": payload_was_altered,
    "GAP-10": sums_collide,
    "GAP-11": sums_collide,
    "GAP-12": never_sent,
    "GAP-13": served_unchecked,
}


def holding_gaps(load: RequestObservation, others: Others) -> tuple[str, ...]:
    """The gaps whose predicate holds for a load."""
    return tuple(gap for gap, holds in PREDICATES.items() if holds(load, others))
