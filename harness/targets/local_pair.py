"""A producer, a consumer and the proxy as processes of this machine, with their control channels."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from engine.config import EngineConfig
from engine.errors import KVChaosError
from harness.remote.harness_side import Dispatcher, EngineLink
from harness.serve import PROXY, TOKEN_VARIABLE
from harness.targets.workload import CONSUMER, PRODUCER

_HOST = "127.0.0.1"
_START_S = 60.0
_STOP_S = 10.0
_POLL_S = 0.05


class PairError(KVChaosError):
    """The processes could not be started, or one has gone."""


@dataclass(frozen=True, slots=True)
class _Server:
    """One process: where it listens, and where its output goes."""

    name: str
    process: subprocess.Popen[bytes]
    url: str
    control: tuple[str, int]
    log: Path


class LocalPair:
    """Three processes from `start` to `stop`. A cell configures the engines anew; the processes stay."""

    def __init__(self) -> None:
        self._token = secrets.token_hex(16)
        self._logs = tempfile.TemporaryDirectory(prefix="kvchaos-local-")
        ports = _free_ports(6)
        producer, consumer = f"http://{_HOST}:{ports[0]}", f"http://{_HOST}:{ports[1]}"
        commands = {
            PRODUCER: ["engine", "--role", PRODUCER],
            CONSUMER: ["engine", "--role", CONSUMER, "--peer", f"{PRODUCER}={producer}"],
            PROXY: ["proxy", "--producer", producer, "--consumer", consumer],
        }
        self._servers = {
            name: self._spawn(name, command, ports[index], ports[index + 3])
            for index, (name, command) in enumerate(commands.items())
        }
        self.links: dict[str, EngineLink] = {}
        try:
            self._wait_until_ready()
            self.links = {name: EngineLink(name, s.control, self._token.encode()) for name, s in self._servers.items()}
        except BaseException:
            self.stop()
            raise
        self.dispatcher = Dispatcher(self.links)

    def url(self, name: str) -> str:
        return self._servers[name].url

    def configure(self, producer: EngineConfig, consumer: EngineConfig) -> None:
        """Give both processes a fresh engine. Raises RemoteCommandError if one refuses."""
        for config in (producer, consumer):
            self.links[config.engine_id].call("configure", config.to_plain())
            self.links[config.engine_id].meet_memory()

    def state(self, name: str) -> Mapping[str, Any]:
        """Counts of one engine: free and all blocks, requests, loads, leases."""
        found: Mapping[str, Any] = self.links[name].call("state")
        return found

    def died(self) -> str | None:
        """Which process has ended by itself, and its last words; None if all run."""
        for server in self._servers.values():
            code = server.process.poll()
            if code is not None:
                return f"the {server.name} process ended with {code}: {_last_line(server.log)}"
        return None

    def stop(self) -> None:
        """End the processes that this pair started."""
        for link in self.links.values():
            link.close()
        for server in self._servers.values():
            server.process.terminate()
        for server in self._servers.values():
            try:
                server.process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                server.process.kill()
                server.process.wait()
        self._logs.cleanup()

    def _spawn(self, name: str, command: list[str], port: int, control_port: int) -> _Server:
        log = Path(self._logs.name) / f"{name}.log"
        # One thread, loopback only: what is measured here is right or wrong, not fast.
        env = os.environ | {
            TOKEN_VARIABLE: self._token,
            "OMP_NUM_THREADS": "1",
            "UCX_TLS": os.environ.get("UCX_TLS", "tcp,self,sm"),
            "UCX_NET_DEVICES": os.environ.get("UCX_NET_DEVICES", "lo"),
        }
        arguments = ["serve", *command, "--port", str(port), "--control", f"{_HOST}:{control_port}"]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "harness.cli", *arguments],
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                env=env,
            )
        return _Server(name, process, f"http://{_HOST}:{port}", (_HOST, control_port), log)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_S
        waiting = set(self._servers)
        while waiting:
            died = self.died()
            if died is not None:
                raise PairError(f"{died}: try `kvchaos doctor`")
            if time.monotonic() > deadline:
                raise PairError(f"not ready after {_START_S:.0f} s: {', '.join(sorted(waiting))}")
            waiting = {name for name in waiting if not _healthy(self._servers[name].url)}
            if waiting:
                time.sleep(_POLL_S)


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=1.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind((_HOST, 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
