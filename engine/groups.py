"""KV cache groups: which caches a model keeps, and what they have in common (BLK, FPR).

A group holds caches of one kind and shape, and a request has a block table in each. Which group a layer's cache is in
follows from the model alone, so both engines number groups, and the caches in them, alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.presets import ModelConfig

FULL, WINDOW, LATENT, STATE = "full_attention", "sliding_window", "mla", "mamba"


@dataclass(frozen=True, slots=True)
class CacheRow:
    """One cache of a group. `layers` are those that use it: the first writes it, the others share it (FPR-3)."""

    names: tuple[str, ...]
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KVGroup:
    """What the caches of a group have in common.

    Attributes:
        spec_type: what fingerprints call the kind (FPR-1).
        rows: its caches, in the order of their layers.
        num_heads: KV heads of a cache, over the unsharded model.
        num_parts: parts that a token has a row of in each cache: K and V, or the one latent.
        width: elements of a part, a token and head.
        window: tokens that attention looks back at; None: all.
        host_resident: the caches stay in the host's memory, whatever the device.
        packed_heads: two heads lie in one head slot of twice the width.
        tokens_per_state: tokens that share one row; more than 1 in compressed caches, which no model of ours has.
    """

    group_id: int
    spec_type: str
    rows: tuple[CacheRow, ...]
    num_heads: int
    num_parts: int
    width: int
    window: int | None = None
    host_resident: bool = False
    packed_heads: bool = False
    tokens_per_state: int = 1

    @property
    def is_state(self) -> bool:
        """A block holds one recurrent state, not the KV of tokens."""
        return self.spec_type == STATE

    def block_size(self, tokens: int) -> int:
        """Slots of a block, where attention blocks hold `tokens`."""
        return 1 if self.is_state else tokens


@dataclass(frozen=True, slots=True)
class CachePlace:
    """Where a layer finds a cache: the row of a group. `writes` says whether it writes it, or shares another's."""

    group_id: int
    row: int
    writes: bool


@dataclass(frozen=True, slots=True)
class _Kind:
    group: KVGroup
    suffixes: tuple[str, ...]


def kv_groups(model: ModelConfig) -> tuple[KVGroup, ...]:
    """The groups of a model, in the order of the first layer of each."""
    rows: dict[KVGroup, list[CacheRow]] = {}
    for layer, kind in enumerate(model.kinds):
        if kind.startswith("shared:"):
            continue
        shape, suffixes = _shape(model, kind)
        sharers = [n for n, other in enumerate(model.kinds) if other == f"shared:{layer}"]
        users = (layer, *sharers)
        rows.setdefault(shape, []).extend(
            CacheRow(tuple(f"model.layers.{n}.{suffix}" for n in users), users) for suffix in suffixes
        )
    return tuple(replace(shape, group_id=n, rows=tuple(found)) for n, (shape, found) in enumerate(rows.items()))


def cache_places(model: ModelConfig) -> tuple[tuple[CachePlace, ...], ...]:
    """Per layer the caches that it uses, in the order in which its mixer names them."""
    found: list[list[CachePlace]] = [[] for _ in model.kinds]
    for group in kv_groups(model):
        for number, row in enumerate(group.rows):
            for layer in row.layers:
                found[layer].append(CachePlace(group.group_id, number, writes=layer == row.layers[0]))
    return tuple(map(tuple, found))


def _shape(model: ModelConfig, kind: str) -> tuple[KVGroup, tuple[str, ...]]:
    """The group of a kind of layer, without its caches, and how these are named."""
    heads = KVGroup(-1, FULL, (), model.num_kv_heads, 2, model.head_dim)
    attn = ("self_attn.attn",)
    match kind:
        case "full":
            return heads, attn
        case "window":
            return replace(heads, spec_type=WINDOW, window=model.window), attn
        case "host":
            return replace(heads, host_resident=True), attn
        case "packed":
            return replace(heads, packed_heads=True), attn
        case "latent":
            return KVGroup(-1, LATENT, (), 1, 1, model.latent_size), attn
        case "indexed":
            return KVGroup(-1, LATENT, (), 1, 1, model.latent_size), (*attn, "self_attn.indexer.k_cache")
        case "state":
            return KVGroup(-1, STATE, (), model.num_heads, 1, model.state_size * model.head_dim), ("mixer",)
    raise ValueError(f"{model.name}: there is no kind of layer {kind!r}")
