"""The sentences of a run are true and grammatical for none, one and many, whatever was left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reports.summary import headline_lines, notes, reasons, standing_of
from reports.text import clip, counted, listed, ranges, visible
from scenarios.words import Policy, Result, Role, VerdictStatus

P, F, U, G, N = Result.PASS, Result.FAIL, Result.UNKNOWN, Result.KNOWN_GAP, Result.NOT_APPLICABLE


@pytest.mark.parametrize(
    ("results", "result", "text"),
    [
        ((), U, "EMPTY: No cell was run, so nothing was shown. An empty run is not a pass."),
        ((P,), P, "PASSED: The only cell came out as expected (1 pass)."),
        ((P, P), P, "PASSED: All 2 cells came out as expected (2 pass)."),
        ((P, N), P, "PASSED: The only cell that applies came out as expected (1 pass, 1 n/a)."),
        ((P, G, N), P, "PASSED: All 2 cells that apply came out as expected (1 pass, 1 known gap, 1 n/a)."),
        ((F, P), F, "FAILED: 1 of 2 cells failed."),
        ((F,), F, "FAILED: 1 of 1 cell failed."),
        ((F, F, U), F, "FAILED: 2 of 3 cells failed; 1 unknown."),
        ((U, P), U, "UNKNOWN: 1 of 2 cells is unknown: nothing was shown there."),
        ((U, U, P), U, "UNKNOWN: 2 of 3 cells are unknown: nothing was shown there."),
        ((G, N), U, "UNKNOWN: None of 2 cells passed (1 known gap, 1 n/a). Not a pass."),
    ],
)
def test_standing(build, results, result, text):
    run = build.run(*(build.cell(result=r, seed=i) for i, r in enumerate(results)))
    standing = standing_of(run)
    assert (standing.result, f"{standing.word}: {standing.sentence}") == (result, text)
    assert (standing.result is P) == (run.exit_code == 0)


@pytest.mark.parametrize(
    ("results", "result", "sentence"),
    [
        ((), U, "The run was stopped after 0 cells; what did not run is not judged."),
        ((P,), U, "The run was stopped after 1 cell; what did not run is not judged."),
        ((P, F, U), F, "The run was stopped after 3 cells: 1 failed and 1 unknown."),
    ],
)
def test_an_interrupted_run_never_stands_as_a_pass(build, results, result, sentence):
    cells = (build.cell(result=r, seed=i) for i, r in enumerate(results))
    standing = standing_of(build.run(*cells, interrupted=True))
    assert (standing.word, standing.result, standing.sentence) == ("INTERRUPTED", result, sentence)


def test_headline_of_a_run_as_expected(smoke):
    assert headline_lines(smoke) == (
        "Checksums off: 8 of 44 requests silently served corrupted KV.",
        "Fail-closed: 0 of 88 requests silently served corrupted KV outside the known gaps; "
        "4 inside them (GAP-1: 2, GAP-8: 2).",
    )


def test_headline_of_an_empty_run(build):
    assert headline_lines(build.run()) == ("Checksums off: not run.", "Fail-closed: not run.")
    assert notes(build.run()) == ()


def test_headline_says_which_policies_were_run(build):
    cell = build.cell(policy=Policy.FAIL_CLOSED_RECOMPUTE, loads=(build.load(),), faults=())
    off, closed = headline_lines(build.run(cell))
    assert off == "Checksums off: not run."
    assert closed == (
        "Fail-closed (recompute only): 0 of 1 request silently served corrupted KV outside the known gaps; "
        "none inside them."
    )


def test_headline_without_a_judged_request_claims_nothing(build):
    cells = (build.cell(policy=p, result=N, why=("no lever",)) for p in Policy)
    off, closed = headline_lines(build.run(*cells))
    assert off == "Checksums off: no request was judged."
    assert closed == "Fail-closed: no request was judged."


def test_notes_qualify_the_headline(build):
    caught = build.load(1, VerdictStatus.MISMATCH, faulted=True, corrupted=True)
    cells = [build.cell(policy=p, result=U, loads=(caught,)) for p in Policy]
    assert notes(build.run(*cells, interrupted=True)) == (
        "Fail-open: 1 of 1 request served corrupted KV: 1 logged as mismatch, 0 warned as unverified, 0 silent.",
        "Fail-closed also answered 2 requests from corrupted KV, or wrongly, although it had caught them.",
        "With checksums off, 1 cell is unknown and proves nothing either way.",
        "With fail-closed, 2 cells are unknown and prove nothing either way.",
        "The counts cover only the cells that finished.",
    )


def test_twins_alone_make_no_headline(build):
    run = build.run(*(build.cell(policy=p, role=Role.TWIN, loads=build.clean_loads(p)) for p in Policy))
    assert headline_lines(run) == ("Checksums off: not run.", "Fail-closed: not run.")


def test_a_problem_without_a_reason_is_said_to_have_none(build):
    assert reasons(build.cell(result=F)) == ("no reason was recorded",)
    assert reasons(replace(build.cell(result=F), violations=("leak",))) == ("violation: leak",)


def test_words_and_numbers():
    assert [counted(n, "cell") for n in (0, 1, 2)] == ["0 cells", "1 cell", "2 cells"]
    assert [listed(["a", "b", "c"][:n]) for n in range(4)] == ["", "a", "a and b", "a, b and c"]
    assert ranges((0, 1, 2, 5, 7, 8)) == "0-2, 5, 7-8"
    assert ranges(()) == "none"
    assert clip("abcdef", 3) == "abc... (3 more characters)"
    assert clip("abc", 3) == "abc"


def test_visible_leaves_text_and_shows_the_rest():
    assert visible("naïve 漢字 ✓ <b> \\n") == "naïve 漢字 ✓ <b> \\n"
    assert visible("a\x00b\nc\x1b[31m\u202e\ud800\uffff") == r"a\x00b\nc\x1b[31m\u202e\ud800\uffff"
