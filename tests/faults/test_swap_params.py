from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from engine.checksum.consumer import CHECKSUMS_PARAM
from engine.seams import ParamsLeave, ParamsPass
from faults.levers import CHECKSUMS
from faults.params import params_digest
from faults.swap_params import SwapParams, SwapParamsParams
from harness.gaps import of_another_request
from scenarios.words import Result, VerdictStatus

MINE = {"remote_block_ids": [[1, 2]], "remote_request_id": "r2", CHECKSUMS_PARAM: "mine"}
THEIRS = {"remote_block_ids": [[3, 4]], "remote_request_id": "r1", CHECKSUMS_PARAM: "theirs"}


def swap(how: str = "whole", load: int = 2, other: int = 1) -> dict[str, Any]:
    return {"kind": "swap_params", "when": {"load": load, "at": "params_pass"}, "how": how, "other_load": other}


@pytest.mark.parametrize("seed", range(3))
def test_two_that_exchange_whole_parameters_both_verify_wrong(sim, seed: int) -> None:
    pair = sim(swap(), swap(load=1, other=2), policy="fail_closed_fail", seed=seed, prompt_tokens=50)
    one, two = pair.fault.load(1), pair.fault.load(2)
    for mine, other in ((one, two), (two, one)):
        assert mine.verdict is VerdictStatus.VERIFIED
        assert mine.load_finished.differing(mine.kv_final) == tuple(mine.kv_final.positions())
        assert mine.load_finished.differing(other.kv_final) == ()
        assert of_another_request(mine, [one, two])
        assert mine.foreign
    assert {item.request_id for item in pair.fault.evidence} == {"r1", "r2"}
    assert pair.fault.evidence[0].before == pair.fault.evidence[1].after
    assert pair.twin.result.result is Result.PASS
    assert pair.fault.seen.violations == ()


@pytest.mark.parametrize("seed", range(3))
def test_block_ids_alone_are_a_mismatch(sim, seed: int) -> None:
    load = sim(swap("ids_only"), policy="fail_open", seed=seed, prompt_tokens=50).fault.load()
    assert load.verdict is VerdictStatus.MISMATCH
    assert load.load_finished.differing(load.kv_final) == load.groups[0].differing == tuple(load.kv_final.positions())


@pytest.mark.parametrize("seed", range(3))
def test_checksums_alone_are_a_false_mismatch(sim, seed: int) -> None:
    load = sim(swap("checksums_only"), policy="fail_open", seed=seed, prompt_tokens=50).fault.load()
    assert load.verdict is VerdictStatus.MISMATCH
    assert load.load_finished.differing(load.kv_final) == load.foreign == ()


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("whole", THEIRS),
        ("ids_only", {**MINE, "remote_block_ids": [[3, 4]]}),
        ("checksums_only", {**MINE, CHECKSUMS_PARAM: "theirs"}),
    ],
)
def test_what_passes_and_what_it_waits_for(attach, how: str, expected: dict[str, Any]) -> None:
    seams, context = attach(swap(how))
    (hold,) = seams.emit(ParamsPass("r2", MINE)).holds
    assert not hold.until()
    seams.emit(ParamsLeave("producer", "r3", {}))
    assert not hold.until()
    seams.emit(ParamsLeave("producer", "r1", THEIRS))
    assert hold.until()
    assert context.evidence == []
    assert seams.emit(ParamsPass("r1", THEIRS)).event.params == THEIRS
    assert seams.emit(ParamsPass("r2", MINE)).event.params == expected
    (item,) = context.evidence
    assert (item.before, item.after) == (params_digest(MINE), params_digest(expected))


def test_equal_parameters_are_no_evidence(attach) -> None:
    seams, context = attach(swap("ids_only"))
    seams.emit(ParamsLeave("producer", "r1", {**THEIRS, "remote_block_ids": MINE["remote_block_ids"]}))
    assert seams.emit(ParamsPass("r2", MINE)).event.params == MINE
    assert context.evidence == []


def test_needs() -> None:
    def needs(how: str) -> frozenset[str]:
        return SwapParams.needs(SwapParamsParams.model_validate(swap(how)))

    assert needs("whole") == needs("ids_only") == {"producer.params_leave", "proxy.params_pass"}
    assert needs("checksums_only") == needs("whole") | {CHECKSUMS}


@pytest.mark.parametrize("wrong", [{"other_load": 2}, {"how": "half"}, {"when": {"load": 2, "at": "in_flight"}}])
def test_parameters_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        SwapParamsParams.model_validate(swap() | wrong)
