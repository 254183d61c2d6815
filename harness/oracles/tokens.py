"""The token oracle: what the same prompt gives without P/D, without batching, and without a paged cache.

It shares the model's weights and arithmetic with the engines and nothing else: no scheduler, worker, block or cache.
What is kept of every token (K and V, latents, states) is dense, rounded to the KV dtype, so an engine that does not
really read its paged caches, or reads them wrongly without P/D as well, gives other tokens than this.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch

from engine.config import KVDtype, preset
from engine.groups import cache_places
from engine.model import Model, load_model
from engine.model.mixer import Parts
from engine.model.state import RecurrentMixer
from engine.numerics import DTYPES, rms_norm
from engine.proxy import Prompt
from engine.sharding import whole_model
from engine.tokenizer import EOS


@lru_cache(maxsize=32)
def oracle_tokens(
    model: str, kv_dtype: KVDtype, model_seed: int, prompts: tuple[Prompt, ...]
) -> Mapping[str, tuple[int, ...]]:
    """The tokens of every prompt, by request id, greedy. Cached: cells of one workload share it."""
    weights = load_model(preset(model), model_seed, kv_dtype=kv_dtype)
    return {prompt.request_id: _generate(weights, kv_dtype, prompt) for prompt in prompts}


def _generate(weights: Model, kv_dtype: KVDtype, prompt: Prompt) -> tuple[int, ...]:
    dense = _Dense(weights, kv_dtype)
    tokens: list[int] = []
    unread = list(prompt.token_ids)
    while len(tokens) < prompt.max_tokens and EOS not in tokens:
        logits = dense.forward(unread)
        # The first of equal maxima, as the engine promises.
        unread = [int((logits == logits.max()).nonzero()[0, 0])]
        tokens += unread
    return tuple(tokens)


class _Dense:
    """All that the layers keep so far, of every token from the first, in values of the KV dtype.

    `held` has, by group and row of a cache, its parts float64 [tokens, heads, width]; `states` what recurrent layers
    have come to.
    """

    def __init__(self, weights: Model, kv_dtype: KVDtype) -> None:
        self._weights = weights
        self._dtype = DTYPES[kv_dtype]
        self._whole = whole_model(weights.config)
        self._places = cache_places(weights.config)
        self._held: dict[tuple[int, int], Parts] = {}
        self._states: dict[int, torch.Tensor] = {}
        self._num_tokens = 0

    def forward(self, token_ids: list[int]) -> torch.Tensor:
        """Append these tokens. Returns the logits after the last: float64 [vocabulary]."""
        weights, first = self._weights, self._num_tokens
        self._num_tokens += len(token_ids)
        x = weights.embed(torch.tensor(token_ids))
        positions = torch.arange(first, self._num_tokens)
        for layer, mixer in enumerate(weights.mixers):
            projected = mixer.project(rms_norm(x), positions, self._whole)
            if isinstance(mixer, RecurrentMixer):
                mixed = self._scan(layer, mixer, projected.query)
            else:
                self._append(layer, projected.entries)
                held = [self._held[place.group_id, place.row] for place in self._places[layer]]
                mixed = mixer.attend(projected.query, held, first, 0, self._whole)
            x = weights.finish_layer(layer, x, mixed)
        return weights.logits(x[-1:])[0]

    def _append(self, layer: int, entries: tuple[Parts, ...]) -> None:
        written = [(place.group_id, place.row) for place in self._places[layer] if place.writes]
        for cache, parts in zip(written, entries, strict=True):
            stored = tuple(part.to(self._dtype).to(torch.float64) for part in parts)
            before = self._held.get(cache)
            grown = zip(before, stored, strict=True) if before else ((part,) for part in stored)
            self._held[cache] = tuple(torch.cat(pair) for pair in grown)

    def _scan(self, layer: int, mixer: RecurrentMixer, query: Parts) -> torch.Tensor:
        config = self._weights.config
        zeros = torch.zeros(config.num_heads, config.state_size * config.head_dim, dtype=torch.float64)
        mixed, _, self._states[layer] = mixer.scan(query, self._states.get(layer, zeros), self._whole)
        return mixed
