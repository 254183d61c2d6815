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
from dataclasses import dataclass
from typing import Any

from engine.cache import KVMemory, PeerMemory
from engine.connectors.nixl_progress import waiting_for_events
from engine.errors import KVChaosError, StartupError

logger = logging.getLogger(__name__)
FetchPeer = Callable[[str], Mapping[str, Any]]
_BACKEND = "UCX"
_MEMORY_KINDS = ("DRAM", "VRAM")
# More than any engine has; what is above is no description of one.
_LIMITS = {
    "num_layers": 2**12,
    "num_kv_heads": 2**16,
    "num_blocks": 2**31,
    "block_size": 2**16,
    "bytes_per_token": 2**24,
}


class PeerError(KVChaosError):
    """A peer cannot be reached, or is not what this engine can read from."""


class NixlAgent:
    """A process's NIXL agent. It outlives the engines that use it, and makes sure that nothing of one is left."""

    def __init__(self, engine_id: str) -> None:
        """Raises StartupError if NIXL is not there or cannot be used."""
        # An agent's name must be new: a peer that knew an earlier process of this id would mix the two up.
        self.name = f"{engine_id}-{time.time_ns():x}"
        self.api = _new_agent(self.name)
        self._registered: Any = None
        self._met: set[str] = set()

    def register(self, memory: KVMemory) -> None:
        """Register an engine's caches in the place of an earlier engine's, and forget the peers of that one.

        Nothing may be read into the earlier engine's memory any more: a posted read cannot be taken back.
        """
        if self._registered is not None:
            self.api.deregister_memory(self._registered)
        for agent in list(self._met):
            self.forget(agent)
        self.api.get_new_notifs()
        views = memory.layer_views()
        kind, device = memory_kind(memory)
        regions = [(view.data_ptr(), view.numel() * view.element_size(), device, "") for view in views]
        self._registered = self.api.register_memory(regions, kind)

    def meet(self, metadata: bytes) -> str:
        """Take in a peer's metadata. Returns its agent's name."""
        found = self.api.add_remote_agent(metadata)
        name = found.decode() if isinstance(found, bytes) else str(found)
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


def memory_kind(memory: KVMemory) -> tuple[str, int]:
    """NIXL's name for where the caches lie, and the number of their device."""
    device = memory.layer_views()[0].device
    return ("VRAM", device.index or 0) if device.type == "cuda" else ("DRAM", 0)


@dataclass(frozen=True, slots=True)
class Peer:
    """How to read an engine's memory: byte strides of [block, K|V, slot, head] in each layer's region."""

    agent: str
    geometry: PeerMemory
    bases: tuple[int, ...]
    strides: tuple[int, int, int, int]
    row_bytes: int
    kind: str = "DRAM"
    device: int = 0

    def rows(self, layer: int, block: int, part: int, head: int, slot: int, count: int) -> list[tuple[int, int]]:
        """(address, bytes) of `count` slots: one run where they lie together, else one a slot."""
        block_stride, part_stride, slot_stride, head_stride = self.strides
        first = self.bases[layer] + block * block_stride + part * part_stride + head * head_stride
        if slot_stride == self.row_bytes:
            return [(first + slot * slot_stride, count * self.row_bytes)]
        return [(first + (slot + n) * slot_stride, self.row_bytes) for n in range(count)]

    @classmethod
    def of(cls, engine_id: str, agent: str, memory: KVMemory) -> Peer:
        """How an engine's own memory is read."""
        views = memory.layer_views()
        size = views[0].element_size()
        block, part, slot, head, _ = (stride * size for stride in views[0].stride())
        geometry = PeerMemory(engine_id, *(getattr(memory, name) for name in _LIMITS))
        bases = tuple(view.data_ptr() for view in views)
        kind, device = memory_kind(memory)
        return cls(agent, geometry, bases, (block, part, slot, head), views[0].shape[-1] * size, kind, device)

    def to_plain(self) -> dict[str, Any]:
        """As JSON values, without the agent's name: that comes with its metadata."""
        return {
            **{name: getattr(self.geometry, name) for name in _LIMITS},
            "bases": list(self.bases),
            "strides": list(self.strides),
            "row_bytes": self.row_bytes,
            "memory": self.kind,
            "device": self.device,
        }

    @classmethod
    def from_plain(cls, engine_id: str, agent: str, plain: Mapping[str, Any]) -> Peer:
        """Read what `to_plain` gave. Raises ValueError or KeyError for anything else."""
        geometry = [_integer(plain, name, 1, most) for name, most in _LIMITS.items()]
        bases, strides = (_addresses(plain, name) for name in ("bases", "strides"))
        if len(strides) != 4 or len(bases) != geometry[0]:
            raise ValueError("bases or strides of another length than the layers and axes have")
        if plain["memory"] not in _MEMORY_KINDS:
            raise ValueError(f"memory is {plain['memory']!r}")
        return cls(
            agent,
            PeerMemory(engine_id, *geometry),
            bases,
            (strides[0], strides[1], strides[2], strides[3]),
            _integer(plain, "row_bytes", 1, _LIMITS["bytes_per_token"]),
            plain["memory"],
            _integer(plain, "device", 0, 2**10),
        )


def _integer(plain: Mapping[str, Any], name: str, least: int, most: int) -> int:
    value = plain[name]
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} is {value!r}")
    return value


def _addresses(plain: Mapping[str, Any], name: str) -> tuple[int, ...]:
    values = plain[name]
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value < 2**63 for value in values):
        raise ValueError(f"{name} are no addresses")
    return tuple(values)


@dataclass(frozen=True, slots=True)
class _Asking:
    since: float
    answer: Future[Mapping[str, Any]]


class Peers:
    """The peers of one engine, by engine id. `fetch` asks one how its memory is read; it raises PeerError."""

    def __init__(
        self, agent: NixlAgent, fetch: FetchPeer, row_bytes: int, patience_s: float, now: Callable[[], float]
    ) -> None:
        self._agent = agent
        self._fetch = fetch
        self._row_bytes = row_bytes
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
        if self._known.get(peer.geometry.engine) is peer:
            del self._known[peer.geometry.engine]
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
        if peer.row_bytes != self._row_bytes:
            raise PeerError(f"engine {engine_id!r} has KV rows of {peer.row_bytes} bytes, not {self._row_bytes}")
        try:
            agent = self._agent.meet(metadata)
        except Exception as error:  # noqa: BLE001 - whatever a peer sends must not end this engine
            raise PeerError(f"engine {engine_id!r} cannot be met ({type(error).__name__}: {error})") from None
        return Peer.from_plain(engine_id, agent, found)
