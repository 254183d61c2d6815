"""results.json is evidence: what is read back is what was written, or an error that names the place."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import KVChaosError
from reports.errors import BrokenResultsError, ReportError
from reports.results import CellResult, LoadResult, RunResult, from_json, read_results, to_json, write_results
from scenarios.words import Outcome, Policy, Result, Role, Tokens, Truth, VerdictStatus

ANY_TEXT = st.text(st.characters(), max_size=8) | st.sampled_from(["\x00", "\ud800", "é\u202e", "</script>"])
LOADS = st.lists(st.builds(LoadResult, request_id=ANY_TEXT, groups=st.just(())), max_size=2).map(tuple)
CELLS = st.lists(st.builds(CellResult, id=ANY_TEXT, loads=LOADS), max_size=2).map(tuple)
RUNS = st.builds(RunResult, name=ANY_TEXT, cells=CELLS)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(RUNS)
def test_a_run_survives_json(run):
    assert from_json(RunResult, json.loads(json.dumps(to_json(run)))) == run


def test_a_file_reads_back_as_what_was_written(tmp_path, troubled):
    path = tmp_path / "results.json"
    write_results(path, troubled)
    assert read_results(path) == troubled
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]


def test_to_json_holds_plain_values_only(troubled):
    def check(value):
        assert type(value) in (dict, list, str, int, bool, type(None))
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            check(inner)

    check(to_json(troubled))


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        (("cells", 0, "loads", 1, "verdict"), "verifed", r"cells\[0\]\.loads\[1\]\.verdict.*verified, mismatch"),
        (("cells", 0, "loads", 1, "load"), True, r"cells\[0\]\.loads\[1\]\.load: not a whole number: True"),
        (("cells", 0, "loads", 1, "load"), 1.0, r"loads\[1\]\.load: not a whole number"),
        (("cells", 0, "loads", 1, "faulted"), 0, r"loads\[1\]\.faulted: not true or false"),
        (("cells", 0, "why"), "line", r"cells\[0\]\.why: not a list"),
        (("cells", 0, "loads", 0), [], r"cells\[0\]\.loads\[0\]: not an object"),
        (("cells", 0, "policy"), None, r"cells\[0\]\.policy: not one of off"),
        (("cells", 0, "policy"), ["off"], r"cells\[0\]\.policy: not one of off"),
        (("name",), None, "name: not a string"),
        (("extra",), 1, "extra: not a field of RunResult"),
        (("schema_version",), 2, "schema_version: not 1: 2"),
        (("schema_version",), True, "schema_version: not 1: True"),
    ],
)
def test_a_broken_field_is_named(tmp_path, smoke, place, value, named):
    path = tmp_path / "results.json"
    write_results(path, smoke)
    document = json.loads(path.read_text())
    inner = document
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    path.write_text(json.dumps(document))
    with pytest.raises(BrokenResultsError, match=named) as caught:
        read_results(path)
    assert str(path) in str(caught.value)
    assert "kvchaos analyze" in str(caught.value)
    assert caught.value.exit_code == 64


@pytest.mark.parametrize("field", ["name", "cells", "schema_version", "interrupted"])
def test_a_missing_field_is_an_error(tmp_path, smoke, field):
    path = tmp_path / "results.json"
    write_results(path, smoke)
    document = json.loads(path.read_text())
    del document[field]
    path.write_text(json.dumps(document))
    with pytest.raises(BrokenResultsError, match=field):
        read_results(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not JSON"),
        (b'{"schema_version": 1, "name": "smo', "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "not an object"),
        (b'{"name": "a", "name": "b"}', "name: written twice"),
        (b'{"seed": NaN}', "NaN: not a number"),
    ],
)
def test_a_file_that_is_no_result_is_an_error_and_not_a_crash(tmp_path, content, said):
    path = tmp_path / "results.json"
    path.write_bytes(content)
    with pytest.raises(BrokenResultsError, match=said):
        read_results(path)


def test_a_missing_file_is_an_error_a_person_can_act_on(tmp_path):
    with pytest.raises(KVChaosError, match=r"cannot be read \(No such file.*name the results.json"):
        read_results(tmp_path / "results.json")


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path, smoke):
    with pytest.raises(ReportError, match="cannot be written"):
        write_results(tmp_path / "nowhere" / "results.json", smoke)
    (tmp_path / "results.json").mkdir()
    with pytest.raises(ReportError, match="cannot be written"):
        write_results(tmp_path / "results.json", smoke)
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]


P, F, U, G, N = Result.PASS, Result.FAIL, Result.UNKNOWN, Result.KNOWN_GAP, Result.NOT_APPLICABLE


@pytest.mark.parametrize(
    ("results", "code"),
    [
        ((), 2),
        ((P,), 0),
        ((P, G, N), 0),
        ((G,), 2),
        ((N, N), 2),
        ((G, N), 2),
        ((P, U), 2),
        ((U,), 2),
        ((P, F), 1),
        ((F, U, P), 1),
        ((F,), 1),
    ],
)
def test_exit_code(build, results, code):
    run = build.run(*(build.cell(result=result, seed=i) for i, result in enumerate(results)))
    assert run.exit_code == code
    assert replace(run, interrupted=True).exit_code == 130


def test_headline_counts_requests_of_fault_cells(smoke):
    head = smoke.headline
    assert (head.silent_off, head.loads_off) == (8, 44)
    assert (head.silent_fail_closed, head.loads_fail_closed) == (0, 88)
    assert head.known_gaps == (("GAP-1", 2), ("GAP-8", 2))
    assert head.silent_fail_closed_known_gap == 4
    assert (head.caught_fail_open, head.warned_fail_open, head.silent_fail_open) == (6, 0, 2)
    assert head.caught_yet_wrong_fail_closed == 0


def test_twins_and_repeats_do_not_count(build):
    bad = build.load(2, VerdictStatus.NOT_CHECKED, faulted=True, corrupted=True, wrong_tokens=True)
    cells = [build.cell(policy=p, role=r, loads=(bad,)) for p in Policy for r in (Role.TWIN, Role.REPEAT)]
    head = build.run(*cells).headline
    assert (head.silent_off, head.loads_off, head.silent_fail_closed, head.loads_fail_closed) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("result", "gap", "outside"),
    [(G, "GAP-8", 0), (G, None, 1), (F, "GAP-8", 1), (P, "GAP-8", 1), (U, "GAP-8", 1)],
)
def test_only_a_named_gap_that_the_judge_granted_explains_a_silent_request(build, result, gap, outside):
    silent = build.load(2, faulted=True, corrupted=True)
    cell = build.cell(policy=Policy.FAIL_CLOSED_FAIL, result=result, known_gap=gap, loads=(silent,))
    head = build.run(cell).headline
    assert head.silent_fail_closed == outside
    assert head.silent_fail_closed_known_gap == 1 - outside


@pytest.mark.parametrize("policy", [Policy.FAIL_CLOSED_FAIL, Policy.FAIL_CLOSED_RECOMPUTE])
def test_fail_closed_that_serves_what_it_caught_is_counted(build, policy):
    served = build.load(1, VerdictStatus.MISMATCH, faulted=True, corrupted=True)
    recomputed = build.load(2, VerdictStatus.UNVERIFIED, Outcome.RECOMPUTED, faulted=True, wrong_tokens=True)
    head = build.run(build.cell(policy=policy, loads=(served, recomputed))).headline
    assert (head.silent_fail_closed, head.caught_yet_wrong_fail_closed) == (0, 2)


def test_unverified_is_warned_under_fail_open_and_silent_under_fail_closed(build):
    lost = build.load(1, VerdictStatus.UNVERIFIED, faulted=True, corrupted=True)
    cells = [build.cell(policy=p, loads=(lost,)) for p in (Policy.FAIL_OPEN, Policy.FAIL_CLOSED_FAIL)]
    head = build.run(*cells).headline
    assert (head.warned_fail_open, head.silent_fail_open, head.silent_fail_closed) == (1, 0, 1)


def test_a_fault_that_touched_no_load_leaves_none_to_show(build):
    loads = build.clean_loads(Policy.FAIL_OPEN)
    assert build.cell(loads=loads).judged_loads == ()
    assert build.cell(loads=loads, faults=()).judged_loads == loads
    assert build.cell(loads=loads, role=Role.TWIN).judged_loads == loads


def test_truth_does_not_depend_on_tokens(build):
    load = build.load(corrupted=True)
    assert replace(load, tokens=Tokens.RIGHT).truth is Truth.CORRUPTED
    assert replace(load, delivered=Truth.INTACT, read=Truth.NONE, tokens=Tokens.WRONG).truth is Truth.INTACT
    assert replace(load, delivered=Truth.NONE, read=Truth.NONE).truth is Truth.NONE
