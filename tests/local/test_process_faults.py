"""Engines that stop, and that die and come back, on real processes; scenarios/processes says what must come of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.history import History, find_all
from harness.judge import judge
from harness.observe import observe
from harness.plan import plan_cells
from harness.targets.pairs.local import LocalPair
from harness.targets.processes import LOCAL, PairTarget
from scenarios.loader import parse_scenario
from scenarios.words import Policy, Result


@pytest.fixture(scope="module")
def target() -> Iterator[PairTarget]:
    target = PairTarget("local", "", LocalPair, levers=LOCAL.provides)
    yield target
    target.close()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("pause-producer-past-lease", "when it went on its lease had ended, and it gave back blocks"),
        ("pause-producer-until-reuse", "c1 overwrote blocks of P"),
        ("restart-consumer-mid-read", "and started again"),
    ],
)
def test_a_scenario_of_processes(root: Path, target: PairTarget, name: str, said: str) -> None:
    scenario = parse_scenario((root / f"scenarios/processes/{name}.yaml").read_text())
    cell, _ = plan_cells([scenario], [Policy.FAIL_CLOSED_FAIL], 5, target.provides)
    history = History()
    target.run(cell, history)
    result = judge(observe(history.lines), "")
    assert (result.result, result.why) == (Result.PASS, ())
    assert said in result.evidence[-1].what
    restarted = [(line["engine"], line["layout"]) for line in find_all(history.lines, "engine.restarted")]
    assert restarted == ([("consumer", "NHD")] if name.startswith("restart") else [])
    assert len(find_all(history.lines, "oracle.pool")) == 2
