"""The transformer: seeded weights and the arithmetic of a layer, without any idea of caches or requests.

Pre-norm blocks, grouped-query attention with RoPE, squared-ReLU MLP. All arithmetic follows `engine.numerics`,
so the same prompt gives the same KV and the same tokens however it is batched, chunked or split over ranks.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from engine.config import ModelConfig
from engine.numerics import MAX_CONTEXT, exp_negative, exp_table, quantize_, quantize_weights, rms_norm
from engine.sharding import Shard, whole_model
from engine.tokenizer import VOCAB_SIZE

# Chosen so that greedy tokens depend on the whole context, not only on the last token (docs/structure.md).
_QK_GAIN = 3.0
_VALUE_GAIN = 1.5
_MLP_GAIN = 0.7
_ROPE_BASE = 10_000.0
# What scores may take at once on a CPU. Larger arrays come from the system anew each time, page by page: that took more
# than half of a long prefill.
_SCORE_BYTES = 2 * 2**20


class Model:
    """Weights on one device. Activations are float64 [tokens, features]."""

    def __init__(self, config: ModelConfig, seed: int, device: str = "cpu") -> None:
        self.config = config
        self._whole = whole_model(config)
        self._columns: dict[tuple[int, range, range], tuple[torch.Tensor, torch.Tensor]] = {}
        rng = np.random.default_rng(np.random.PCG64(seed))
        hidden = config.hidden_size
        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

        def weight(rows: int, columns: int, gain: float) -> torch.Tensor:
            return quantize_weights(rng.standard_normal((rows, columns)) * (gain / np.sqrt(rows)), device)

        self.embedding = quantize_weights(rng.standard_normal((VOCAB_SIZE, hidden)), device)
        self.qk = [weight(hidden, query + kv, _QK_GAIN**0.5) for _ in range(config.num_layers)]
        self.v = [weight(hidden, kv, _VALUE_GAIN) for _ in range(config.num_layers)]
        self.o = [weight(query, hidden, _VALUE_GAIN) for _ in range(config.num_layers)]
        self.up = [weight(hidden, config.mlp_size, 1.0) for _ in range(config.num_layers)]
        self.down = [weight(config.mlp_size, hidden, _MLP_GAIN) for _ in range(config.num_layers)]
        self.head = weight(hidden, VOCAB_SIZE, 1.0)
        self.exp = exp_table(device)
        self.cos, self.sin = _rope_tables(config.head_dim, device)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [tokens] to float64 [tokens, hidden]."""
        return self.embedding[token_ids].clone()

    def qkv(
        self, layer: int, x: torch.Tensor, positions: torch.Tensor, shard: Shard | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Q float64 [tokens, heads, head_dim], K and V float64 [tokens, kv_heads, head_dim] of a shard's heads.

        Without a shard: of all heads.
        """
        shard = shard or self._whole
        heads, kv_heads, dim = len(shard.heads), len(shard.kv_heads), self.config.head_dim
        of_qk, of_v = self._projections(layer, shard)
        normed = rms_norm(x)
        qk = quantize_(normed @ of_qk).view(len(x), heads + kv_heads, dim)
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        low, high = qk.chunk(2, dim=-1)
        rotated = quantize_(torch.cat((low * cos - high * sin, low * sin + high * cos), dim=-1))
        v = quantize_(normed @ of_v).view(len(x), kv_heads, dim)
        return rotated[:, :heads], rotated[:, heads:], v

    def _projections(self, layer: int, shard: Shard) -> tuple[torch.Tensor, torch.Tensor]:
        """The columns of `qk` and `v` for a shard's heads."""
        if shard.heads == self._whole.heads:
            return self.qk[layer], self.v[layer]
        key = layer, shard.heads, shard.kv_heads
        if key not in self._columns:
            dim = self.config.head_dim
            q, kv = (slice(run.start * dim, run.stop * dim) for run in (shard.heads, shard.kv_heads))
            query = self.config.num_heads * dim
            k = slice(query + kv.start, query + kv.stop)
            of_qk = torch.cat((self.qk[layer][:, q], self.qk[layer][:, k]), dim=1)
            self._columns[key] = of_qk, self.v[layer][:, kv].contiguous()
        return self._columns[key]

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first_position: int) -> torch.Tensor:
        """Causal attention of one request.

        Args:
            q: float64 [tokens, heads, head_dim], tokens at `first_position` onwards.
            k, v: float64 [context, kv_heads, head_dim], context = first_position + tokens, from the cache.

        Returns:
            float64 [tokens, heads, head_dim].
        """
        tokens, heads, _ = q.shape
        rows = max(1, _SCORE_BYTES // (heads * len(k) * q.element_size())) if q.device.type == "cpu" else tokens
        tiles = [(first, min(first + rows, tokens)) for first in range(0, tokens, rows)]
        # Each row by itself, and none looks beyond its own position: how they are cut changes nothing.
        contexts = [first_position + stop for _, stop in tiles]
        attended = [
            self._attend_rows(q[first:stop], k[:context], v[:context], first_position + first)
            for (first, stop), context in zip(tiles, contexts, strict=True)
        ]
        return torch.cat(attended) if len(attended) > 1 else attended[0]

    def _attend_rows(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first_position: int) -> torch.Tensor:
        """`attend`, with all scores in memory at once."""
        tokens, heads, dim = q.shape
        context, kv_heads, _ = k.shape
        # [kv_heads, group * tokens, dim]: the query heads of one KV head share its K and V.
        grouped = q.view(tokens, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
        scores = torch.bmm(grouped, k.permute(1, 2, 0)).mul_(dim**-0.5).view(kv_heads, -1, tokens, context)
        if tokens > 1:
            rows = torch.arange(first_position, context, device=q.device).unsqueeze(1)
            scores.masked_fill_(torch.arange(context, device=q.device) > rows, -torch.inf)
        weights = exp_negative(scores.amax(-1, keepdim=True) - scores, self.exp)
        if tokens > 1:
            weights.masked_fill_(scores == -torch.inf, 0.0)
        total = weights.sum(-1, keepdim=True)
        summed = torch.bmm(weights.view(kv_heads, -1, context), v.permute(1, 0, 2)).view(kv_heads, -1, tokens, dim)
        return quantize_(summed / total).permute(2, 0, 1, 3).reshape(tokens, heads, dim)

    def finish_layer(self, layer: int, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Output projection and MLP on top of the residual `x` float64 [tokens, hidden]."""
        x = quantize_(x + attended.reshape(len(x), -1) @ self.o[layer])
        inner = quantize_(torch.relu(rms_norm(x) @ self.up[layer]))
        inner = quantize_(inner * inner)
        return quantize_(x + inner @ self.down[layer])

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """float64 [tokens, hidden] to [tokens, VOCAB_SIZE]."""
        return rms_norm(x) @ self.head


def _rope_tables(head_dim: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = _ROPE_BASE ** (-np.arange(0, head_dim, 2) / head_dim)
    angles = np.arange(MAX_CONTEXT)[:, None] * frequencies[None, :]
    scale = 2.0**12
    cos, sin = np.rint(np.cos(angles) * scale) / scale, np.rint(np.sin(angles) * scale) / scale
    return torch.from_numpy(cos).to(device), torch.from_numpy(sin).to(device)


@lru_cache(maxsize=8)
def load_model(config: ModelConfig, seed: int, device: str = "cpu") -> Model:
    """The model of this configuration and seed; weights are read-only, so engines of a process share them."""
    return Model(config, seed, device)
