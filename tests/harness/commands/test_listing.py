from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.seams import SEAMS
from faults.moments import MOMENTS
from faults.registry import FAULTS
from harness.targets import TARGETS
from scenarios.words import Policy

Run = Callable[..., Any]


def test_scenarios(kvchaos: Run, write_scenario: Callable[..., Path], clean: dict[str, Any]) -> None:
    write_scenario("b")
    path = write_scenario("a", **clean)
    assert kvchaos("list", "scenarios", path.parent, "--json").json == [
        {"name": "a", "faults": "none", "summary": "The scenario a of a test."},
        {"name": "b", "faults": "bit_flip", "summary": "The scenario b of a test."},
    ]
    lines = kvchaos("list", "scenarios", path.parent).out.splitlines()
    assert [line.split()[0] for line in lines] == ["name", "a", "b"]


def test_scenarios_are_looked_for_in_the_folder_of_that_name(kvchaos: Run, write_scenario: Callable[..., Path]) -> None:
    write_scenario("a")
    assert [row["name"] for row in kvchaos("list", "scenarios", "--json").json] == ["a"]


def test_without_such_a_folder_it_says_so(kvchaos: Run) -> None:
    done = kvchaos("list", "scenarios")
    assert done.code == 64
    assert done.err.startswith("kvchaos: scenarios: cannot be read")


@pytest.mark.parametrize("summary", ["[bold]x[/nothing] :smile: [link=file:///x]y[/]", "é 漢字 ✓", "[/]"])
def test_a_summary_is_text_and_no_markup(kvchaos: Run, write_scenario: Callable[..., Path], summary: str) -> None:
    assert summary in kvchaos("list", "scenarios", write_scenario(summary=summary)).out


def test_faults_are_those_of_the_registry_with_all_that_a_scenario_may_say(kvchaos: Run) -> None:
    rows = {row["kind"]: row for row in kvchaos("list", "faults", "--json").json}
    assert set(rows) == set(FAULTS)
    for kind, row in rows.items():
        assert set(row["at"].split(", ")) <= set(MOMENTS)
        fields = set(FAULTS[kind].params_model.model_fields) - {"kind", "when"}
        assert set(row["parameters"].split(", ")) == (fields or {"none"})
        assert row["summary"].endswith(".")
    assert set(rows["noop"]["at"].split(", ")) == set(MOMENTS)
    text = kvchaos("list", "faults").out
    assert all(kind in text for kind in FAULTS)
    assert set(MOMENTS.values()) <= set(SEAMS)


def test_policies_are_the_flags_that_the_engines_get(kvchaos: Run) -> None:
    rows = kvchaos("list", "policies", "--json").json
    assert [row["policy"] for row in rows] == [str(policy) for policy in Policy]
    for row in rows:
        settings = Policy(row["policy"]).settings()
        assert row["kv_checksum_mode"] == settings.kv_checksum_mode
        assert row["kv_load_failure_policy"] == settings.kv_load_failure_policy


def test_targets(kvchaos: Run) -> None:
    rows = kvchaos("list", "targets", "--json").json
    assert [row["target"] for row in rows] == sorted(TARGETS)


def test_validate_lists_what_it_checked(kvchaos: Run, write_scenario: Callable[..., Path]) -> None:
    write_scenario("b")
    path = write_scenario("a")
    assert kvchaos("validate", path).out == "a: ok\n1 scenario checked, all can be run\n"
    assert kvchaos("validate", path.parent, path).out == "a: ok\nb: ok\n2 scenarios checked, all can be run\n"
    plain = kvchaos("validate", path, "--json").json
    assert plain[0]["name"] == "a"
    assert plain[0]["faults"][0]["kind"] == "bit_flip"
