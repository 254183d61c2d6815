"""The target runs cells like the simulator, and does not believe a cell whose two runs differ."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvchaos_example.twice import TwiceTarget

from engine.cache import KVMemory
from engine.seams import LoadFinished, Seams
from harness.history import History
from harness.judge import judge
from harness.observe import observe
from harness.plan import plan_cells
from harness.targets import TARGETS
from scenarios.loader import load_scenario
from scenarios.words import Policy, Result

SCENARIO = Path(__file__).parents[1] / "scenarios" / "inverted-layer.yaml"


def run(target: TwiceTarget, policy: Policy = Policy.FAIL_OPEN) -> History:
    cell, _ = plan_cells([load_scenario(SCENARIO)], [policy], 0, target.provides)
    history = History()
    target.run(cell, history)
    return history


@pytest.mark.parametrize("policy", Policy)
def test_a_cell_comes_out_as_on_the_simulator(policy: Policy) -> None:
    twice, once = run(TARGETS["twice"], policy), run(TARGETS["sim"], policy)
    assert twice.lines[0] == {**once.lines[0], "target": "twice"}
    assert twice.lines[1:] == once.lines[1:]
    assert judge(observe(twice.lines), "").result is Result.PASS


def test_a_cell_whose_runs_differ_is_unknown() -> None:
    runs = iter([1, 2])

    def disturb(seams: Seams) -> None:
        run = next(runs)

        def spoil(event: LoadFinished) -> None:
            memory: KVMemory = event.memory
            memory.fill(event.groups[0].block_ids, bytes([run] * 8))

        seams.on("consumer.load_finished", spoil)

    history = run(TwiceTarget(watch=disturb))
    result = judge(observe(history.lines), "")
    assert result.result is Result.UNKNOWN
    assert "two runs of this cell left different histories" in " ".join(result.why)
