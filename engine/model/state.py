"""A recurrent layer: a matrix of state a head that every token decays and adds to (the shape of Mamba-2).

The state is rounded to the KV dtype after every token, so it is the same however a prompt is cut into chunks, and
also after a transfer.
"""

from __future__ import annotations

import torch

from engine.model.attention import columns
from engine.model.mixer import Parts, Projected
from engine.numerics import quantize_
from engine.sharding import Shard


class RecurrentMixer:
    """S = decay * S + k v^T, and the output is q S. Weights are float64 [hidden, heads * size], `v` [.., head_dim]."""

    def __init__(
        self,
        num_heads: int,
        weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        decay: torch.Tensor,
        dtype: torch.dtype,
    ) -> None:
        """`weights` are those of q, k and v; `decay` is float64 [heads]; `dtype` is what the state is stored as."""
        self._num_heads = num_heads
        self._weights = weights
        self._decay = decay
        self._dtype = dtype

    def project(self, normed: torch.Tensor, positions: torch.Tensor, shard: Shard) -> Projected:
        """Of a shard's heads, as `AttentionMixer.project`; nothing is kept a token."""
        heads = shard.run(self._num_heads)
        of_heads = (w[:, columns(heads, w.shape[1] // self._num_heads)] for w in self._weights)
        q, k, v = (quantize_(normed @ w).view(len(normed), len(heads), -1) for w in of_heads)
        return Projected((q, k, v), ())

    def scan(self, query: Parts, state: torch.Tensor, shard: Shard) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Go through the tokens of one request.

        Args:
            query: of its tokens, as `project` gave it.
            state: float64 [heads, width], after the tokens before these; zeros at the beginning.

        Returns:
            float64 [tokens, heads, head_dim], the state before the last token, and the state after it.
        """
        q, k, v = query
        heads = shard.run(self._num_heads)
        decay = self._decay[heads.start : heads.stop, None, None]
        now = state.view(len(heads), k.shape[-1], v.shape[-1])
        before = now
        outputs = []
        for token in range(len(q)):
            before = now
            added = k[token].unsqueeze(-1) * v[token].unsqueeze(-2)
            now = quantize_(before * decay + added).to(self._dtype).to(torch.float64)
            outputs.append(quantize_((q[token].unsqueeze(-1) * now).sum(-2)))
        return torch.stack(outputs), before.reshape(state.shape), now.reshape(state.shape)
