"""The terminal says the same at any width, without colour and without Unicode."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from reports.summary import headline_lines
from reports.terminal import MAX_PROBLEMS, print_run
from reports.untested import untested_line
from scenarios.words import Policy, Result

HOSTILE = "[red]x[/red] \x1b[2J\r\n\u202e\ud800 {0} %s"


def shown(run, width, encoding="utf-8", run_dir=None, **options):
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    print_run(run, run_dir, Console(file=file, width=width, **options))
    return raw.getvalue().decode(encoding)


def words(text):
    return " ".join(text.split())


@pytest.mark.parametrize("width", [30, 60, 80, 120, 160, 200])
def test_every_width_shows_everything_and_fits(troubled, width):
    text = shown(troubled, width)
    assert "\x1b" not in text
    for line in headline_lines(troubled):
        assert line in words(text)
    assert untested_line(troubled) in words(text)
    for word in ("✓ pass", "✗ FAIL", "? unknown", "△ GAP-8", "- n/a", "not run", "silent"):
        assert word in words(text)
    for cell in troubled.cells:
        if cell.result in (Result.FAIL, Result.UNKNOWN):
            assert f"    {cell.rerun}\n" in text
    too_long = [line for line in text.splitlines() if len(line.rstrip()) > width and "kvchaos run" not in line]
    assert not too_long


def test_narrow_terminals_keep_the_verdict_with_its_policy(smoke):
    assert "fail_closed_recompute: ✓ pass mismatch/recomputed" in words(shown(smoke, 60))


def test_one_line_a_scenario_where_it_fits(smoke):
    lines = [words(line) for line in shown(smoke, 200).splitlines()]
    assert (
        "short-transfer ✓ pass not_checked/served, silent ✓ pass mismatch/served ✓ pass mismatch/failed "
        "✓ pass mismatch/recomputed"
    ) in lines


@pytest.mark.parametrize("width", [60, 80, 160])
def test_without_unicode_the_words_remain(troubled, width):
    cell = replace(troubled.cells[7], scenario="naïve-漢字", why=("né",))
    text = shown(replace(troubled, cells=(*troubled.cells, cell)), width, "ascii")
    assert "FAIL: na\\xefve" in text
    assert "unknown: stale" in text
    assert "✗" not in text


def test_colour_is_only_an_addition(troubled):
    coloured = shown(troubled, 100, force_terminal=True, color_system="truecolor")
    assert "\x1b[" in coloured
    plain = "".join(Text.from_ansi(coloured).plain.split())
    assert plain == "".join(shown(troubled, 100).split())


@pytest.mark.parametrize("width", [60, 80, 160])
def test_hostile_text_is_neither_markup_nor_control(build, width):
    cell = build.cell(HOSTILE, result=Result.FAIL, why=(HOSTILE,), topology=HOSTILE, faults=(HOSTILE,))
    text = shown(replace(build.run(replace(cell, rerun=HOSTILE)), name=HOSTILE, target=HOSTILE), width)
    assert "[red]x[/red]" in text
    assert not set(text) & set("\x1b\r\u202e\ud800")


def test_an_empty_run_says_so(build):
    text = words(shown(build.run(), 80))
    assert "EMPTY: No cell was run" in text
    assert "pass" not in text.replace("is not a pass", "")


def test_only_the_policies_that_were_run_are_shown(build):
    run = build.run(build.cell(policy=Policy.FAIL_OPEN, loads=build.clean_loads(Policy.FAIL_OPEN), faults=()))
    text = words(shown(run, 80))
    before, not_tested = text.split("Not tested: ")
    assert "fail_open" in before
    assert "fail_closed" not in before
    assert "Fail-closed: not run." in before
    assert not_tested.startswith("policies off, fail_closed_fail and fail_closed_recompute;")


def test_a_fault_that_touched_nothing_is_not_shown_as_verified(build):
    loads = build.clean_loads(Policy.FAIL_OPEN)
    run = build.run(build.cell(policy=Policy.FAIL_OPEN, result=Result.UNKNOWN, loads=loads, evidence=()))
    text = words(shown(run, 80))
    assert "no request" in text
    assert "verified/" not in text
    assert "nothing proves that the fault happened" in text


@pytest.mark.parametrize(("more", "said"), [(0, None), (1, "1 more failed or unknown cell:"), (2, "2 more failed")])
def test_many_problems_are_cut_and_counted(build, more, said):
    cells = (build.cell(result=Result.FAIL, seed=i, why=("x",) * 9) for i in range(MAX_PROBLEMS + more))
    text = words(shown(build.run(*cells), 80))
    assert text.count("rerun") == MAX_PROBLEMS
    assert "- and 3 more" in text
    assert (said in text) if said else ("more failed" not in text)


def test_the_report_files_are_named(smoke):
    text = shown(smoke, 40, run_dir=Path("runs/smoke/a-long-folder-name-that-would-wrap"))
    assert "  runs/smoke/a-long-folder-name-that-would-wrap/report.html\n" in text
