"""summary.md leads with the headline, stays under GitHub's limit and shows text as it is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reports.markdown import MAX_PROBLEMS, MAX_ROWS, escape, summary_markdown
from reports.summary import headline_lines
from reports.untested import untested
from scenarios.words import Policy, Result


def table_rows(text):
    return [line for line in text.splitlines() if line.startswith("|")]


def test_the_headline_comes_first(troubled):
    lines = summary_markdown(troubled).splitlines()
    assert lines[0] == "# kvchaos: FAILED"
    assert lines[2].strip() == f"**{headline_lines(troubled)[0]}**"
    assert lines[3].strip() == f"**{headline_lines(troubled)[1]}**"


def test_what_was_not_tested_is_said_before_anything_else(troubled):
    text = summary_markdown(troubled)
    assert text.index("## Not tested") < text.index("| ✓ pass")
    for part in untested(troubled):
        assert f"- {escape(part.whole)}" in text


def test_the_matrix_has_a_row_a_scenario_and_even_columns(troubled):
    rows = table_rows(summary_markdown(troubled))
    matrix = [row for row in rows if row.count("|") == 7]
    assert len(matrix) == 2 + len({cell.scenario for cell in troubled.cells})
    assert any("✗ FAIL<br>verified / served<br>**silent corruption**" in row for row in matrix)
    assert any("| not run |" in row for row in matrix)


@pytest.mark.parametrize(
    "text", ["a|b", "<script>alert(1)</script>", "`x` *y* _z_ [a](b) # ~~c~~ $d$ &amp; \\", "a\nb"]
)
def test_text_is_shown_as_it_is(text):
    escaped = escape(text)
    assert not set(escaped.replace("&#", "").replace(";", "")) & set("|<>`*_[]~$\n\\&")


def test_a_hostile_name_cannot_leave_its_cell(build):
    cell = build.cell("a|b\n| c | <img src=x>", result=Result.FAIL, why=("x\n# heading\n</details>",))
    text = summary_markdown(build.run(replace(cell, rerun="```\n# heading `````")))
    assert {row.count("|") for row in table_rows(text)} == {2, 4}
    assert "<img" not in text
    assert "</details>" not in text
    assert "\n# heading" not in text
    assert "\n``````sh\n```\\n# heading `````\n``````\n" in text


def test_an_empty_run_is_no_pass(build):
    text = summary_markdown(build.run())
    assert text.startswith("# kvchaos: EMPTY")
    assert "✓" not in text


def test_long_sections_are_cut_and_counted(build):
    cells = [build.cell(f"s{i}", result=Result.FAIL, why=("x",) * 20) for i in range(MAX_ROWS + 3)]
    text = summary_markdown(build.run(*cells))
    assert "\n3 more rows left out: see `report.html`." in text
    assert f"\n{MAX_ROWS + 3 - MAX_PROBLEMS} more cells left out: see `report.html`." in text
    assert "- and 12 more\n" in text


def test_any_run_fits_a_step_summary(build):
    huge = "漢<" * 5000
    cells = [
        replace(
            build.cell(f"{i}{huge}", p, Result.FAIL, why=(huge,) * 50, topology=huge, faults=(huge,)), rerun=huge * 5
        )
        for i in range(60)
        for p in Policy
    ]
    text = summary_markdown(replace(build.run(*cells), name=huge, target=huge))
    assert len(text.encode()) < 2**20
    assert "left out: see `report.html`." in text
