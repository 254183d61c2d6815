"""What was found on vLLM 0.32, without any fault but what the name of a test says. docs/vllm.md lists it.

These tests say how vLLM is, not how it should be: one that fails on a later version is good news, and a line less
there.
"""

from __future__ import annotations

from typing import Any

import pytest

PROMPT = [(3 * n + 5) % 250 for n in range(150)]
THREE_BLOCKS = PROMPT[:96]


def verdict_of(pair: Any) -> dict[str, Any]:
    (told,) = [event for event in pair.consumer.events if event["event"] == "consumer.verified"]
    return told["verdict"]


@pytest.mark.parametrize(("prompt", "count"), [(THREE_BLOCKS, 2), (PROMPT, 40)])
def test_a_producer_that_answers_more_than_one_token_shifts_every_block(
    pair: Any, prompt: list[int], count: int
) -> None:
    """P then names more blocks than D loads, and D takes the last of them: each block holds another one's KV."""
    pair.prepare("off")
    wanted = pair.plain(prompt)
    pair.prepare("off")
    assert pair.decode(prompt, pair.prefill(prompt))["tokens"] == wanted
    pair.prepare("off")
    answer = pair.decode(prompt, pair.prefill(prompt, count))
    assert answer["finish_reason"] == "length"
    assert answer["tokens"] != wanted


@pytest.mark.parametrize(("prompt", "count"), [(THREE_BLOCKS, 2), (PROMPT, 40)])
def test_checksums_notice_the_shift(pair: Any, prompt: list[int], count: int) -> None:
    pair.prepare("enforce", "recompute")
    wanted = pair.plain(prompt)
    pair.prepare("enforce", "recompute")
    answer = pair.decode(prompt, pair.prefill(prompt, count))
    verdict = verdict_of(pair)
    assert verdict["status"] == "mismatch"
    assert verdict["groups"][0]["differing"] == verdict["groups"][0]["loaded"]
    assert answer["tokens"] == wanted


@pytest.mark.parametrize("mode", ["off", "enforce"])
def test_parameters_are_taken_twice_and_read_what_others_have_written_since(pair: Any, mode: str) -> None:
    """P has freed the blocks after the first read; it logs the second, and D is told nothing."""
    pair.prepare(mode)
    wanted = pair.plain(PROMPT)
    pair.prepare(mode)
    params = pair.prefill(PROMPT)
    assert pair.decode(PROMPT, params)["tokens"] == wanted
    pair.producer("tick")
    pair.producer("compete")
    pair.consumer("reset")
    again = pair.decode(PROMPT, params)
    if mode == "off":
        assert again["finish_reason"] == "length"
        assert again["tokens"] != wanted
    else:
        assert (verdict_of(pair)["status"], again["finish_reason"]) == ("mismatch", "error")


def test_a_lease_that_has_ended_is_read_all_the_same(pair: Any) -> None:
    pair.prepare("off")
    wanted = pair.plain(PROMPT)
    pair.prepare("off")
    params = pair.prefill(PROMPT)
    pair.producer("end_leases")
    pair.producer("compete")
    answer = pair.decode(PROMPT, params)
    assert answer["finish_reason"] == "length"
    assert answer["tokens"] != wanted
    pair.producer("tick")
    assert "Potentially invalid KV blocks for unrecognized request" in pair.producer.log.read_text()


def test_parameters_without_a_host_leave_the_request_and_its_blocks_waiting_for_ever(
    fresh_pair: Any,
) -> None:
    """The log says that the request will not use a transfer, but its scheduler waits for one, also once aborted."""
    pair = fresh_pair
    pair.prepare("off")
    params = pair.prefill(PROMPT)
    del params["remote_host"]
    answer = pair.decode(PROMPT, params, patience_s=5)
    assert answer["finish_reason"] is None
    assert "This request will not utilize KVTransfer" in pair.consumer.log.read_text()
    states = [pair.consumer("tick") for _ in range(5)]
    assert states[-1]["free"] == states[-1]["total"] - 5


def test_parameters_without_block_ids_raise_out_of_the_scheduler(fresh_pair: Any) -> None:
    """Every step raises from then on, and no other request is answered."""
    pair = fresh_pair
    pair.prepare("off")
    params = pair.prefill(PROMPT)
    del params["remote_block_ids"]
    with pytest.raises(RuntimeError, match="AssertionError"):
        pair.decode(PROMPT, params)
    with pytest.raises(RuntimeError, match="AssertionError"):
        pair.plain(THREE_BLOCKS)


def test_too_few_block_ids_raise_out_of_the_worker(fresh_pair: Any) -> None:
    pair = fresh_pair
    pair.prepare("off")
    params = pair.prefill(PROMPT)
    params["remote_block_ids"] = [params["remote_block_ids"][0][:2]]
    with pytest.raises(RuntimeError, match="AssertionError"):
        pair.decode(PROMPT, params)


def test_a_block_id_that_p_does_not_have_fails_the_load(pair: Any) -> None:
    """As it must: NIXL refuses the address."""
    pair.prepare("off")
    params = pair.prefill(PROMPT)
    params["remote_block_ids"][0][0] = -1
    assert pair.decode(PROMPT, params)["finish_reason"] == "error"
