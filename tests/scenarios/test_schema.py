from __future__ import annotations

import json
import math
from itertools import combinations
from typing import Any

import pytest

from faults import registry
from scenarios.loader import parse_scenario
from scenarios.problems import ScenarioError
from scenarios.schema import Expectation, Scenario, Workload
from scenarios.topology import BLOCK_SIZES, EngineTopology, Topology
from scenarios.words import NotCheckedReason, Outcome, Policy, Tokens, Truth, UnverifiedReason, VerdictStatus

MINIMAL = """
schema_version: 1
name: a
summary: Nothing goes wrong.
policies: [off]
expect: {off: {verdict: not_checked}}
"""


def test_a_sound_scenario(sound: str) -> None:
    scenario = parse_scenario(sound)
    assert scenario.name == "stale-read"
    assert scenario.incidents == ("vllm-project/vllm#52234",)
    assert scenario.policies == tuple(Policy)
    assert scenario.topology.consumer == EngineTopology(layout="NHD")
    assert scenario.workload == Workload(competitors=1)
    (fault,) = scenario.faults
    assert type(fault) is registry.PARAMS["early_reuse"]
    assert (fault.when.load, fault.when.at) == (2, "before_read")
    assert scenario.expect[Policy.OFF] == Expectation(
        verdict=VerdictStatus.NOT_CHECKED,
        reason=NotCheckedReason.OFF,
        outcome=Outcome.SERVED,
        truth=Truth.CORRUPTED,
    )
    assert scenario.expect[Policy.FAIL_CLOSED_FAIL].tokens is Tokens.NONE
    assert scenario.expect[Policy.FAIL_OPEN].reason is None


def test_everything_but_the_essentials_has_a_default() -> None:
    scenario = parse_scenario(MINIMAL)
    assert scenario.topology == Topology()
    assert scenario.checksum.version == 1
    assert scenario.workload == Workload(
        requests=4, prompt_tokens=(40, 200), output_tokens=16, competitors=0, shared_prefix_tokens=0
    )
    engine = {
        "tp": 1,
        "pp": 1,
        "block_size": 16,
        "layout": "HND",
        "kernel_block_splits": 1,
        "num_blocks": 64,
        "max_batched_tokens": 64,
        "max_num_seqs": 8,
        "steps_in_flight": 2,
        "prefix_caching": True,
        "max_model_len": None,
        "dcp": 1,
        "pcp": 1,
        "collects_all_stages": True,
        "speculator": None,
        "draft_tokens": 3,
        "checksums_after_speculator": True,
    }
    assert scenario.topology.producer.model_dump() == scenario.topology.consumer.model_dump() == engine
    assert (scenario.faults, scenario.others, scenario.load_failure, scenario.known_gap) == ((), None, None, {})
    assert scenario.twin


def test_one_prompt_length_is_a_range_of_one() -> None:
    scenario = parse_scenario(f"{MINIMAL}workload: {{prompt_tokens: 50, shared_prefix_tokens: 49}}\n")
    assert scenario.workload.prompt_tokens == (50, 50)
    assert scenario.workload.longest == 66


def test_policies_are_in_their_own_order_whatever_the_file_says() -> None:
    text = MINIMAL.replace("[off]", "[fail_open, off]").replace("}}", "}, fail_open: {verdict: verified}}")
    assert parse_scenario(text).policies == (Policy.OFF, Policy.FAIL_OPEN)


def test_one_gap_stands_for_every_policy_that_runs(sound: str) -> None:
    assert parse_scenario(f"{MINIMAL}known_gap: GAP-13\n").known_gap == {Policy.OFF: "GAP-13"}
    assert parse_scenario(f"{sound}known_gap: GAP-1\n").known_gap == dict.fromkeys(Policy, "GAP-1")
    assert parse_scenario(f"{sound}known_gap: {{fail_open: GAP-2}}\n").known_gap == {Policy.FAIL_OPEN: "GAP-2"}


def test_anchors_write_an_expectation_once() -> None:
    text = MINIMAL.replace("[off]", "[off, fail_open]").replace(
        "{off: {verdict: not_checked}}", "\n  off: &same {verdict: not_checked, reason: no_carrier}\n  fail_open: *same"
    )
    expect = parse_scenario(text).expect
    assert expect[Policy.OFF] == expect[Policy.FAIL_OPEN]


@pytest.mark.parametrize("verdict", VerdictStatus)
@pytest.mark.parametrize("reason", [*UnverifiedReason, *NotCheckedReason])
def test_a_reason_belongs_to_its_verdict(verdict: VerdictStatus, reason: UnverifiedReason | NotCheckedReason) -> None:
    text = MINIMAL.replace("not_checked", f"{verdict}, reason: {reason}")
    legal = {VerdictStatus.UNVERIFIED: UnverifiedReason, VerdictStatus.NOT_CHECKED: NotCheckedReason}.get(verdict)
    if legal is not None and isinstance(reason, legal):
        assert parse_scenario(text).expect[Policy.OFF].reason is reason
    else:
        with pytest.raises(ScenarioError, match=r":6: expect\.off\.reason: "):
            parse_scenario(text)


@pytest.mark.parametrize(
    "extra",
    [
        "",
        "known_gap: {fail_open: GAP-13}\n",
        "load_failure: recompute\ntwin: false\n",
        "others:\n  off: {verdict: not_checked, reason: off, outcome: served, truth: intact, tokens: right}\n",
        "incidents: []\n",
    ],
)
def test_plain_values_read_back_identical(sound: str, extra: str) -> None:
    faults = "  - {kind: swap_tokens, first: 1, second: 2, target: 3, when: {load: 4, at: anywhere}}\n"
    text = sound.replace("expect:", f"{faults}expect:")
    if "incidents" in extra:
        text = text.replace("incidents: [vllm-project/vllm#52234]\n", "")
    scenario = parse_scenario(text + extra)
    plain = scenario.to_plain()
    stored = json.loads(json.dumps(plain, allow_nan=False))
    assert stored == plain
    again = Scenario.from_plain(stored)
    assert again == scenario
    assert again.to_plain() == plain
    assert [type(fault) for fault in again.faults] == [type(fault) for fault in scenario.faults]
    assert plain["faults"][0] == {
        "kind": "early_reuse",
        "when": {"load": 2, "at": "before_read"},
        "blocks": 1,
        "share": 0.5,
        "groups": [],
    }


@pytest.mark.parametrize(
    ("damage", "wanted"),
    [
        ({"twin": 1}, "stored scenario: twin: twin is 1: use true or false"),
        ({"faults": [{"kind": "gone"}]}, "stored scenario: faults[0].kind: kind is 'gone': use one of "),
        ({"twin": math.nan}, "stored scenario: not plain JSON values "),
        ({"twin": {1, 2}}, "stored scenario: not plain JSON values "),
        ({"summary": "\ud800"}, "stored scenario: "),
    ],
)
def test_plain_values_that_are_no_scenario(sound: str, damage: dict[str, Any], wanted: str) -> None:
    plain = parse_scenario(sound).to_plain() | damage
    with pytest.raises(ScenarioError) as caught:
        Scenario.from_plain(plain)
    assert str(caught.value).startswith(wanted)


def test_plain_values_must_be_a_mapping() -> None:
    with pytest.raises(ScenarioError, match="the top level is empty"):
        Scenario.from_plain(None)


def test_the_usual_topology_has_a_readable_id() -> None:
    topology = Topology(consumer=EngineTopology(layout="NHD"))
    assert topology.id == "p[HND,bs16]-d[NHD,bs16]-tiny-bf16-pull"


def test_topology_ids_differ_whenever_a_field_differs() -> None:
    engines = [
        EngineTopology(),
        EngineTopology(tp=2),
        EngineTopology(pp=2),
        EngineTopology(kernel_block_splits=2),
        EngineTopology(block_size=32),
        EngineTopology(layout="NHD"),
        EngineTopology(num_blocks=65),
        EngineTopology(max_batched_tokens=65),
        EngineTopology(max_num_seqs=9),
        EngineTopology(steps_in_flight=1),
        EngineTopology(prefix_caching=False),
        EngineTopology(max_model_len=1000),
        EngineTopology(num_blocks=65, max_num_seqs=9),
        EngineTopology(dcp=2),
        EngineTopology(pcp=2),
        EngineTopology(collects_all_stages=False),
        EngineTopology(speculator="ngram", steps_in_flight=1),
        EngineTopology(speculator="ngram", steps_in_flight=1, draft_tokens=2),
        EngineTopology(checksums_after_speculator=False),
    ]
    assert {name for e in engines for name in e.model_fields_set} == set(EngineTopology.model_fields)
    assert set(Topology.model_fields) == {"producer", "consumer", "model", "kv_dtype", "transfer", "connector"}
    topologies = [
        Topology(producer=producer, consumer=consumer, model=model, kv_dtype=dtype)
        for producer in engines
        for consumer in engines
        for model in ("tiny", "small")
        for dtype in ("bfloat16", "float16")
    ]
    topologies += [Topology(transfer="push"), Topology(connector="offload"), Topology(connector="offload_pull")]
    assert len({topology.id for topology in topologies}) == len(topologies)


def test_topology_ids_are_stable() -> None:
    """Seeds of cells come from them: a change here changes every history."""
    assert Topology(producer=EngineTopology(num_blocks=8)).id == "p[HND,bs16]-d[HND,bs16]-tiny-bf16-pull-9399d033"
    assert parse_scenario(MINIMAL).topology_id == "p[HND,bs16]-d[HND,bs16]-tiny-bf16-pull"


def test_a_default_written_out_does_not_change_the_id() -> None:
    assert Topology(producer=EngineTopology(num_blocks=64, steps_in_flight=2)).id == Topology().id


@pytest.mark.req("DEF-6")
def test_one_block_size_divides_the_other() -> None:
    """Otherwise blocks of the two sides would share no boundaries to compare at."""
    for small, large in combinations(sorted(BLOCK_SIZES), 2):
        assert large % small == 0


def test_the_pool_has_one_block_less_than_it_counts() -> None:
    side = EngineTopology(num_blocks=4, block_size=8)
    assert (Topology().capacity(side), Topology().blocks_for(side, 24)) == (24, 4)
    hybrid = Topology(model="tiny-hybrid")
    assert (hybrid.capacity(side), hybrid.blocks_for(side, 16)) == (16, 4), "one of them is the state's"
    assert Topology(model="tiny-window").capacity(side) == 8


def test_the_longest_request_may_fill_a_side_exactly(sound: str) -> None:
    exact = sound.replace("block_size: 16, layout: HND", "block_size: 8, num_blocks: 28, max_model_len: 216")
    topology = parse_scenario(exact).topology
    assert topology.capacity(topology.producer) == parse_scenario(exact).workload.longest == 216
