"""The token oracle: what the same prompt gives without P/D, without batching, and without a paged cache.

It shares the model's weights and arithmetic with the engines and nothing else: no scheduler, worker, block or cache.
K and V of every token lie in one dense tensor, rounded to the KV dtype, so an engine that does not really read its
paged cache, or reads it wrongly without P/D as well, gives other tokens than this.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch

from engine.config import KVDtype, preset
from engine.model import Model, load_model
from engine.paged import DTYPES
from engine.proxy import Prompt
from engine.tokenizer import EOS


@lru_cache(maxsize=32)
def oracle_tokens(
    model: str, kv_dtype: KVDtype, model_seed: int, prompts: tuple[Prompt, ...]
) -> Mapping[str, tuple[int, ...]]:
    """The tokens of every prompt, by request id, greedy. Cached: cells of one workload share it."""
    weights = load_model(preset(model), model_seed)
    return {prompt.request_id: _generate(weights, kv_dtype, prompt) for prompt in prompts}


def _generate(weights: Model, kv_dtype: KVDtype, prompt: Prompt) -> tuple[int, ...]:
    dense = _DenseKV(weights, kv_dtype)
    tokens: list[int] = []
    unread = list(prompt.token_ids)
    while len(tokens) < prompt.max_tokens and EOS not in tokens:
        logits = dense.forward(unread)
        # The first of equal maxima, as the engine promises.
        unread = [int((logits == logits.max()).nonzero()[0, 0])]
        tokens += unread
    return tuple(tokens)


class _DenseKV:
    """All K and V so far: per layer float64 [tokens, kv_heads, head_dim], holding values of the KV dtype."""

    def __init__(self, weights: Model, kv_dtype: KVDtype) -> None:
        self._weights = weights
        self._dtype = DTYPES[kv_dtype]
        config = weights.config
        empty = torch.zeros(0, config.num_kv_heads, config.head_dim, dtype=torch.float64)
        self._k = [empty] * config.num_layers
        self._v = [empty] * config.num_layers

    def forward(self, token_ids: list[int]) -> torch.Tensor:
        """Append these tokens. Returns the logits after the last: float64 [vocabulary]."""
        weights, first = self._weights, len(self._k[0])
        x = weights.embed(torch.tensor(token_ids))
        positions = torch.arange(first, first + len(token_ids))
        for layer in range(weights.config.num_layers):
            q, k, v = weights.qkv(layer, x, positions)
            self._k[layer] = torch.cat((self._k[layer], self._stored(k)))
            self._v[layer] = torch.cat((self._v[layer], self._stored(v)))
            x = weights.finish_layer(layer, x, weights.attend(q, self._k[layer], self._v[layer], first))
        return weights.logits(x[-1:])[0]

    def _stored(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self._dtype).to(torch.float64)
