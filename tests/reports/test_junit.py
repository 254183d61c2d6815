"""junit.xml parses back to one test case a cell, and is red whenever the run is not a pass."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest
from junitparser import JUnitXml

from reports.junit import junit_xml
from scenarios.words import Policy, Result, Role

P, F, U, G, N = Result.PASS, Result.FAIL, Result.UNKNOWN, Result.KNOWN_GAP, Result.NOT_APPLICABLE


def parse(run):
    document = JUnitXml.fromstring(junit_xml(run).encode())
    return document, [case for suite in document for case in suite]


def test_a_case_a_cell_with_matching_counts(troubled):
    document, cases = parse(troubled)
    totals = troubled.totals
    assert len(cases) == document.tests == len(troubled.cells)
    assert (document.failures, document.errors, document.skipped) == (totals[F], totals[U], totals[N])
    assert [case.classname for case in cases] == [cell.scenario for cell in troubled.cells]
    assert cases[0].name == "off fault"
    assert len({(case.classname, case.name) for case in cases}) == len(cases)


def test_each_result_has_its_own_element(build):
    cells = [
        build.cell("a", result=P),
        build.cell("b", result=F, why=("line one", "line two")),
        build.cell("c", result=U, why=("no evidence",), evidence=()),
        build.cell("d", result=N, why=("no lever Network",)),
        build.cell("e", result=G, known_gap="GAP-8"),
    ]
    _, (passed, failed, unknown, skipped, gap) = parse(build.run(*cells))
    assert passed.is_passed
    assert failed.is_failure
    assert failed.result[0].message == "line one"
    for part in ("line two", "9f2c11 -> 8b44e0", cells[1].rerun):
        assert part in failed.result[0].text
    assert unknown.is_error
    assert "nothing proves" in unknown.result[0].text
    assert skipped.result[0].message == "not applicable: no lever Network"
    assert gap.is_passed
    element = ElementTree.fromstring(junit_xml(build.run(cells[4])))
    assert element.find(".//testcase//property[@name='known_gap']").get("value") == "GAP-8"


@pytest.mark.parametrize(
    ("results", "interrupted", "red"),
    [
        ((), False, True),
        ((P,), False, False),
        ((P,), True, True),
        ((G, N), False, True),
        ((N,), False, True),
        ((P, N), False, False),
        ((P, U), False, True),
        ((P, F), True, True),
    ],
)
def test_red_exactly_when_the_run_is_not_a_pass(build, results, interrupted, red):
    run = build.run(*(build.cell(result=r, seed=i) for i, r in enumerate(results)), interrupted=interrupted)
    document, _ = parse(run)
    assert bool(document.failures + document.errors) is red is (run.exit_code != 0)
    assert document.tests >= len(run.cells)


def test_cells_that_differ_only_in_topology_or_seed_keep_their_own_name(build):
    cells = [
        build.cell(topology="a"),
        build.cell(topology="b", seed=1),
        build.cell(topology="b", seed=2),
        build.cell(role=Role.TWIN),
        build.cell(policy=Policy.FAIL_OPEN),
    ]
    _, cases = parse(build.run(*cells))
    assert [case.name for case in cases] == [
        "off fault a",
        "off fault b seed 1",
        "off fault b seed 2",
        "off twin",
        "fail_open fault",
    ]


def test_nothing_changes_from_run_to_run(troubled):
    text = junit_xml(troubled)
    assert text == junit_xml(replace(troubled))
    assert "timestamp" not in text
    assert "hostname" not in text


def test_what_xml_cannot_hold_is_shown_as_an_escape(build):
    nasty = "".join(map(chr, [*range(0x20), 0x7F, 0x85, 0xD800, 0xDFFF, 0xFFFE, 0xFFFF])) + "]]><a b='\"'>&amp;"
    cell = replace(build.cell(nasty, result=F, why=(nasty,), known_gap=nasty), rerun=nasty, id=nasty)
    run = replace(build.run(cell), name=nasty, target=nasty)
    _, (case,) = parse(run)
    assert case.classname.startswith("\\x00\\x01")
    assert case.classname.endswith("\\uffff]]><a b='\"'>&amp;")
