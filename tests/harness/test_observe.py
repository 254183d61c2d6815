from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from engine.errors import InputError
from faults.base import Evidence
from harness.errors import HistoryError
from harness.history import History, Line
from harness.judge import judge
from harness.observe import observe
from harness.plan import plan_cells
from harness.targets import TARGETS
from reports.records import to_json
from scenarios.words import Outcome, Policy, Result, Role

TARGET = TARGETS["sim"]
VERDICT = {"status": "verified", "reason": None, "groups": []}


@pytest.fixture(scope="module")
def flipped(scenario_of: Callable[..., Any]) -> list[Line]:
    """The history of the small scenario under fail_open: r2 is corrupted and caught."""
    history = History()
    TARGET.run(plan_cells([scenario_of()], [Policy.FAIL_OPEN], 1, TARGET.provides)[0], history)
    return history.lines


@pytest.fixture
def lines(flipped: list[Line]) -> list[Line]:
    return copy.deepcopy(flipped)


def without(lines: list[Line], event: str, **fields: Any) -> list[Line]:
    return [
        line
        for line in lines
        if line["event"] != event or any(line.get(name) != value for name, value in fields.items())
    ]


def test_a_cell_is_what_its_history_says(lines: list[Line]) -> None:
    seen = observe(lines)
    assert (seen.id, seen.policy, seen.role, seen.target) == ("flip--fail_open", Policy.FAIL_OPEN, Role.FAULT, "sim")
    assert seen.problems == seen.undone == seen.violations == seen.missing == ()
    assert [request.request_id for request in seen.requests] == ["r1", "r2"]
    first, second = seen.requests
    assert (first.outcome, first.verdict, first.error) == (Outcome.SERVED, "verified", None)
    assert (second.outcome, second.verdict) == (Outcome.SERVED, "mismatch")
    assert first.tokens == first.wanted
    assert first.kv_final == first.checksummed == first.load_finished
    assert len(second.load_finished.differing(second.kv_final)) == 1
    (evidence,) = seen.evidence
    assert isinstance(evidence, Evidence)
    assert evidence.request_id == "r2"


def test_it_survives_a_file(lines: list[Line]) -> None:
    assert observe([json.loads(json.dumps(line)) for line in lines]) == observe(lines)


# ---- what a person must look at


def test_a_history_without_an_end_was_interrupted(lines: list[Line]) -> None:
    seen = observe(without(lines, "end"))
    assert seen.problems == ("the history has no end: the run was interrupted",)
    assert judge(seen, "").result is Result.UNKNOWN


def test_a_crashed_checker_is_a_problem(lines: list[Line]) -> None:
    seen = observe([*without(lines, "end"), {"event": "checker.crashed", "error": "X at y: KeyError"}])
    assert seen.problems == ("a checker crashed: X at y: KeyError",)
    assert judge(seen, "").result is Result.UNKNOWN


@pytest.mark.parametrize("how", ["none", "gone"])
def test_a_fault_without_evidence_is_undone(lines: list[Line], how: str) -> None:
    """Also one that was never attached: what counts is what the scenario lists."""
    lines = without(lines, "evidence")
    if how == "none":
        next(line for line in lines if line["event"] == "fault.done")["evidence"] = 0
    else:
        lines = without(lines, "fault.done")
    seen = observe(lines)
    assert len(seen.undone) == 1
    assert "bit_flip" in seen.undone[0]
    assert judge(seen, "").result is Result.UNKNOWN


def test_an_engine_that_refuses_to_start_leaves_a_listed_fault_undone(lines: list[Line]) -> None:
    kept = [line for line in lines if line["event"] in ("cell", "request", "oracle.tokens")]
    seen = observe([*kept, {"event": "engine.refused", "error": "no"}])
    assert [(request.outcome, request.error) for request in seen.requests] == [(Outcome.REFUSED, "no")] * 2
    assert seen.problems == ()
    assert judge(seen, "").result is Result.UNKNOWN


# ---- outcomes


def answer(lines: list[Line], request: str = "r1") -> Line:
    return next(line for line in lines if line["event"] == "answer" and line["request"] == request)


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        ({"finish_reason": "length"}, Outcome.SERVED),
        ({"finish_reason": "stop"}, Outcome.SERVED),
        ({"finish_reason": "stop", "recomputed": True}, Outcome.RECOMPUTED),
        ({"finish_reason": "error", "error": "why"}, Outcome.FAILED),
        ({"finish_reason": "error", "error": "why", "recomputed": True}, Outcome.FAILED),
        ({"finish_reason": "abort", "error": "why"}, Outcome.ABORTED),
    ],
)
def test_an_answer_tells_the_outcome(lines: list[Line], change: dict[str, Any], outcome: Outcome) -> None:
    answer(lines).update(change)
    request = observe(lines).requests[0]
    assert (request.outcome, request.error) == (outcome, change.get("error"))


def test_no_answer_by_the_deadline_is_hung(lines: list[Line]) -> None:
    request = observe(without(lines, "answer", request="r1")).requests[0]
    assert (request.outcome, request.error, request.tokens) == (Outcome.HUNG, "no answer by the deadline", ())
    assert request.verdict == "verified", "the verdict that it came to is kept"


def test_no_answer_after_a_crash_is_crashed(lines: list[Line]) -> None:
    crash = {"event": "engine.crashed", "error": "KeyError: 3"}
    first, second = observe([*without(lines, "answer", request="r1"), crash]).requests
    assert (first.outcome, first.error) == (Outcome.CRASHED, "KeyError: 3")
    assert second.outcome is Outcome.SERVED


def test_a_request_without_load_and_answer_has_no_verdict(lines: list[Line]) -> None:
    kept = without(without(lines, "answer", request="r1"), "consumer.verified", request="r1")
    assert observe(kept).requests[0].verdict == "no_load"


# ---- violations


@pytest.mark.parametrize(
    ("event", "change", "violation"),
    [
        ("oracle.pool", {"free": 3, "total": 5}, "leak: 2 of 5 blocks of the producer never came back"),
        ("oracle.pool", {"ends": [["r1", 1], ["r2", 2]]}, "two_terminal_states: r2 on the producer"),
        ("end", {"finished": False, "held": ["a", "b"]}, "no_progress: the deadline passed with work left (a; b)"),
        ("end", {"finished": False, "held": []}, "no_progress: the deadline passed with work left (nothing was held)"),
    ],
)
def test_violations(lines: list[Line], event: str, change: dict[str, Any], violation: str) -> None:
    next(line for line in lines if line["event"] == event).update(change)
    seen = observe(lines)
    assert seen.violations == (violation,)
    assert judge(seen, "").result is Result.FAIL


@pytest.mark.parametrize("finished", [False, None])
def test_blocks_that_an_unfinished_run_still_holds_have_not_leaked(lines: list[Line], finished: bool | None) -> None:
    """None: the engine crashed."""
    next(line for line in lines if line["event"] == "oracle.pool").update(free=3, total=5)
    next(line for line in lines if line["event"] == "end").update(finished=finished)
    assert not [violation for violation in observe(lines).violations if violation.startswith("leak")]


def test_a_killed_engine_leaks_nothing_but_ends_a_request_once_all_the_same(lines: list[Line]) -> None:
    kept = [line for line in lines if line["event"] != "oracle.pool"]
    killed = {"event": "oracle.engine_killed", "engine": "producer", "ends": [["r1", 1]]}
    assert observe([*kept, killed]).violations == ()
    twice = killed | {"ends": [["r1", 2]]}
    assert observe([*kept, twice]).violations == ("two_terminal_states: r1 on the producer",)


def test_two_answers_are_a_violation(lines: list[Line]) -> None:
    seen = observe([*lines, answer(lines, "r2")])
    assert seen.violations == ("two_terminal_states: r2 was answered 2 times",)


@pytest.mark.parametrize(("error", "found"), [("DoubleFreeError: block 3", True), ("KeyError: 3", False)])
def test_a_double_free_is_a_violation(lines: list[Line], error: str, found: bool) -> None:
    seen = observe([*lines, {"event": "engine.crashed", "error": error}])
    assert seen.violations == ((f"double_free: {error}",) if found else ())


def test_a_prompt_that_is_computed_again_is_seen_as_it_was_last(lines: list[Line]) -> None:
    first = next(line for line in lines if line["event"] == "oracle.kv" and line["at"] == "kv_final")
    again = copy.deepcopy(first)
    again["digests"] = ["other"] * len(again["digests"])
    assert set(observe([*lines, again]).requests[0].kv_final.digests) == {"other"}


# ---- damage


@pytest.mark.parametrize(
    ("event", "change"),
    [
        ("cell", {"policy": "maybe"}),
        ("cell", {"role": None}),
        ("cell", {"scenario": {"schema_version": 9}}),
        ("cell", {"scenario": None}),
        ("cell", {"missing": 3}),
        ("request", {"load": None}),
        ("answer", {"verdict": None}),
        ("answer", {"verdict": VERDICT | {"status": "fine"}}),
        ("answer", {"verdict": VERDICT | {"groups": [{}]}}),
        ("answer", {"finish_reason": "bored"}),
        ("answer", {"tokens": 3}),
        ("answer", {"request": []}),
        ("oracle.kv", {"digests": 5}),
        ("oracle.kv", {"grid": 0}),
        ("oracle.kv", {"grid": 1 << 40}),
        ("oracle.pool", {"ends": [1]}),
        ("oracle.pool", {"total": "x"}),
        ("end", {"held": [1], "finished": False}),
        ("evidence", {"what": None}),
    ],
)
def test_a_damaged_line_is_refused(lines: list[Line], event: str, change: dict[str, Any]) -> None:
    next(line for line in lines if line["event"] == event).update(change)
    with pytest.raises(HistoryError, match="flip--fail_open"):
        judge(observe(lines), "")


@pytest.mark.parametrize(
    ("event", "unused"),
    [
        ("cell", {"connector"}),
        ("request", set()),
        ("answer", {"t", "engine"}),
        ("oracle.kv", {"group"}),
        ("oracle.pool", set()),
        ("fault.done", set()),
    ],
)
def test_a_field_that_is_missing_is_refused(lines: list[Line], event: str, unused: set[str]) -> None:
    line = next(line for line in lines if line["event"] == event)
    taken = []
    for name in set(line) - {"event"} - unused:
        kept = line.pop(name)
        try:
            judge(observe(lines), "")
            taken.append(name)
        except HistoryError:
            pass
        line[name] = kept
    assert taken == []


def test_no_damage_raises_anything_else(flipped: list[Line]) -> None:
    """Any value of any line replaced by another kind: refused, or judged and still plain JSON."""
    rng = random.Random(0)
    refused: list[str] = []
    junk: list[Any] = [None, True, -1, 0, 10**30, 1.5, "", "x", [], [[]], {}, [None], {"status": []}, ["r1", "r1"]]
    for _ in range(1500):
        lines = [dict(line) for line in flipped]
        line = rng.choice(lines)
        path: Any = line
        key = rng.choice(sorted(line))
        while isinstance(path[key], dict | list) and path[key] and rng.random() < 0.7:
            path[key] = copy.copy(path[key])
            path = path[key]
            key = rng.choice(sorted(path)) if isinstance(path, dict) else rng.randrange(len(path))
        path[key] = rng.choice(junk)
        if not isinstance(line["event"], str):
            continue  # read_cells refuses it
        try:
            json.dumps(to_json(judge(observe(lines), "")))
        except InputError as error:
            refused.append(str(error))
    assert refused
    assert not [message for message in refused if "\n" in message]


@pytest.mark.parametrize(
    ("event", "fields", "problem"),
    [
        ("request", {"load": 2}, "the history holds the requests"),
        ("oracle.tokens", {"request": "r2"}, "no oracle said which tokens are right for r2"),
        ("oracle.pool", {"engine": "consumer"}, "no oracle said of both engines"),
        ("oracle.provenance", {}, "no oracle watched the attention reads"),
    ],
)
def test_what_nobody_watched_is_a_problem(lines: list[Line], event: str, fields: dict[str, Any], problem: str) -> None:
    assert judge(observe(lines), "").result is Result.PASS
    seen = observe(without(lines, event, **fields))
    assert len(seen.problems) == 1
    assert seen.problems[0].startswith(problem)
    assert judge(seen, "").result is Result.UNKNOWN
