"""Composes an engine or proxy server with the control channel: an engine started by itself cannot load a fault.

The channel exists only when an address for it is given and a token is in the environment. It lets its holder read and
change the KV cache of the engine, so the server says loudly that it is on.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Listener
from typing import Any, NoReturn

import httpx
import uvicorn
from starlette.applications import Starlette

from engine.cache import KVMemory
from engine.clock import MonotonicClock
from engine.config import EngineConfig
from engine.connectors.nixl import NixlAgent, NixlWorker, PeerError
from engine.connectors.pull import PullScheduler
from engine.core import EngineCore
from engine.errors import InputError
from engine.loop import EngineLoop
from engine.server.app import DESCRIBE_PATH, EngineServer
from engine.server.metrics import EngineMetrics
from engine.server.proxy_app import ProxyServer
from harness.remote.engine_side import RemoteSeams

logger = logging.getLogger(__name__)
TOKEN_VARIABLE = "KVCHAOS_CONTROL_TOKEN"
MIN_TOKEN_LENGTH = 16
PROXY = "proxy"
_PEER_TIMEOUT_S = 2.0
_GRACE_S = 5

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Where a server listens, and what its engine reads from: engine ids and the addresses of their servers."""

    host: str
    port: int
    control: Address | None = None
    peers: Mapping[str, str] = field(default_factory=dict)


class EngineHost:
    """The engine of a server process. A harness may put another one in its place, between requests."""

    def __init__(self, config: EngineConfig, peers: Mapping[str, str]) -> None:
        self._fetch_peer = peer_fetcher(peers)
        self._agent = NixlAgent(config.engine_id)
        self.seams = RemoteSeams(config.engine_id)
        self.engine, self._leases, self.describe = self._build(config)
        self.loop = EngineLoop(self.engine, self.seams.poll)
        self._offer_commands()

    def _build(self, config: EngineConfig) -> tuple[EngineCore, PullScheduler, dict[str, Any]]:
        leases = PullScheduler(config.engine_id, config.lease_ticks, MonotonicClock())
        workers: list[NixlWorker] = []

        def connect(memory: KVMemory) -> NixlWorker:
            workers.append(NixlWorker(config.engine_id, memory, self.seams, self._fetch_peer, self._agent))
            return workers[0]

        engine = EngineCore(config, self.seams, leases, connect)
        return engine, leases, workers[0].describe()

    def _offer_commands(self) -> None:
        commands = {"configure": self.configure} | engine_commands(self.engine, self._leases)
        self.seams.serve(self.engine.memory, commands)

    def configure(self, plain: Mapping[str, Any]) -> None:
        """Replace the engine by one of this configuration (`EngineConfig.to_plain`). Called in the loop's thread.

        Raises:
            StartupError: it cannot be started so; the engine that runs is kept.
        """
        self.engine, self._leases, self.describe = self._build(EngineConfig.from_plain(plain))
        self.loop.replace(self.engine)
        self._offer_commands()


def serve_engine(config: EngineConfig, options: ServeOptions) -> NoReturn:
    """Run an engine with the NIXL pull connector behind its server, until a signal ends it."""
    host = EngineHost(config, options.peers)
    metrics = EngineMetrics(lambda: host.engine)
    server = EngineServer(config.engine_id, host.loop, metrics, lambda: host.describe)
    accept_control(
        options.control, lambda events, commands: host.loop.post(lambda: host.seams.connect(events, commands))
    )
    host.loop.start()
    code = _serve(server.app, options)
    host.loop.stop()
    leave(code)


def serve_proxy(producer: str, consumer: str, options: ServeOptions) -> NoReturn:
    """Run the P/D proxy until a signal ends it."""
    seams = RemoteSeams(PROXY)
    seams.serve_commands({})
    pending: list[Callable[[], None]] = []

    def between() -> None:
        while pending:
            pending.pop(0)()
        seams.poll()

    server = ProxyServer(producer, consumer, seams, between)
    accept_control(options.control, lambda events, commands: pending.append(lambda: seams.connect(events, commands)))
    leave(_serve(server.app, options))


def engine_commands(engine: EngineCore, leases: PullScheduler) -> dict[str, Callable[..., Any]]:
    """What a harness may ask of an engine beside its memory."""

    def shape() -> dict[str, int]:
        names = ("num_layers", "num_kv_heads", "num_blocks", "block_size", "bytes_per_token")
        return {name: getattr(engine.memory, name) for name in names}

    def end_lease(request_id: str) -> bool:
        if not leases.holds_lease(request_id):
            return False
        leases.end_lease(request_id)
        return True

    def state() -> dict[str, int]:
        pool = engine.scheduler.kv.pool
        return {
            "free": pool.num_free,
            "total": pool.num_blocks - 1,
            "unfinished": engine.scheduler.num_unfinished,
            "loading": engine.scheduler.num_loading,
            "leases": leases.num_leases,
            "fenced": engine.scheduler.kv.num_fenced + engine.steps_in_flight,
        }

    def end_leases() -> None:
        for request_id in leases.held:
            leases.end_lease(request_id)

    return {"shape": shape, "end_lease": end_lease, "end_leases": end_leases, "state": state}


def peer_fetcher(peers: Mapping[str, str]) -> Callable[[str], Mapping[str, Any]]:
    """Asks a configured peer how its memory is read. A request may name an engine, never an address."""

    def fetch(engine_id: str) -> Mapping[str, Any]:
        url = peers.get(engine_id)
        if url is None:
            raise PeerError(f"engine {engine_id!r} is no peer of this engine: start it with --peer {engine_id}=URL")
        try:
            answer = httpx.get(f"{url.rstrip('/')}{DESCRIBE_PATH}", timeout=_PEER_TIMEOUT_S, trust_env=False)
            answer.raise_for_status()
            found = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise PeerError(f"engine {engine_id} at {url} cannot be asked ({type(error).__name__})") from None
        if not isinstance(found, dict) or found.get("engine_id") != engine_id:
            raise PeerError(f"{url} is not engine {engine_id}")
        return found

    return fetch


def control_token() -> bytes:
    """The token that the control channel wants.

    Raises:
        InputError: there is none, or it is too short to be one.
    """
    token = os.environ.get(TOKEN_VARIABLE, "")
    if len(token) < MIN_TOKEN_LENGTH:
        raise InputError(f"--control needs {TOKEN_VARIABLE} with {MIN_TOKEN_LENGTH} characters or more in it")
    return token.encode()


def accept_control(address: Address | None, connected: Callable[[Any, Any], None]) -> None:
    """Listen for a harness, if an address is given: it makes two connections, for events and for commands."""
    if address is None:
        return
    listener = Listener(address, authkey=control_token())
    logger.warning("FAULT CONTROL IS ON at %s:%s: who holds the token can change KV caches", *address)

    def accept() -> None:
        waiting: list[Any] = []
        while True:
            try:
                waiting.append(listener.accept())
            except (AuthenticationError, EOFError, OSError) as error:
                logger.warning("fault control: a connection was refused (%s)", type(error).__name__)
                continue
            if len(waiting) == 2:
                connected(*waiting)
                waiting.clear()

    threading.Thread(target=accept, name="control", daemon=True).start()


def _serve(app: Starlette, options: ServeOptions) -> int:
    # uvicorn raises the signal that stopped it once more when it has stopped; by then we are leaving anyway.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            host=options.host,
            port=options.port,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=_GRACE_S,
        )
    )
    server.run()
    return 0 if server.started else 1


def leave(code: int) -> NoReturn:
    """End the process now: a NIXL agent can crash the interpreter while that shuts down, so nothing is left to it."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
