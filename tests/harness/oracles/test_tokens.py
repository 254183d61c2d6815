from __future__ import annotations

import random

import pytest

from engine.config import EngineConfig, preset
from engine.core import EngineCore
from engine.proxy import Prompt
from engine.request import Request
from harness.oracles.tokens import oracle_tokens

RNG = random.Random(5)
PROMPTS = tuple(Prompt(f"r{n}", tuple(RNG.randrange(256) for _ in range(20 * n)), 3 + n) for n in range(1, 5))


def alone(prompt: Prompt, **config: object) -> tuple[int, ...]:
    """The tokens of one prompt on an engine that serves nothing else."""
    engine = EngineCore(EngineConfig("x", preset("tiny"), seed=9, **config))
    engine.add_request(Request(prompt.request_id, list(prompt.token_ids), prompt.max_tokens))
    for _ in range(500):
        for output in engine.step():
            return output.token_ids
    raise AssertionError("no answer")


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: prompt.request_id)
def test_the_tokens_of_a_prompt_do_not_depend_on_what_else_is_served(prompt: Prompt) -> None:
    tokens = oracle_tokens("tiny", "bfloat16", 9, PROMPTS)
    assert set(tokens) == {"r1", "r2", "r3", "r4"}
    assert tokens[prompt.request_id] == alone(prompt, num_blocks=32, block_size=8, max_batched_tokens=16)
    assert len(tokens[prompt.request_id]) <= prompt.max_tokens


def test_they_depend_on_model_seed_and_dtype() -> None:
    tokens = {
        tuple(sorted(oracle_tokens(model, dtype, seed, PROMPTS).items()))
        for model, dtype, seed in (("tiny", "bfloat16", 9), ("tiny", "bfloat16", 8), ("small", "bfloat16", 9))
    }
    assert len(tokens) == 3
