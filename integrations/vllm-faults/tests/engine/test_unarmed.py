"""Without the token the connector moves KV as it always does, and no fault can be armed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

PROMPT = [(5 * n + 1) % 250 for n in range(150)]


@pytest.fixture(scope="module")
def unarmed(make_pair: Callable[..., Any]) -> Any:
    return make_pair(token=None)


def test_nothing_can_be_armed_and_both_say_so(unarmed: Any) -> None:
    for role in (unarmed.producer, unarmed.consumer):
        with pytest.raises(RuntimeError, match="KVCHAOS_VLLM_FAULT_TOKEN is not set"):
            unarmed.arm(role, "bit_flip", "before_verify")
        assert "no fault can be armed in this process: KVCHAOS_VLLM_FAULT_TOKEN is not set" in role.log.read_text()


def test_kv_arrives_as_it_left(unarmed: Any) -> None:
    wanted = unarmed.plain(PROMPT)
    unarmed.prepare("enforce")
    answer = unarmed.transfer(PROMPT)
    final, arrived = unarmed.producer.kv("producer.kv_final"), unarmed.consumer.kv("consumer.load_finished")
    assert (final == arrived).all()
    assert answer["tokens"] == wanted
    # Whole blocks, per layer and head: all slots move, also those behind the last token.
    ids = [
        next(event for event in role.events if event["event"] == name)["block_ids"]
        for role, name in ((unarmed.producer, "producer.kv_final"), (unarmed.consumer, "consumer.load_finished"))
    ]
    (verdict,) = [event for event in unarmed.consumer.events if event["event"] == "consumer.verified"]
    assert verdict["verdict"]["status"] == "verified"
    there, here = unarmed.producer("digests", block_ids=ids[0]), unarmed.consumer("digests", block_ids=ids[1])
    assert [len(there), len(there[0]), len(there[0][0])] == [5, 4, 2]
    assert there[:4] == here[:4]  # D has written behind the prompt in the last one
