"""The engine's half of the control channel: seams that ask, and commands that are served between and inside steps.

One thread owns the engine and this object. While it waits for a decision at a seam it goes on serving commands, so
that the harness can read and write the memory of an engine that stands at a seam, and of one that does not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

from engine.cache import GroupShape, KVMemory
from engine.errors import KVChaosError
from engine.groups import KVGroup
from engine.seams import NAMES, SEAMS, Hold, Outcome, Seams
from harness.remote.codec import MAX_MESSAGE_BYTES, MemoryOf, WireError, pack, unpack

logger = logging.getLogger(__name__)
Command = Callable[..., Any]


class RemoteSeams(Seams):
    """Seams of an engine whose handlers live in the harness.

    Until a harness is connected, and after it has gone, nobody listens and the engine runs as if it were alone.
    """

    def __init__(self, engine: str) -> None:
        super().__init__()
        self._engine = engine
        self._events: Connection | None = None
        self._commands: Connection | None = None
        self._subscribed: frozenset[str] = frozenset()
        self._memory: KVMemory | None = None
        self._served: dict[str, Command] = {"subscribe": self._subscribe}

    def serve(self, memory: KVMemory, commands: dict[str, Command]) -> None:
        """What the harness may ask for: the memory's shape and methods, and these commands."""
        self._memory = memory
        self.serve_commands({"memory.shape": lambda: [_shape(group) for group in memory.groups]})
        for name in ("slots", "tokens", "write_slot", "fill"):
            self._served[f"memory.{name}"] = partial(_call, memory, name)
        self.serve_commands(commands)

    def serve_commands(self, commands: dict[str, Command]) -> None:
        """What the harness may ask of something that has no KV memory."""
        self._served |= commands

    def connect(self, events: Connection, commands: Connection) -> None:
        """Take a harness's two connections; an earlier one is dropped."""
        self._disconnect()
        self._events, self._commands = events, commands

    @property
    def connected(self) -> bool:
        return self._events is not None

    def poll(self) -> None:
        """Serve the commands that have arrived. Called by the engine's thread between steps."""
        while self._commands is not None and self._ready(self._commands):
            self._serve_one()

    def listened(self, seam: str) -> bool:
        return seam in self._subscribed or super().listened(seam)

    def emit(self, event: Any) -> Outcome[Any]:
        """Ask the harness if it listens to this seam; else whoever listens in this process."""
        name = NAMES[type(event)]
        if name not in self._subscribed:
            return super().emit(event)
        reply = self._ask(["event", event])
        if reply is None:
            return Outcome(event)
        kind = reply[0]
        if kind == "drop":
            return Outcome(event, dropped=True)
        if kind == "hold":
            return Outcome(event, holds=tuple(self._hold(number, why) for number, why in reply[1]))
        changed = self._with_own_memory(reply[1], event)
        return Outcome(changed)

    def _hold(self, number: int, why: str) -> Hold:
        def until() -> bool:
            reply = self._ask(["released", number])
            return True if reply is None else bool(reply[0])

        return Hold(until, why)

    def _with_own_memory(self, changed: Any, event: Any) -> Any:
        """The harness names memories; what goes on in the engine is the engine's own."""
        for field in ("memory", "source", "target"):
            if hasattr(changed, field):
                object.__setattr__(changed, field, getattr(event, field))
        return changed

    def _ask(self, message: Any) -> Any:
        """Send and wait for the reply, serving commands meanwhile. None: the harness has gone."""
        try:
            if self._events is None:
                return None
            self._events.send_bytes(pack(message, self._engine_of))
            while True:
                connections = [c for c in (self._events, self._commands) if c is not None]
                if self._events not in connections:
                    return None
                ready = wait(connections)
                if self._commands in ready:
                    self._serve_one()
                if self._events in ready:
                    return unpack(self._events.recv_bytes(MAX_MESSAGE_BYTES), MemoryOf)
        except (OSError, EOFError, WireError) as error:
            self._give_up(error)
            return None

    def _serve_one(self) -> None:
        commands = self._commands
        if commands is None:
            return
        try:
            message = unpack(commands.recv_bytes(MAX_MESSAGE_BYTES), MemoryOf)
            if not isinstance(message, list) or not message or not isinstance(message[0], str):
                raise WireError("a command is a list that begins with its name")
            commands.send_bytes(pack(self._run(message[0], message[1:]), self._engine_of))
        except (OSError, EOFError, WireError) as error:
            self._give_up(error)

    def _run(self, name: str, arguments: list[Any]) -> list[Any]:
        command = self._served.get(name)
        if command is None:
            return ["error", f"engine {self._engine} knows no command {name!r}"]
        try:
            return ["ok", command(*arguments)]
        except (KVChaosError, ValueError, TypeError, IndexError, KeyError, RuntimeError) as error:
            return ["error", f"{name}: {type(error).__name__}: {error}"]

    def _subscribe(self, names: list[str]) -> None:
        unknown = sorted(set(names) - set(SEAMS))
        if unknown:
            raise WireError(f"there is no seam {unknown[0]!r}")
        self._subscribed = frozenset(names)

    def _engine_of(self, value: Any) -> str | None:
        return self._engine if value is self._memory and value is not None else None

    @staticmethod
    def _ready(connection: Connection) -> bool:
        try:
            return connection.poll()
        except (OSError, EOFError):
            return True

    def _give_up(self, error: Exception) -> None:
        """The harness has gone, or is none: the engine goes on without it."""
        if isinstance(error, WireError):
            logger.warning("engine %s hangs up on its harness: %s", self._engine, error)
        self._disconnect()

    def _disconnect(self) -> None:
        for connection in (self._events, self._commands):
            if connection is not None:
                connection.close()
        self._events = self._commands = None
        self._subscribed = frozenset()


def _shape(group: KVMemory) -> tuple[GroupShape, KVGroup, tuple[tuple[int, int], ...]]:
    return GroupShape.of(group), group.spec, group.factors


def _call(memory: KVMemory, method: str, group_id: int, replica: int | None, *arguments: Any) -> Any:
    """A method of the memory of one group, over all replicas or of one."""
    group = memory.group(group_id)
    return getattr(group if replica is None else group.replica(replica), method)(*arguments)
