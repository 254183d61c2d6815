"""The map of blocks says of each what was compared, what differs, and what nobody saw."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reports.blocks import MAX_SQUARES, block_rows, meanings
from reports.results import GroupCoverage
from scenarios.words import Truth, VerdictStatus


def rows(build, load):
    return block_rows(build.cell(loads=(load,)))


def coverage(group=0, *, loaded=range(6), compared=(), differing=(), status=VerdictStatus.VERIFIED):
    not_compared = tuple(p for p in loaded if p not in compared)
    return GroupCoverage(group, status, None, tuple(loaded), tuple(compared), not_compared, tuple(differing))


def squares(row):
    return "".join(row.squares)


@pytest.mark.parametrize(
    ("compared", "differing", "corrupted", "shown", "words"),
    [
        (range(6), (), (), "eeeeee", "compared and equal: 0-5"),
        (range(6), (4, 5), (4, 5), "eeeedd", "differing: 4-5; compared and equal: 0-3"),
        (range(6), (4,), (), "eeeefe", "false mismatch: 4; compared and equal: 0-3, 5"),
        (range(6), (), (2,), "eemeee", "corrupted and not seen: 2; compared and equal: 0-1, 3-5"),
        (range(3), (), (5,), "eeennm", "corrupted and not seen: 5; not compared: 3-4; compared and equal: 0-2"),
        ((), (), (), "nnnnnn", "not compared: 0-5"),
    ],
)
def test_each_square_says_one_thing(build, compared, differing, corrupted, shown, words):
    group = coverage(compared=compared, differing=differing)
    load = replace(build.load(), groups=(group,), corrupted_positions=corrupted)
    (row,) = rows(build, load)
    assert (squares(row), row.words, row.group, row.left) == (shown, words, None, 0)
    assert {square for square, _ in meanings([row])} == set(shown)


def test_a_difference_is_no_false_mismatch_where_the_truth_is_not_known(build):
    load = replace(build.load(), groups=(coverage(compared=range(6), differing=(1,)),), delivered=Truth.NONE)
    assert squares(rows(build, load)[0]) == "edeeee"


def test_a_row_a_group(build):
    """Group 1 saw the damage at position 1; nobody saw the one at 4."""
    groups = (coverage(0, compared=range(6)), coverage(1, loaded=range(3), compared=range(3), differing=(1,)))
    load = replace(build.load(), groups=groups, corrupted_positions=(1, 4))
    assert [(row.group, squares(row)) for row in rows(build, load)] == [("0", "eeeeme"), ("1", "ede")]


def test_without_a_comparison_only_known_corruption_is_shown(build):
    off = replace(build.load(verdict=VerdictStatus.NOT_CHECKED, reason="off"), corrupted_positions=(6, 7))
    (row,) = rows(build, off)
    assert (squares(row), row.status, row.words) == ("mm", "not_checked (off)", "corrupted and not seen: 6-7")
    assert rows(build, replace(off, corrupted_positions=())) == ()


def test_a_long_row_is_cut_and_its_words_are_not(build):
    positions = range(MAX_SQUARES + 9)
    load = replace(build.load(), groups=(coverage(loaded=positions, compared=positions),), corrupted_positions=())
    (row,) = rows(build, load)
    assert (len(row.squares), row.left) == (MAX_SQUARES, 9)
    assert row.words == f"compared and equal: 0-{MAX_SQUARES + 8}"
