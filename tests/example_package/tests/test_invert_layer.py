"""The fault does what it says, only to the load that it names, and proves it."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from kvchaos_example.invert_layer import InvertLayer, InvertLayerParams

from engine.cache import KVMemory, PagedKVCache
from engine.checksum.records import GroupBlocks
from engine.config import EngineConfig
from engine.seams import LoadFinished, Seams
from faults.base import FaultContext
from faults.levers import Levers
from harness.history import History
from harness.judge import judge
from harness.observe import observe
from harness.plan import plan_cells
from harness.targets import TARGETS
from scenarios.loader import load_scenario
from scenarios.words import Policy, Result

SCENARIO = Path(__file__).parents[1] / "scenarios" / "inverted-layer.yaml"
BLOCKS = GroupBlocks(group_id=0, block_size=16, start=1, block_ids=(5, 3), num_tokens=40)


def finish_a_load(layer: int, request_id: str = "r2") -> tuple[FaultContext, np.ndarray, np.ndarray]:
    """Let a load of 24 tokens finish with the fault attached. Returns its notebook, and the KV before and after."""
    memory = KVMemory(PagedKVCache(EngineConfig("consumer")))
    memory.fill(tuple(range(64)), b"12345678")
    params = {"kind": "invert_layer", "when": {"load": 2, "at": "before_verify"}, "layer": layer}
    context = FaultContext("r2", random.Random(0), Levers())
    seams = Seams()
    InvertLayer(InvertLayerParams.model_validate(params), context).attach(seams)
    before = memory.slots(tuple(range(64)))
    seams.emit(LoadFinished("consumer", request_id, {0: BLOCKS}, memory))
    return context, before, memory.slots(tuple(range(64)))


def test_it_inverts_the_tokens_of_the_load_in_that_layer_and_nothing_else() -> None:
    context, before, after = finish_a_load(layer=1)
    wanted = before.copy()
    for slot in (*range(5 * 16, 6 * 16), *range(3 * 16, 3 * 16 + 8)):
        wanted[1, :, slot] = ~before[1, :, slot]
    assert np.array_equal(after, wanted)
    (evidence,) = context.evidence
    assert (evidence.fault, evidence.seam) == ("invert_layer", "consumer.load_finished")
    assert evidence.before != evidence.after


@pytest.mark.parametrize(("layer", "request_id"), [(2, "r2"), (1, "r1")])
def test_without_the_layer_or_the_load_it_does_nothing_and_claims_nothing(layer: int, request_id: str) -> None:
    context, before, after = finish_a_load(layer, request_id)
    assert np.array_equal(after, before)
    assert context.evidence == []


@pytest.mark.parametrize("connector", ["pull", "staged"])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_scenario_comes_out_as_it_says(seed: int, connector: str) -> None:
    target = TARGETS["sim"]
    cells = plan_cells([load_scenario(SCENARIO)], tuple(Policy), seed, target.provides, connector=connector)
    for cell in cells:
        history = History()
        target.run(cell, history)
        result = judge(observe(history.lines), "kvchaos run")
        assert result.result is Result.PASS, result.why
