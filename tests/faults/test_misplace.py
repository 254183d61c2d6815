from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from engine.checksum.records import GroupBlocks
from engine.seams import CopyOp, KVFinal, LoadFinished, LoadScheduled, OpPosted, ParamsPass
from faults.misplace import Misplace, MisplaceParams
from scenarios.loader import parse_scenario
from scenarios.problems import ScenarioError
from scenarios.words import Outcome, Result, VerdictStatus

POSITION = re.compile(r"block position (\d+)")
REDIRECTED = ("swap_blocks", "shift", "duplicate", "reverse")
EXCHANGED = ("swap_tokens", "swap_heads", "swap_layers", "swap_kv")


def misplace(how: str, load: int = 2, **params: Any) -> dict[str, Any]:
    at = "params_pass" if how == "out_of_range" else "in_flight"
    return {"kind": "misplace", "when": {"load": load, "at": at}, "how": how, **params}


def named(ran) -> list[int]:
    return [int(POSITION.search(item.what)[1]) for item in ran.evidence]


@pytest.mark.parametrize("how", [*REDIRECTED, *EXCHANGED, "other_request"])
@pytest.mark.parametrize("layouts", [("HND", "NHD"), ("NHD", "HND")])
def test_evidence_names_what_the_oracles_saw_and_the_twin_is_clean(sim, how: str, layouts: tuple[str, str]) -> None:
    topology = {"producer": {"layout": layouts[0]}, "consumer": {"layout": layouts[1]}}
    other = {"other_load": 1} if how == "other_request" else {}
    pair = sim(misplace(how, **other), topology=topology, prompt_tokens=[70, 90])
    load = pair.fault.load()
    wrong = load.load_finished.differing(load.kv_final)
    assert wrong
    assert named(pair.fault) == list(wrong)
    assert {token // 16 for token in load.foreign if token < load.num_prompt_tokens - 1} == set(wrong)
    assert all(item.before != item.after for item in pair.fault.evidence)
    assert pair.fault.load(1).foreign == ()
    assert pair.twin.result.result is Result.PASS
    assert pair.twin.load().foreign == ()


@pytest.mark.parametrize("how", [*REDIRECTED, "other_request"])
@pytest.mark.parametrize("sizes", [(32, 16), (16, 32), (8, 8)])
def test_other_block_sizes(sim, how: str, sizes: tuple[int, int]) -> None:
    topology = {"producer": {"block_size": sizes[0]}, "consumer": {"block_size": sizes[1]}}
    other = {"other_load": 1} if how == "other_request" else {}
    ran = sim(misplace(how, **other), topology=topology, prompt_tokens=[100, 120]).fault
    load = ran.load()
    per_block = sizes[1] // min(sizes)
    assert set(named(ran)) == {grid // per_block for grid in load.load_finished.differing(load.kv_final)} != set()


def digests(sim, how: str, seed: int, load: int = 2, **params: Any) -> tuple[list[str], list[str]]:
    """Of full blocks: what P held, what D got. 80 tokens are five blocks."""
    ran = sim(misplace(how, **params), seed=seed, prompt_tokens=80).fault
    held = [ran.load(load).kv_final.digest(p) for p in range(5)]
    return held, [ran.load(2).load_finished.digest(p) for p in range(5)]


@pytest.mark.parametrize("seed", range(3))
def test_which_block_arrives_where(sim, seed: int) -> None:
    held, got = digests(sim, "shift", seed)
    assert got == [held[0], *held[:-1]]
    held, got = digests(sim, "reverse", seed)
    assert got == held[::-1]
    held, got = digests(sim, "swap_blocks", seed)
    assert sorted(got) == sorted(held)
    assert sum(a != b for a, b in zip(held, got, strict=True)) == 2
    held, got = digests(sim, "duplicate", seed)
    assert sum(a != b for a, b in zip(held, got, strict=True)) == 1
    assert len(set(got)) == 4
    held, got = digests(sim, "other_request", seed, load=1, other_load=1)
    assert got == held


def columns(view, position: int) -> list[str]:
    """Digests of (layer, head): 0 to 3 of the preset `tiny`."""
    return re.findall("." * 8, view.digest(position))


@pytest.mark.parametrize(("how", "order"), [("swap_heads", [1, 0, 3, 2]), ("swap_layers", [2, 3, 0, 1])])
def test_heads_and_layers_change_places_in_every_block(sim, how: str, order: list[int]) -> None:
    load = sim(misplace(how)).fault.load()
    for position in load.kv_final.positions():
        held, got = columns(load.kv_final, position), columns(load.load_finished, position)
        assert got == [held[n] for n in order]


@pytest.mark.parametrize(
    ("policy", "outcome"),
    [
        ("off", Outcome.FAILED),
        ("fail_open", Outcome.FAILED),
        ("fail_closed_fail", Outcome.FAILED),
        ("fail_closed_recompute", Outcome.RECOMPUTED),
    ],
)
def test_an_id_out_of_range_fails_the_load_and_crashes_nothing(sim, policy: str, outcome: Outcome) -> None:
    pair = sim(misplace("out_of_range"), policy=policy)
    load = pair.fault.load()
    assert (load.outcome, load.verdict, load.reason) == (outcome, VerdictStatus.NOT_CHECKED, "load_failed")
    assert load.load_finished is None
    assert pair.fault.seen.violations == ()
    (item,) = pair.fault.evidence
    assert re.fullmatch(
        r"block id \d+ of P \(block position \d+\) is (6[4-9]|[7-9]\d|1[01]\d|12[0-7]), of 64 blocks", item.what
    )
    assert pair.fault.load(1).outcome is Outcome.SERVED


@pytest.mark.parametrize("how", REDIRECTED)
def test_a_load_of_one_block_has_nothing_to_misplace(sim, how: str) -> None:
    ran = sim(misplace(how), prompt_tokens=12).fault
    assert ran.evidence == ()
    assert ran.load().load_finished.differing(ran.load().kv_final) == ()
    assert ran.result.result is Result.UNKNOWN


def test_a_single_token_cannot_be_swapped(sim) -> None:
    ran = sim(misplace("swap_tokens"), prompt_tokens=1).fault
    assert ran.evidence == ()
    assert ran.result.result is Result.UNKNOWN


BLOCKS = GroupBlocks(0, 16, 0, (5, 3), 32)


def posted(memory, request: str, position: int, source: int) -> OpPosted:
    return OpPosted("consumer", request, CopyOp(0, position, 0, 0, 0, source, 0, 1, 0, 16), 24, memory, memory)


def test_it_redirects_only_its_own_load_and_waits_for_the_other(memory_of, attach) -> None:
    memory = memory_of()
    seams, context = attach(misplace("other_request", other_load=3))
    held = seams.emit(ParamsPass("r2", {})).holds
    assert len(held) == 1
    assert seams.emit(ParamsPass("r1", {})).holds == ()
    assert not held[0].until()
    seams.emit(KVFinal("producer", "r3", {0: GroupBlocks(0, 16, 0, (8, 9, 10), 48)}, memory))
    assert held[0].until()
    assert seams.emit(ParamsPass("r2", {})).holds == ()
    seams.emit(LoadScheduled("consumer", "r2", {0: BLOCKS}, memory))
    assert [seams.emit(posted(memory, "r2", p, 5)).event.op.source_block for p in (0, 1)] == [8, 9]
    assert seams.emit(posted(memory, "r1", 0, 5)).event.op.source_block == 5
    seams.emit(LoadFinished("consumer", "r1", {0: BLOCKS}, memory))
    assert context.evidence == []


def test_needs() -> None:
    def needs(how: str, **params: Any) -> frozenset[str]:
        return Misplace.needs(MisplaceParams.model_validate(misplace(how, **params)))

    copies = {"producer.kv_final", "consumer.load_scheduled", "transfer.op_posted", "consumer.load_finished"}
    assert needs("shift") == copies
    assert needs("other_request", other_load=1) == copies | {"proxy.params_pass"}
    assert needs("swap_kv") == {"consumer.load_finished"}
    assert needs("out_of_range") == {"producer.kv_final", "proxy.params_pass"}


@pytest.mark.parametrize(
    "wrong",
    [
        misplace("swap_tickets"),
        misplace("shift", other_load=1),
        misplace("other_request"),
        misplace("other_request", other_load=2),
        misplace("other_request", other_load=0),
        misplace("shift") | {"when": {"load": 2, "at": "params_pass"}},
        misplace("out_of_range") | {"when": {"load": 2, "at": "in_flight"}},
        misplace("shift") | {"when": {"load": 2, "at": "before_verify"}},
    ],
)
def test_parameters_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        MisplaceParams.model_validate(wrong)


def test_the_other_load_must_be_one_of_the_workload() -> None:
    text = (
        "{schema_version: 1, name: x, summary: x, policies: ['off'], expect: {'off': {verdict: not_checked}},"
        f" workload: {{requests: 3}}, faults: [{misplace('other_request', other_load=4)}]}}"
    )
    with pytest.raises(ScenarioError, match=r"other_load is 4, but workload\.requests is 3: use 1 to 3"):
        parse_scenario(text)
