"""Latents (MLA), which each of D's two workers holds whole: every replica is checked (EXT-1).

Tokens are not compared: without any P/D, vLLM's CPU backend for latents gives another token in a decode step than in a
prefill step of the same prompt.
"""

from __future__ import annotations

import tiny_model
from roles import BLOCK, decode, prefill

ENFORCE = {"kv_checksum_mode": "enforce", "policy": "recompute"}


def test_clean_latents_verify_on_both_workers_and_a_flip_is_found(pair, prompts, tmp_path):
    p, d = pair(ENFORCE, ENFORCE, model=tiny_model.deepseek(tmp_path), d_tensor_parallel_size=2)
    asked = prompts(6, BLOCK, 3 * BLOCK, seed=70)
    params = prefill(p, asked)
    p("flip", layer=3, block=params[0]["remote_block_ids"][0][0], byte=2300, mask=8)
    decode(d, asked, params, tokens=1)
    verdicts = d("take_verdicts")
    assert sorted(verdict["status"] for verdict in verdicts) == ["mismatch"] + ["verified"] * 5
    assert [v["groups"][0]["differing"] for v in verdicts if v["status"] == "mismatch"] == [[0]]
