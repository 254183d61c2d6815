"""A producer, a consumer and the proxy in other processes, wherever they run, with their control channels."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from engine.config import EngineConfig
from engine.errors import KVChaosError
from faults.levers import Network, Process
from harness.remote.harness_side import Dispatcher, EngineLink, RemoteMemory

# How long consumers that kvchaos starts wait for a load. That goes on while a fault holds it, on a slow machine too:
# seconds are only for faults that need them, and those wait for nothing themselves.
PATIENT_MS, IMPATIENT_MS = 120_000, 10_000
_START_S = 120.0
_POLL_S = 0.05


class PairError(KVChaosError):
    """The servers are not there, or one has gone."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One server: where it answers, and where its control channel is."""

    url: str
    control: tuple[str, int]


class Processes(Process, Protocol):
    """The lever `Process`, with what a run must know of it: who was killed, who is stopped and was not resumed."""

    @property
    def killed(self) -> set[str]: ...

    @property
    def paused(self) -> set[str]: ...

    def resume_all(self) -> None:
        """Let everything that a fault has left stopped go on."""
        ...


class Pair:
    """Servers that are reached by name: producer, consumer, proxy.

    `processes` and `network` where this end can signal them, and change the link between the engines.
    """

    processes: Processes | None = None
    network: Network | None = None

    def __init__(self, endpoints: Mapping[str, Endpoint], token: bytes) -> None:
        """Wait until all are up and connect to their control channels. Raises PairError if that does not come."""
        self._endpoints = dict(endpoints)
        self._secret = token
        self._wait_until_ready(self._endpoints)
        self.links = {name: EngineLink(name, point.control, token) for name, point in self._endpoints.items()}
        self.dispatcher = Dispatcher(self.links)

    def url(self, name: str) -> str:
        return self._endpoints[name].url

    def prepare(self, levers: frozenset[str]) -> None:
        """Called before a cell whose faults need these. Raises PairError if one cannot be had here after all."""

    def configure(self, *configs: EngineConfig) -> None:
        """Give each of these engines' processes a fresh engine. Raises RemoteCommandError if one refuses."""
        for config in configs:
            self.links[config.engine_id].call("configure", config.to_plain())
            self.links[config.engine_id].meet_memory()

    def memory(self, name: str) -> RemoteMemory | None:
        """The memory of an engine as it was configured last."""
        return self.links[name].memory

    def state(self, name: str) -> Mapping[str, Any]:
        """Counts of one engine: free and all blocks, requests, loads, leases."""
        found: Mapping[str, Any] = self.links[name].call("state")
        return found

    @property
    def killed(self) -> frozenset[str]:
        """The servers that a fault has killed. A pair that has any has to be mended before another cell."""
        return frozenset() if self.processes is None else frozenset(self.processes.killed)

    def restore(self) -> None:
        """Undo what faults have left: what is stopped goes on, the link is as it was. What was killed stays so."""
        if self.processes is not None:
            self.processes.resume_all()
        if self.network is not None:
            self.network.heal()

    def revive(self, names: Collection[str]) -> None:
        """Start again what a fault has killed, and connect to it. Its engine is not configured.

        Raises:
            PairError: it does not come up, or nobody here can start it.
        """
        raise PairError(f"{', '.join(sorted(names))}: nobody here can start it again")

    def mend(self) -> bool:
        """Start again what faults have killed. False if that is not all that has gone: then only a new pair helps.

        Raises:
            PairError: they do not come up.
        """
        return False

    def died(self) -> str | None:
        """Which server has gone by itself, and what is known of why; None if all answer that no fault has killed."""
        gone = sorted(name for name, point in self._endpoints.items() if not _healthy(point.url))
        return f"no answer from the {gone[0]}" if gone else None

    def stop(self) -> None:
        """Hang up; the servers go on alone."""
        for link in self.links.values():
            link.close()

    def _meet_again(self, names: Collection[str]) -> None:
        """Connect to servers that were started again."""
        self._wait_until_ready(names)
        for name in sorted(names):
            self.links[name].close()
            self.links[name] = EngineLink(name, self._endpoints[name].control, self._secret)
            self.dispatcher.listen_to(self.links[name])

    def _wait_until_ready(self, names: Collection[str]) -> None:
        deadline = time.monotonic() + _START_S
        waiting = set(names)
        while waiting:
            waiting = {name for name in waiting if not _healthy(self._endpoints[name].url)}
            if not waiting:
                return
            self._give_up_if_hopeless(waiting, deadline)
            time.sleep(_POLL_S)

    def _give_up_if_hopeless(self, waiting: set[str], deadline: float) -> None:
        if time.monotonic() > deadline:
            raise PairError(f"not ready after {_START_S:.0f} s: {', '.join(sorted(waiting))}")


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
