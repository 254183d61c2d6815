"""One worker on one side and two on the other: only a scheduler can add up the parts that its workers hold."""

from __future__ import annotations

from roles import BLOCK, checksum_transfer, decode, meet, plain, prefill

ENFORCE = {"kv_checksum_mode": "enforce", "policy": "recompute"}
TOKENS = 4
"""Tokens an answer: two workers take their time for each."""


def test_each_worker_of_d_holds_a_head_and_a_flip_in_either_is_found(pair, start, prompts):
    """Then the way back: two workers of P sum a part each, for one of D."""
    p, d = pair(ENFORCE, ENFORCE | {"role": "kv_both"}, d_tensor_parallel_size=2)
    asked = prompts(12, seed=30)
    answers = []
    for first in range(0, 12, 6):
        some = asked[first : first + 6]
        answers += decode(d, some, prefill(p, some), TOKENS)
    assert [verdict["status"] for verdict in d("take_verdicts")] == ["verified"] * 12
    assert d("reset_prefix_cache")
    assert [answer["tokens"] for answer in answers] == plain(d, asked, TOKENS)

    assert d("reset_prefix_cache")
    asked = prompts(3, 2 * BLOCK, 3 * BLOCK, seed=31)
    params = prefill(p, asked)
    half = BLOCK * 2 * 32 * 4
    for head in (0, 1):
        p("flip", layer=2, block=params[head]["remote_block_ids"][0][1], byte=head * half + 9, mask=1)
    answers = decode(d, asked, params, TOKENS)
    told = {verdict["request_id"].partition("-")[0]: verdict["status"] for verdict in d("take_verdicts")}
    assert [told[request_id] for request_id in sorted(told, key=int)] == ["mismatch", "mismatch", "verified"]
    assert d("reset_prefix_cache")
    assert [answer["tokens"] for answer in answers] == plain(d, asked, TOKENS)

    one = start("one", kv_transfer_config=checksum_transfer(**ENFORCE)).wait_until_ready()
    assert one.refused is None
    meet(d, one)
    asked = prompts(10, seed=32)
    answers = decode(one, asked, prefill(d, asked), TOKENS)
    assert [verdict["status"] for verdict in one("take_verdicts")] == ["verified"] * 10
    assert one("reset_prefix_cache")
    assert [answer["tokens"] for answer in answers] == plain(one, asked, TOKENS)
