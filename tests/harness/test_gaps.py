"""Each predicate on views by hand: three blocks of 16 tokens, 45 of them prompt, named by what is in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from engine.checksum.verdict import VerdictStatus
from harness.gaps import (
    PREDICATES,
    corrupted_grid,
    corrupted_positions,
    foreign_positions,
    holding_gaps,
    wrong_groups,
)
from harness.observe import GroupObservation, KVView, RequestObservation

Make = Callable[..., RequestObservation]
View = Callable[..., KVView]


def holds(gap: str, load: RequestObservation, *others: RequestObservation) -> bool:
    return PREDICATES[gap](load, [load, *others])


def in_second_group(**views: Any) -> GroupObservation:
    fields: dict[str, Any] = {
        "group_id": 1,
        "block_size": 16,
        **dict.fromkeys(("kv_final", "checksummed", "load_finished", "to_be_read", "first_use")),
        "foreign": (),
        "landed": (),
    }
    return GroupObservation(**(fields | views))


def test_gap_3_is_a_group_that_neither_side_checks_beside_one_that_was_compared(load_of: Make, view_of: View) -> None:
    other = in_second_group(kv_final=view_of("p q r"), load_finished=view_of("p X r"))
    load = load_of(more=(other,))
    assert corrupted_positions(load) == (1,)
    assert holding_gaps(load, [load]) == ("GAP-3", "GAP-4", "GAP-12")
    assert not holds("GAP-3", load_of(more=(in_second_group(),))), "nothing is wrong"
    judged = replace(load, groups=(*load.groups, replace(load.groups[0], group_id=1)))
    assert not holds("GAP-3", judged), "it was compared"
    assert not holds("GAP-3", load_of(more=(other,), load_finished=view_of("a X c"))), "the first group is wrong too"
    assert not holds("GAP-3", load_of(more=(other,), verdict="not_checked")), "no group was compared"


def test_a_gap_must_explain_every_group_in_which_something_is_wrong(load_of: Make, view_of: View) -> None:
    same_sum = in_second_group(kv_final=view_of("p q", sums="1 2"), load_finished=view_of("p X", sums="1 2"))
    other_sum = in_second_group(kv_final=view_of("p q", sums="1 2"), load_finished=view_of("p X", sums="1 3"))
    assert holds("GAP-8", load_of(more=(same_sum,)))
    assert not holds("GAP-8", load_of(more=(other_sum,)))
    both = {"kv_final": view_of("a b c", sums="1 2 3"), "load_finished": view_of("a X c", sums="1 2 3")}
    assert holds("GAP-8", load_of(more=(same_sum,), **both))
    assert not holds("GAP-8", load_of(more=(other_sum,), **both))


def test_what_a_request_writes_after_a_foreign_read_is_no_wrong_of_its_own(load_of: Make) -> None:
    """It is tainted in every group: only what it received counts, where there is any."""
    load = load_of(foreign=(44,), more=(in_second_group(foreign=(17, 44)),))
    assert wrong_groups(load) == {1}
    assert wrong_groups(load_of(foreign=(44,), more=(in_second_group(),))) == {0}


def test_a_clean_load_has_no_gap(load_of: Make) -> None:
    load = load_of()
    assert corrupted_grid(load) == corrupted_positions(load) == foreign_positions(load) == ()
    assert holding_gaps(load, [load, load_of(2)]) == ()


@pytest.mark.parametrize("missing", ["kv_final", "load_finished"])
def test_what_was_not_seen_is_not_corrupted(load_of: Make, view_of: View, missing: str) -> None:
    load = load_of(load_finished=view_of("a X c"))
    assert corrupted_grid(load) == (1,)
    unseen = load_of(**{"load_finished": view_of("a X c"), missing: None})
    assert corrupted_grid(unseen) == ()
    assert holding_gaps(unseen, [unseen]) == ()


def test_grid_positions_become_positions_of_the_consumers_blocks(load_of: Make, view_of: View) -> None:
    """P has blocks of 8, D of 32: four grid positions a block."""
    final = view_of("a b c d e f g h", grid=8)
    load = load_of(block_size=32, kv_final=final, load_finished=view_of("a b c d X f Y h", grid=8))
    assert corrupted_grid(load) == (4, 6)
    assert corrupted_positions(load) == (1,)


def test_a_position_that_p_did_not_have_is_corrupted(load_of: Make, view_of: View) -> None:
    assert corrupted_grid(load_of(kv_final=view_of("a b"))) == (2,)


@pytest.mark.parametrize(
    ("foreign", "first_use", "positions"),
    [
        ((3, 17, 18), "a b c-", (0, 1)),
        ((), "a X c-", ()),
        (None, "a X Y", (1, 2)),
        (None, "a b c-", ()),
    ],
)
def test_who_watched_the_reads_knows_better_than_the_bytes(
    load_of: Make, view_of: View, foreign: Any, first_use: str, positions: tuple[int, ...]
) -> None:
    assert foreign_positions(load_of(foreign=foreign, first_use=view_of(first_use))) == positions


# ---- GAP-1: P was wrong before it summed


@pytest.mark.req("GAP-1")
@pytest.mark.parametrize(
    ("final", "checksummed", "finished", "found"),
    [
        ("a b c", "a X c", "a X c", True),
        ("a b c", "X Y Z", "X Y Z", True),
        ("a b c", "a X c", "a Y c", False),  # changed on the way as well
        ("a b c", "a X c", "Y X c", False),  # another block changed on the way
        ("a b c", "a b c", "a X c", False),
        ("a b c", "a X c", "a b c", False),
    ],
)
def test_gap_1(load_of: Make, view_of: View, final: str, checksummed: str, finished: str, found: bool) -> None:
    load = load_of(kv_final=view_of(final), checksummed=view_of(checksummed), load_finished=view_of(finished))
    assert holds("GAP-1", load) is found


def test_gap_1_needs_to_have_seen_what_was_summed(load_of: Make, view_of: View) -> None:
    assert not holds("GAP-1", load_of(checksummed=None, load_finished=view_of("a X c")))


# ---- GAP-2: written after it was verified


@pytest.mark.req("GAP-2")
@pytest.mark.parametrize(
    ("finished", "foreign", "compared", "found"),
    [
        ("a b c", (17,), (0, 1, 2), True),
        ("a b c", (), (0, 1, 2), False),
        ("a X c", (17,), (0, 1, 2), False),  # it arrived wrong
        ("a b c", (17,), (0, 2), False),  # nobody compared that block
        ("a b c", (17,), (), False),
    ],
)
def test_gap_2(load_of: Make, view_of: View, finished: str, foreign: Any, compared: Any, found: bool) -> None:
    assert holds("GAP-2", load_of(load_finished=view_of(finished), foreign=foreign, compared=compared)) is found


def test_gap_2_by_bytes_where_nobody_watched_the_reads(load_of: Make, view_of: View) -> None:
    assert holds("GAP-2", load_of(foreign=None, first_use=view_of("a X c-")))
    assert not holds("GAP-2", load_of(foreign=None))


# ---- GAP-4 and what builds on it: not compared


@pytest.mark.req("GAP-4")
@pytest.mark.parametrize(
    ("finished", "foreign", "compared", "found"),
    [
        ("a b X", (), (0, 1), True),
        ("a b X", (40,), (0, 1), True),
        ("a b c", (40,), (0, 1), True),
        ("a X Y", (), (0, 1), False),  # one of them was compared
        ("a b X", (3,), (0, 1), False),
        ("a b X", (), (0, 1, 2), False),
        ("a b c", (), (0, 1), False),
    ],
)
def test_gap_4(load_of: Make, view_of: View, finished: str, foreign: Any, compared: Any, found: bool) -> None:
    assert holds("GAP-4", load_of(load_finished=view_of(finished), foreign=foreign, compared=compared)) is found


@pytest.mark.req("GAP-9")
@pytest.mark.parametrize(("altered", "compared", "found"), [(True, (0, 1), True), (False, (0, 1), False)])
def test_gap_9_needs_altered_checksums(load_of: Make, view_of: View, altered: bool, compared: Any, found: bool) -> None:
    load = load_of(load_finished=view_of("a b X"), compared=compared, checksums_altered=altered)
    assert holds("GAP-9", load) is found


def test_gap_9_does_not_explain_a_block_that_was_compared(load_of: Make, view_of: View) -> None:
    assert not holds("GAP-9", load_of(load_finished=view_of("a b X"), checksums_altered=True))


@pytest.mark.req("GAP-12")
@pytest.mark.parametrize(
    ("landed", "compared", "found"),
    [((0, 1), (0, 1), True), ((0, 1, 2), (0, 1), False), ((0, 1), (0, 1, 2), False), ((), (0, 1), True)],
)
def test_gap_12(load_of: Make, view_of: View, landed: Any, compared: Any, found: bool) -> None:
    load = load_of(load_finished=view_of("a b X"), landed=landed, compared=compared)
    assert holds("GAP-12", load) is found


# ---- GAP-7, GAP-13: nobody looked


@pytest.mark.req("GAP-7", "GAP-13")
@pytest.mark.parametrize("gap", ["GAP-7", "GAP-13"])
@pytest.mark.parametrize(
    ("verdict", "reason", "finished", "found"),
    [
        (VerdictStatus.NOT_CHECKED, "no_carrier", "a X c", True),
        (VerdictStatus.NOT_CHECKED, "off", "a X c", True),
        (VerdictStatus.NOT_CHECKED, "no_carrier", "a b c", False),
        (VerdictStatus.NOT_CHECKED, "load_failed", "a X c", False),
        (VerdictStatus.VERIFIED, None, "a X c", False),
        (VerdictStatus.UNVERIFIED, "no_checksums", "a X c", False),
    ],
)
def test_gap_7_and_13(
    load_of: Make, view_of: View, gap: str, verdict: VerdictStatus, reason: Any, finished: str, found: bool
) -> None:
    load = load_of(verdict=verdict, reason=reason, load_finished=view_of(finished))
    assert holds(gap, load) is found


# ---- GAP-5: another request's parameters


@pytest.mark.req("GAP-5")
@pytest.mark.parametrize(
    ("finished", "found"),
    [("d e f", True), ("d e", True), ("d e c", False), ("a b c", False)],
)
def test_gap_5(load_of: Make, view_of: View, finished: str, found: bool) -> None:
    other = load_of(2, kv_final=view_of("d e f"))
    assert holds("GAP-5", load_of(load_finished=view_of(finished)), other) is found


def test_gap_5_is_not_its_own_kv_and_not_of_nobody(load_of: Make, view_of: View) -> None:
    load = load_of(load_finished=view_of("d e f"))
    assert not holds("GAP-5", load, load_of(2), load_of(3, kv_final=None))


# ---- GAP-8, GAP-10, GAP-11: the sums agree


@pytest.mark.req("GAP-8", "GAP-10", "GAP-11")
@pytest.mark.parametrize("gap", ["GAP-8", "GAP-10", "GAP-11"])
@pytest.mark.parametrize(
    ("finished", "sums", "found"),
    [
        ("a X c", "a b c", True),
        ("X Y c", "a b c", True),
        ("a X c", "a X c", False),
        ("X Y c", "a X c", False),  # one of the two is seen
        ("a b c", "a b c", False),
        ("a X c", "X b c", True),  # a block that is right need not even have the right sum
    ],
)
def test_gaps_of_sums(load_of: Make, view_of: View, gap: str, finished: str, sums: str, found: bool) -> None:
    load = load_of(kv_final=view_of("a b c", "a b c"), load_finished=view_of(finished, sums))
    assert holds(gap, load) is found


def test_a_load_behind_a_local_prefix_is_compared_at_its_own_positions(load_of: Make, view_of: View) -> None:
    load = load_of(
        kv_final=view_of("a b c d", "1 2 3 4"), load_finished=view_of("c X", "3 4", start=2), compared=(2, 3)
    )
    assert corrupted_positions(load) == (3,)
    assert holding_gaps(load, [load]) == ("GAP-8", "GAP-10", "GAP-11")


def test_every_gap_that_holds_is_named(load_of: Make, view_of: View) -> None:
    load = load_of(
        load_finished=view_of("a b X", "a b c"), checksummed=view_of("a b X"), compared=(0, 1), landed=(0, 1)
    )
    assert holding_gaps(load, [load]) == ("GAP-1", "GAP-4", "GAP-8", "GAP-10", "GAP-11", "GAP-12")
