"""Which layers and heads each rank of an engine holds (TP x PP).

Layers are split into stages of consecutive layers, heads into runs of consecutive heads. Where there are more ranks
than KV heads, several ranks hold the same head: its replicas, counted from 0 (EXT-1).
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of the model. Layers and heads are numbered over the unsharded model."""

    tp_rank: int
    pp_rank: int
    layers: range
    heads: range
    kv_heads: range
    replica: int
    num_replicas: int


def shard_model(model: ModelConfig, tp_size: int, pp_size: int) -> list[list[Shard]]:
    """The shards, a list a stage, by TP rank. The sizes must divide the model, which `EngineConfig` sees to."""
    return [[_shard(model, tp_size, pp_size, tp, pp) for tp in range(tp_size)] for pp in range(pp_size)]


def whole_model(model: ModelConfig) -> Shard:
    """The only shard of an engine of one rank."""
    return _shard(model, 1, 1, 0, 0)


def _shard(model: ModelConfig, tp_size: int, pp_size: int, tp_rank: int, pp_rank: int) -> Shard:
    num_replicas = max(1, tp_size // model.num_kv_heads)
    # Ranks with replicas of one head follow each other, as their query heads do.
    return Shard(
        tp_rank=tp_rank,
        pp_rank=pp_rank,
        layers=_run(model.num_layers, pp_size, pp_rank),
        heads=_run(model.num_heads, tp_size, tp_rank),
        kv_heads=_run(model.num_kv_heads, tp_size // num_replicas, tp_rank // num_replicas),
        replica=tp_rank % num_replicas,
        num_replicas=num_replicas,
    )


def _run(count: int, parts: int, part: int) -> range:
    """The `part`-th of `parts` equal runs of range(count)."""
    size = count // parts
    return range(part * size, (part + 1) * size)
