"""One scenario in this process gives what `kvchaos run` gives, and leaves nothing behind."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import api
from harness.api import Runs, run_scenario, run_scenarios
from harness.cli import main
from harness.history import History
from harness.plan import Cell
from harness.targets.sim import SimTarget
from reports.results import read_results
from scenarios.loader import parse_scenario
from scenarios.problems import ScenarioError
from scenarios.words import Outcome, Policy, Result, Role, VerdictStatus

FLIP = """\
schema_version: 1
name: flip
summary: A bit of D's copy flips before the check.
workload: {requests: 2, prompt_tokens: 20, output_tokens: 2}
faults:
  - kind: bit_flip
    when: {load: 2, at: before_verify}
expect:
  off:                   {verdict: not_checked, outcome: served, truth: corrupted}
  fail_open:             {verdict: mismatch, outcome: served, truth: corrupted}
  fail_closed_fail:      {verdict: mismatch, outcome: failed, truth: corrupted}
  fail_closed_recompute: {verdict: mismatch, outcome: recomputed, truth: corrupted, tokens: right}
"""
CLEAN = """\
schema_version: 1
name: clean
summary: No fault.
workload: {requests: 1, prompt_tokens: 20, output_tokens: 2}
policies: [fail_open]
expect:
  fail_open: {verdict: verified, outcome: served, truth: intact, tokens: right}
"""
LOST = """\
schema_version: 1
name: lost
summary: The checksums are lost.
workload: {requests: 1, prompt_tokens: 20, output_tokens: 2}
policies: [off]
faults:
  - kind: drop_checksums
    when: {load: 1}
expect:
  off: {verdict: not_checked}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two scenarios, to be in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "flip.yaml").write_text(FLIP)
    (tmp_path / "mine" / "clean.yaml").write_text(CLEAN)
    return tmp_path


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of the cells that the target `sim` runs."""
    ids: list[str] = []

    class Counting(SimTarget):
        def run(self, cell: Cell, history: History) -> None:
            ids.append(cell.id)
            super().run(cell, history)

    monkeypatch.setitem(api.TARGETS, "sim", Counting())
    return ids


def test_a_cell_is_judged_in_this_process() -> None:
    cell = run_scenario(FLIP, policy="fail_closed_fail", seed=7)
    assert (cell.result, cell.role, cell.policy) == (Result.PASS, Role.FAULT, Policy.FAIL_CLOSED_FAIL)
    assert [(load.verdict, load.outcome) for load in cell.loads] == [
        (VerdictStatus.VERIFIED, Outcome.SERVED),
        (VerdictStatus.MISMATCH, Outcome.FAILED),
    ]
    assert cell.evidence
    assert cell.rerun == "run_scenario(<flip>, policy='fail_closed_fail', seed=7, target='sim')"


def test_the_same_cells_come_out_as_of_the_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twins, reruns and all: the one difference is that nothing is written."""
    monkeypatch.setattr(sys, "argv", ["kvchaos", "run", "mine", "--seed", "5", "--runs-dir", "kept"])
    with pytest.raises(SystemExit, match="0"):
        main()
    stored = read_results(folder / "kept" / "latest" / "results.json")
    result = run_scenarios(["mine"], seed=5)
    assert result.cells == tuple(cell for cell in stored.cells if cell.role is not Role.REPEAT)
    assert (result.seed, result.target, result.exit_code) == (5, "sim", 0)


def test_a_cell_is_that_of_a_whole_run(folder: Path) -> None:
    whole = {(cell.policy, cell.role): cell for cell in run_scenarios([Path("mine/flip.yaml")], seed=5).cells}
    for twin, role in ((False, Role.FAULT), (True, Role.TWIN)):
        assert run_scenario("mine/flip.yaml", policy="off", seed=5, twin=twin) == whole[Policy.OFF, role]


def test_a_scenario_is_given_in_any_form(folder: Path) -> None:
    forms = [parse_scenario(FLIP), FLIP, FLIP.replace("\n", "\r\n"), "mine/flip.yaml", folder / "mine" / "flip.yaml"]
    cells = [replace(run_scenario(form, policy=Policy.FAIL_OPEN), rerun="") for form in forms]
    assert cells == [cells[0]] * len(forms)


def test_another_seed_gives_another_cell() -> None:
    first, again, other = (run_scenario(FLIP, policy="off", seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.evidence != other.evidence


def test_the_twin_has_no_fault() -> None:
    twin = run_scenario(FLIP, policy="fail_closed_fail", twin=True)
    assert (twin.role, twin.result, twin.faults) == (Role.TWIN, Result.PASS, ("noop",))
    assert twin.rerun.endswith("twin=True)")


def test_what_fails_is_a_result() -> None:
    cell = run_scenario(FLIP.replace("outcome: failed", "outcome: served"), policy="fail_closed_fail")
    assert cell.result is Result.FAIL
    assert any("outcome is failed" in line for line in cell.why)


def test_what_the_target_cannot_run_is_not_applicable() -> None:
    for twin in (False, True):
        cell = run_scenario(LOST, policy="off", twin=twin)
        assert (cell.result, cell.loads) == (Result.NOT_APPLICABLE, ())


def test_a_target_that_breaks_makes_the_cell_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(SimTarget):
        def run(self, cell: Cell, history: History) -> None:
            super().run(cell, history)
            raise RuntimeError("out of luck")

    monkeypatch.setitem(api.TARGETS, "sim", Broken())
    cell = run_scenario(CLEAN, policy="fail_open")
    assert cell.result is Result.UNKNOWN
    assert "out of luck" in cell.why[0]


def test_a_twin_is_run_once(ran: list[str]) -> None:
    scenario, runs = parse_scenario(FLIP), Runs(seed=0, target="sim")
    other = scenario.model_copy(update={"name": "another-flip"})
    first = runs.judge(scenario, Policy.OFF, "a.yaml")
    second = runs.judge(other, Policy.OFF, "b.yaml")
    assert [cell.role for cell in (*first, *second)] == [Role.FAULT, Role.TWIN] * 2
    assert ran == ["flip--off", first[1].id, "another-flip--off"]
    assert replace(first[1], rerun="") == replace(second[1], rerun="")
    assert [cell.rerun.split()[2] for cell in (first[1], second[1])] == ["a.yaml", "b.yaml"]


def test_nothing_is_left_behind(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    log, threads, level = logging.getLogger("engine"), torch.get_num_threads(), logging.getLogger("engine").level
    try:
        log.setLevel(logging.DEBUG)
        torch.set_num_threads(2)
        run_scenario("mine/flip.yaml", policy="fail_open")
        assert (log.level, torch.get_num_threads()) == (logging.DEBUG, 2)
    finally:
        log.setLevel(level)
        torch.set_num_threads(threads)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "of"}, "policy: policy is 'of': use one of off, fail_open, .*; did you mean 'off'"),
        ({"policy": "fail_closed_fail"}, "clean: policy: .*which the scenario does not run: use fail_open"),
        ({"policy": "fail_open", "seed": -1}, "seed: seed is -1: use a whole number from 0"),
        ({"policy": "fail_open", "seed": True}, "seed: seed is true"),
        ({"policy": "fail_open", "seed": 1 << 63}, "seed: "),
        ({"policy": "fail_open", "target": "simm"}, "target: target is 'simm': use .*; did you mean 'sim'"),
        ({"policy": "fail_open", "twin": True}, "twin: the scenario has no clean twin"),
    ],
)
def test_an_argument_that_cannot_be_used(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        run_scenario(CLEAN, **arguments)


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        ("nowhere.yaml", r"nowhere.yaml: cannot be read \(no such file or directory\)"),
        (Path("nowhere.yaml"), "nowhere.yaml"),
        ("mine", "not a regular file"),
        ("name: x\n", "<string>:1: schema_version: schema_version is missing"),
        (FLIP.replace("at: before_verify", "at: never"), "faults.0..when.at: at is 'never'"),
    ],
)
def test_a_scenario_that_cannot_be_used(folder: Path, scenario: str | Path, message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        run_scenario(scenario, policy="off")


def test_several_run_with_the_policies_that_are_wanted(ran: list[str]) -> None:
    result = run_scenarios([FLIP, CLEAN, LOST], policies=["off", "fail_open"])
    assert [cell.id for cell in result.cells if cell.role is Role.FAULT] == [
        "clean--fail_open",
        "flip--off",
        "flip--fail_open",
        "lost--off",
    ]
    assert "lost--off" in ran
    assert result.exit_code == 0


@pytest.mark.parametrize(
    ("scenarios", "policies", "message"),
    [
        ([], ["off"], "no path is given"),
        ([CLEAN], ["off"], "none of the 1 scenarios runs under off"),
        ([CLEAN], ["open"], "policy is 'open'"),
        ([CLEAN, CLEAN], ["fail_open"], "clean is given twice"),
        (["mine", CLEAN], ["fail_open"], "clean is given twice"),
        (["mine", "nowhere"], ["fail_open"], "nowhere: cannot be read"),
    ],
)
def test_several_that_cannot_be_run(folder: Path, scenarios: list[str], policies: list[str], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        run_scenarios(scenarios, policies=policies)
