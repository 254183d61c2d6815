"""The page, the plot and the command show what was measured, and the committed campaign is a good one."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from click.testing import CliRunner

from engine.errors import InputError
from harness.commands.strength import strength
from harness.errors import OutputError
from harness.strength import campaign
from harness.strength.block import Block
from harness.strength.models import MODELS
from harness.strength.page import BEGIN, END, markdown, rate_text, read_results, strength_page
from harness.strength.plot import svg
from harness.strength.results import ModelResult, Rate, StrengthResult
from harness.strength.theory import EXACT, VERSION_1

SVG = "{http://www.w3.org/2000/svg}"
SMALL = Block(2, 2, 4, 4)


@pytest.fixture(scope="module")
def committed(root: Path) -> StrengthResult:
    return read_results(root)


@pytest.fixture
def small() -> StrengthResult:
    rates = (Rate("version 1", 5, 1000, 0.0005, 0.02), Rate("version 2", 0, 1000, 0.0, 0.0076))
    return StrengthResult(0, 1000, SMALL, (ModelResult("a <kind>", 0.005, True, rates),), ())


@pytest.mark.req("GAP-8", "HRD-1", "DEF-9")
def test_the_committed_campaign_is_large_and_without_surprises(committed: StrengthResult) -> None:
    assert committed.surprises == []
    assert committed.samples == 10_000_000
    assert [model.model for model in committed.models] == [model.name for model in MODELS]
    double = next(model for model in committed.models if model.model == "2 bit flips")
    assert double.exact
    assert double.rate("version 1").low <= (double.theory or 0) <= double.rate("version 1").high
    assert all(rate.samples == committed.samples for rate in double.rates if rate.checksum != "xxh3_64")


def test_the_committed_expectations_are_those_of_today(committed: StrengthResult) -> None:
    for model, stored in zip(MODELS, committed.models, strict=True):
        theory = None if model.theory is None else VERSION_1[model.theory](committed.block)
        assert (stored.theory, stored.exact) == (theory, model.theory in EXACT), model.name


def test_rates_in_words() -> None:
    assert rate_text(Rate("x", 0, 100, 0.0, 0.05)) == "< 0.05"
    assert rate_text(Rate("x", 7, 100, 0.01, 0.2)) == "**0.07** (0.01 to 0.2)"
    assert rate_text(Rate("x", 100, 100, 0.95, 1.0)) == "**all** (> 0.95)"
    assert rate_text(Rate("x", 0, 0, 0.0, 1.0)) == "-"


def test_the_page_keeps_its_prose(tmp_path: Path, committed: StrengthResult, root: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "strength.json").write_text((root / "docs" / "strength.json").read_text())
    page = tmp_path / "docs" / "strength.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    made = strength_page(tmp_path)
    assert made.startswith(f"before\n{BEGIN}\n\nOne block")
    assert made.endswith(f"{END}\nafter\n")
    assert "old" not in made
    page.write_text("no markers")
    with pytest.raises(OutputError, match="must hold the lines"):
        strength_page(tmp_path)


def test_the_tables_have_a_row_a_fault(committed: StrengthResult) -> None:
    lines = markdown(committed)
    for model in committed.models:
        assert sum(line.startswith(f"| {model.model} |") for line in lines) == 1
    assert sum("pairs of a block" in line for line in lines) == 2


def test_the_plot_shows_misses_as_dots_and_theory_as_ticks(small: StrengthResult) -> None:
    drawn = ElementTree.fromstring(svg(small))
    assert any(text.text == "a <kind>" for text in drawn.iter(f"{SVG}text"))
    legend = len(small.models[0].rates)
    assert len(list(drawn.iter(f"{SVG}circle"))) == legend + 1
    assert sum(path.get("stroke") == "#000" for path in drawn.iter(f"{SVG}path")) == 1


def test_the_command_prints_a_campaign_and_fails_on_a_surprise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.commands.strength.Block", lambda: SMALL)
    runner = CliRunner()
    shown = runner.invoke(strength, ["--samples", "1000"], standalone_mode=False)
    assert shown.return_value == 0
    assert "Version 1 misses what it must, version 2 none of" in shown.output
    as_json = json.loads(runner.invoke(strength, ["--samples", "1000", "--json"], standalone_mode=False).output)
    assert [model["model"] for model in as_json["models"]] == [model.name for model in MODELS]
    monkeypatch.setattr(campaign, "many_pairs", lambda changes, seed: [])
    monkeypatch.setitem(campaign.VERSION_1, "two flips", lambda block: 0.5)
    wrong = runner.invoke(strength, ["--samples", "1000"], standalone_mode=False)
    assert wrong.return_value == 1
    assert "SURPRISE: 2 bit flips: version 1 is not what was counted" in wrong.output


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "harness.strength.campaign")
    monkeypatch.delitem(sys.modules, "harness.strength.checksums")
    monkeypatch.setitem(sys.modules, "crc32c", None)
    result = CliRunner().invoke(strength, ["--samples", "1000"], standalone_mode=False)
    assert isinstance(result.exception, InputError)
    assert "crc32c is not here: pip install 'kvchaos[bench]'" in str(result.exception)


def test_the_costs_need_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "harness.strength.cost", None)  # as if what it imports were not here
    with pytest.raises(InputError, match=r"--cost measures the compiled path, which needs .*: pip install numba"):
        CliRunner().invoke(strength, ["--cost"], catch_exceptions=False)


def test_what_version_2_costs_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.strength import cost

    costs = cost.measure(num_tokens=640, megabytes=1, repeats=1)
    assert [c.unit for c in costs] == ["characters", "ms", "ms", "ms", "ms"]
    assert costs[0].version_2 - costs[0].version_1 in (12, 16)
    monkeypatch.setattr(cost, "measure", lambda: costs)
    shown = CliRunner().invoke(strength, ["--cost"], standalone_mode=False)
    assert shown.return_value == 0
    assert "kv_checksums of 640 tokens" in shown.output
    as_json = json.loads(CliRunner().invoke(strength, ["--cost", "--json"], standalone_mode=False).output)
    assert len(as_json) == 5
