"""The provenance oracle in whole runs: what it says of faults whose place is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.cache import KVMemory, PagedKVCache
from engine.config import EngineConfig
from engine.seams import Forward, Seams
from harness.history import History, find_all
from harness.observe import RequestObservation, observe
from harness.oracles.provenance import ProvenanceOracle
from harness.oracles.view import EngineView
from harness.plan import plan_cells
from harness.targets import TARGETS
from scenarios.words import Policy

SIM = TARGETS["sim"]
PROMPT = 37
WORKLOAD = {"requests": 2, "prompt_tokens": PROMPT, "output_tokens": 5}


@pytest.fixture
def reads(scenario_of: Callable[..., Any]) -> Callable[..., dict[str, RequestObservation]]:
    """The requests of a cell in which one fault acts on r2, checksums off; none if no fault is given."""

    def run(fault: dict[str, Any] | None = None, provenance: bool = True, **changes: Any) -> dict[str, Any]:
        workload = WORKLOAD | changes.pop("workload", {})
        faults = [fault] if fault is not None else None
        expect = {"off": {"verdict": "not_checked"}}
        scenario = scenario_of(faults=faults, workload=workload, policies=["off"], expect=expect, **changes)
        cell = plan_cells([scenario], [Policy.OFF], 3, SIM.provides, provenance)[0]
        history = History()
        SIM.run(cell, history)
        assert bool(find_all(history.lines, "oracle.provenance")) is provenance
        return {request.request_id: request for request in observe(history.lines).requests}

    return run


def flip(at: str, token: int) -> dict[str, Any]:
    return {"kind": "bit_flip", "when": {"load": 2, "at": at}, "token": token}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"topology": {"producer": {"block_size": 32}, "consumer": {"block_size": 8, "layout": "NHD"}}},
        {"topology": {"producer": {"max_batched_tokens": 8}, "consumer": {"max_num_seqs": 1, "num_blocks": 5}}},
        {"workload": {"shared_prefix_tokens": 32}, "topology": {"consumer": {"max_num_seqs": 1}}},
    ],
)
def test_in_a_clean_run_everybody_reads_what_is_his(reads: Callable[..., Any], changes: dict[str, Any]) -> None:
    assert {request.foreign for request in reads(**changes).values()} == {()}


@pytest.mark.parametrize("at", ["before_checksum", "after_checksum", "before_verify", "after_verify"])
@pytest.mark.parametrize("token", [0, 15, 16, PROMPT - 2])
def test_a_changed_slot_is_foreign_wherever_it_was_changed(reads: Callable[..., Any], at: str, token: int) -> None:
    """And with it what D computes after it has read it: the last prompt token and the output."""
    found = reads(flip(at, token))
    received = [position for position in found["r2"].foreign if position < PROMPT - 1]
    assert received == [token]
    assert found["r1"].foreign == ()


def test_the_last_prompt_token_is_computed_again_and_never_read_as_it_came(reads: Callable[..., Any]) -> None:
    assert reads(flip("before_verify", PROMPT - 1))["r2"].foreign == ()


def test_slots_behind_the_prompt_are_not_read(reads: Callable[..., Any]) -> None:
    fault = {"kind": "bit_flip", "when": {"load": 2, "at": "before_verify"}, "where": "past_end"}
    assert reads(fault)["r2"].foreign == ()


@pytest.mark.parametrize(("moved", "first"), [(0, 0), (1, 16), (2, 32)])
def test_what_did_not_arrive_is_foreign(reads: Callable[..., Any], moved: int, first: int) -> None:
    fault = {"kind": "short_transfer", "when": {"load": 2}, "moved_blocks": moved}
    fault["when"]["at"] = "in_flight"
    received = [position for position in reads(fault)["r2"].foreign if position < PROMPT - 1]
    assert received == list(range(first, PROMPT - 1))


@pytest.mark.parametrize(("at", "first"), [("before_read", 0), ("mid_read", 16), ("after_read", PROMPT)])
def test_what_another_request_wrote_is_foreign(reads: Callable[..., Any], at: str, first: int) -> None:
    """Of three blocks the second is being read when the competitor writes: half of its heads and layers are right."""
    fault = {"kind": "early_reuse", "when": {"load": 2, "at": at}}
    found = reads(fault, workload={"competitors": 1})
    received = [position for position in found["r2"].foreign if position < PROMPT - 1]
    assert received == list(range(first, PROMPT - 1))
    assert found["r1"].foreign == ()


def test_it_can_be_switched_off(reads: Callable[..., Any]) -> None:
    assert reads(flip("before_verify", 3), provenance=False)["r2"].foreign is None


def test_a_memory_that_begins_again_holds_nothing_and_may_have_another_shape() -> None:
    """Of an engine that was started again: what its predecessor was sent is nobody's any more."""
    producer, old, new = (
        PagedKVCache(EngineConfig(name, block_size=size, num_blocks=4))
        for name, size in (("producer", 16), ("consumer", 16), ("consumer", 32))
    )
    views = [EngineView(name, KVMemory(cache), lambda: (3, 3)) for name, cache in (("p", producer), ("d", old))]
    history, seams = History(), Seams()
    prompt = tuple(range(20))
    oracle = ProvenanceOracle(history, *views, {"r1": prompt})
    oracle.attach(seams)
    seams.emit(Forward("d", "r1", 0, prompt, (1, 2), {0: (1, 2)}))
    seams.emit(Forward("d", "r1", 20, (7,), (1, 2), {0: (1, 2)}))
    assert [line["foreign"] for line in find_all(history.lines, "oracle.read")] == [[]]
    memory = KVMemory(new)
    oracle.begin_again("d", memory)
    seams.emit(Forward("d", "r1", 20, (7,), (1,), {0: (1,)}))
    assert find_all(history.lines, "oracle.read")[-1]["foreign"] == list(prompt)
