"""The matrix shows the worst of each place, and every cell of the roles asked for exactly once."""

from __future__ import annotations

import pytest

from reports.matrix import by_fault, policies_of, rows_of
from scenarios.words import Policy, Result, Role, VerdictStatus

P, F, U, G, N = Result.PASS, Result.FAIL, Result.UNKNOWN, Result.KNOWN_GAP, Result.NOT_APPLICABLE


def test_every_fault_cell_has_one_place(troubled):
    placed = [cell.id for row in rows_of(troubled) for spot in row.spots.values() for cell in spot.cells]
    assert sorted(placed) == sorted(cell.id for cell in troubled.cells if cell.role is Role.FAULT)
    assert policies_of(troubled) == tuple(Policy)


@pytest.mark.parametrize(
    ("results", "worst", "word"),
    [
        ((P,), P, "pass"),
        ((P, P), P, "pass 2 of 2"),
        ((P, F, U), F, "FAIL 1 of 3"),
        ((P, U, G), U, "unknown 1 of 3"),
        ((P, G), G, "GAP-8 1 of 2"),
        ((N, P), P, "pass 1 of 2"),
        ((N,), N, "n/a"),
    ],
)
def test_a_place_with_several_seeds_shows_the_worst(build, results, worst, word):
    cells = [build.cell(result=r, seed=i, known_gap="GAP-8" if r is G else None) for i, r in enumerate(results)]
    (row,) = rows_of(build.run(*cells))
    assert (row.spots[Policy.OFF].result, row.spots[Policy.OFF].word) == (worst, word)


def test_topologies_are_rows_of_their_own_and_named_only_then(build):
    one = rows_of(build.run(build.cell(topology="a")))
    two = rows_of(build.run(build.cell(topology="a"), build.cell(topology="b")))
    assert [row.label for row in one] == ["bit-flip-before-verify"]
    assert [row.label for row in two] == ["bit-flip-before-verify (a)", "bit-flip-before-verify (b)"]


def test_rows_with_the_same_fault_stand_together(smoke):
    groups = by_fault(rows_of(smoke))
    assert [fault for fault, _ in groups][:3] == ["no fault", "bit_flip", "early_reuse"]
    assert [row.scenario for row in groups[1][1]] == ["bit-flip-before-verify", "double-sign-flip", "double-bit-63"]


def test_warned_is_not_called_silent_under_fail_open_only(build):
    lost = build.load(1, VerdictStatus.UNVERIFIED, faulted=True, corrupted=True)
    cells = [build.cell(policy=p, loads=(lost,)) for p in (Policy.FAIL_OPEN, Policy.FAIL_CLOSED_FAIL)]
    (row,) = rows_of(build.run(*cells))
    assert row.spots[Policy.FAIL_OPEN].flags == ("warned",)
    assert row.spots[Policy.FAIL_CLOSED_FAIL].flags == ("silent",)
