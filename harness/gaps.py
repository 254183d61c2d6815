"""Known gaps as predicates: what the checksums cannot see, decided from the oracles' bytes alone.

A load that is verified and yet corrupted must satisfy one of these, or it is a violation. Without that, "none
outside the known gaps" would mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from harness.observe import RequestObservation


def corrupted_grid(load: RequestObservation) -> tuple[int, ...]:
    """Grid positions where D's bytes, when the load finished, are not P's at KV final."""
    if load.kv_final is None or load.load_finished is None:
        return ()
    return load.load_finished.differing(load.kv_final)


def producer_was_wrong(load: RequestObservation) -> bool:
    """GAP-1: P summed bytes that were wrong already, and D holds exactly those."""
    if load.checksummed is None or load.load_finished is None:
        return False
    wrong = corrupted_grid(load)
    same = all(load.load_finished.digest(p) == load.checksummed.digest(p) for p in wrong)
    return bool(wrong) and same


def changed_after_verification(load: RequestObservation) -> bool:
    """GAP-2: the right bytes arrived, others were read."""
    if load.to_be_read is None or load.first_use is None or corrupted_grid(load):
        return False
    return bool(load.first_use.differing(load.to_be_read))


def position_not_compared(load: RequestObservation) -> bool:
    """GAP-4: every corrupted position is one that was not compared."""
    wrong = _block_positions(load)
    compared = {position for group in load.groups for position in group.compared}
    return bool(wrong) and not compared & set(wrong)


def sums_collide(load: RequestObservation) -> bool:
    """GAP-8, GAP-10, GAP-11: the definition gives equal sums for what P held and what D holds."""
    wrong = corrupted_grid(load)
    if load.kv_final is None or load.load_finished is None or not wrong:
        return False
    return all(load.kv_final.sum(p) == load.load_finished.sum(p) for p in wrong)


PREDICATES: dict[str, Callable[[RequestObservation], bool]] = {
    "GAP-1": producer_was_wrong,
    "GAP-2": changed_after_verification,
    "GAP-4": position_not_compared,
    "GAP-8": sums_collide,
    "GAP-10": sums_collide,
    "GAP-11": sums_collide,
}


def holding_gaps(load: RequestObservation) -> tuple[str, ...]:
    """The gaps whose predicate holds for a load."""
    return tuple(gap for gap, holds in PREDICATES.items() if holds(load))


def corrupted_positions(load: RequestObservation) -> tuple[int, ...]:
    """D's block positions with corrupted bytes when the load finished."""
    return _block_positions(load)


def _block_positions(load: RequestObservation) -> tuple[int, ...]:
    wrong = corrupted_grid(load)
    if load.load_finished is None or not wrong:
        return ()
    size = load.block_size // load.load_finished.grid
    return tuple(sorted({position // size for position in wrong}))
