"""The transformer: seeded weights, and the arithmetic around the mixers of its layers.

Pre-norm blocks, each a mixer (attention of some kind, or a recurrent state) and a squared-ReLU MLP. All arithmetic
follows `engine.numerics`, so the same prompt gives the same KV and the same tokens however it is batched, chunked or
split over ranks.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from engine.config import KVDtype
from engine.model.attention import GroupedQueryMixer, Rope
from engine.model.latent import IndexerWeights, LatentMixer, LatentWeights
from engine.model.mixer import AttentionMixer
from engine.model.state import RecurrentMixer
from engine.numerics import DTYPES, exp_table, quantize_, quantize_weights, rms_norm
from engine.presets import ModelConfig
from engine.tokenizer import VOCAB_SIZE

# Chosen so that greedy tokens depend on the whole context, not only on the last token (docs/structure.md).
_QK_GAIN = 3.0
_VALUE_GAIN = 1.5
_MLP_GAIN = 0.7
_DECAYS = 0.875, 0.9375, 0.96875, 0.984375


class Model:
    """Weights on one device. Activations are float64 [tokens, features]."""

    def __init__(self, config: ModelConfig, seed: int, device: str = "cpu", kv_dtype: KVDtype = "bfloat16") -> None:
        """`kv_dtype` is what a recurrent state is rounded to; nothing else depends on it."""
        self.config = config
        self._rng = np.random.default_rng(np.random.PCG64(seed))
        self._device = device
        hidden, query = config.hidden_size, config.num_heads * config.head_dim
        kv = config.num_kv_heads * config.head_dim
        layers = range(config.num_layers)
        grouped = [layer for layer in layers if config.kinds[layer] not in ("latent", "indexed", "state")]
        self.embedding = quantize_weights(self._rng.standard_normal((VOCAB_SIZE, hidden)), device)
        qk = {layer: self._weight(hidden, query + kv, _QK_GAIN**0.5) for layer in grouped}
        v = {layer: self._weight(hidden, kv, _VALUE_GAIN) for layer in grouped}
        self.o = [self._weight(query, hidden, _VALUE_GAIN) for _ in layers]
        self.up = [self._weight(hidden, config.mlp_size, 1.0) for _ in layers]
        self.down = [self._weight(config.mlp_size, hidden, _MLP_GAIN) for _ in layers]
        self.head = self._weight(hidden, VOCAB_SIZE, 1.0)
        self.exp = exp_table(device)
        self._rope = Rope(config.head_dim, device)
        self.mixers: list[AttentionMixer | RecurrentMixer] = [
            self._grouped(config.kinds[layer], qk[layer], v[layer])
            if layer in qk
            else self._recurrent(DTYPES[kv_dtype])
            if config.kinds[layer] == "state"
            else self._latent(indexed=config.kinds[layer] == "indexed")
            for layer in layers
        ]

    def _weight(self, rows: int, columns: int, gain: float) -> torch.Tensor:
        return quantize_weights(self._rng.standard_normal((rows, columns)) * (gain / np.sqrt(rows)), self._device)

    def _grouped(self, kind: str, qk: torch.Tensor, v: torch.Tensor) -> GroupedQueryMixer:
        config = self.config
        return GroupedQueryMixer(
            (config.num_heads, config.num_kv_heads, config.head_dim),
            (qk, v),
            self._rope,
            self.exp,
            window=config.window if kind == "window" else None,
            keeps=not kind.startswith("shared:"),
        )

    def _latent(self, indexed: bool) -> LatentMixer:
        config = self.config
        hidden, heads, dim, latent = config.hidden_size, config.num_heads, config.head_dim, config.latent_size
        weights = LatentWeights(
            q=self._weight(hidden, heads * 2 * dim, _QK_GAIN**0.5),
            down=self._weight(hidden, latent, _QK_GAIN**0.5),
            up_k=self._weight(latent - dim, heads * dim, 1.0),
            up_v=self._weight(latent - dim, heads * dim, 1.0),
        )
        indexer = None
        if indexed:
            q, k = (self._weight(hidden, latent, 1.0) for _ in range(2))
            indexer = IndexerWeights(q, k, config.index_top)
        return LatentMixer(heads, dim, weights, self._rope, self.exp, indexer)

    def _recurrent(self, dtype: torch.dtype) -> RecurrentMixer:
        config = self.config
        hidden, heads, size = config.hidden_size, config.num_heads, config.state_size
        q, k = (self._weight(hidden, heads * size, 1.0) for _ in range(2))
        v = self._weight(hidden, heads * config.head_dim, 0.5)
        decays = np.resize(_DECAYS, heads)
        return RecurrentMixer(heads, (q, k, v), torch.from_numpy(decays).to(self._device), dtype)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [tokens] to float64 [tokens, hidden]."""
        return self.embedding[token_ids].clone()

    def finish_layer(self, layer: int, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """Output projection and MLP on top of the residual `x` float64 [tokens, hidden]."""
        x = quantize_(x + mixed.reshape(len(x), -1) @ self.o[layer])
        inner = quantize_(torch.relu(rms_norm(x) @ self.up[layer]))
        inner = quantize_(inner * inner)
        return quantize_(x + inner @ self.down[layer])

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """float64 [tokens, hidden] to [tokens, VOCAB_SIZE]."""
        return rms_norm(x) @ self.head


@lru_cache(maxsize=8)
def load_model(config: ModelConfig, seed: int, device: str = "cpu", kv_dtype: KVDtype = "bfloat16") -> Model:
    """The model of this configuration and seed; weights are read-only, so engines of a process share them."""
    return Model(config, seed, device, kv_dtype)
