"""Which layers and heads each rank of an engine holds (TP x PP).

Layers are split into stages of consecutive layers, heads into runs of consecutive heads. Where there are more ranks
than KV heads, several ranks hold the same head: its replicas, counted from 0 (EXT-1).
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.presets import ModelConfig


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of the model. Layers and heads are numbered over the unsharded model."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    layers: range

    def num_replicas(self, num_heads: int) -> int:
        """How many ranks hold each of so many heads."""
        return max(1, self.tp_size // num_heads)

    def replica(self, num_heads: int) -> int:
        """Which of the replicas of its heads this rank holds, where there are so many heads."""
        return self.tp_rank % self.num_replicas(num_heads)

    def run(self, num_heads: int) -> range:
        """The heads that this rank holds of so many."""
        # Ranks with replicas of one head follow each other, as their query heads do.
        replicas = self.num_replicas(num_heads)
        return _run(num_heads, self.tp_size // replicas, self.tp_rank // replicas)


def shard_model(model: ModelConfig, tp_size: int, pp_size: int) -> list[list[Shard]]:
    """The shards, a list a stage, by TP rank. The sizes must divide the model, which `EngineConfig` sees to."""
    stages = [_run(model.num_layers, pp_size, pp_rank) for pp_rank in range(pp_size)]
    return [[Shard(tp, tp_size, pp, layers) for tp in range(tp_size)] for pp, layers in enumerate(stages)]


def whole_model(model: ModelConfig) -> Shard:
    """The only shard of an engine of one rank."""
    return Shard(0, 1, 0, range(model.num_layers))


def _run(count: int, parts: int, part: int) -> range:
    """The `part`-th of `parts` equal runs of range(count)."""
    size = count // parts
    return range(part * size, (part + 1) * size)
