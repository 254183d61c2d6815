"""What faults do to a real vLLM, and what is left of it afterwards."""

from __future__ import annotations

from typing import Any

import pytest

PROMPT = [(7 * n + 2) % 250 for n in range(150)]
NOTHING_ARRIVES = ("short_transfer", "in_flight", {"moved_blocks": 0})


def verdict_of(pair: Any) -> str:
    (told,) = [event for event in pair.consumer.events if event["event"] == "consumer.verified"]
    return told["verdict"]["status"]


def evidence_of(role: Any) -> list[dict[str, Any]]:
    return [event for event in role.events if event["event"] == "evidence"]


@pytest.fixture(scope="module")
def wanted(pair: Any) -> list[int]:
    return pair.plain(PROMPT)


def test_another_token_arms_nothing(pair: Any) -> None:
    with pytest.raises(RuntimeError, match="is not that of"):
        pair.arm(pair.consumer, "bit_flip", "before_verify", token="0" * 16)


@pytest.mark.parametrize(
    ("kind", "at", "params"),
    [
        ("bit_flip", "before_verify", {}),
        ("misplace", "in_flight", {"how": "swap_blocks"}),
        ("misplace", "in_flight", {"how": "swap_kv"}),
        ("layout_mismatch", "in_flight", {"how": "hnd_as_nhd"}),
        NOTHING_ARRIVES,
    ],
)
def test_a_fault_proves_itself_is_noticed_and_recomputed(
    pair: Any, wanted: list[int], kind: str, at: str, params: dict[str, Any]
) -> None:
    pair.prepare("enforce", "recompute")
    pair.arm(pair.consumer, kind, at, **params)
    answer = pair.transfer(PROMPT)
    assert verdict_of(pair) == "mismatch"
    assert evidence_of(pair.consumer)
    assert answer["tokens"] == wanted


def test_fail_closed_ends_the_request_with_an_error(pair: Any) -> None:
    pair.prepare("enforce", "fail")
    pair.arm(pair.consumer, "bit_flip", "before_verify")
    answer = pair.transfer(PROMPT)
    assert (verdict_of(pair), answer["finish_reason"]) == ("mismatch", "error")


def test_without_checks_wrong_blocks_are_served_and_stay_in_the_prefix_cache(pair: Any, wanted: list[int]) -> None:
    """What vLLM does by itself: a later request that never used P is answered from them."""
    pair.prepare("off")
    pair.arm(pair.consumer, *NOTHING_ARRIVES[:2], **NOTHING_ARRIVES[2])
    assert pair.transfer(PROMPT)["tokens"] != wanted
    assert pair.plain(PROMPT) != wanted


@pytest.mark.parametrize("load_failure", ["fail", "recompute"])
def test_fail_closed_keeps_them_out_of_the_prefix_cache(pair: Any, wanted: list[int], load_failure: str) -> None:
    pair.prepare("enforce", load_failure)
    pair.arm(pair.consumer, *NOTHING_ARRIVES[:2], **NOTHING_ARRIVES[2])
    pair.transfer(PROMPT)
    assert pair.plain(PROMPT) == wanted


def test_all_blocks_come_back(pair: Any) -> None:
    for role in (pair.producer, pair.consumer):
        role("end_leases")
        state = role("tick")
        assert (state["free"], state["unfinished"]) == (state["total"], 0)
