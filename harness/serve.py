"""Composes an engine or proxy server with the control channel: an engine started by itself cannot load a fault."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import httpx
import torch

from engine.cache import KVMemory
from engine.clock import MonotonicClock
from engine.config import EngineConfig
from engine.connectors.nixl import NixlPatience, NixlWorker
from engine.connectors.nixl_memory import PeerError
from engine.connectors.nixl_peers import NixlAgent
from engine.connectors.pull import PullScheduler
from engine.core import EngineCore
from engine.errors import EXIT_SOFTWARE, KVChaosError, StartupError
from engine.loop import EngineLoop
from engine.server.app import DESCRIBE_PATH, EngineServer
from engine.server.metrics import EngineMetrics
from engine.server.proxy_app import ProxyServer
from engine.server.running import DRAIN_S, bind, run
from harness.control import TOKEN_VARIABLE, Address, ControlChannel, control_token
from harness.overhead.planted_delay import PlantedDelay
from harness.remote.engine_side import RemoteSeams

__all__ = ["PROXY", "TOKEN_VARIABLE", "ServeOptions", "control_token", "serve_engine", "serve_proxy"]
logger = logging.getLogger(__name__)
PROXY = "proxy"
_PEER_TIMEOUT_S = 2.0
_DESCRIPTION_S = 5.0
_MAX_DESCRIPTION_BYTES = 4 * 2**20
_REPLACE_S = 5.0
_POLL_S = 0.01
_EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Where a server listens, and what its engine reads from: engine ids and the addresses of their servers.

    `planted` slows a producer down on purpose; only a study may ask for it.
    """

    host: str
    port: int
    control: Address | None = None
    peers: Mapping[str, str] = field(default_factory=dict)
    patience: NixlPatience = field(default_factory=NixlPatience)
    drain_s: float = DRAIN_S
    planted: PlantedDelay | None = None


class EngineHost:
    """The engine of a server process. A harness may put another one in its place, between requests."""

    def __init__(self, config: EngineConfig, options: ServeOptions) -> None:
        self._patience = options.patience
        self._fetch_peer = peer_fetcher(options.peers)
        self._agent = NixlAgent(config.engine_id)
        self.seams = RemoteSeams(config.engine_id)
        if options.planted is not None:
            options.planted.attach(self.seams)
        self.engine, self._leases, self._worker = self._build(config)
        self.describe = self._worker.describe()
        self.metrics = EngineMetrics(lambda: self.engine, fault_control=_may_be_harmed(options))
        self.loop = EngineLoop(self.engine, self.seams.poll, self.metrics.finished, self._patience.read_s)
        self._offer_commands()

    def _build(self, config: EngineConfig) -> tuple[EngineCore, PullScheduler, NixlWorker]:
        leases = PullScheduler(config.engine_id, config.lease_ticks, MonotonicClock())
        workers: list[NixlWorker] = []

        def connect(memory: KVMemory) -> NixlWorker:
            name, seams = config.engine_id, self.seams
            workers.append(NixlWorker(name, memory, seams, self._fetch_peer, self._agent, self._patience, leases.renew))
            return workers[0]

        engine = EngineCore(config, self.seams, leases, connect)
        return engine, leases, workers[0]

    def _offer_commands(self) -> None:
        commands = {"configure": self.configure} | engine_commands(self.engine, self._leases)
        self.seams.serve(self.engine.memory, commands)

    def configure(self, plain: Mapping[str, Any]) -> None:
        """Replace the engine by one of this configuration (`EngineConfig.to_plain`). Called in the loop's thread.

        Where it computes is the server's to say: its device stays.

        Raises:
            StartupError: it cannot be started so, or bytes still land in the engine that runs; that one is kept.
        """
        config = replace(EngineConfig.from_plain(plain), device=self.engine.config.device)
        self._wait_for_reads()
        self.engine, self._leases, self._worker = self._build(config)
        self.describe = self._worker.describe()
        self.loop.replace(self.engine)
        self._offer_commands()

    def _wait_for_reads(self) -> None:
        """Memory that a read still writes must not go: a posted read cannot be taken back."""
        deadline = time.monotonic() + _REPLACE_S
        while self._worker.num_moving:
            if time.monotonic() > deadline:
                raise StartupError(f"{self._worker.num_moving} reads do not end: their producer has to go on, or to go")
            time.sleep(_POLL_S)


def _may_be_harmed(options: ServeOptions) -> bool:
    """Whether this engine serves nobody but a harness."""
    return options.control is not None or options.planted is not None


def serve_engine(config: EngineConfig, options: ServeOptions) -> NoReturn:
    """Run an engine with the NIXL pull connector behind its server, until a signal ends it."""

    def serve() -> None:
        # What can be refused is refused before there is an agent.
        if config.device == "cuda" and not torch.cuda.is_available():
            raise StartupError("--device cuda: torch finds no CUDA device here; see `kvchaos doctor`")
        control = None if options.control is None else ControlChannel(options.control)
        listening = bind(options.host, options.port)
        _keep_transport_local(options.host)
        host = EngineHost(config, options)
        server = EngineServer(config.engine_id, host.loop, host.metrics, lambda: host.describe)
        if control is not None:
            control.start(lambda events, commands: host.loop.post(lambda: host.seams.connect(events, commands)))
        host.loop.start()

        async def stop() -> None:
            await asyncio.to_thread(host.loop.stop)

        run(f"engine {config.engine_id}", server.app, listening, stop, options.drain_s)
        host.loop.stop()

    _run_and_leave(serve)


def serve_proxy(producer: str, consumer: str, options: ServeOptions) -> NoReturn:
    """Run the P/D proxy until a signal ends it."""

    def serve() -> None:
        control = None if options.control is None else ControlChannel(options.control)
        listening = bind(options.host, options.port)
        seams = RemoteSeams(PROXY)
        seams.serve_commands({})
        pending: list[Callable[[], None]] = []

        def between() -> None:
            while pending:
                pending.pop(0)()
            seams.poll()

        server = ProxyServer(producer, consumer, seams, between)
        if control is not None:
            control.start(lambda events, commands: pending.append(lambda: seams.connect(events, commands)))
        run("proxy", server.app, listening, server.stop, options.drain_s)

    _run_and_leave(serve)


def _keep_transport_local(host: str) -> None:
    """UCX listens on every network device that it is not told to leave alone; a local server listens on no other."""
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    if local and sys.platform == "linux":
        os.environ.setdefault("UCX_NET_DEVICES", "lo")


def engine_commands(engine: EngineCore, leases: PullScheduler) -> dict[str, Callable[..., Any]]:
    """What a harness may ask of an engine beside its memory."""

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

    return {"end_lease": end_lease, "end_leases": end_leases, "state": state}


def peer_fetcher(peers: Mapping[str, str]) -> Callable[[str], Mapping[str, Any]]:
    """Asks a configured peer how its memory is read. A request may name an engine, never an address."""

    def fetch(engine_id: str) -> Mapping[str, Any]:
        url = peers.get(engine_id)
        if url is None:
            raise PeerError(f"engine {engine_id!r} is no peer of this engine: start it with --peer {engine_id}=URL")
        try:
            found = json.loads(_read_at_most(f"{url.rstrip('/')}{DESCRIBE_PATH}"))
        except (httpx.HTTPError, ValueError, RecursionError) as error:
            raise PeerError(f"engine {engine_id} at {url} cannot be asked ({type(error).__name__})") from None
        if not isinstance(found, dict) or found.get("engine_id") != engine_id:
            raise PeerError(f"{url} is not engine {engine_id}")
        return found

    return fetch


def _read_at_most(url: str) -> bytes:
    """What a server answers, as long as it is of the size of a description and comes in time.

    Raises:
        httpx.HTTPError: it does not answer, or with another status than 200.
        ValueError: it answers more than that, or drop by drop.
    """
    deadline, body = time.monotonic() + _DESCRIPTION_S, bytearray()
    with httpx.stream("GET", url, timeout=_PEER_TIMEOUT_S, trust_env=False) as answer:
        answer.raise_for_status()
        for part in answer.iter_bytes(2**16):
            body += part
            if len(body) > _MAX_DESCRIPTION_BYTES or time.monotonic() > deadline:
                raise ValueError("too much, or too slowly")
    return bytes(body)


def _run_and_leave(serve: Callable[[], None]) -> NoReturn:
    code = 0
    try:
        serve()
    except KVChaosError as error:
        print(f"kvchaos: {error}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        code = _EXIT_INTERRUPTED
    except BaseException:  # noqa: BLE001 - whatever it is, leaving by another way may crash on the way out
        traceback.print_exc()
        code = EXIT_SOFTWARE
    leave(code)


def leave(code: int) -> NoReturn:
    """End the process now: a NIXL agent can crash the interpreter while that shuts down, so nothing is left to it."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
