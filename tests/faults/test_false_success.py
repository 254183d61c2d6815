from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from faults.base import digest
from faults.false_success import FalseSuccess, FalseSuccessParams
from faults.short_transfer import POISON
from scenarios.words import Result

LOST = re.compile(
    r"(\d+) operations of D's block (\d+) \(block position (\d+)\) had not landed "
    r"when the load was reported as finished"
)
LANDED = re.compile(r"the rest of D's block (\d+) landed after its first read")
OPS_A_BLOCK = 2 * 2 * 2  # layers, K and V, heads of the preset `tiny`


def false_success(how: str, load: int = 2) -> dict[str, Any]:
    return {"kind": "false_success", "when": {"load": load, "at": "in_flight"}, "how": how}


def lost(ran) -> dict[int, int]:
    """Block position -> operations that had not landed."""
    matches = [LOST.fullmatch(item.what) for item in ran.evidence if item.seam == "consumer.load_finished"]
    return {int(match[3]): int(match[1]) for match in matches}


@pytest.mark.parametrize("how", ["failed", "cancelled", "timed_out"])
@pytest.mark.parametrize("sizes", [(16, 16), (32, 16), (16, 32)])
def test_evidence_names_what_the_oracles_saw_and_the_twin_is_clean(sim, how: str, sizes: tuple[int, int]) -> None:
    topology = {"producer": {"block_size": sizes[0]}, "consumer": {"block_size": sizes[1], "layout": "NHD"}}
    for seed in range(3):
        pair = sim(false_success(how), topology=topology, seed=seed, prompt_tokens=[70, 90])
        load = pair.fault.load()
        per_block = sizes[1] // min(sizes)
        wrong = {grid // per_block for grid in load.load_finished.differing(load.kv_final)}
        assert wrong
        assert set(lost(pair.fault)) == wrong
        assert wrong <= {token // sizes[1] for token in load.foreign}
        assert pair.fault.load(1).foreign == pair.twin.load().foreign == ()


def test_failed_leaves_poison_everywhere(sim) -> None:
    ran = sim(false_success("failed"), prompt_tokens=64).fault
    assert lost(ran) == dict.fromkeys(range(4), OPS_A_BLOCK)
    assert {item.after for item in ran.evidence} == {digest(POISON * (OPS_A_BLOCK * 16 * 32 // len(POISON)))}
    assert ran.all("transfer.landed")[0]["positions"] == []


@pytest.mark.parametrize("seed", range(8))
def test_cancelled_stops_in_the_middle_of_a_block(sim, seed: int) -> None:
    ran = sim(false_success("cancelled"), seed=seed, prompt_tokens=[70, 90]).fault
    missing = lost(ran)
    first, *rest = sorted(missing)
    assert 0 < missing[first] < OPS_A_BLOCK
    assert [missing[position] for position in rest] == [OPS_A_BLOCK] * len(rest)
    assert [first, *rest] == list(range(first, ran.load().kv_final.positions().stop))


@pytest.mark.parametrize("policy", ["off", "fail_open"])
@pytest.mark.parametrize("seed", range(3))
def test_timed_out_lands_after_the_first_read_with_what_p_holds(sim, policy: str, seed: int) -> None:
    ran = sim(false_success("timed_out"), policy=policy, seed=seed, prompt_tokens=64).fault
    assert lost(ran) == {2: OPS_A_BLOCK, 3: OPS_A_BLOCK}
    late = [item for item in ran.evidence if item.seam == "step.end"]
    (scheduled,) = ran.all("consumer.load_scheduled")
    assert [int(LANDED.fullmatch(item.what)[1]) for item in late] == scheduled["groups"][0]["blocks"][2:]
    # The block behind which nothing was computed again holds poison, and then all that P held: as a right copy would.
    assert late[0].before == digest(POISON * (OPS_A_BLOCK * 16 * 32 // len(POISON)))
    assert late[0].after != late[0].before
    assert ran.load().load_finished.differing(ran.load().kv_final) == (2, 3)
    assert ran.load().first_use.differing(ran.load().to_be_read) == (2, 3)


@pytest.mark.parametrize("policy", ["fail_closed_fail", "fail_closed_recompute"])
def test_a_refused_load_gets_nothing_late(sim, policy: str) -> None:
    ran = sim(false_success("timed_out"), policy=policy).fault
    assert lost(ran)
    assert {item.seam for item in ran.evidence} == {"consumer.load_finished"}


def test_a_load_that_is_refused_before_it_begins_leaves_no_evidence(sim) -> None:
    spoilt = {"kind": "misplace", "when": {"load": 2, "at": "params_pass"}, "how": "out_of_range"}
    ran = sim(spoilt, false_success("failed")).fault
    assert ran.seen.undone == ("false_success on r2",)
    assert ran.result.result is Result.UNKNOWN


def test_needs() -> None:
    base = {"consumer.load_scheduled", "transfer.op_posted", "consumer.load_finished"}
    needs = {
        how: FalseSuccess.needs(FalseSuccessParams.model_validate(false_success(how)))
        for how in ("failed", "timed_out")
    }
    assert needs == {"failed": base, "timed_out": base | {"consumer.first_use", "step.end"}}


@pytest.mark.parametrize(
    "wrong", [{"how": "succeeded"}, {"when": {"load": 2, "at": "after_read"}}, {"moved_blocks": 1}]
)
def test_parameters_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        FalseSuccessParams.model_validate(false_success("failed") | wrong)
