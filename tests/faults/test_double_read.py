from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from faults.double_read import DoubleRead, DoubleReadParams
from faults.levers import CLOCK, COMPETITORS
from harness.gaps import of_another_request
from scenarios.words import Result, VerdictStatus

SAME = {"identical_prompts": True}
UNCACHED = {"producer": {"prefix_caching": False, "num_blocks": 24}, "consumer": {"prefix_caching": False}}
AGAIN = "the parameters are those of r1, whose blocks were read and freed before"


def double_read(how: str, load: int = 2, other: int = 1) -> dict[str, Any]:
    return {"kind": "double_read", "when": {"load": load, "at": "params_pass"}, "how": how, "other_load": other}


def first(ran, event: str, request: str) -> int:
    """The number of the first line of an event of a request."""
    return next(n for n, line in enumerate(ran.lines) if line["event"] == event and line.get("request") == request)


@pytest.mark.parametrize("seed", range(3))
def test_before_reuse_the_same_prompt_reads_right_bytes_from_freed_blocks(sim, seed: int) -> None:
    pair = sim(double_read("before_reuse"), policy="fail_closed_fail", topology=UNCACHED, seed=seed, **SAME)
    load = pair.fault.load()
    assert load.verdict is VerdictStatus.VERIFIED
    assert load.load_finished.differing(load.kv_final) == load.foreign == ()
    assert load.tokens == load.wanted == pair.fault.load(1).tokens
    (item,) = pair.fault.evidence
    assert item.what == AGAIN
    assert item.before != item.after
    assert first(pair.fault, "evidence", "r2") > first(pair.fault, "transfer.landed", "r1")
    assert pair.twin.result.result is Result.PASS


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("loads", [(2, 1), (1, 2)])
def test_after_reuse_every_block_is_a_competitors(sim, seed: int, loads: tuple[int, int]) -> None:
    load, other = loads
    fault = double_read("after_reuse", load, other)
    pair = sim(fault, policy="fail_open", topology=UNCACHED, seed=seed, competitors=1, **SAME)
    mine = pair.fault.load(load)
    assert mine.verdict is VerdictStatus.MISMATCH
    assert mine.load_finished.differing(mine.kv_final) == tuple(mine.kv_final.positions())
    overwritten, again = pair.fault.evidence
    assert overwritten.what == f"c1 has overwritten P's blocks of r{other}"
    assert overwritten.before != overwritten.after
    assert again.what == AGAIN.replace("r1", f"r{other}")
    assert pair.fault.load(other).foreign == ()
    assert pair.twin.result.result is Result.PASS


@pytest.mark.parametrize("seed", range(3))
def test_another_prompt_verifies_and_is_another_requests_answer(sim, seed: int) -> None:
    pair = sim(double_read("another_prompt"), policy="fail_closed_fail", seed=seed, prompt_tokens=50)
    mine, other = pair.fault.load(), pair.fault.load(1)
    assert mine.verdict is VerdictStatus.VERIFIED
    assert mine.load_finished.differing(mine.kv_final) == tuple(mine.kv_final.positions())
    assert mine.load_finished.differing(other.kv_final) == ()
    assert of_another_request(mine, [mine, other])
    assert mine.foreign
    assert other.foreign == ()


def test_without_a_competitor_it_leaves_the_parameters_and_no_evidence(sim) -> None:
    ran = sim(double_read("after_reuse"), topology=UNCACHED, **SAME).fault
    assert ran.evidence == ()
    assert ran.result.result is Result.UNKNOWN
    assert ran.load().load_finished.differing(ran.load().kv_final) == ()


def test_needs() -> None:
    def needs(how: str) -> frozenset[str]:
        return DoubleRead.needs(DoubleReadParams.model_validate(double_read(how)))

    base = {"producer.params_leave", "blocks.freed", "proxy.params_pass"}
    assert needs("before_reuse") == needs("another_prompt") == base
    assert needs("after_reuse") == base | {"producer.kv_final", CLOCK, COMPETITORS}


@pytest.mark.parametrize("wrong", [{"other_load": 2}, {"how": "twice"}, {"when": {"load": 2, "at": "after_read"}}])
def test_parameters_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        DoubleReadParams.model_validate(double_read("before_reuse") | wrong)
    with pytest.raises(ValidationError):
        DoubleReadParams.model_validate({"kind": "double_read", "when": {"load": 2}})
