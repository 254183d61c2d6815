from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from faults.local_prefix import LocalPrefix, LocalPrefixParams
from harness.gaps import changed_after_verification, position_not_compared
from scenarios.words import Result, VerdictStatus

WHAT = re.compile(r"D's cached block (\d+) \(block position 0\) of r1 was changed \((.*)\) and used")
FLIPPED = re.compile(r"bit \d of byte \d+, layer \d, head \d, token (\d+)")


def local_prefix(how: str = "flip", load: int = 2, other: int = 1) -> dict[str, Any]:
    return {"kind": "local_prefix", "when": {"load": load, "at": "params_pass"}, "how": how, "other_load": other}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("how", ["flip", "poison"])
def test_the_load_verifies_and_the_prefix_is_read_changed(sim, how: str, seed: int) -> None:
    pair = sim(local_prefix(how), policy="fail_closed_fail", seed=seed, shared_prefix_tokens=35)
    mine, other = pair.fault.load(), pair.fault.load(1)
    (item,) = pair.fault.evidence
    block, what = WHAT.fullmatch(item.what).groups()
    assert item.before != item.after
    assert [int(block)] == pair.fault.all("consumer.load_scheduled", "r1")[0]["groups"][0]["blocks"][:1]
    assert mine.verdict is VerdictStatus.VERIFIED
    assert mine.load_finished.start == 2
    assert mine.load_finished.differing(mine.kv_final) == ()
    read = [token for token in mine.foreign if token < mine.num_prompt_tokens - 1]
    assert read == ([int(FLIPPED.fullmatch(what)[1])] if how == "flip" else list(range(16)))
    assert other.foreign == ()
    assert other.tokens == other.wanted
    assert position_not_compared(mine, [other])
    assert not changed_after_verification(mine, [other])
    assert pair.twin.result.result is Result.PASS
    assert pair.twin.load().foreign == ()


def test_a_block_that_the_load_does_not_use_is_no_evidence(sim) -> None:
    """Without a shared prefix the load brings every block, and reads none of the changed one."""
    ran = sim(local_prefix()).fault
    assert ran.evidence == ()
    assert ran.load().foreign == ()
    assert ran.result.result is Result.UNKNOWN


def test_without_a_prefix_cache_it_does_nothing(sim) -> None:
    uncached = {"consumer": {"prefix_caching": False}}
    ran = sim(local_prefix(), topology=uncached, shared_prefix_tokens=35).fault
    assert ran.evidence == ()
    assert ran.result.result is Result.UNKNOWN


def test_needs() -> None:
    assert LocalPrefix.needs(LocalPrefixParams.model_validate(local_prefix())) == {
        "consumer.verified",
        "request.ended",
        "blocks.freed",
        "proxy.params_pass",
        "consumer.load_scheduled",
    }


@pytest.mark.parametrize("wrong", [{"other_load": 2}, {"how": "drop"}, {"when": {"load": 2, "at": "after_verify"}}])
def test_parameters_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        LocalPrefixParams.model_validate(local_prefix() | wrong)
