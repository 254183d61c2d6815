"""NIXL as the connector uses it, in this process: bytes move by address, or do not, as a test says."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any


class NixlError(Exception):
    """NIXL has a dozen kinds of these, none of which can be imported without it."""


@dataclass(eq=False)
class Handle:
    """One posted transfer."""

    reader: str
    peer: str
    moves: list[tuple[int, int, int]]
    state: str = "PROC"
    posted: bool = False
    released: bool = False
    error: Exception | None = None

    def land(self) -> None:
        """Its bytes arrive now, whoever still holds the handle."""
        for target, source, size in self.moves:
            ctypes.memmove(target, source, size)
        self.state = "DONE"

    def fail(self, error: Exception | None = None) -> None:
        self.state, self.error = "ERR", error


@dataclass
class Net:
    """All agents, and what they have posted. `at_once`: transfers land when they are posted."""

    at_once: bool = True
    agents: dict[str, FakeAgent] = field(default_factory=dict)
    handles: list[Handle] = field(default_factory=list)
    notes: list[tuple[str, bytes]] = field(default_factory=list)
    dead: set[str] = field(default_factory=set)

    @property
    def moving(self) -> list[Handle]:
        return [handle for handle in self.handles if handle.posted and handle.state == "PROC"]


class FakeAgent:
    """The methods of `nixl._api.nixl_agent` that the connector calls."""

    def __init__(self, net: Net, name: str) -> None:
        self.net, self.name = net, name
        self.backends = {"UCX": 1}
        self.regions: list[tuple[int, int, int, str]] = []
        self.known: dict[str, list[tuple[int, int, int, str]]] = {}
        self.removed: list[str] = []
        self.inbox: dict[str, list[bytes]] = {}
        self.fails: dict[str, Exception] = {}
        net.agents[name] = self

    def _maybe(self, call: str) -> None:
        if call in self.fails:
            raise self.fails[call]

    def register_memory(self, regions: Any, kind: str) -> Any:
        assert kind == "DRAM"
        self.regions += regions
        return list(regions)

    def deregister_memory(self, regions: Any) -> None:
        assert not [h for h in self.net.moving if h.reader == self.name], "memory goes while bytes land in it"
        self.regions = [region for region in self.regions if region not in regions]

    def get_agent_metadata(self) -> bytes:
        return b"nixl:" + self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        self._maybe("add_remote_agent")
        if not metadata.startswith(b"nixl:"):
            raise NixlError("NIXL_ERR_MISMATCH")
        name = metadata[5:].decode()
        self.known[name] = self.net.agents[name].regions
        return name.encode()

    def remove_remote_agent(self, name: str) -> None:
        assert not [h for h in self.net.moving if h.peer == name], "nobody could tell any more when its reads end"
        self.removed.append(name)
        del self.known[name]

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        taken, self.inbox = self.inbox, {}
        return taken

    def send_notif(self, name: str, note: bytes) -> None:
        if name not in self.known or name in self.net.dead:
            raise NixlError("NIXL_ERR_REMOTE_DISCONNECT")
        self.net.notes.append((name, note))
        self.net.agents[name].inbox.setdefault(self.name, []).append(note)

    def get_xfer_descs(self, descriptors: list[tuple[int, int, int]], kind: str) -> Any:
        assert kind == "DRAM"
        return descriptors

    def initialize_xfer(self, operation: str, local: Any, remote: Any, peer: str) -> Handle:
        assert operation == "READ"
        self._maybe("initialize_xfer")
        if peer not in self.known:
            raise NixlError("NIXL_ERR_NOT_FOUND")
        for regions, descriptors in ((self.regions, local), (self.known[peer], remote)):
            for start, size, _ in descriptors:
                if not any(first <= start and start + size <= first + length for first, length, _, _ in regions):
                    raise NixlError("NIXL_ERR_NOT_FOUND")
        moves = []
        for (target, size, _), (source, same, _) in zip(local, remote, strict=True):
            assert size == same
            moves.append((target, source, size))
        handle = Handle(self.name, peer, moves)
        self.net.handles.append(handle)
        return handle

    def transfer(self, handle: Handle) -> str:
        self._maybe("transfer")
        if handle.peer in self.net.dead:
            raise NixlError("NIXL_ERR_REMOTE_DISCONNECT")
        handle.posted = True
        if self.net.at_once:
            handle.land()
        return handle.state

    def check_xfer_state(self, handle: Handle) -> str:
        assert not handle.released
        if not handle.posted:
            raise NixlError("NIXL_ERR_NOT_POSTED")
        if handle.error is not None:
            raise handle.error
        return handle.state

    def release_xfer_handle(self, handle: Handle) -> None:
        assert handle.state != "PROC" or not handle.posted, "a handle that moves is released"
        handle.released = True
        self._maybe("release_xfer_handle")
