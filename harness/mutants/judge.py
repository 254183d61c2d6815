"""A broken judge or blind oracles: what would hide everything else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from harness.history import Line
from harness.mutants.base import Function, Mutant, applied
from harness.mutants.bench import Bench
from harness.mutants.policy import MUTANTS as POLICY
from harness.mutants.report_checks import (
    CAUGHT,
    a_crashed_checker_is_unknown,
    a_violation_fails,
    a_wrong_expectation_fails,
    corruption_outside_the_known_gaps_fails,
    exit_codes_say_the_worst,
    missing_evidence_is_unknown,
    wrong_tokens_fail,
)
from harness.oracles.bookkeeping import BookkeepingOracle
from harness.oracles.provenance import ProvenanceOracle
from scenarios.words import Outcome, Result, Tokens, Violation

JUDGE_RESULT = "harness.judge._result"
SOUND = "flip-before-verify--fail_open"


def a_leak_is_seen(bench: Bench) -> str | None:
    """Blocks that the engine loses are a violation: that mutant is put in as well."""
    (leaks,) = [mutant for mutant in POLICY if mutant.name == "failed-load-leaks"]
    with applied(leaks):
        (cell,) = bench.run(CAUGHT).cells
    seen = any(line.startswith(Violation.LEAK) for line in cell.violations)
    return None if seen and cell.result is Result.FAIL else f"blocks are lost, and the cell is {cell.result}"


def _nothing(original: Function) -> Function:
    return lambda *args, **named: ()


def _judged_without(**changes: Any) -> Any:
    """The judge, of a cell about which less is known."""

    def make(original: Function) -> Function:
        return lambda cell, *args: original(replace(cell, **changes), *args)

    return make


def _passes(original: Function) -> Function:
    def result(*args: Any) -> tuple[Result, tuple[str, ...]]:
        found, why = original(*args)
        return (Result.PASS, ()) if found is Result.UNKNOWN else (found, why)

    return result


def _right(original: Function) -> Function:
    def tokens(request: Any) -> Tokens:
        return Tokens.RIGHT if request.outcome in (Outcome.SERVED, Outcome.RECOMPUTED) else Tokens.NONE

    return tokens


def _always(original: Function) -> Function:
    return lambda load, others: True


def _nothing_foreign(original: Function) -> Function:
    def report(oracle: ProvenanceOracle, request_id: str, group_id: int, wrong: list[int]) -> None:
        original(oracle, request_id, group_id, [])

    return report


def _all_free(original: Function) -> Function:
    def finish(oracle: BookkeepingOracle) -> None:
        for engine in oracle._engines:
            _, total = engine.pool()
            oracle._history.add("oracle.pool", engine=engine.engine_id, free=total, total=total, ends=[])

    return finish


def _last_one_lost(original: Function) -> Function:
    def read_cells(*args: Any) -> Iterator[list[Line]]:
        yield from list(original(*args))[:-1]

    return read_cells


MUTANTS = (
    Mutant(
        name="expectations-skipped",
        area="judge",
        what="What came out is not compared with what the scenario expects.",
        target="harness.judge._deviations",
        replace=_nothing,
        killers=(a_wrong_expectation_fails,),
        control=SOUND,
    ),
    Mutant(
        name="unknown-is-pass",
        area="judge",
        what="A cell of which nothing is known passes.",
        target=JUDGE_RESULT,
        replace=_passes,
        killers=(
            missing_evidence_is_unknown,
            a_crashed_checker_is_unknown,
        ),
        control=SOUND,
    ),
    Mutant(
        name="evidence-not-needed",
        area="judge",
        what="A fault need not have happened.",
        target=JUDGE_RESULT,
        replace=_judged_without(undone=()),
        killers=(missing_evidence_is_unknown,),
        control=SOUND,
    ),
    Mutant(
        name="crashes-ignored",
        area="judge",
        what="A fault or an oracle that raised is forgotten.",
        target=JUDGE_RESULT,
        replace=_judged_without(problems=()),
        killers=(a_crashed_checker_is_unknown,),
        control=SOUND,
    ),
    Mutant(
        name="violations-ignored",
        area="judge",
        what="Leaks, double answers and hangs are not violations.",
        target="harness.observe._violations",
        replace=_nothing,
        killers=(a_violation_fails,),
        control=SOUND,
    ),
    Mutant(
        name="unexplained-ignored",
        area="judge",
        what="A load may be verified and corrupted without a known gap.",
        target="harness.judge._unexplained",
        replace=_nothing,
        killers=(corruption_outside_the_known_gaps_fails,),
        control=SOUND,
    ),
    Mutant(
        name="every-gap-holds",
        area="judge",
        what="A known gap explains everything.",
        target="harness.gaps.sums_collide",
        replace=_always,
        killers=(corruption_outside_the_known_gaps_fails,),
        control=SOUND,
    ),
    Mutant(
        name="tokens-never-wrong",
        area="judge",
        what="Every answer has the right tokens.",
        target="harness.judge._tokens",
        replace=_right,
        killers=(wrong_tokens_fail,),
        control=SOUND,
    ),
    Mutant(
        name="bytes-oracle-blind",
        area="judge",
        what="No two bytes differ.",
        target="harness.observe.KVView.differing",
        replace=_nothing,
        killers=(
            "flip-before-verify--fail_closed_fail",
            "empty-transfer--fail_closed_recompute",
        ),
        control="clean-transfer--fail_open",
    ),
    Mutant(
        name="provenance-oracle-blind",
        area="judge",
        what="No attention read is ever foreign.",
        target="harness.oracles.provenance.ProvenanceOracle._report",
        replace=_nothing_foreign,
        killers=("flip-after-verify",),
        control="clean-transfer--fail_open",
    ),
    Mutant(
        name="bookkeeping-oracle-blind",
        area="judge",
        what="Every pool is said to be full again.",
        target="harness.oracles.bookkeeping.BookkeepingOracle.finish",
        replace=_all_free,
        killers=(a_leak_is_seen,),
        control=SOUND,
    ),
    Mutant(
        name="cells-get-lost",
        area="judge",
        what="The last cell of a run is never judged.",
        target="harness.history.read_cells",
        replace=_last_one_lost,
        killers=("clean-transfer--fail_open",),
        control=exit_codes_say_the_worst,
    ),
)
