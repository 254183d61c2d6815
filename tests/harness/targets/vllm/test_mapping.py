"""A scenario in vLLM's sizes has the loads, blocks and places that it speaks of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.targets.vllm.mapping import HOWS, in_blocks_of, lacking, order_params, outside
from harness.targets.workload import make_prompts
from scenarios.loader import load_scenarios, parse_scenario
from scenarios.schema import Scenario
from scenarios.words import Policy

Make = Callable[..., Any]
ROOT = Path(__file__).resolve().parents[4]
PAGE = """
schema_version: 1
name: a
summary: A scenario of a test.
policies: [fail_open]
topology: {producer: {block_size: SIZE}, consumer: {block_size: SIZE}}
workload: {requests: 1, prompt_tokens: TOKENS}
faults: [{kind: bit_flip, when: {load: 1, at: before_verify}, token: TOKEN}]
expect: {fail_open: {verdict: mismatch}}
"""


def blocks(tokens: int, size: int) -> int:
    return -(-tokens // size)


@given(size=st.sampled_from([8, 16, 32]), tokens=st.integers(2, 300), data=st.data())
def test_a_prompt_keeps_its_blocks_and_a_token_its_block(size: int, tokens: int, data: st.DataObject) -> None:
    token = data.draw(st.integers(0, tokens - 1))
    page = PAGE.replace("SIZE", str(size)).replace("TOKENS", str(tokens)).replace("TOKEN", str(token))
    scenario = parse_scenario(page)
    mapped = in_blocks_of(scenario, 32)
    (prompt,) = make_prompts(mapped, 1)
    assert blocks(len(prompt.token_ids), 32) == blocks(tokens, size)
    assert mapped.faults[0].token // 32 == token // size  # type: ignore[attr-defined]
    # As full as it was: the last block holds the same part of its slots.
    assert (len(prompt.token_ids) % 32) * size == (tokens % size) * 32


def test_a_mapped_scenario_can_be_stored_and_read_again(scenario_of: Make) -> None:
    mapped = in_blocks_of(scenario_of(), 32)
    assert Scenario.from_plain(mapped.to_plain()) == mapped
    assert (mapped.topology.producer.block_size, mapped.topology.consumer.block_size) == (32, 32)
    assert mapped.workload.prompt_tokens == (40, 80)


def test_of_the_smoke_set_only_what_needs_two_block_sizes_is_lacking(root: Path) -> None:
    scenarios = load_scenarios([root / "scenarios" / "smoke"])
    reasons = {(scenario.name, policy): list(lacking(scenario, policy)) for scenario in scenarios for policy in Policy}
    assert {name: found for name, found in reasons.items() if found} == {
        ("clean-other-block-size", policy): ["topology.block_size that differs between the sides"] for policy in Policy
    }


def test_a_load_that_never_arrives_can_only_be_intact_where_reads_are_watched(root: Path) -> None:
    (scenario,) = load_scenarios([root / "scenarios" / "faults" / "block-id-out-of-range.yaml"])
    assert not list(lacking(scenario, Policy.FAIL_CLOSED_FAIL))
    assert list(lacking(scenario, Policy.FAIL_CLOSED_RECOMPUTE)) == ["oracle of attention reads"]


def test_every_fault_kind_and_how_is_a_real_one(root: Path) -> None:
    """What is offered here is what a scenario can say."""
    from faults.registry import PARAMS

    for kind, hows in HOWS.items():
        allowed = PARAMS[kind].model_fields.get("how")
        assert (hows is None) or set(hows) <= set(allowed.annotation.__args__), kind  # type: ignore[union-attr]


@pytest.mark.parametrize(("field", "value"), [("layer", 4), ("head", 2), ("byte", 256)])
def test_a_place_outside_of_the_cache_is_named(scenario_of: Make, field: str, value: int) -> None:
    about = {"num_layers": 4, "num_heads": 2, "bytes_per_token": 256}
    fault = {"kind": "bit_flip", "when": {"load": 1, "at": "before_verify"}}
    (inside,), (beyond,) = (scenario_of(faults=[fault | {field: place}]).faults for place in (value - 1, value))
    assert not list(outside(inside, about))
    assert list(outside(beyond, about)) == [f"{field} {value} (there are {value})"]


def test_an_order_says_what_the_scenario_says(scenario_of: Make) -> None:
    (fault,) = scenario_of(faults=[{"kind": "short_transfer", "when": {"load": 2}, "moved_blocks": 3}]).faults
    assert order_params(fault) == {"moved_blocks": 3}
