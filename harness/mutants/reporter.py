"""Reports and exit codes that look green: what a person or CI sees of a run that went wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from harness.mutants.base import Function, Mutant
from harness.mutants.report_checks import (
    a_failing_twin_fails_the_run,
    every_report_names_the_cells_to_look_at,
    every_report_says_that_it_failed,
    exit_codes_say_the_worst,
    junit_has_every_failure,
    the_headline_counts_silent_corruption,
    the_matrix_shows_what_is_not_green,
)
from reports.results import CellResult, RunResult
from reports.summary import Standing
from scenarios.words import Result, Role

SOUND = "flip-before-verify--fail_open"
EXIT_CODE = "reports.results.RunResult.exit_code"


def _exit_code(original: Function) -> Function:
    return lambda run: 130 if run.interrupted else 0


def _empty_passes(original: Function) -> Function:
    return lambda run: original(run) if run.cells else 0


def _unknown_passes(original: Function) -> Function:
    return lambda run: 0 if original(run) == 2 and run.cells else original(run)


def _fault_cells_only(original: Function) -> Function:
    return lambda run: original(replace(run, cells=tuple(c for c in run.cells if c.role is Role.FAULT)))


def _case_of_a_pass(original: Function) -> Function:
    return lambda cell, name: original(replace(cell, result=Result.PASS), name)


def _passed(original: Function) -> Function:
    def standing_of(run: RunResult) -> Standing:
        return Standing(Result.PASS, "PASSED", "All cells came out as expected.")

    return standing_of


def _no_problems(original: Function) -> Function:
    def problems_of(run: RunResult) -> tuple[CellResult, ...]:
        return ()

    return problems_of


def _green(original: Function) -> Function:
    def result(spot: Any) -> Result:
        found: Result = original(spot)
        return found if found is Result.KNOWN_GAP else Result.PASS

    return result


def _never(original: Function) -> Function:
    return lambda load: False


MUTANTS = (
    Mutant(
        name="exit-code-always-0",
        area="reporter",
        what="The exit code does not say what failed.",
        target=EXIT_CODE,
        replace=_exit_code,
        killers=(
            exit_codes_say_the_worst,
            a_failing_twin_fails_the_run,
        ),
        control=SOUND,
    ),
    Mutant(
        name="empty-run-passes",
        area="reporter",
        what="A run without cells exits with 0.",
        target=EXIT_CODE,
        replace=_empty_passes,
        killers=(exit_codes_say_the_worst,),
        control=SOUND,
    ),
    Mutant(
        name="unknown-run-passes",
        area="reporter",
        what="A run in which something is unknown exits with 0.",
        target=EXIT_CODE,
        replace=_unknown_passes,
        killers=(exit_codes_say_the_worst,),
        control=SOUND,
    ),
    Mutant(
        name="twins-do-not-count",
        area="reporter",
        what="Only the cells with a fault count, not their twins and repeats.",
        target="reports.results.RunResult.totals",
        replace=_fault_cells_only,
        killers=(a_failing_twin_fails_the_run,),
        control=SOUND,
    ),
    Mutant(
        name="junit-without-failures",
        area="reporter",
        what="Every test case of junit.xml is green.",
        target="reports.junit._test_case",
        replace=_case_of_a_pass,
        killers=(junit_has_every_failure,),
        control=SOUND,
    ),
    Mutant(
        name="reports-say-passed",
        area="reporter",
        what="Every report says that the run passed.",
        target="reports.summary.standing_of",
        replace=_passed,
        killers=(every_report_says_that_it_failed,),
        control=SOUND,
    ),
    Mutant(
        name="problems-not-shown",
        area="reporter",
        what="The reports leave out the cells that failed or are unknown.",
        target="reports.summary.problems_of",
        replace=_no_problems,
        killers=(every_report_names_the_cells_to_look_at,),
        control=SOUND,
    ),
    Mutant(
        name="matrix-always-green",
        area="reporter",
        what="A failed or unknown cell is green in the matrix.",
        target="reports.matrix.Spot.result",
        replace=_green,
        killers=(the_matrix_shows_what_is_not_green,),
        control=SOUND,
    ),
    Mutant(
        name="silence-not-counted",
        area="reporter",
        what="Silently served corruption is not counted.",
        target="reports.results.LoadResult.silent",
        replace=_never,
        killers=(the_headline_counts_silent_corruption,),
        control=SOUND,
    ),
)
