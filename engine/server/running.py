"""Runs a server in this process until a signal ends it: bind first, then serve, then let requests finish for a while.

A signal closes the door. Who is inside has `drain_s` to finish; whoever is left then is told that the server stops.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import socket
from collections.abc import Awaitable, Callable

import uvicorn
from starlette.applications import Starlette

from engine.errors import StartupError

logger = logging.getLogger(__name__)
DRAIN_S = 3.0
_LAST_WORDS_S = 3  # for the errors to reach their clients; who is not gone by then is cut off


class BindError(StartupError):
    """The address cannot be listened on."""


def bind(host: str, port: int, option: str = "--port") -> socket.socket:
    """A socket that listens on this address; port 0 takes any free one.

    Raises:
        BindError: somebody else has it, or it is none of this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, ValueError) as error:  # ValueError: no text that a name could be
        reason = getattr(error, "strerror", None) or error
        raise BindError(f"cannot listen on {host!r}: {reason}") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen()
        bound.set_inheritable(False)
    except OSError as error:
        bound.close()
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise BindError(f"cannot listen on {host}:{port}: {reason}: choose another {option}") from None
    return bound


Stop = Callable[[], Awaitable[None]]


def run(name: str, app: Starlette, listening: socket.socket, stop: Stop, drain_s: float) -> None:
    """Serve `app` until SIGTERM or SIGINT, in the main thread. `stop` ends the requests that are left."""
    server = _Server(name, app, stop, drain_s)
    # uvicorn installs its own while it runs, and then raises what it got once more for those that were there before.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, server.handle_exit)
    server.run([listening])


class _Server(uvicorn.Server):
    def __init__(self, name: str, app: Starlette, stop: Stop, drain_s: float) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=math.ceil(drain_s) + _LAST_WORDS_S,
            )
        )
        self._name = name
        self._stop = stop
        self._drain_s = drain_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or ():
            host, port = listening.getsockname()[:2]
            logger.info("%s listens on http://%s:%d", self._name, f"[{host}]" if ":" in host else host, port)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        logger.info("%s stops: %d requests have %g s to finish", self._name, self._num_requests, self._drain_s)
        ending = asyncio.create_task(self._end_what_is_left())
        await super().shutdown(sockets)
        ending.cancel()

    @property
    def _num_requests(self) -> int:
        return len(self.server_state.tasks)

    async def _end_what_is_left(self) -> None:
        await asyncio.sleep(self._drain_s)
        await self._stop()
