"""A model with one KV head, and two workers of D that each hold a replica of it (EXT-1)."""

from __future__ import annotations

import tiny_model
from roles import BLOCK, decode, plain, prefill

ENFORCE = {"kv_checksum_mode": "enforce", "policy": "recompute"}


def test_a_head_that_both_workers_of_d_hold_is_checked_on_both(pair, prompts, tmp_path):
    """With one KV head, each worker of D has a replica of it (EXT-1)."""
    p, d = pair(ENFORCE, ENFORCE, model=tiny_model.llama(tmp_path, kv_heads=1), d_tensor_parallel_size=2)
    asked = prompts(6, 2 * BLOCK, 3 * BLOCK, seed=33)
    params = prefill(p, asked)
    p("flip", layer=2, block=params[0]["remote_block_ids"][0][1], byte=9, mask=1)
    answers = decode(d, asked, params, tokens=4)
    assert sorted(verdict["status"] for verdict in d("take_verdicts")) == ["mismatch"] + ["verified"] * 5
    assert d("reset_prefix_cache")
    assert [answer["tokens"] for answer in answers] == plain(d, asked, tokens=4)
