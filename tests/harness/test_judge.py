from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from faults.base import Evidence
from harness.judge import judge, judge_repeat
from harness.observe import CellObservation, KVView, RequestObservation
from reports.results import CellResult
from scenarios.words import Outcome, Policy, Result, Role, Tokens, Truth

Load = Callable[..., RequestObservation]
Cell = Callable[..., CellObservation]
View = Callable[..., KVView]
EVIDENCE = Evidence("bit_flip", "consumer.load_finished", "r2", "bit 1", "aa", "bb")


@pytest.fixture
def caught(load_of: Load, view_of: View) -> Callable[..., RequestObservation]:
    """Load 2 as the small scenario wants it: corrupted and seen, served all the same. With changes."""

    def make(**changes: Any) -> RequestObservation:
        return load_of(2, **({"verdict": "mismatch", "load_finished": view_of("a X c"), "foreign": (17,)} | changes))

    return make


@pytest.fixture
def missed(caught: Load, view_of: View) -> Callable[..., RequestObservation]:
    """Load 2, verified although block 1 is corrupted: its sum is the right one."""

    def make(**changes: Any) -> RequestObservation:
        return caught(**({"verdict": "verified", "load_finished": view_of("a X c", "a b c")} | changes))

    return make


GAP = {
    "known_gap": "GAP-8",
    "policies": ["fail_open"],
    "expect": {"fail_open": {"verdict": "verified", "outcome": "served", "truth": "corrupted"}},
}


def test_everything_as_expected_is_a_pass(cell_of: Cell, load_of: Load, caught: Load) -> None:
    result = judge(cell_of(load_of(), caught(), evidence=(EVIDENCE,), twin="twin-1"), "kvchaos run x")
    assert (result.result, result.why, result.violations) == (Result.PASS, (), ())
    assert (result.scenario, result.policy, result.role, result.seed) == ("flip", Policy.FAIL_OPEN, Role.FAULT, 1)
    assert (result.rerun, result.twin, result.evidence) == ("kvchaos run x", "twin-1", (EVIDENCE,))
    assert [load.faulted for load in result.loads] == [False, True]
    assert result.loads[1].corrupted_positions == (1,)


def test_judging_is_pure(cell_of: Cell, load_of: Load, caught: Load) -> None:
    cell = cell_of(load_of(), caught())
    before = copy.deepcopy(cell)
    assert judge(cell, "x") == judge(cell, "x")
    assert cell == before


# ---- deviations


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"verdict": "verified", "load_finished": "a b c"}, "verdict is verified, expected mismatch"),
        ({"outcome": Outcome.FAILED, "error": "no", "tokens": ()}, "outcome is failed (no), expected served"),
        ({"outcome": Outcome.RECOMPUTED}, "outcome is recomputed, expected served"),
        ({"outcome": Outcome.ABORTED, "tokens": ()}, "outcome is aborted, expected served"),
        ({"outcome": Outcome.HUNG, "error": "late", "tokens": ()}, "outcome is hung (late), expected served"),
        ({"outcome": Outcome.CRASHED, "error": "K", "tokens": ()}, "outcome is crashed (K), expected served"),
        ({"outcome": Outcome.REFUSED, "error": "K", "tokens": ()}, "outcome is refused (K), expected served"),
        ({"load_finished": "a b c", "foreign": ()}, "truth is intact, expected corrupted"),
        ({"load_finished": None, "foreign": None}, "truth is none, expected corrupted"),
    ],
)
def test_whatever_deviates_is_said(
    cell_of: Cell, load_of: Load, caught: Load, view_of: View, changes: dict[str, Any], why: str
) -> None:
    if isinstance(changes.get("load_finished"), str):
        changes = changes | {"load_finished": view_of(changes["load_finished"])}
    result = judge(cell_of(load_of(), caught(**changes)), "")
    assert result.result is Result.FAIL
    assert f"r2 (load 2): {why}" in result.why


def test_every_deviation_has_its_line(cell_of: Cell, load_of: Load, caught: Load) -> None:
    expect = {"verdict": "unverified", "reason": "invalid", "outcome": "failed", "truth": "intact", "tokens": "none"}
    off = expect | {"verdict": "not_checked", "reason": "off"}
    cell = cell_of(load_of(), caught(), scenario={"expect": {"off": off, "fail_open": expect}})
    assert judge(cell, "").why == (
        "r2 (load 2): verdict is mismatch, expected unverified",
        "r2 (load 2): reason is None, expected invalid",
        "r2 (load 2): outcome is served, expected failed",
        "r2 (load 2): truth is corrupted, expected intact",
        "r2 (load 2): tokens is right, expected none",
    )


def test_what_is_not_said_is_not_judged(cell_of: Cell, load_of: Load, caught: Load) -> None:
    expect = {policy: {"verdict": "not_checked" if policy == "off" else "mismatch"} for policy in ("off", "fail_open")}
    cell = cell_of(load_of(), caught(outcome=Outcome.ABORTED, tokens=()), scenario={"expect": expect})
    assert judge(cell, "").result is Result.PASS


def test_a_wrong_answer_from_corrupted_kv_is_no_violation(cell_of: Cell, load_of: Load, caught: Load) -> None:
    """Only `tokens` says whether the answer must be right."""
    assert judge(cell_of(load_of(), caught(tokens=(9, 9, 9))), "").result is Result.PASS


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"verdict": "mismatch"}, "verdict is mismatch, expected verified"),
        ({"outcome": Outcome.FAILED, "tokens": ()}, "outcome is failed, expected served"),
        ({"load_finished": "a b X", "verdict": "mismatch"}, "truth is corrupted, expected intact"),
        ({"tokens": (5, 6)}, "tokens is wrong, expected right"),
    ],
)
def test_the_other_requests_must_be_as_in_a_clean_run(
    cell_of: Cell, load_of: Load, caught: Load, view_of: View, changes: dict[str, Any], why: str
) -> None:
    if "load_finished" in changes:
        changes = changes | {"load_finished": view_of(changes["load_finished"])}
    result = judge(cell_of(load_of(**changes), caught()), "")
    assert result.result is Result.FAIL
    assert f"r1 (load 1): {why}" in result.why


def test_others_judges_the_other_requests(cell_of: Cell, load_of: Load, caught: Load) -> None:
    others = {"fail_open": {"verdict": "unverified", "outcome": "served"}}
    served = cell_of(load_of(verdict="unverified"), caught(), scenario={"others": others})
    assert judge(served, "").result is Result.PASS
    assert judge(cell_of(load_of(), caught(), scenario={"others": others}), "").result is Result.FAIL


def test_without_a_fault_expect_judges_every_request(cell_of: Cell, load_of: Load, clean: dict[str, Any]) -> None:
    assert judge(cell_of(load_of(), load_of(2), scenario=clean), "").result is Result.PASS
    result = judge(cell_of(load_of(), load_of(2, verdict="unverified"), scenario=clean), "")
    assert result.why == ("r2 (load 2): verdict is unverified, expected verified",)
    assert result.others is None


# ---- unknown, not applicable


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"undone": ("bit_flip on r2",)}, "no evidence that bit_flip on r2 happened"),
        ({"problems": ("a checker crashed: X",)}, "a checker crashed: X"),
        ({"problems": ("the history has no end: the run was interrupted",)}, "the history has no end"),
    ],
)
def test_what_cannot_be_decided_is_unknown_even_if_all_is_as_expected(
    cell_of: Cell, load_of: Load, caught: Load, changes: dict[str, Any], why: str
) -> None:
    result = judge(cell_of(load_of(), caught(), **changes), "")
    assert result.result is Result.UNKNOWN
    assert result.why[0].startswith(why)


def test_an_unknown_cell_still_says_what_deviates(cell_of: Cell, load_of: Load, caught: Load) -> None:
    result = judge(cell_of(load_of(), caught(outcome=Outcome.HUNG, error="late"), undone=("x on r2",)), "")
    assert result.result is Result.UNKNOWN
    assert result.why == (
        "no evidence that x on r2 happened",
        "r2 (load 2): outcome is hung (late), expected served",
    )


def test_nothing_observed_is_no_pass(cell_of: Cell) -> None:
    result = judge(cell_of(), "")
    assert (result.result, result.why) == (Result.UNKNOWN, ("no request was observed",))


def test_what_the_target_lacks_makes_it_not_applicable(cell_of: Cell) -> None:
    result = judge(cell_of(missing=("kv_checksums", "lever.clock"), policy="off"), "")
    assert result.result is Result.NOT_APPLICABLE
    assert result.why == ("sim with policy off has no kv_checksums, lever.clock",)


# ---- known gaps


def test_a_gap_that_holds_is_a_known_gap(cell_of: Cell, load_of: Load, missed: Load) -> None:
    result = judge(cell_of(load_of(), missed(), scenario=GAP), "")
    assert (result.result, result.known_gap, result.why, result.violations) == (Result.KNOWN_GAP, "GAP-8", (), ())


def test_a_gap_that_is_detected_now_fails(cell_of: Cell, load_of: Load, missed: Load) -> None:
    """Until somebody tightens the expectation."""
    result = judge(cell_of(load_of(), missed(verdict="mismatch"), scenario=GAP), "")
    assert result.result is Result.FAIL
    assert result.why == ("r2 (load 2): verdict is mismatch, expected verified",)


def test_a_gap_whose_predicate_is_false_fails(cell_of: Cell, load_of: Load, missed: Load) -> None:
    result = judge(cell_of(load_of(), missed(), scenario=GAP | {"known_gap": "GAP-1"}), "")
    assert result.result is Result.FAIL
    assert result.why == (
        "r2 (load 2): GAP-1 is named as the known gap, but does not explain this",
        "unexplained_verified: r2 is verified and corrupted; it looks like GAP-8, GAP-10, GAP-11, "
        "which the scenario does not name",
    )
    assert len(result.violations) == 1


def test_a_gap_that_nobody_can_recognise_fails(cell_of: Cell, load_of: Load, missed: Load) -> None:
    result = judge(cell_of(load_of(), missed(), scenario=GAP | {"known_gap": "GAP-6"}), "")
    assert result.result is Result.FAIL
    assert "GAP-6 is named as the known gap, but this version cannot recognise it" in result.why[0]


def test_without_checksums_there_is_no_gap(cell_of: Cell, load_of: Load, caught: Load) -> None:
    scenario = {"known_gap": "GAP-8"}
    faulted = caught(verdict="not_checked", reason="off")
    clean = load_of(verdict="not_checked", reason="off")
    result = judge(cell_of(clean, faulted, policy="off", scenario=scenario), "")
    assert (result.result, result.known_gap) == (Result.PASS, None)


def test_a_known_gap_does_not_excuse_the_other_requests(cell_of: Cell, load_of: Load, missed: Load) -> None:
    result = judge(cell_of(load_of(tokens=(1,)), missed(), scenario=GAP), "")
    assert result.result is Result.FAIL
    assert "r1 (load 1): tokens is wrong, expected right" in result.why


# ---- violations


def test_verified_and_corrupted_without_a_gap_is_a_violation_whatever_is_expected(
    cell_of: Cell, load_of: Load, caught: Load
) -> None:
    expect = {"expect": {"off": {"verdict": "not_checked"}, "fail_open": {"verdict": "verified", "truth": "corrupted"}}}
    result = judge(cell_of(load_of(), caught(verdict="verified", foreign=()), scenario=expect), "")
    assert result.result is Result.FAIL
    assert len(result.violations) == 1
    assert result.violations[0].startswith("unexplained_verified: r2")
    assert result.why == result.violations


def test_wrong_tokens_from_intact_reads_are_a_violation_whatever_is_expected(
    cell_of: Cell, load_of: Load, caught: Load
) -> None:
    result = judge(cell_of(load_of(), caught(foreign=(), tokens=(1, 2, 3))), "")
    assert result.result is Result.FAIL
    assert len(result.violations) == 1
    assert result.violations[0].startswith("unexplained_tokens: r2")


def test_a_prompt_that_was_recomputed_must_read_nothing_of_the_load(cell_of: Cell, load_of: Load, caught: Load) -> None:
    result = judge(cell_of(load_of(), caught(outcome=Outcome.RECOMPUTED, foreign=(3,))), "")
    assert result.result is Result.FAIL
    assert [violation.partition(":")[0] for violation in result.violations] == ["stale_recompute"]
    clean = judge(cell_of(load_of(), caught(outcome=Outcome.RECOMPUTED, foreign=())), "")
    assert clean.violations == ()


@pytest.mark.parametrize(
    "violation",
    [
        "leak: 2 of 63 blocks of the producer never came back",
        "double_free: x",
        "two_terminal_states: r1",
        "no_progress: y",
    ],
)
def test_a_violation_fails_a_cell_that_is_otherwise_as_expected(
    cell_of: Cell, load_of: Load, caught: Load, violation: str
) -> None:
    result = judge(cell_of(load_of(), caught(), violations=(violation,)), "")
    assert (result.result, result.why, result.violations) == (Result.FAIL, (violation,), (violation,))


def test_a_violation_of_a_known_gap_fails_it(cell_of: Cell, load_of: Load, missed: Load) -> None:
    assert judge(cell_of(load_of(), missed(), scenario=GAP, violations=("leak: x",)), "").result is Result.FAIL


# ---- truth


@pytest.mark.parametrize(
    ("changes", "delivered", "read", "truth"),
    [
        ({}, Truth.INTACT, Truth.INTACT, Truth.INTACT),
        ({"finished": "a X c"}, Truth.CORRUPTED, Truth.INTACT, Truth.CORRUPTED),
        ({"foreign": (17,)}, Truth.INTACT, Truth.CORRUPTED, Truth.CORRUPTED),
        ({"foreign": None}, Truth.INTACT, Truth.NONE, Truth.INTACT),
        ({"load_finished": None, "foreign": None}, Truth.NONE, Truth.NONE, Truth.NONE),
        ({"kv_final": None, "foreign": None}, Truth.NONE, Truth.NONE, Truth.NONE),
        ({"provenance": False}, Truth.INTACT, Truth.INTACT, Truth.INTACT),
        ({"provenance": False, "used": "a X c-"}, Truth.INTACT, Truth.CORRUPTED, Truth.CORRUPTED),
        ({"provenance": False, "used": "a b c-", "foreign": (3,)}, Truth.INTACT, Truth.INTACT, Truth.INTACT),
        ({"provenance": False, "first_use": None}, Truth.INTACT, Truth.NONE, Truth.INTACT),
    ],
)
def test_the_three_truths_do_not_depend_on_each_other(
    cell_of: Cell, load_of: Load, view_of: View, changes: dict[str, Any], delivered: Truth, read: Truth, truth: Truth
) -> None:
    names = {"finished": "load_finished", "used": "first_use"}
    fields = {names.get(key, key): view_of(value) if key in names else value for key, value in changes.items()}
    provenance = fields.pop("provenance", True)
    (load,) = judge(cell_of(load_of(**fields), provenance=provenance), "").loads
    assert (load.delivered, load.read, load.truth, load.tokens) == (delivered, read, truth, Tokens.RIGHT)


@pytest.mark.parametrize(
    ("outcome", "tokens", "found"),
    [
        (Outcome.SERVED, (5, 6, 7), Tokens.RIGHT),
        (Outcome.SERVED, (5, 6), Tokens.WRONG),
        (Outcome.SERVED, (), Tokens.WRONG),
        (Outcome.RECOMPUTED, (5, 6, 8), Tokens.WRONG),
        (Outcome.FAILED, (5, 6, 7), Tokens.NONE),
        (Outcome.HUNG, (), Tokens.NONE),
    ],
)
def test_tokens_count_where_there_is_an_answer(
    cell_of: Cell, load_of: Load, outcome: Outcome, tokens: Any, found: Tokens
) -> None:
    (load,) = judge(cell_of(load_of(outcome=outcome, tokens=tokens)), "").loads
    assert load.tokens is found
    assert (load.tokens_got, load.tokens_wanted) == (tokens, (5, 6, 7))


# ---- repeats


def test_a_repeat_must_have_the_same_history(cell_of: Cell, load_of: Load, caught: Load) -> None:
    passed = judge(cell_of(load_of(), caught(), repeats="flip--fail_open"), "")
    first: list[dict[str, Any]] = [{"event": "cell", "id": "a"}, {"event": "x", "n": 1}, {"event": "end"}]
    again = [{"event": "cell", "id": "a--repeat"}, *first[1:]]
    assert judge_repeat(passed, first, again) == passed
    for other, line in (
        ([again[0], {"event": "x", "n": 2}, again[2]], 2),
        (again[:2], 3),
        ([*again, {"event": "y"}], 4),
        ([again[0], again[2], again[1]], 2),
    ):
        result: CellResult = judge_repeat(passed, first, other)
        assert result.result is Result.FAIL
        assert result.why == (f"not reproducible: line {line} of its history is not that of the first time",)


def test_a_repeat_of_nothing_is_unknown(cell_of: Cell, load_of: Load, caught: Load) -> None:
    passed = judge(cell_of(load_of(), caught()), "")
    assert judge_repeat(passed, None, []).result is Result.UNKNOWN
