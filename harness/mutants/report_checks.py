"""Checks that kill a broken judge or reporter: what is wrong must be red, and say so in every report.

A history is doctored so that one thing in it is wrong; then the judge and the reports are asked.
"""

from __future__ import annotations

import io
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rich.console import Console

from harness.history import Line
from harness.mutants.bench import Bench, doctored
from reports.html import report_html
from reports.junit import junit_xml
from reports.markdown import summary_markdown
from reports.results import CellResult, RunResult
from reports.summary import headline_lines
from reports.terminal import print_run
from scenarios.words import Result, Role, Violation

CLEAN, FLIP, CAUGHT = (
    "clean-transfer--fail_open",
    "flip-before-verify--fail_open",
    "flip-before-verify--fail_closed_fail",
)
FAILED, UNKNOWN = "planted-failure", "planted-doubt"


def a_wrong_expectation_fails(bench: Bench) -> str | None:
    """Each word of an expectation is compared: one that is not so fails the cell."""
    lines = bench.history(CLEAN)
    for wrong in ({"verdict": "mismatch"}, {"outcome": "failed"}, {"truth": "corrupted"}, {"tokens": "wrong"}):
        if noticed := _not(Result.FAIL, bench.judge(_expecting(lines, wrong))):
            return f"expected {wrong}: {noticed}"
    return None


def missing_evidence_is_unknown(bench: Bench) -> str | None:
    """A fault that cannot be proved to have happened proves nothing."""
    lines = [line for line in bench.history(FLIP) if line["event"] != "evidence"]
    return _not(Result.UNKNOWN, bench.judge(doctored(lines, "fault.done", evidence=0)))


def a_crashed_checker_is_unknown(bench: Bench) -> str | None:
    """A fault or an oracle that raised has seen nothing."""
    lines = [*bench.history(FLIP), {"event": "checker.crashed", "error": "an oracle raised"}]
    return _not(Result.UNKNOWN, bench.judge(lines))


def a_violation_fails(bench: Bench) -> str | None:
    """A leak, two answers, or work left at the deadline fail a cell whose loads are all as expected."""
    lines = bench.history(CLEAN)
    answer = next(line for line in lines if line["event"] == "answer")
    histories = {
        Violation.LEAK: doctored(lines, "oracle.pool", free=1),
        Violation.TWO_TERMINAL_STATES: [*lines[:-1], answer, lines[-1]],
        Violation.NO_PROGRESS: doctored(lines, "end", finished=False),
    }
    for violation, history in histories.items():
        result = bench.judge(history)
        if noticed := _not(Result.FAIL, result):
            return f"{violation}: {noticed}"
        if not any(line.startswith(violation) for line in result.violations):
            return f"{violation} is not among the violations"
    return None


def corruption_outside_the_known_gaps_fails(bench: Bench) -> str | None:
    """Verified and corrupted, as the scenario expects it, but the known gap that it names does not explain it."""
    lines = bench.history(FLIP)
    scenario = {**lines[0]["scenario"], "known_gap": {lines[0]["policy"]: "GAP-8"}}
    lines = doctored(lines, "cell", scenario=scenario)
    (answer,) = [line for line in lines if line["event"] == "answer" and line["request"] == "r2"]
    groups = [
        {**group, "status": "verified", "compared": group["loaded"], "not_compared": [], "differing": []}
        for group in answer["verdict"]["groups"]
    ]
    verified = {"status": "verified", "reason": None, "groups": groups}
    result = bench.judge(_expecting(doctored(lines, "answer", "r2", verdict=verified), {"verdict": "verified"}))
    if any(line.startswith(Violation.UNEXPLAINED_VERIFIED) for line in result.violations):
        return _not(Result.FAIL, result)
    return f"{Violation.UNEXPLAINED_VERIFIED} is not among the violations"


def wrong_tokens_fail(bench: Bench) -> str | None:
    """Tokens that are not the oracle's fail a clean load."""
    return _not(Result.FAIL, bench.judge(doctored(bench.history(CLEAN), "answer", "r1", tokens=[1, 2, 3])))


def exit_codes_say_the_worst(bench: Bench) -> str | None:
    """0 only where something passed and nothing is failed or unknown; an empty run is not a pass."""
    passed, failed, unknown = _cells(bench)
    wanted = {(): 2, (passed,): 0, (unknown,): 2, (passed, unknown): 2, (passed, failed): 1, (failed, unknown): 1}
    for cells, code in wanted.items():
        got = _run(*cells).exit_code
        if got != code:
            return f"exit code {got} instead of {code} for {', '.join(c.result for c in cells) or 'an empty run'}"
    return None


def a_failing_twin_fails_the_run(bench: Bench) -> str | None:
    """A twin or a repeat that fails makes the run red, in its exit code and for CI."""
    passed, failed, _ = _cells(bench)
    for role in (Role.TWIN, Role.REPEAT):
        run = _run(passed, replace(failed, role=role))
        if run.exit_code != 1:
            return f"a {role} failed, and the exit code is {run.exit_code}"
        if not list(ET.fromstring(junit_xml(run)).iter("failure")):
            return f"a {role} failed, and junit.xml has no failure"
    return None


def junit_has_every_failure(bench: Bench) -> str | None:
    """A failed cell is a failure, an unknown one an error, and an empty run is not green."""
    document = ET.fromstring(junit_xml(_run(*_cells(bench))))
    counts = len(list(document.iter("failure"))), len(list(document.iter("error")))
    if counts != (1, 1):
        return f"1 cell failed and 1 is unknown: {counts[0]} failures, {counts[1]} errors"
    return None if list(ET.fromstring(junit_xml(_run())).iter("error")) else "an empty run is green"


def every_report_says_that_it_failed(bench: Bench) -> str | None:
    """The word that a person reads first."""
    passed, failed, unknown = _cells(bench)
    for word, run in (("FAILED", _run(passed, failed)), ("UNKNOWN", _run(passed, unknown)), ("EMPTY", _run())):
        for report, text in _reports(run).items():
            if word not in text or "PASSED" in text:
                return f"{report} does not say {word}"
    return None


def every_report_names_the_cells_to_look_at(bench: Bench) -> str | None:
    """A failed or unknown cell is named, with what is wrong."""
    passed, failed, unknown = _cells(bench)
    for cell, word in ((failed, "FAIL"), (unknown, "unknown")):
        for report, text in _reports(_run(passed, cell)).items():
            if word.lower() not in text.lower() or cell.scenario not in text or cell.why[0] not in text:
                return f"{report} does not show {cell.scenario} as {word}, with its reason"
    return None


def the_matrix_shows_what_is_not_green(bench: Bench) -> str | None:
    """A failed or unknown cell is not green in its row."""
    passed, failed, unknown = _cells(bench)
    for cell, word in ((failed, "FAIL"), (unknown, "unknown")):
        reports = _reports(_run(passed, cell))
        for report, start in (("the terminal", cell.scenario), ("summary.md", f"| {cell.scenario} |")):
            rows = [line for line in reports[report].splitlines() if line.startswith(start)]
            if not rows or word not in rows[0]:
                return f"{report} does not show {cell.scenario} as {word} in its matrix"
    return None


def the_headline_counts_silent_corruption(bench: Bench) -> str | None:
    """With checksums off, an empty transfer that is answered counts as silent."""
    run = bench.run("empty-transfer--off")
    silent = sum(load.faulted for cell in run.cells for load in cell.loads)
    line = headline_lines(run)[0]
    return None if silent and f" {silent} of " in line else f"the headline is: {line}"


def _not(wanted: Result, cell: CellResult) -> str | None:
    return None if cell.result is wanted else f"the cell is {cell.result}, not {wanted}"


def _expecting(lines: list[Line], words: Mapping[str, str]) -> list[Line]:
    """The history of a cell whose scenario expects something else."""
    scenario: dict[str, Any] = lines[0]["scenario"]
    policy = lines[0]["policy"]
    expected = {**scenario["expect"][policy], **words}
    return doctored(lines, "cell", scenario={**scenario, "expect": {**scenario["expect"], policy: expected}})


def _cells(bench: Bench) -> tuple[CellResult, CellResult, CellResult]:
    """A cell that passed, one that failed, and one that is unknown, in that order."""
    lines = bench.history(CLEAN)
    passed = bench.judge(lines)
    failed = replace(passed, scenario=FAILED, id=FAILED, result=Result.FAIL, why=("planted: it went wrong",))
    unknown = replace(passed, scenario=UNKNOWN, id=UNKNOWN, result=Result.UNKNOWN, why=("planted: nobody knows",))
    return passed, failed, unknown


def _run(*cells: CellResult) -> RunResult:
    return RunResult("selftest", "sim", 0, False, cells)


def _reports(run: RunResult) -> dict[str, str]:
    console = Console(file=io.StringIO(), width=200)
    print_run(run, console=console)
    stream = console.file
    return {
        "the terminal": stream.getvalue() if isinstance(stream, io.StringIO) else "",
        "summary.md": summary_markdown(run),
        "report.html": report_html(run),
        "junit.xml": junit_xml(run),
    }
