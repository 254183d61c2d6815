"""What a run did not test is said, and nothing that it did test."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from faults.registry import FAULTS
from reports.gaps import GAPS
from reports.results import RunResult
from reports.untested import MAX_REASONS, untested, untested_line
from scenarios.words import Policy, Result, Role

KINDS = tuple(kind for kind in FAULTS if kind != "noop")


def complete_run(build, **changes) -> RunResult:
    """Every policy, every known gap and every kind of fault, with one seed."""
    cells = [build.cell(f"{kind}-{policy}", policy, faults=(kind,)) for kind in KINDS for policy in Policy]
    gaps = [
        build.cell(gap.lower(), Policy.FAIL_OPEN, Result.KNOWN_GAP, faults=(KINDS[0],), known_gap=gap) for gap in GAPS
    ]
    return replace(build.run(*cells, *gaps), **changes)


def sentences(run: RunResult) -> list[str]:
    return [part.sentence for part in untested(run)]


def test_the_table_of_gaps_is_that_of_the_spec(root):
    in_spec = re.findall(r"^- (GAP-\d+) ", (root / "docs" / "spec.md").read_text(), re.MULTILINE)
    assert list(GAPS) == in_spec
    assert all(meaning.endswith(".") and "\n" not in meaning for meaning in GAPS.values())


def test_a_complete_run_still_leaves_target_and_seeds(build):
    assert untested_line(complete_run(build)) == "Not tested: any target but sim; more than one seed."
    assert sentences(complete_run(build)) == [
        "Only target sim was run: no real transport, process or network.",
        "Each cell ran with one seed only (the run's is 7): with others it may come out otherwise.",
    ]


def test_an_unknown_target_has_no_limits_of_its_own(build):
    assert sentences(complete_run(build, target="http"))[0] == "Only target http was run."


def test_several_seeds(build):
    run = complete_run(build)
    twice = replace(run, cells=(*run.cells, *(replace(cell, seed=8) for cell in run.cells)))
    assert untested_line(twice).endswith("; more than 2 seeds.")
    some = replace(run, cells=(*run.cells, replace(run.cells[0], seed=8)))
    assert sentences(some)[-1].startswith("Some of the cells ran with one seed only")


@pytest.mark.parametrize("result", [Result.NOT_APPLICABLE, Result.UNKNOWN])
def test_what_was_not_judged_was_not_tested(build, result):
    run = complete_run(build)
    cells = tuple(
        replace(cell, result=result, why=("no lever",))
        if cell.policy is Policy.OFF or cell.known_gap == "GAP-9" or cell.faults == (KINDS[-1],)
        else cell
        for cell in run.cells
    )
    text = " ".join(part.whole for part in untested(replace(run, cells=cells)))
    assert "No cell was judged under policy off." in text
    assert "1 of the 13 known gaps had no cell: GAP-9." in text
    assert f"1 of the {len(KINDS)} kinds of fault was judged in no cell: {KINDS[-1]}." in text


def test_what_did_not_apply_is_named_with_what_was_missing(build):
    run = complete_run(build)
    missing = [build.cell(f"m{n}", Policy.OFF, Result.NOT_APPLICABLE, why=("sim has no lever.network",)) for n in "ab"]
    other = build.cell("c", Policy.OFF, Result.NOT_APPLICABLE, faults=("early_reuse",), why=("sim has no lever.clock",))
    (part, *_) = untested(replace(run, cells=(*run.cells, *missing, other)))
    assert part.short == "3 cells that did not apply"
    assert part.details == (
        ("bit_flip", "2 cells: sim has no lever.network"),
        ("early_reuse", "1 cell: sim has no lever.clock"),
    )
    assert part.whole.startswith("3 cells did not apply: bit_flip (2 cells: sim has no lever.network); early_reuse (1")


def test_many_reasons_are_cut_and_counted(build):
    cells = [build.cell(f"s{n}", Policy.OFF, Result.NOT_APPLICABLE, why=(f"no {n}",)) for n in range(MAX_REASONS + 2)]
    (part,) = [p for p in untested(build.run(*cells)) if "did not apply" in p.short]
    assert part.details[-1] == ("others", "2 other reasons: see the cells")


def test_twins_test_nothing(build):
    twin = build.cell(role=Role.TWIN)
    assert untested_line(build.run(twin)) == "Not tested: everything."
    assert untested_line(build.run()) == "Not tested: everything."


def test_a_stopped_run_says_so_first(build):
    assert untested_line(complete_run(build, interrupted=True)).startswith(
        "Not tested: what the stopped run did not reach; "
    )


def test_a_run_with_nothing_judged_names_everything(build):
    text = untested_line(build.run(build.cell(result=Result.UNKNOWN)))
    for part in ("policies off, fail_open, ", "13 of 13 known gaps", f"{len(KINDS)} of {len(KINDS)} kinds of fault"):
        assert part in text
