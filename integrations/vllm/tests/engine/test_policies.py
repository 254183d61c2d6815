"""What a failed check does: fail-closed with vLLM's policy `fail`, and fail-open."""

from __future__ import annotations

import pytest
from roles import BLOCK, checksum_transfer, decode, meet, plain, prefill


@pytest.fixture(scope="module")
def p_and_consumers(pair, start):
    """One producer, a consumer that fails requests and one that only logs."""
    log = start("log", kv_transfer_config=checksum_transfer(kv_checksum_mode="log"))
    p, fail = pair({"kv_checksum_mode": "log"}, {"kv_checksum_mode": "enforce", "policy": "fail"})
    assert log.wait_until_ready().refused is None
    meet(p, log)
    return p, fail, log


def corrupted(p, prompt):
    [params] = prefill(p, [prompt])
    block = params["remote_block_ids"][0][0]
    for byte in range(40, 4 * BLOCK * 32, 64):
        p("flip", layer=0, block=block, byte=byte + 3, mask=0x40)
    return params


def test_fail_ends_the_request_with_an_error_and_nothing_stays_in_the_prefix_cache(p_and_consumers, prompts):
    p, d, _ = p_and_consumers
    bad, good = prompts(2, 3 * BLOCK, 4 * BLOCK, seed=20)
    params = [corrupted(p, bad), *prefill(p, [good])]
    answers = decode(d, [bad, good], params)
    assert [answer["finish_reason"] for answer in answers] == ["error", "length"]
    assert answers[0]["tokens"] == []
    assert sorted(verdict["status"] for verdict in d("take_verdicts")) == ["mismatch", "verified"]
    later = plain(d, [bad, good])
    assert d("reset_prefix_cache")
    assert later == plain(d, [bad, good])
    assert answers[1]["tokens"] == later[1]


def test_fail_open_serves_wrong_tokens_and_says_so(p_and_consumers, prompts):
    p, _, d = p_and_consumers
    [bad] = prompts(1, 3 * BLOCK, 4 * BLOCK, seed=21)
    [answer] = decode(d, [bad], [corrupted(p, bad)])
    assert [verdict["status"] for verdict in d("take_verdicts")] == ["mismatch"]
    assert "KV checksum mismatch, block positions by group: {0: [0]}" in d.text()
    later = plain(d, [bad])
    assert d("reset_prefix_cache")
    right = plain(d, [bad])
    assert answer["finish_reason"] == "length"
    assert [answer["tokens"]] != right
    assert later != right, "the corrupted block stays in the prefix cache: that is what fail-open means"
