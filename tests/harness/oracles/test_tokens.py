from __future__ import annotations

import random

import pytest

from engine.config import PRESETS, EngineConfig, preset
from engine.core import EngineCore
from engine.proxy import Prompt
from engine.request import Request
from harness.oracles.tokens import oracle_tokens

RNG = random.Random(5)
PROMPTS = tuple(Prompt(f"r{n}", tuple(RNG.randrange(256) for _ in range(20 * n)), 3 + n) for n in range(1, 5))


def alone(prompt: Prompt, model: str = "tiny", **config: object) -> tuple[int, ...]:
    """The tokens of one prompt on an engine that serves nothing else."""
    engine = EngineCore(EngineConfig("x", preset(model), seed=9, **config))
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


@pytest.mark.parametrize("model", PRESETS)
def test_every_kind_of_model_gives_these_tokens_however_it_is_run(model: str) -> None:
    """Paged, in chunks, on several ranks: the dense model knows nothing of all that."""
    tokens = oracle_tokens(model, "bfloat16", 9, PROMPTS)
    assert len(set(tokens.values())) == len(PROMPTS)
    for prompt in PROMPTS:
        for config in ({"max_batched_tokens": 7}, {"tp_size": 4, "layout": "NHD"}, {"pp_size": 2, "block_size": 8}):
            assert tokens[prompt.request_id] == alone(prompt, model, num_blocks=64, **config), config


def test_they_depend_on_model_seed_and_dtype() -> None:
    tokens = {
        tuple(sorted(oracle_tokens(model, dtype, seed, PROMPTS).items()))
        for model, dtype, seed in (("tiny", "bfloat16", 9), ("tiny", "bfloat16", 8), ("small", "bfloat16", 9))
    }
    assert len(tokens) == 3
