"""What the layers of a model have in common: how tokens are mixed, and what has to be kept of them for later ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.sharding import Shard

Parts = tuple[torch.Tensor, ...]
"""What a cache holds of some tokens: float64 [tokens, kv_heads, width], one for each part of the cache."""


@dataclass(frozen=True, slots=True)
class Projected:
    """What a layer makes of its input, a row a token: `query` is for the mixer alone, `entries` go into its caches."""

    query: Parts
    entries: tuple[Parts, ...]


class AttentionMixer(Protocol):
    """A layer that looks back at what it keeps of every token."""

    def project(self, normed: torch.Tensor, positions: torch.Tensor, shard: Shard) -> Projected:
        """Of a shard's heads; `normed` is float64 [tokens, hidden]."""
        ...

    def attend(
        self, query: Parts, caches: Sequence[Parts], first_position: int, first_context: int, shard: Shard
    ) -> torch.Tensor:
        """Causal attention of one request.

        Args:
            query: of its tokens, which are those from `first_position` on.
            caches: what each of the layer's caches holds of the positions from `first_context` on, to the last token.

        Returns:
            float64 [tokens, heads, head_dim].
        """
        ...
