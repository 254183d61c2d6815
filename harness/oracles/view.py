"""An engine as the oracles see it, in this process or in another one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.cache import KVMemory
from engine.core import EngineCore


@dataclass(frozen=True, slots=True)
class EngineView:
    """`pool` gives (free blocks, all blocks) as the engine counts them.

    `killed` says whether a fault has ended the engine: then nobody can be asked for its pool.
    """

    engine_id: str
    memory: KVMemory
    pool: Callable[[], tuple[int, int]]
    killed: Callable[[], bool] = lambda: False


def view_of(engine: EngineCore) -> EngineView:
    """The view of an engine in this process."""
    pool = engine.scheduler.kv.pool
    return EngineView(engine.config.engine_id, engine.memory, lambda: (pool.num_free, pool.num_blocks - 1))
