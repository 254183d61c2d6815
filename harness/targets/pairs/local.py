"""A producer, a consumer and the proxy as processes of this machine."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from harness.control import TOKEN_VARIABLE
from harness.targets.pairs.pair import PATIENT_MS, Endpoint, Pair, PairError
from harness.targets.pairs.signals import SignalledProcesses
from harness.targets.ports import HOST, free_ports
from harness.targets.workload import CONSUMER, PRODUCER, PROXY

_STOP_S = 10.0


@dataclass(frozen=True, slots=True)
class _Server:
    """One process: what it runs, where it listens, and where its output goes."""

    name: str
    command: tuple[str, ...]
    process: subprocess.Popen[bytes]
    endpoint: Endpoint
    log: Path


class LocalPair(Pair):
    """Three processes from construction to `stop`. A cell configures the engines anew; the processes stay."""

    def __init__(self, load_timeout_ms: int = PATIENT_MS) -> None:
        self._token = secrets.token_hex(16)
        self._logs = tempfile.TemporaryDirectory(prefix="kvchaos-local-")
        ports = free_ports(6)
        producer, consumer = f"http://{HOST}:{ports[0]}", f"http://{HOST}:{ports[1]}"
        commands = {
            PRODUCER: ["engine", "--role", PRODUCER],
            CONSUMER: [
                *("engine", "--role", CONSUMER, "--peer", f"{PRODUCER}={producer}"),
                *("--load-timeout-ms", str(load_timeout_ms)),
            ],
            PROXY: ["proxy", "--producer", producer, "--consumer", consumer],
        }
        self._servers: dict[str, _Server] = {}
        self.processes = self._signals = SignalledProcesses({})
        try:
            for index, (name, command) in enumerate(commands.items()):
                self._servers[name] = self._spawn(name, tuple(command), ports[index], ports[index + 3])
                self._signals.took_over(name, self._servers[name].process)
            super().__init__({name: server.endpoint for name, server in self._servers.items()}, self._token.encode())
        except BaseException:
            self._end_processes()
            raise

    def died(self) -> str | None:
        for name, server in self._servers.items():
            code = server.process.poll()
            if code is not None and name not in self.killed:
                return f"the {server.name} process ended with {code}: {_last_line(server.log)}"
        return None

    @property
    def pids(self) -> dict[str, int]:
        """The process of each server."""
        return {name: server.process.pid for name, server in self._servers.items()}

    def mend(self) -> bool:
        gone = {name for name, server in self._servers.items() if server.process.poll() is not None}
        if not gone or gone != self.killed:
            return False
        self.revive(gone)
        return True

    def revive(self, names: Collection[str]) -> None:
        for name in sorted(names):
            server = self._servers[name]
            port = int(server.endpoint.url.rpartition(":")[2])
            self._servers[name] = self._spawn(name, server.command, port, server.endpoint.control[1])
        self._meet_again(names)
        for name in names:
            self._signals.took_over(name, self._servers[name].process)

    def _give_up_if_hopeless(self, waiting: set[str], deadline: float) -> None:
        died = self.died()
        if died is not None:
            raise PairError(f"{died}: `kvchaos doctor` says what is missing")
        super()._give_up_if_hopeless(waiting, deadline)

    def stop(self) -> None:
        """End the processes that this pair started."""
        super().stop()
        self._end_processes()

    def _end_processes(self) -> None:
        self._signals.resume_all()
        for server in self._servers.values():
            server.process.terminate()
        for server in self._servers.values():
            try:
                server.process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                server.process.kill()
                server.process.wait()
        self._logs.cleanup()

    def _spawn(self, name: str, command: tuple[str, ...], port: int, control_port: int) -> _Server:
        log = Path(self._logs.name) / f"{name}.log"
        # One thread, loopback only: what is measured here is right or wrong, not fast.
        env = os.environ | {
            TOKEN_VARIABLE: self._token,
            "OMP_NUM_THREADS": "1",
            "UCX_TLS": os.environ.get("UCX_TLS", "tcp,self"),
            "UCX_NET_DEVICES": os.environ.get("UCX_NET_DEVICES", "lo"),
        }
        arguments = ["serve", *command, "--port", str(port), "--control", f"{HOST}:{control_port}"]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "harness.cli", *arguments],
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                env=env,
            )
        return _Server(name, command, process, Endpoint(f"http://{HOST}:{port}", (HOST, control_port)), log)


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
