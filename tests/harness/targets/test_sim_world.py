from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from engine.request import RequestOutput
from engine.seams import Seams
from engine.tokenizer import BOS
from harness.plan import Cell, plan_cells
from harness.targets import TARGETS
from harness.targets.sim_world import SimClock, SimWorld, engine_config, make_prompts
from scenarios.words import Policy

Make = Callable[..., Any]


@pytest.fixture
def cell(scenario_of: Make, clean: dict[str, Any]) -> Callable[..., Cell]:
    def make(policy: Policy = Policy.FAIL_OPEN, seed: int = 1, **changes: Any) -> Cell:
        return plan_cells([scenario_of(**(clean | changes))], [policy], seed, TARGETS["sim"].provides)[0]

    return make


def world(cell: Cell, on_output: Callable[[str, RequestOutput], None] = lambda engine, output: None) -> SimWorld:
    return SimWorld(cell, Seams(), on_output)


# ---- prompts


def test_prompts_are_within_what_the_workload_says(scenario_of: Make) -> None:
    workload = {"requests": 50, "prompt_tokens": [20, 24], "output_tokens": 3}
    prompts = make_prompts(scenario_of(workload=workload), 7)
    assert [prompt.request_id for prompt in prompts] == [f"r{n}" for n in range(1, 51)]
    assert {len(prompt.token_ids) for prompt in prompts} == set(range(20, 25))
    assert {prompt.max_tokens for prompt in prompts} == {3}
    assert all(0 <= token < BOS for prompt in prompts for token in prompt.token_ids)
    assert len({prompt.token_ids for prompt in prompts}) == 50


def test_prompts_share_exactly_the_prefix_that_they_are_told_to(scenario_of: Make) -> None:
    workload = {"requests": 8, "prompt_tokens": [20, 24], "output_tokens": 1, "shared_prefix_tokens": 13}
    prompts = make_prompts(scenario_of(workload=workload), 7)
    assert len({prompt.token_ids[:13] for prompt in prompts}) == 1
    assert len({prompt.token_ids[13] for prompt in prompts}) > 1
    assert {len(prompt.token_ids) for prompt in prompts} <= set(range(20, 25))


def test_the_seed_decides_the_prompts(scenario_of: Make) -> None:
    scenario = scenario_of()
    assert make_prompts(scenario, 7) == make_prompts(scenario, 7)
    assert make_prompts(scenario, 7) != make_prompts(scenario, 8)


# ---- engines


@pytest.mark.req("POL-1")
@pytest.mark.parametrize("policy", list(Policy))
def test_the_engines_get_what_the_scenario_says(scenario_of: Make, policy: Policy) -> None:
    side = {
        "block_size": 8,
        "layout": "NHD",
        "num_blocks": 33,
        "max_batched_tokens": 11,
        "max_num_seqs": 3,
        "steps_in_flight": 4,
        "prefix_caching": False,
        "max_model_len": 70,
    }
    scenario = scenario_of(
        topology={"consumer": side, "kv_dtype": "float16", "model": "small"},
        policies=list(map(str, Policy)),
        expect={str(policy): {"verdict": "no_load"} for policy in Policy},
    )
    cell = plan_cells([scenario], [policy], 0, TARGETS["sim"].provides)[0]
    config = engine_config(cell, "consumer", scenario.topology.consumer)
    assert {name: getattr(config, name) for name in side} == side
    assert (config.engine_id, config.model.name, config.kv_dtype) == ("consumer", "small", "float16")
    assert config.seed == cell.data_seed
    assert config.checksum == policy.settings()


# ---- running


def test_every_request_is_answered_and_nothing_is_left(cell: Make) -> None:
    answers: list[tuple[str, str]] = []
    simulated = world(cell(), lambda engine, output: answers.append((engine, output.request_id)))
    assert not simulated.quiet or simulated.clock.now == 0
    assert simulated.run() is True
    assert simulated.quiet
    assert sorted(answers) == [("consumer", "r1"), ("consumer", "r2")]
    assert simulated.leases.num_leases == 0


def test_a_clean_run_comes_nowhere_near_the_deadline(cell: Make) -> None:
    workload = {"requests": 8, "prompt_tokens": 200, "output_tokens": 16}
    tight = {"max_batched_tokens": 8, "max_num_seqs": 1, "num_blocks": 28, "block_size": 8}
    simulated = world(cell(workload=workload, topology={"producer": tight, "consumer": tight}))
    assert simulated.run()
    assert simulated.clock.now < simulated.deadline / 4


def test_a_run_that_is_held_up_ends_at_the_deadline(cell: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.targets.sim_world.deadline_of", lambda topology, prompts: 10)
    simulated = world(cell())
    assert simulated.run() is False
    assert not simulated.quiet


def test_the_seed_decides_the_order_of_what_happens(cell: Make) -> None:
    def order(seed: int) -> tuple[int, list[str]]:
        answers: list[str] = []
        workload = {"requests": 5, "prompt_tokens": [5, 60], "output_tokens": 2}
        simulated = world(cell(seed=seed, workload=workload), lambda engine, output: answers.append(output.request_id))
        simulated.run()
        return simulated.clock.now, answers

    assert order(1) == order(1)
    assert len({order(seed)[0] for seed in range(6)}) > 1
    assert len({tuple(order(seed)[1]) for seed in range(6)}) > 1


# ---- levers


def test_a_lease_ends_once_and_only_where_there_is_one(cell: Make) -> None:
    simulated = world(cell())
    clock = SimClock(simulated.leases)
    assert clock.end_lease("r1") is False
    rng = random.Random(0)
    while not simulated.leases.holds_lease("r1"):
        rng.choice(simulated._actions())()
        simulated._take_outputs()
    assert clock.end_lease("r1") is True


def test_competitors_fill_the_producer_and_are_let_in_one_by_one(cell: Make) -> None:
    workload = {"requests": 1, "prompt_tokens": 20, "output_tokens": 1, "competitors": 2}
    simulated = world(cell(workload=workload, topology={"producer": {"num_blocks": 6}}))
    competitors = simulated.competitors
    limit = simulated.producer.config.context_limit
    assert [len(prompt.token_ids) for prompt in competitors.waiting] == [limit - 1, limit - 1]
    assert competitors.release() == "c1"
    assert not competitors.has_finished("c1")
    while not competitors.has_finished("c1"):
        for output in simulated.producer.step():
            assert competitors.take(output)
    assert competitors.release() == "c2"
    assert competitors.release() is None
    assert not competitors.has_finished("c2")


def test_competitors_that_nobody_asks_for_come_at_the_end(cell: Make) -> None:
    """So that a twin, in which no fault asks, serves the same requests."""
    workload = {"requests": 2, "prompt_tokens": 20, "output_tokens": 1, "competitors": 2}
    simulated = world(cell(workload=workload))
    assert simulated.run()
    assert simulated.competitors.finished == {"c1", "c2"}
