"""Multi-head latent attention: one latent row a token, from which every head makes its K and V (the shape of MLA).

With an indexer (the shape of sparse attention on top of MLA) a second, smaller key a token decides which tokens are
attended to at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.model.attention import Rope, attend, columns, hidden_from
from engine.model.mixer import Parts, Projected
from engine.numerics import quantize_
from engine.sharding import Shard


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """float64: `q` [hidden, heads * 2 * head_dim], half of each head for position; `down` [hidden, latent_size], its
    last head_dim for position; `up_k`, `up_v` [latent_size - head_dim, heads * head_dim].
    """

    q: torch.Tensor
    down: torch.Tensor
    up_k: torch.Tensor
    up_v: torch.Tensor


@dataclass(frozen=True, slots=True)
class IndexerWeights:
    """float64 [hidden, latent_size] each. The `top` tokens with the best scores are attended to."""

    q: torch.Tensor
    k: torch.Tensor
    top: int


class LatentMixer:
    """Every rank keeps the one latent: its single head is replicated across TP."""

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        weights: LatentWeights,
        rope: Rope,
        exp: torch.Tensor,
        indexer: IndexerWeights | None = None,
    ) -> None:
        self._num_heads = num_heads
        self._dim = head_dim
        self._weights = weights
        self._rope = rope
        self._exp = exp
        self._indexer = indexer

    def project(self, normed: torch.Tensor, positions: torch.Tensor, shard: Shard) -> Projected:
        heads, dim, weights = shard.run(self._num_heads), self._dim, self._weights
        q = quantize_(normed @ weights.q[:, columns(heads, 2 * dim)]).view(len(normed), -1, 2 * dim)
        q = torch.cat((q[..., :dim], self._rope.rotate(q[..., dim:], positions)), dim=-1)
        latent = quantize_(normed @ weights.down).unsqueeze(1)
        latent = torch.cat((latent[..., :-dim], self._rope.rotate(latent[..., -dim:], positions)), dim=-1)
        if self._indexer is None:
            return Projected((q,), ((latent,),))
        index_q, index_k = quantize_(normed @ self._indexer.q), quantize_(normed @ self._indexer.k)
        return Projected((q, index_q), ((latent,), (index_k.unsqueeze(1),)))

    def attend(
        self, query: Parts, caches: Sequence[Parts], first_position: int, first_context: int, shard: Shard
    ) -> torch.Tensor:
        q, *index_q = query
        (latent,), *index_k = caches
        content, position = latent[:, 0, : -self._dim], latent[:, :, -self._dim :]
        own = columns(shard.run(self._num_heads), self._dim)
        up = self._weights.up_k[:, own], self._weights.up_v[:, own]
        k, v = (quantize_(content @ w).view(len(latent), -1, self._dim) for w in up)
        k = torch.cat((k, position.expand(-1, q.shape[1], -1)), dim=-1)
        hidden = hidden_from(first_position - first_context, len(q), None, q.device)
        if self._indexer is not None:
            ((index,),) = index_k
            hidden = _beyond_the_best(index_q[0] @ index[:, 0].T, hidden, self._indexer.top)
        return attend(q, k, v, self._exp, hidden)


def _beyond_the_best(scores: torch.Tensor, hidden: torch.Tensor | None, top: int) -> torch.Tensor:
    """Hide all but the `top` best of each row, the earlier of equals first. bool [tokens, context]."""
    scores = scores.nan_to_num_(nan=0.0)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    beyond = torch.ones_like(scores, dtype=torch.bool).scatter_(1, order[:, :top], False)
    return beyond if hidden is None else beyond | hidden
