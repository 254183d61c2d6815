"""junit.xml: what CI systems read. One test case a cell, so that a regression has a name and a history.

fail is a failure, unknown an error, not_applicable skipped. A known gap passes, with a property that names it. What a
CI system would otherwise show as green (an empty run, one that was stopped, one in which nothing passed) gets a test
case of its own that errs. Nothing in here changes from one run to the next unless a result does.
"""

# junitparser is annotated only in part.
# mypy: allow-untyped-calls

from __future__ import annotations

from collections import Counter

from junitparser import Error, Failure, JUnitXml, Properties, Property, Skipped, TestCase, TestSuite

from reports.results import CellResult, RunResult
from reports.summary import cell_title, evidence_line, headline_lines, no_evidence, notes, reasons, standing_of
from reports.text import visible
from reports.untested import untested
from scenarios.words import Result

RUN_CLASSNAME = "kvchaos"


def junit_xml(run: RunResult) -> str:
    """The whole document, ready to be written as UTF-8."""
    suite = TestSuite(visible(run.name))
    standing = standing_of(run)
    for name, value in (
        ("target", visible(run.target)),
        ("seed", str(run.seed)),
        ("interrupted", str(run.interrupted).lower()),
        ("standing", f"{standing.word}: {standing.sentence}"),
        ("headline", " ".join((*headline_lines(run), *notes(run)))),
        ("not_tested", " ".join(part.whole for part in untested(run))),
    ):
        suite.add_property(name, value)
    cases = [_test_case(cell, name) for cell, name in zip(run.cells, _names(run.cells), strict=True)]
    if standing.result is not Result.PASS and (run.interrupted or not _red(run)):
        cases.append(_run_case(standing.sentence))
    suite.add_testcases(cases)
    document = JUnitXml(RUN_CLASSNAME)
    document.add_testsuite(suite)
    document.update_statistics()
    return '<?xml version="1.0" encoding="utf-8"?>\n' + _text(document.tostring()) + "\n"


def _red(run: RunResult) -> bool:
    """Whether a test case of a cell already shows that the run is not a pass."""
    return bool(run.totals[Result.FAIL] or run.totals[Result.UNKNOWN])


def _run_case(sentence: str) -> TestCase:
    case = TestCase("the whole run", RUN_CLASSNAME)
    case.append(_with_text(Error(sentence, "run"), sentence))
    return case


def _test_case(cell: CellResult, name: str) -> TestCase:
    case = TestCase(name, visible(cell.scenario))
    properties = Properties()
    known = {"id": cell.id, "topology": cell.topology, "seed": str(cell.seed), "result": str(cell.result)}
    if cell.known_gap is not None:
        known["known_gap"] = cell.known_gap
    for key, value in known.items():
        properties.add_property(Property(key, visible(value)))
    case.append(properties)
    message = reasons(cell)[0]
    if cell.result is Result.FAIL:
        case.append(_with_text(Failure(message, "fail"), _details(cell)))
    elif cell.result is Result.UNKNOWN:
        case.append(_with_text(Error(message, "unknown"), _details(cell)))
    elif cell.result is Result.NOT_APPLICABLE:
        case.append(Skipped(f"not applicable: {message}", "not_applicable"))
    return case


def _details(cell: CellResult) -> str:
    evidence = [evidence_line(item) for item in cell.evidence] or [no_evidence(cell)]
    lines = [cell_title(cell), "", "Why:", *_indented(reasons(cell)), "", "Evidence:", *_indented(evidence)]
    return "\n".join([*lines, "", "Rerun:", *_indented([visible(cell.rerun)])])


def _indented(lines: list[str] | tuple[str, ...]) -> list[str]:
    return [f"  {line}" for line in lines]


def _with_text(result: Failure | Error, text: str) -> Failure | Error:
    result.text = text
    return result


def _text(document: bytes | str) -> str:
    return document.decode("utf-8") if isinstance(document, bytes) else document


def _names(cells: tuple[CellResult, ...]) -> list[str]:
    """Policy and role, and as much of topology, seed and id as it takes to tell the cells of a scenario apart."""
    names = [f"{cell.policy} {cell.role}" for cell in cells]
    for more in (lambda c: c.topology, lambda c: f"seed {c.seed}", lambda c: c.id):
        shared = Counter((cell.scenario, name) for cell, name in zip(cells, names, strict=True))
        names = [
            f"{name} {more(cell)}" if shared[cell.scenario, name] > 1 else name
            for cell, name in zip(cells, names, strict=True)
        ]
    return [visible(name) for name in names]
