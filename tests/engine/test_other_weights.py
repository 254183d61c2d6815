"""P and D of one architecture with other weights: every byte arrives, and means something else (GAP-6)."""

import numpy as np
import pytest

from engine.checksum.payload import PayloadLimits, decode
from engine.checksum.verdict import VerdictStatus
from engine.proxy import Prompt
from engine.request import FinishReason

LIMITS = PayloadLimits(4096, 1, 1000)
LENGTHS = (20, 45, 60, 90)


def served(tools, new_world, mode, producer_seed):
    """The answers of D, whose weights have seed 0, and per load whether the bytes on D are those on P."""
    held, arrived = {}, {}
    world = new_world(mode, producer={"seed": producer_seed})
    world.seams.on("producer.kv_final", lambda e: held.update({e.request_id: e.memory.tokens(e.groups[0])}))
    world.seams.on("consumer.load_finished", lambda e: arrived.update({e.request_id: e.memory.tokens(e.groups[0])}))
    prompts = [tools.prompt(f"r{length}", length, max_tokens=6) for length in LENGTHS]
    answers = world.run(prompts)
    assert all(np.array_equal(arrived[name], held[name]) for name in held)
    assert set(held) == set(arrived) == set(answers)
    return prompts, answers


@pytest.mark.req("GAP-6", "POL-2", "POL-3")
@pytest.mark.parametrize("mode", ["log", "enforce"])
def test_gap_kv_of_other_weights_verifies_and_gives_tokens_of_neither_model(tools, new_world, mode):
    prompts, answers = served(tools, new_world, mode, producer_seed=1)
    for prompt in prompts:
        answer = answers[prompt.request_id]
        assert answer.verdict.status is VerdictStatus.VERIFIED
        assert answer.verdict.groups[0].not_compared == ()
        assert answer.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
        assert answer.token_ids != tools.tokens_alone(prompt.token_ids, 6), "D's own model"
        assert answer.token_ids != tools.tokens_alone(prompt.token_ids, 6, seed=1), "P's"


def test_of_the_same_weights_the_tokens_are_those_of_one_engine(tools, new_world):
    prompts, answers = served(tools, new_world, "enforce", producer_seed=0)
    for prompt in prompts:
        assert answers[prompt.request_id].token_ids == tools.tokens_alone(prompt.token_ids, 6)


def test_its_fingerprint_says_nothing_of_weights(new_world):
    params = [new_world(producer={"seed": seed}).run_producer(Prompt("r", (5, 6, 7), 1)) for seed in (0, 1)]
    one, other = (decode(each["kv_checksums"], LIMITS).groups[0] for each in params)
    assert one.fingerprint == other.fingerprint
    assert one.values.tolist() != other.values.tolist()
