"""Runs an engine in a thread of its own, for a server: requests in, tokens out as they are sampled.

Only this thread touches the engine. Everybody else posts work to it. Once it has ended, whether it was stopped or has
crashed, nothing that is posted is left waiting for an answer.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.core import EngineCore
from engine.errors import KVChaosError, RequestError
from engine.request import FinishReason, Request, RequestOutput, Status

logger = logging.getLogger(__name__)
_BUSY_WAIT_S = 0.001  # between looks at a transfer that is under way
_LEASED_WAIT_S = 0.005  # where nothing but leases can end
_IDLE_WAIT_S = 0.05
_DEADLINE_CHECK_S = 0.05
_STOP_S = 3.0
STOPPING = "the server is stopping"


class EngineStoppedError(KVChaosError):
    """The engine's thread has ended: it takes no requests any more."""


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Tokens of a request that were sampled since the last chunk; `output` is set in the last one.

    One with neither is the last one too: the engine has crashed.
    """

    token_ids: tuple[int, ...]
    output: RequestOutput | None

    @property
    def crashed(self) -> bool:
        return self.output is None and not self.token_ids


Listener = Callable[[TokenChunk], None]
RefusedListener = Callable[[KVChaosError], None]


@dataclass(slots=True, eq=False)
class _Live:
    request: Request
    listener: Listener
    sent: int = 0
    loading_since: float | None = None


class EngineLoop:
    """Owns `engine` from `start` to `stop`. `between_steps` is called in the engine's thread, often.

    `finished` is told there of every request that ended. A request whose load is not done within `load_timeout_s` ends
    with an error, while its blocks are kept until the transport has let go of them.
    """

    def __init__(
        self,
        engine: EngineCore,
        between_steps: Callable[[], None] = lambda: None,
        finished: Callable[[RequestOutput], None] = lambda _: None,
        load_timeout_s: float | None = None,
    ) -> None:
        self._engine = engine
        self._between_steps = between_steps
        self._finished = finished
        self._load_timeout_s = load_timeout_s
        self._next_deadline_check = 0.0
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._stopping = False
        self._ended = False
        self._posting = threading.Lock()
        self._live: dict[str, _Live] = {}
        self._thread = threading.Thread(target=self._run, name=f"engine-{engine.config.engine_id}", daemon=True)
        self.crashed: str | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Abort what is left and end the thread. It is not waited for where a harness holds it."""
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout=_STOP_S)
        if self._thread.is_alive():
            logger.warning("engine %s is busy and does not stop by itself", self._engine.config.engine_id)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self.crashed is None

    def submit(self, request: Request, listener: Listener, refused: RefusedListener) -> None:
        """Queue a request. `listener` and `refused` are called in the engine's thread and must not block.

        `refused` gets a RequestError, or EngineStoppedError (then maybe in this thread).
        """

        def add() -> None:
            if self._ended:
                refused(EngineStoppedError(self.crashed or STOPPING))
                return
            try:
                self._engine.add_request(request)
            except RequestError as error:
                refused(error)
                return
            self._live[request.request_id] = _Live(request, listener)

        self.post(add)

    def abort(self, request: Request) -> None:
        """End this request; ignored if it has ended, also where another one has taken its id since."""

        def end() -> None:
            live = self._live.get(request.request_id)
            if live is not None and live.request is request:
                self._engine.abort(request.request_id)

        self.post(end)

    def replace(self, engine: EngineCore) -> None:
        """Drive another engine from now on. Called in this loop's thread; requests of the old one are aborted."""
        self._abort_all("the engine is replaced")
        self._engine = engine

    def post(self, work: Callable[[], None]) -> None:
        """Run something in the engine's thread, between steps; in this one if that has ended."""
        with self._posting:
            if not self._ended:
                self._inbox.put(work)
                self._wake.set()
                return
        work()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wake.clear()
                self._between_steps()
                self._drain()
                if not self._advance():
                    self._wake.wait(self._rest_s)
            self._abort_all(STOPPING)
        except Exception as error:
            logger.exception("engine %s crashed", self._engine.config.engine_id)
            self.crashed = f"{type(error).__name__}: {error}"
            for live in self._live.values():
                live.listener(TokenChunk((), None))
            self._live.clear()
        with self._posting:
            self._ended = True
        self._drain()

    def _drain(self) -> None:
        while True:
            try:
                work = self._inbox.get_nowait()
            except queue.Empty:
                return
            work()

    @property
    def _rest_s(self) -> float:
        scheduler = self._engine.scheduler
        if scheduler.num_unfinished or scheduler.num_loading:
            return _BUSY_WAIT_S
        return _LEASED_WAIT_S if scheduler.has_work else _IDLE_WAIT_S

    def _advance(self) -> bool:
        """Do what can be done now. False if that moved no request: whoever called may rest."""
        engine = self._engine
        progressed = False
        if engine.can_collect():
            engine.collect()
            progressed = True
        if engine.can_execute():
            engine.execute()
            progressed = True
        if engine.can_schedule() and engine.schedule():
            progressed = True
        self._end_overdue_loads()
        self._deliver()
        # A step that only polls, while all wait for a load or for blocks, is nothing to hurry for.
        return progressed and engine.scheduler.num_running > 0

    def _end_overdue_loads(self) -> None:
        if self._load_timeout_s is None or time.monotonic() < self._next_deadline_check:
            return
        now = time.monotonic()
        self._next_deadline_check = now + _DEADLINE_CHECK_S
        for live in self._live.values():
            if live.request.status is not Status.WAITING_FOR_REMOTE_KVS:
                live.loading_since = None
            elif live.loading_since is None:
                live.loading_since = now
            elif now - live.loading_since > self._load_timeout_s:
                why = f"KV load failed: not done after {self._load_timeout_s:g} s"
                self._engine.abort(live.request.request_id, FinishReason.ERROR, why)

    def _abort_all(self, why: str) -> None:
        for request_id in list(self._live):
            self._engine.abort(request_id, FinishReason.ABORT, why)
        self._deliver()

    def _deliver(self) -> None:
        for live in self._live.values():
            fresh = tuple(live.request.output_token_ids[live.sent :])
            if fresh and live.request.finish_reason is None:
                live.sent += len(fresh)
                live.listener(TokenChunk(fresh, None))
        for output in self._engine.take_finished():
            self._finished(output)
            finished = self._live.pop(output.request_id, None)
            if finished is not None:
                finished.listener(TokenChunk(output.token_ids[finished.sent :], output))
