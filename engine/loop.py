"""Runs an engine in a thread of its own, for a server: requests in, tokens out as they are sampled.

Only this thread touches the engine. Everybody else posts work to it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from engine.core import EngineCore
from engine.errors import RequestError
from engine.request import Request, RequestOutput

logger = logging.getLogger(__name__)
_BUSY_WAIT_S = 0.001  # between looks at a transfer that is under way
_IDLE_WAIT_S = 0.05


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Tokens of a request that were sampled since the last chunk; `output` is set in the last one."""

    token_ids: tuple[int, ...]
    output: RequestOutput | None


Listener = Callable[[TokenChunk], None]
RefusedListener = Callable[[Exception], None]


@dataclass(slots=True, eq=False)
class _Live:
    request: Request
    listener: Listener
    sent: int = 0


class EngineLoop:
    """Owns `engine` from `start` to `stop`. `between_steps` is called in the engine's thread, often."""

    def __init__(self, engine: EngineCore, between_steps: Callable[[], None] = lambda: None) -> None:
        self._engine = engine
        self._between_steps = between_steps
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._stopping = False
        self._live: dict[str, _Live] = {}
        self._thread = threading.Thread(target=self._run, name=f"engine-{engine.config.engine_id}", daemon=True)
        self.crashed: str | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Abort what is left and end the thread."""
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout=30)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self.crashed is None

    def submit(self, request: Request, listener: Listener, refused: RefusedListener) -> None:
        """Queue a request. `listener` and `refused` are called in the engine's thread and must not block."""

        def add() -> None:
            try:
                self._engine.add_request(request)
            except RequestError as error:
                refused(error)
                return
            self._live[request.request_id] = _Live(request, listener)

        self.post(add)

    def replace(self, engine: EngineCore) -> None:
        """Drive another engine from now on. Called in this loop's thread; requests of the old one are aborted."""
        for request_id in list(self._live):
            self._engine.abort(request_id)
        self._deliver()
        self._engine = engine

    def abort(self, request_id: str) -> None:
        """End a request; unknown ids are ignored."""
        self.post(lambda: self._engine.abort(request_id))

    def post(self, work: Callable[[], None]) -> None:
        """Run something in the engine's thread, between steps."""
        self._inbox.put(work)
        self._wake.set()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wake.clear()
                self._between_steps()
                self._drain()
                if not self._advance():
                    self._wake.wait(_BUSY_WAIT_S if self._engine.scheduler.has_work else _IDLE_WAIT_S)
            for request_id in list(self._live):
                self._engine.abort(request_id)
            self._deliver()
        except Exception as error:
            logger.exception("engine %s crashed", self._engine.config.engine_id)
            self.crashed = f"{type(error).__name__}: {error}"
            for live in self._live.values():
                live.listener(TokenChunk((), None))
            self._live.clear()

    def _drain(self) -> None:
        while True:
            try:
                work = self._inbox.get_nowait()
            except queue.Empty:
                return
            work()

    def _advance(self) -> bool:
        """Do what can be done now. False if that moved no request: whoever called may rest."""
        engine = self._engine
        runnable = engine.scheduler.num_unfinished > engine.scheduler.num_loading
        progressed = False
        if engine.can_collect():
            engine.collect()
            progressed = True
        if engine.can_execute():
            engine.execute()
            progressed = True
        if engine.can_schedule() and engine.schedule():
            progressed = True
        self._deliver()
        return progressed and runnable

    def _deliver(self) -> None:
        for live in self._live.values():
            fresh = tuple(live.request.output_token_ids[live.sent :])
            if fresh and live.request.finish_reason is None:
                live.sent += len(fresh)
                live.listener(TokenChunk(fresh, None))
        for output in self._engine.take_finished():
            finished = self._live.pop(output.request_id, None)
            if finished is not None:
                finished.listener(TokenChunk(output.token_ids[finished.sent :], output))
