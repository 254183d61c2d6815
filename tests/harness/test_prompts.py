from __future__ import annotations

import json

import pytest

from harness.plan import plan_cells
from harness.targets import TARGETS
from harness.targets.workload import make_prompts
from scenarios.loader import parse_scenario
from scenarios.schema import Scenario, Workload
from scenarios.words import Policy


def scenario(**workload: object) -> Scenario:
    plain = {
        "schema_version": 1,
        "name": "prompts",
        "summary": "prompts",
        "policies": ["off"],
        "workload": {"requests": 3, "prompt_tokens": [20, 90]} | workload,
        "expect": {"off": {"verdict": "not_checked"}},
    }
    return parse_scenario(json.dumps(plain))


@pytest.mark.parametrize("seed", range(4))
def test_identical_prompts_are_the_first_one(seed: int) -> None:
    drawn = make_prompts(scenario(), seed)
    same = make_prompts(scenario(identical_prompts=True), seed)
    assert len({prompt.token_ids for prompt in drawn}) == 3
    assert [prompt.request_id for prompt in same] == ["r1", "r2", "r3"]
    assert {prompt.token_ids for prompt in same} == {drawn[0].token_ids}


def test_a_field_that_is_not_used_leaves_seeds_as_they_were() -> None:
    assert "identical_prompts" not in Workload().identity
    assert Workload(identical_prompts=True).identity["identical_prompts"] is True
    provides = TARGETS["sim"].provides
    (plain,), (off,), (on,) = (
        plan_cells([made], [Policy.OFF], 0, provides)
        for made in (scenario(), scenario(identical_prompts=False), scenario(identical_prompts=True))
    )
    assert (plain.data_seed, plain.world_seed) == (off.data_seed, off.world_seed)
    assert plain.data_seed != on.data_seed
