"""The lever `Restart` over a pair: an engine that was killed is started again while the run goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from engine.config import EngineConfig, Layout
from engine.errors import KVChaosError
from faults.levers import LeverError, Side
from harness.targets.pairs.pair import Pair


class Restarts:
    """Starts in threads of its own: whoever asks may be what the new process must be heard by.

    `configs` is how the engines were configured; `came_back` is called with the new configuration before the new
    engine says anything at a seam.
    """

    def __init__(
        self, pair: Pair, configs: Mapping[str, EngineConfig], came_back: Callable[[EngineConfig], None]
    ) -> None:
        self._pair = pair
        self._configs = configs
        self._came_back = came_back
        self._pool = ThreadPoolExecutor(max(1, len(configs)))
        self._starting: dict[str, Future[None]] = {}

    def start(self, side: Side, block_size: int | None = None, layout: Layout | None = None) -> str:
        if side in self._starting or side not in self._pair.killed:
            raise LeverError(f"the {side} runs, or has been started already: kill it once, then start it")
        old = self._configs[side]
        config = replace(old, block_size=block_size or old.block_size, layout=layout or old.layout)
        self._starting[side] = self._pool.submit(self._start, side, config)
        return f"block size {config.block_size}, layout {config.layout}"

    @property
    def any(self) -> bool:
        """Whether an engine was started again."""
        return bool(self._starting)

    def ready(self, side: Side) -> bool:
        starting = self._starting.get(side)
        if starting is None:
            raise LeverError(f"nobody has started the {side} again")
        if not starting.done():
            return False
        _check(side, starting)
        return True

    def join(self) -> None:
        """Wait for what is being started. Raises LeverError if it does not come up."""
        self.close()
        for side, starting in self._starting.items():
            _check(side, starting)

    def close(self) -> None:
        """Wait, whatever comes of it: who ends the pair after this must not leave behind what starts meanwhile."""
        self._pool.shutdown()

    def _start(self, side: Side, config: EngineConfig) -> None:
        self._pair.revive({side})
        self._pair.configure(config)
        self._came_back(config)
        self._pair.dispatcher.subscribe(side)


def _check(side: str, started: Future[None]) -> None:
    try:
        started.result()
    except (KVChaosError, OSError) as error:
        raise LeverError(f"the {side} does not come up again: {error}") from error
