"""Which of vLLM's KV cache groups can be checksummed, and how a worker's caches are read (DEF-4, FPR, EXT-1).

Written for vLLM 0.32, whose caches all have the logical shape [blocks, KV heads, tokens of a block, content], whatever
lies how in memory. What cannot be told for sure is left out and logged: a checksum of the wrong bytes protects nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvchaos_vllm.blocks import GroupShape
from kvchaos_vllm.fingerprint import fingerprint, layer_number
from kvchaos_vllm.log import get_logger
from kvchaos_vllm.paged_sums import LayerCache, problem_of
from kvchaos_vllm.token_order import token_order
from kvchaos_vllm.worker import SummedGroup

logger = get_logger(__name__)

TOKEN_ROWS = frozenset(
    {
        "FlashAttentionBackend",
        "FlashInferBackend",
        "FlexAttentionBackend",
        "TritonAttentionBackend",
        "CPUMLABackend",
        "CutlassMLABackend",
        "FlashAttnMLABackend",
        "FlashInferMLABackend",
        "FlashMLABackend",
        "TritonMLABackend",
    }
)
"""Backends that keep what a token holds for a head in one row: its K, then its V, or its latent."""

ASKED = frozenset({"CPUAttentionBackend"})
"""Backends that keep it elsewhere in the block, and are asked where (`token_order.py`)."""

_PLAIN_QUANT_MODES = (0, 1)  # none, and fp8 with one scale a tensor, which is no part of the cache


class CannotChecksum(Exception):  # noqa: N818 - it is no error: the group is left out (FPR-2)
    """Why a group is not checksummed."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Where a worker stands, and how many KV heads the unsharded model has."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    total_kv_heads: int


def group_shapes(kv_cache_config: Any, window_of: Mapping[int, int]) -> list[GroupShape]:
    """The groups that the connector transfers and whose kind can be checksummed, for the scheduler.

    Args:
        kv_cache_config: vLLM's.
        window_of: the window in tokens of sliding-window groups, by group id.
    """
    shapes = []
    for group_id in kv_cache_config.transfer_group_ids:
        group = kv_cache_config.kv_cache_groups[group_id]
        why = why_skipped(group)
        if why is None:
            shapes.append(GroupShape(group_id, group.kv_cache_spec.block_size, window_of.get(group_id)))
        else:
            logger.warning("KV cache group %d is not checksummed: %s", group_id, why)
    return shapes


def why_skipped(group: Any) -> str | None:
    """Why a group of this kind cannot be checksummed by any worker; None: it can."""
    if group.host_resident:
        return "it is host-resident"
    for spec in layer_specs(group).values():
        if not hasattr(spec, "num_kv_heads") or not hasattr(spec, "head_size"):
            return f"its layers have no KV blocks of tokens ({type(spec).__name__})"
        if spec.tokens_per_state != 1:
            return f"it is compressed: a state for {spec.tokens_per_state} tokens"
        if spec.num_head_slots is not None and spec.num_head_slots != spec.num_kv_heads:
            return f"its {spec.num_kv_heads} KV heads are packed into {spec.num_head_slots} head slots"
        if int(spec.kv_quant_mode) not in _PLAIN_QUANT_MODES:
            return f"how its quantised content is laid out is not known ({spec.kv_quant_mode.name})"
    numbers = [layer_number(name) for name in group.layer_names]
    if None in numbers:
        return f"the layer name {group.layer_names[numbers.index(None)]} holds no single layer number"
    return None


def layer_specs(group: Any) -> dict[str, Any]:
    """The spec of each layer of a group, by name."""
    several = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    if several is None:
        return dict.fromkeys(group.layer_names, group.kv_cache_spec)
    return {name: several[name] for name in group.layer_names}


def summed_groups(
    kv_cache_config: Any, caches: Mapping[str, torch.Tensor], layers: Mapping[str, Any], ranks: Ranks
) -> dict[int, SummedGroup]:
    """The groups that this worker can checksum, with its caches of them.

    Args:
        caches: vLLM's caches by layer name, layers that share one under each of their names.
        layers: vLLM's attention layers by name.
    """
    found = {}
    for group_id in kv_cache_config.transfer_group_ids:
        group = kv_cache_config.kv_cache_groups[group_id]
        if why_skipped(group) is not None:
            continue
        try:
            found[group_id] = _summed_group(group, caches, layers, ranks)
        except CannotChecksum as why:
            logger.warning("KV cache group %d is not checksummed: %s", group_id, why)
    return found


def _summed_group(
    group: Any, caches: Mapping[str, torch.Tensor], layers: Mapping[str, Any], ranks: Ranks
) -> SummedGroup:
    specs = {name: spec for name, spec in layer_specs(group).items() if name in caches}
    sharing = by_cache(specs, caches)
    numbers = [number for number, _ in sharing]
    if len(set(numbers)) != len(numbers):
        raise CannotChecksum("two of its caches have one layer number")
    orders: dict[tuple[Any, ...], torch.Tensor | None] = {}
    made, held = [], set()
    for number, names in sharing:
        spec, cache = specs[names[0]], caches[names[0]]
        first_head, replica, num_replicas = heads_of(spec, ranks)
        problem = problem_of(cache, group.kv_cache_spec.block_size, first_head)
        if problem is not None:
            raise CannotChecksum(problem)
        # A sharing layer may be the lowest; the one that owns the cache knows how it is written.
        layer = next((layers[name] for name in names if name in layers and not _shares(layers[name])), None)
        made.append(LayerCache(number, first_head, cache, _order_of(names[0], layer, spec, cache, orders)))
        held.add((replica, num_replicas))
    if len(held) > 1:
        raise CannotChecksum("its layers are not replicated alike across TP")
    replica, num_replicas = held.pop() if held else (0, 1)
    identity = ((name, type(spec).__name__, str(spec.dtype).removeprefix("torch.")) for name, spec in specs.items())
    return SummedGroup(made, fingerprint(identity), replica, num_replicas)


def by_cache(names: Iterable[str], caches: Mapping[str, torch.Tensor]) -> list[tuple[int, Sequence[str]]]:
    """Each cache once, under the lowest layer number that uses it, with the names of its layers (FPR-3)."""
    users: dict[tuple[int, int], list[str]] = {}
    for name in names:
        cache = caches[name]
        users.setdefault((cache.untyped_storage().data_ptr(), int(cache.storage_offset())), []).append(name)
    return sorted((min(layer_number(name) or 0 for name in sharing), sharing) for sharing in users.values())


def heads_of(spec: Any, ranks: Ranks) -> tuple[int, int, int]:
    """The worker's first KV head over the unsharded model, which replica of its heads it holds, and of how many.

    Raises:
        CannotChecksum: how heads are spread over the TP ranks is not known.
    """
    if ranks.tp_size == 1:
        return 0, 0, 1
    # A cache that says into how many shards it splits says it of itself; else the model's heads are split.
    shards = getattr(spec, "max_tp_shards", None)
    if shards is None:
        shards = ranks.total_kv_heads
        if spec.num_kv_heads != max(1, shards // ranks.tp_size):
            raise CannotChecksum(
                f"{spec.num_kv_heads} KV heads on each of {ranks.tp_size} ranks are not the model's {shards}"
            )
    if shards >= ranks.tp_size and shards % ranks.tp_size == 0:
        return ranks.tp_rank * spec.num_kv_heads, 0, 1
    if ranks.tp_size % shards:
        raise CannotChecksum(f"it is not known which of {ranks.tp_size} ranks hold which of {shards} KV heads")
    replicas = ranks.tp_size // shards
    return ranks.tp_rank // replicas * spec.num_kv_heads, ranks.tp_rank % replicas, replicas


def _shares(layer: Any) -> bool:
    return getattr(layer, "kv_sharing_target_layer_name", None) is not None


def _order_of(
    name: str, layer: Any, spec: Any, cache: torch.Tensor, known: dict[tuple[Any, ...], torch.Tensor | None]
) -> torch.Tensor | None:
    """Where a token's elements lie, None for its row; asked once a form of cache (`known`)."""
    if layer is None:
        raise CannotChecksum(f"{name} has no attention layer that could be asked how its cache is laid out")
    backend = layer.get_attn_backend().__name__
    if backend in TOKEN_ROWS:
        return None
    if backend not in ASKED:
        raise CannotChecksum(f"how {backend} lays out tokens in a block is not known")
    if int(spec.kv_quant_mode) != 0 or spec.head_size != spec.head_size_v:
        raise CannotChecksum(f"how {backend} lays out a quantised cache is not known")
    tokens, width = cache.shape[2:]
    if width != 2 * spec.head_size or cache.stride()[2:] != (width, 1):
        raise CannotChecksum(f"a block of {backend} has strides {cache.stride()}, not those of whole heads")
    form = (backend, cache.dtype, tokens, spec.head_size, getattr(layer, "isa", None))
    if form not in known:
        slots = torch.arange(tokens, dtype=torch.int64)

        def write(key: torch.Tensor, value: torch.Tensor, scratch: torch.Tensor) -> None:
            layer.impl.do_kv_cache_update(layer, key, value, scratch, slots)

        known[form] = token_order(write, cache.dtype, tokens, spec.head_size)
    order = known[form]
    if order is None:
        raise CannotChecksum(f"{backend} does not store each element of a token in a place of its own")
    return order
