"""The token oracle: the same prompts on one engine without P/D, greedy."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from engine.config import EngineConfig, KVDtype, preset
from engine.core import EngineCore
from engine.numerics import MAX_CONTEXT
from engine.proxy import Prompt
from engine.request import Request


@lru_cache(maxsize=32)
def oracle_tokens(
    model: str, kv_dtype: KVDtype, model_seed: int, prompts: tuple[Prompt, ...]
) -> Mapping[str, tuple[int, ...]]:
    """The tokens of every prompt, by request id. Cached: cells of one workload share it."""
    block_size = 16
    config = EngineConfig(
        "oracle",
        preset(model),
        seed=model_seed,
        kv_dtype=kv_dtype,
        block_size=block_size,
        num_blocks=MAX_CONTEXT // block_size + 1,
    )
    engine = EngineCore(config)
    tokens: dict[str, tuple[int, ...]] = {}
    for prompt in prompts:
        engine.add_request(Request(prompt.request_id, list(prompt.token_ids), prompt.max_tokens))
    while engine.scheduler.num_unfinished:
        for output in engine.step():
            tokens[output.request_id] = output.token_ids
    return tokens
