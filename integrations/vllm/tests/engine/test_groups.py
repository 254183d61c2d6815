"""A model with two KV cache groups, one with a window: each is checksummed and judged by itself (BLK, VER-5)."""

from __future__ import annotations

import pytest
import tiny_model
from roles import BLOCK, decode, plain, prefill

ENFORCE = {"kv_checksum_mode": "enforce", "policy": "recompute"}
WINDOW_BLOCKS = tiny_model.WINDOW // BLOCK + 1


@pytest.fixture(scope="module")
def engines(pair, tmp_path_factory):
    model = tiny_model.gemma(tmp_path_factory.mktemp("gemma"))
    return pair(ENFORCE, ENFORCE, model=model, max_num_batched_tokens=256)


def test_both_groups_verify_and_each_finds_its_own_corrupted_blocks(engines, prompts):
    p, d = engines
    asked = prompts(12, 3, 12 * BLOCK, seed=50)
    answers = decode(d, asked, prefill(p, asked))
    verdicts = d("take_verdicts")
    assert [verdict["status"] for verdict in verdicts] == ["verified"] * 12
    compared = [[len(group["compared"]) for group in verdict["groups"]] for verdict in verdicts]
    assert {len(groups) for groups in compared} == {2}
    assert sorted(max(groups) for groups in compared) == sorted(-(-len(prompt) // BLOCK) for prompt in asked)
    assert max(min(groups) for groups in compared) == WINDOW_BLOCKS
    assert d("reset_prefix_cache")
    assert [answer["tokens"] for answer in answers] == plain(d, asked)

    assert d("reset_prefix_cache")
    asked = prompts(2, 6 * BLOCK, 7 * BLOCK, seed=51)
    params = prefill(p, asked)
    groups = params[0]["remote_block_ids"]
    assert len(groups) == 2
    windowed = min(range(2), key=lambda group: len(groups[group]))
    # Layers 0 and 2 have the window.
    p("flip", layer=0, block=params[0]["remote_block_ids"][windowed][-2], byte=5, mask=4)
    p("flip", layer=1, block=params[1]["remote_block_ids"][1 - windowed][0], byte=5, mask=4)
    answers = decode(d, asked, params)
    bad = [[bool(group["differing"]) for group in verdict["groups"]] for verdict in d("take_verdicts")]
    expected = [[group == windowed for group in range(2)], [group != windowed for group in range(2)]]
    assert sorted(bad) == sorted(expected)
    assert d("reset_prefix_cache")
    assert [answer["tokens"] for answer in answers] == plain(d, asked)
