"""What a run says in a few sentences: the same words in the terminal, JUnit, Markdown and HTML.

Every sentence must stay true for any run: with none, one or many of a thing, with policies left out, stopped half
way, or empty. What was not judged is said, never left to look like something that came out well.
"""

from __future__ import annotations

from dataclasses import dataclass

from reports.results import CellResult, Evidence, Expected, RunResult
from reports.text import counted, listed, visible
from scenarios.words import Policy, Result, Role

RESULT_WORDS = {
    Result.PASS: "pass",
    Result.FAIL: "FAIL",
    Result.UNKNOWN: "unknown",
    Result.KNOWN_GAP: "known gap",
    Result.NOT_APPLICABLE: "n/a",
}
RESULT_MARKS = {
    Result.PASS: "✓",
    Result.FAIL: "✗",
    Result.UNKNOWN: "?",
    Result.KNOWN_GAP: "△",
    Result.NOT_APPLICABLE: "-",
}
NO_REASON = "no reason was recorded"


@dataclass(frozen=True, slots=True)
class Standing:
    """What a run as a whole came to. `result` is pass only where the exit code is 0."""

    result: Result
    word: str
    sentence: str


def standing_of(run: RunResult) -> Standing:
    """One word and one sentence, from the same facts as the exit code."""
    totals = run.totals
    cells = len(run.cells)
    failed, unknown = totals[Result.FAIL], totals[Result.UNKNOWN]
    problems = listed(
        [text for text in (f"{failed} failed" if failed else "", f"{unknown} unknown" if unknown else "") if text]
    )
    if run.interrupted:
        finished = f"The run was stopped after {counted(cells, 'cell')}"
        sentence = f"{finished}: {problems}." if problems else f"{finished}; what did not run is not judged."
        return Standing(Result.FAIL if failed else Result.UNKNOWN, "INTERRUPTED", sentence)
    if not cells:
        return Standing(Result.UNKNOWN, "EMPTY", "No cell was run, so nothing was shown. An empty run is not a pass.")
    of_cells = f"of {counted(cells, 'cell')}"
    if failed:
        also = f"; {unknown} unknown" if unknown else ""
        return Standing(Result.FAIL, "FAILED", f"{failed} {of_cells} failed{also}.")
    if unknown:
        verb = "is" if unknown == 1 else "are"
        return Standing(Result.UNKNOWN, "UNKNOWN", f"{unknown} {of_cells} {verb} unknown: nothing was shown there.")
    if not totals[Result.PASS]:
        return Standing(Result.UNKNOWN, "UNKNOWN", f"None {of_cells} passed ({totals_sentence(run)}). Not a pass.")
    apply = cells - totals[Result.NOT_APPLICABLE]
    one, many = (" that applies", " that apply") if apply < cells else ("", "")
    judged = f"The only cell{one}" if apply == 1 else f"All {apply} cells{many}"
    return Standing(Result.PASS, "PASSED", f"{judged} came out as expected ({totals_sentence(run)}).")


def totals_sentence(run: RunResult) -> str:
    """`30 pass, 2 fail, 4 known gap`, in a fixed order, without the zeros."""
    totals = run.totals
    return ", ".join(f"{totals[r]} {RESULT_WORDS[r].lower()}" for r in Result if totals[r]) or "0 cells"


def headline_lines(run: RunResult) -> tuple[str, str]:
    """The two lines that a run exists for: what happens without checksums, and what fail-closed let through."""
    return _off_line(run), _fail_closed_line(run)


def _off_line(run: RunResult) -> str:
    head = run.headline
    if not head.loads_off:
        return f"Checksums off: {_nothing(run, (Policy.OFF,))}."
    return f"Checksums off: {head.silent_off} of {counted(head.loads_off, 'request')} silently served corrupted KV."


def _fail_closed_line(run: RunResult) -> str:
    head = run.headline
    policies = tuple(policy for policy in Policy if policy.fail_closed)
    seen = [policy for policy in policies if policy in _policies_run(run)]
    only = f" ({seen[0].removeprefix('fail_closed_')} only)" if len(seen) == 1 else ""
    if not head.loads_fail_closed:
        return f"Fail-closed{only}: {_nothing(run, policies)}."
    gaps = ", ".join(f"{visible(gap)}: {count}" for gap, count in head.known_gaps)
    inside = f"{head.silent_fail_closed_known_gap} inside them ({gaps})" if gaps else "none inside them"
    return (
        f"Fail-closed{only}: {head.silent_fail_closed} of {counted(head.loads_fail_closed, 'request')} "
        f"silently served corrupted KV outside the known gaps; {inside}."
    )


def _policies_run(run: RunResult) -> set[Policy]:
    return {cell.policy for cell in run.cells if cell.role is Role.FAULT}


def _nothing(run: RunResult, policies: tuple[Policy, ...]) -> str:
    return "no request was judged" if _policies_run(run) & set(policies) else "not run"


def notes(run: RunResult) -> tuple[str, ...]:
    """What qualifies the headline: fail-open, wrong answers that were caught, and what proves nothing."""
    head = run.headline
    found: list[str] = []
    if head.loads_fail_open:
        served = head.caught_fail_open + head.warned_fail_open + head.silent_fail_open
        parts = f": {head.caught_fail_open} logged as mismatch, {head.warned_fail_open} warned as unverified, "
        detail = parts + f"{head.silent_fail_open} silent" if served else ""
        found.append(f"Fail-open: {served} of {counted(head.loads_fail_open, 'request')} served corrupted KV{detail}.")
    if head.caught_yet_wrong_fail_closed:
        wrong = counted(head.caught_yet_wrong_fail_closed, "request")
        found.append(f"Fail-closed also answered {wrong} from corrupted KV, or wrongly, although it had caught them.")
    for where, count in (("checksums off", head.unknown_off), ("fail-closed", head.unknown_fail_closed)):
        if count:
            proves = "cell is unknown and proves" if count == 1 else "cells are unknown and prove"
            found.append(f"With {where}, {count} {proves} nothing either way.")
    if run.interrupted and run.cells:
        found.append("The counts cover only the cells that finished.")
    return tuple(found)


def expectation(expected: Expected | None) -> str:
    """`verdict mismatch, outcome served, truth corrupted`, or that nothing is said."""
    if expected is None:
        return "nothing is said"
    named = {
        "verdict": expected.verdict,
        "reason": expected.reason,
        "outcome": expected.outcome,
        "truth": expected.truth,
        "tokens": expected.tokens,
    }
    return ", ".join(f"{name} {value}" for name, value in named.items() if value is not None) or "nothing is said"


def problems_of(run: RunResult) -> tuple[CellResult, ...]:
    """The cells that need a person, of any role: the failed ones first, then the unknown ones, in plan order."""
    return tuple(c for result in (Result.FAIL, Result.UNKNOWN) for c in run.cells if c.result is result)


def cell_title(cell: CellResult) -> str:
    """A cell in words. Its id says the same to a machine."""
    role = "" if cell.role is Role.FAULT else f" ({cell.role})"
    return visible(f"{cell.scenario}, {cell.policy}{role}, {cell.topology}, seed {cell.seed}")


def reasons(cell: CellResult) -> tuple[str, ...]:
    """The why lines and the violations of a cell; never empty, so that no problem is shown without a word."""
    violations = (f"violation: {name}" for name in cell.violations)
    return tuple(visible(line) for line in (*cell.why, *violations)) or (NO_REASON,)


def evidence_line(evidence: Evidence) -> str:
    """What a fault touched, where, and how it looked before and after."""
    request = f", {evidence.request_id}" if evidence.request_id is not None else ""
    change = ""
    if evidence.before is not None or evidence.after is not None:
        change = f" ({evidence.before or 'nothing'} -> {evidence.after or 'nothing'})"
    return visible(f"{evidence.fault} at {evidence.seam}{request}: {evidence.what}{change}")


def no_evidence(cell: CellResult) -> str:
    """What a missing evidence list means: a fault that cannot be proved, or none asked for."""
    return "none: nothing proves that the fault happened" if cell.faults else "none: no fault was asked for"


def twin_totals(run: RunResult) -> str:
    """`Twins: 36 pass. Repeats: 4 pass.`, or nothing if there are none."""
    parts = []
    for role, name in ((Role.TWIN, "Twins"), (Role.REPEAT, "Repeats")):
        cells = tuple(cell for cell in run.cells if cell.role is role)
        if cells:
            part = RunResult(run.name, run.target, run.seed, run.interrupted, cells)
            parts.append(f"{name}: {totals_sentence(part)}.")
    return " ".join(parts)
