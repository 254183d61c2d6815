"""A producer, a consumer and the proxy in other processes, wherever they run, with their control channels."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from engine.config import EngineConfig
from engine.errors import KVChaosError
from harness.remote.harness_side import Dispatcher, EngineLink

_START_S = 120.0
_POLL_S = 0.05


class PairError(KVChaosError):
    """The servers are not there, or one has gone."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One server: where it answers, and where its control channel is."""

    url: str
    control: tuple[str, int]


class Pair:
    """Servers that are reached by name: producer, consumer, proxy."""

    def __init__(self, endpoints: Mapping[str, Endpoint], token: bytes) -> None:
        """Wait until all are up and connect to their control channels. Raises PairError if that does not come."""
        self._endpoints = dict(endpoints)
        self._wait_until_ready()
        self.links = {name: EngineLink(name, point.control, token) for name, point in self._endpoints.items()}
        self.dispatcher = Dispatcher(self.links)

    def url(self, name: str) -> str:
        return self._endpoints[name].url

    def configure(self, producer: EngineConfig, consumer: EngineConfig) -> None:
        """Give both engines' processes a fresh engine. Raises RemoteCommandError if one refuses."""
        for config in (producer, consumer):
            self.links[config.engine_id].call("configure", config.to_plain())
            self.links[config.engine_id].meet_memory()

    def state(self, name: str) -> Mapping[str, Any]:
        """Counts of one engine: free and all blocks, requests, loads, leases."""
        found: Mapping[str, Any] = self.links[name].call("state")
        return found

    def died(self) -> str | None:
        """Which server has gone, and what is known of why; None if all answer."""
        gone = sorted(name for name, point in self._endpoints.items() if not _healthy(point.url))
        return f"no answer from the {gone[0]}" if gone else None

    def stop(self) -> None:
        """Hang up; the servers go on alone."""
        for link in self.links.values():
            link.close()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_S
        waiting = set(self._endpoints)
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
