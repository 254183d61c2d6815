"""D with larger blocks than P, which vLLM 0.32's NIXL connector takes: on CPU, what arrives is wrong, and is found.

The connector puts the small blocks together as if each held rows of tokens, but vLLM's CPU backend keeps K in columns.
Its compatibility check passes, and every transfer ends without an error.
"""

from __future__ import annotations

import pytest
from roles import checksum_transfer, decode, meet, plain, prefill


@pytest.fixture(scope="module")
def engines(start):
    p = start("p", kv_transfer_config=checksum_transfer(kv_checksum_mode="log"), block_size=32)
    log = start("log", kv_transfer_config=checksum_transfer(kv_checksum_mode="log"), block_size=64)
    enforce = checksum_transfer(kv_checksum_mode="enforce", policy="recompute")
    d = start("d", kv_transfer_config=enforce, block_size=64)
    for engine in (p, log, d):
        assert engine.wait_until_ready().refused is None, engine.refused
    for consumer in (log, d):
        meet(p, consumer)
    return p, log, d


def test_blocks_of_different_sizes_are_compared_and_wrong_ones_are_not_served(engines, prompts):
    p, log, d = engines
    asked = prompts(4, 40, 200, seed=60)
    served = decode(log, asked, prefill(p, asked))
    answers = decode(d, asked, prefill(p, asked))
    right = plain(p, asked)
    assert [answer["tokens"] for answer in answers] == right
    for engine in (log, d):
        verdicts = engine("take_verdicts")
        assert [verdict["status"] for verdict in verdicts] == ["mismatch"] * 4
        assert all(verdict["groups"][0]["differing"] for verdict in verdicts)
    # Were this right one day, the checksums above would have to verify.
    assert [answer["finish_reason"] for answer in served] == ["length"] * 4
    assert all(answer["tokens"] != expected for answer, expected in zip(served, right, strict=True))
