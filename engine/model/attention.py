"""Grouped-query attention with RoPE, over all earlier tokens or over a window of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.model.mixer import Parts, Projected
from engine.numerics import MAX_CONTEXT, exp_negative, quantize_
from engine.sharding import Shard

_ROPE_BASE = 10_000.0
# What scores may take at once on a CPU. Larger arrays come from the system anew each time, page by page: that took more
# than half of a long prefill.
_SCORE_BYTES = 2 * 2**20


class Rope:
    """Rotary embedding of `dim` elements by tables of 12 bits."""

    def __init__(self, dim: int, device: str) -> None:
        frequencies = _ROPE_BASE ** (-np.arange(0, dim, 2) / dim)
        angles = np.arange(MAX_CONTEXT)[:, None] * frequencies[None, :]
        scale = 2.0**12
        self._cos, self._sin = (
            torch.from_numpy(np.rint(table * scale) / scale).to(device) for table in (np.cos(angles), np.sin(angles))
        )

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """float64 [tokens, heads, dim], on the activation grid."""
        cos, sin = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)
        low, high = x.chunk(2, dim=-1)
        return quantize_(torch.cat((low * cos - high * sin, low * sin + high * cos), dim=-1))


class GroupedQueryMixer:
    """Keeps K and V of each token; with `keeps` False it reads those of another layer and keeps none itself."""

    def __init__(
        self,
        heads: tuple[int, int, int],
        weights: tuple[torch.Tensor, torch.Tensor],
        rope: Rope,
        exp: torch.Tensor,
        window: int | None = None,
        keeps: bool = True,
    ) -> None:
        """
        Args:
            heads: how many heads and KV heads there are, and head_dim.
            weights: of Q and K, float64 [hidden, (heads + kv_heads) * head_dim], and of V.
        """
        self._num_heads, self._num_kv_heads, self._head_dim = heads
        self._qk, self._v = weights
        self._rope = rope
        self._exp = exp
        self._window = window
        self._keeps = keeps
        self._columns: dict[Shard, tuple[torch.Tensor, torch.Tensor]] = {}

    def project(self, normed: torch.Tensor, positions: torch.Tensor, shard: Shard) -> Projected:
        of_qk, of_v = self._projections(shard)
        heads, dim = len(shard.run(self._num_heads)), self._head_dim
        qk = quantize_(normed @ of_qk).view(len(normed), -1, dim)
        rotated = self._rope.rotate(qk, positions)
        if not self._keeps:
            return Projected((rotated,), ())
        v = quantize_(normed @ of_v).view(len(normed), -1, dim)
        return Projected((rotated[:, :heads],), ((rotated[:, heads:], v),))

    def attend(
        self, query: Parts, caches: Sequence[Parts], first_position: int, first_context: int, shard: Shard
    ) -> torch.Tensor:
        (q,), ((k, v),) = query, caches
        hidden = hidden_from(first_position - first_context, len(q), self._window, q.device)
        return attend(q, k, v, self._exp, hidden)

    def _projections(self, shard: Shard) -> tuple[torch.Tensor, torch.Tensor]:
        """The columns of `qk` and `v` for a shard's heads."""
        if shard not in self._columns:
            q, kv = (
                columns(run, self._head_dim) for run in (shard.run(self._num_heads), shard.run(self._num_kv_heads))
            )
            query = self._num_heads * self._head_dim
            k = slice(query + kv.start, query + kv.stop)
            of_qk = self._qk[:, q] if not self._keeps else torch.cat((self._qk[:, q], self._qk[:, k]), dim=1)
            self._columns[shard] = of_qk.contiguous(), self._v[:, kv].contiguous()
        return self._columns[shard]


def columns(heads: range, width: int) -> slice:
    """The columns of a projection that belong to these heads."""
    return slice(heads.start * width, heads.stop * width)


def hidden_from(first: int, tokens: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """What each of `tokens` tokens from place `first` of the context on does not see: bool [tokens, first + tokens].

    It sees itself and what comes before, no more than `window` tokens (None: all). None: everything is seen.
    """
    if tokens == 1 and (window is None or first < window):
        return None
    context = torch.arange(first + tokens, device=device)
    behind = context[first:, None] - context
    return behind < 0 if window is None else (behind < 0) | (behind >= window)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, exp: torch.Tensor, hidden: torch.Tensor | None
) -> torch.Tensor:
    """Attention of one request's tokens over a context.

    Args:
        q: float64 [tokens, heads, dim].
        k: float64 [context, kv_heads, dim]; v: float64 [context, kv_heads, value_dim].
        exp: `engine.numerics.exp_table`.
        hidden: what is not seen, bool [tokens, context], never all of a row; None: nothing is hidden.

    Returns:
        float64 [tokens, heads, value_dim].
    """
    tokens, heads, _ = q.shape
    rows = max(1, _SCORE_BYTES // (heads * len(k) * q.element_size())) if q.device.type == "cpu" else tokens
    if tokens <= rows:
        return _attend_rows(q, k, v, exp, hidden)
    attended = []
    for first in range(0, tokens, rows):
        # Each row by itself, and none looks beyond its own position: how they are cut changes nothing.
        stop = min(first + rows, tokens)
        context = len(k) - tokens + stop
        unseen = None if hidden is None else hidden[first:stop, :context]
        attended.append(_attend_rows(q[first:stop], k[:context], v[:context], exp, unseen))
    return torch.cat(attended)


def _attend_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, exp: torch.Tensor, hidden: torch.Tensor | None
) -> torch.Tensor:
    """`attend`, with all scores in memory at once."""
    tokens, heads, dim = q.shape
    context, kv_heads, value_dim = v.shape
    # [kv_heads, group * tokens, dim]: the query heads of one KV head share its K and V.
    grouped = q.view(tokens, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
    scores = torch.bmm(grouped, k.permute(1, 2, 0)).mul_(dim**-0.5).view(kv_heads, -1, tokens, context)
    if hidden is not None:
        scores.masked_fill_(hidden, -torch.inf)
    weights = exp_negative(scores.amax(-1, keepdim=True) - scores, exp)
    if hidden is not None:
        weights.masked_fill_(scores == -torch.inf, 0.0)
    total = weights.sum(-1, keepdim=True)
    summed = torch.bmm(weights.view(kv_heads, -1, context), v.permute(1, 0, 2)).view(kv_heads, -1, tokens, value_dim)
    return quantize_(summed / total).permute(2, 0, 1, 3).reshape(tokens, heads, value_dim)
