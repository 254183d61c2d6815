"""A process's NIXL agent, and the engines that it reads from: who they are, and where their memory lies.

A peer is asked in the background, since it may take as long as it likes to answer, and the engine's thread never
waits for it. What it answers is checked before anything is computed from it.
"""

from __future__ import annotations

import base64
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from engine.cache import KVMemory
from engine.connectors.nixl_memory import Peer, PeerError, memory_kind
from engine.connectors.nixl_progress import waiting_for_events
from engine.errors import StartupError

logger = logging.getLogger(__name__)
FetchPeer = Callable[[str], Mapping[str, Any]]
_BACKEND = "UCX"


class NixlAgent:
    """A process's NIXL agent. It outlives the engines that use it, and makes sure that nothing of one is left."""

    def __init__(self, engine_id: str) -> None:
        """Raises StartupError if NIXL is not there or cannot be used."""
        # An agent's name must be new: a peer that knew an earlier process of this id would mix the two up.
        self.name = f"{engine_id}-{time.time_ns():x}"
        self.api = _new_agent(self.name)
        self._registered: list[Any] = []
        self._met: set[str] = set()

    def register(self, memory: KVMemory) -> None:
        """Register an engine's caches in the place of an earlier engine's, and forget the peers of that one.

        Nothing may be read into the earlier engine's memory any more: a posted read cannot be taken back.
        """
        for registered in self._registered:
            self.api.deregister_memory(registered)
        self._registered.clear()
        for agent in list(self._met):
            self.forget(agent)
        self.api.get_new_notifs()
        regions: dict[str, list[tuple[int, int, int, str]]] = {}
        for cache in (cache for group in memory.groups for cache in group.caches):
            kind, device = memory_kind(cache)
            sizes = [(layer.data_ptr(), layer.numel() * layer.element_size()) for layer in cache.layers]
            regions.setdefault(kind, []).extend((base, size, device, "") for base, size in sizes)
        self._registered += [self.api.register_memory(found, kind) for kind, found in regions.items()]

    def meet(self, metadata: bytes) -> str:
        """Take in a peer's metadata. Returns its agent's name."""
        found = self.api.add_remote_agent(metadata)
        try:
            name = found.decode() if isinstance(found, bytes) else str(found)
        except UnicodeDecodeError:
            self.api.remove_remote_agent(found)
            raise
        self._met.add(name)
        return name

    def forget(self, name: str) -> None:
        """Drop a peer; one that has gone already is no trouble. No read from it may be under way."""
        self._met.discard(name)
        try:
            self.api.remove_remote_agent(name)
        except Exception as error:  # noqa: BLE001 - NIXL raises many kinds; the peer is gone anyway
            logger.debug("peer %s: %s", name, error)


def _new_agent(name: str) -> Any:
    try:
        from nixl._api import nixl_agent, nixl_agent_config  # type: ignore[import-untyped] # it has no types
    except ImportError as error:
        raise StartupError(
            f"NIXL cannot be imported ({error}): install the extra kvchaos[nixl]; `kvchaos doctor` says how"
        ) from None
    try:
        with waiting_for_events(nixl_agent):
            agent = nixl_agent(name, nixl_agent_config(backends=[_BACKEND]))
    except Exception as error:  # noqa: BLE001 - NIXL raises many kinds, and none of them is for the user
        raise StartupError(
            f"NIXL cannot make an agent ({type(error).__name__}: {error}): see `kvchaos doctor`"
        ) from None
    if _BACKEND not in agent.backends:
        raise StartupError(f"this NIXL has no {_BACKEND} backend: see `kvchaos doctor`")
    return agent


@dataclass(frozen=True, slots=True)
class _Asking:
    since: float
    answer: Future[Mapping[str, Any]]


class Peers:
    """The peers of one engine, by engine id. `fetch` asks one how its memory is read; it raises PeerError."""

    def __init__(
        self, agent: NixlAgent, fetch: FetchPeer, mine: Peer, patience_s: float, now: Callable[[], float]
    ) -> None:
        self._agent = agent
        self._fetch = fetch
        self._mine = mine
        self._patience_s = patience_s
        self._now = now
        self._known: dict[str, Peer] = {}
        self._asking: dict[str, _Asking] = {}
        self._condemned: set[str] = set()

    def find(self, engine_id: str) -> Peer | None:
        """The peer; None while it is being asked, so ask again. Raises PeerError if it cannot be read from."""
        known = self._known.get(engine_id)
        if known is not None:
            return known
        asking = self._asking.get(engine_id)
        if asking is None:
            asking = self._asking[engine_id] = _Asking(self._now(), Future())
            name = f"ask-{engine_id}"[:64]
            threading.Thread(target=self._ask, args=(engine_id, asking.answer), name=name, daemon=True).start()
        if not asking.answer.done():
            if self._now() - asking.since > self._patience_s:
                raise PeerError(f"engine {engine_id!r} has not answered for {self._patience_s:.0f} s")
            return None
        del self._asking[engine_id]
        peer = self._known[engine_id] = self._take_in(engine_id, asking.answer.result())
        return peer

    def forget(self, peer: Peer) -> None:
        """After a failure the peer may be another process behind the same id: it is asked again next time."""
        if self._known.get(peer.engine) is peer:
            del self._known[peer.engine]
            self._condemned.add(peer.agent)

    def sweep(self, in_use: set[str]) -> None:
        """Drop the agents of forgotten peers, but for those that a read or a notice still uses.

        A read under way would go on into this engine's memory, only nobody could tell any more when it has ended.
        """
        gone = self._condemned - in_use
        if gone:
            self._condemned -= gone
            for agent in sorted(gone - {peer.agent for peer in self._known.values()}):
                self._agent.forget(agent)

    def _ask(self, engine_id: str, answer: Future[Mapping[str, Any]]) -> None:
        try:
            answer.set_result(self._fetch(engine_id))
        except Exception as error:  # noqa: BLE001 - whatever it is, who asked is told
            answer.set_exception(error if isinstance(error, PeerError) else PeerError(f"engine {engine_id!r}: {error}"))

    def _take_in(self, engine_id: str, found: Mapping[str, Any]) -> Peer:
        try:
            peer = Peer.from_plain(engine_id, "", found)
            metadata = base64.b64decode(found["metadata"], validate=True)
        except (ValueError, KeyError, TypeError) as error:
            raise PeerError(f"engine {engine_id!r} describes itself in a way that cannot be used ({error})") from None
        if (difference := peer.differs_from(self._mine)) is not None:
            raise PeerError(f"engine {engine_id!r} keeps other KV than this engine: {difference}")
        try:
            agent = self._agent.meet(metadata)
        except Exception as error:  # noqa: BLE001 - NIXL raises many kinds, and each means that it is no peer
            raise PeerError(f"engine {engine_id!r} cannot be met ({type(error).__name__}: {error})") from None
        return replace(peer, agent=agent)
