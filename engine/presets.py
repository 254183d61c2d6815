"""The models that kvchaos brings: sizes, and the kind of every layer. Their weights come from a seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from engine.errors import StartupError

PARALLEL_SIZES = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer. `head_dim` is even (RoPE) and a slice is whole 8-byte pieces (DEF-2).

    `layers` gives the kind of each layer, none: all are `full`.

    - `full`, `window`: grouped-query attention, over all tokens or over the last `window`.
    - `shared:n`: as full, over the K and V of layer n, an earlier one.
    - `latent`: MLA; `latent_size` elements a token, of which the last head_dim are for position.
    - `indexed`: the same, but only the `index_top` tokens that a second cache of keys of that size finds best.
    - `state`: recurrent; each head holds `state_size` times head_dim elements.
    - `host`, `packed`: as full, with caches that stay in host memory, or hold two heads in a head slot.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    layers: tuple[str, ...] = ()
    window: int = 0
    latent_size: int = 0
    index_top: int = 0
    state_size: int = 0

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer."""
        return self.layers or ("full",) * self.num_layers

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Read what `dataclasses.asdict` gave, also by way of JSON."""
        return cls(**{**plain, "layers": tuple(plain["layers"])})

    def why_unshardable(self, tp_size: int, pp_size: int) -> str | None:
        """Why the model cannot be split over this many ranks; None: it can."""
        for name, size in (("tp", tp_size), ("pp", pp_size)):
            if size not in PARALLEL_SIZES:
                return f"{name} is {size}: use {', '.join(map(str, PARALLEL_SIZES[:-1]))} or {PARALLEL_SIZES[-1]}"
        if self.num_heads % tp_size or (self.num_kv_heads % tp_size and tp_size % self.num_kv_heads):
            heads = f"{self.num_heads} heads and {self.num_kv_heads} KV heads"
            return f"tp is {tp_size}: the {heads} of {self.name} cannot be split evenly over it"
        if self.num_layers % pp_size:
            return f"pp is {pp_size}: the {self.num_layers} layers of {self.name} cannot be split evenly over it"
        stage = self.num_layers // pp_size
        for layer, kind in enumerate(self.kinds):
            if kind.startswith("shared:") and int(kind.removeprefix("shared:")) // stage != layer // stage:
                return f"pp is {pp_size}: layer {layer} of {self.name} would be in another stage than the KV it shares"
        return None


def _tiny(name: str, *layers: str, **sizes: int) -> ModelConfig:
    return ModelConfig(name, len(layers), 64, 4, 2, 16, 128, layers, **sizes)


PRESETS = {
    model.name: model
    for model in (
        ModelConfig("tiny", 2, 64, 4, 2, 16, 128),
        ModelConfig("small", 4, 128, 8, 4, 16, 256),
        _tiny("tiny-window", "full", "window", "full", "window", window=24),
        _tiny("tiny-shared", "full", "shared:0", "full", "shared:2"),
        _tiny("tiny-mla", "latent", "latent", latent_size=48),
        _tiny("tiny-indexed", "indexed", "indexed", latent_size=48, index_top=32),
        _tiny("tiny-hybrid", "state", "full", "state", "full", state_size=8),
        _tiny("tiny-skips", "full", "host", "full", "packed"),
    )
}


def preset(name: str) -> ModelConfig:
    """The model preset of that name.

    Raises:
        StartupError: there is none.
    """
    try:
        return PRESETS[name]
    except KeyError:
        raise StartupError(f"unknown model preset {name!r}: use one of {', '.join(PRESETS)}") from None
