"""The control channel of a server: how a harness in another process gets at its seams and its memory.

It exists only when an address for it is given and a token is in the environment. Who holds the token can read and
change the KV cache, so the server says loudly that it is on.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge

from engine.errors import InputError
from engine.server.running import BindError

logger = logging.getLogger(__name__)
TOKEN_VARIABLE = "KVCHAOS_CONTROL_TOKEN"
MIN_TOKEN_LENGTH = 16
_HANDSHAKE_S = 5.0

Address = tuple[str, int]
Connected = Callable[[Connection, Connection], None]


def control_token() -> bytes:
    """The token that the control channel wants.

    Raises:
        InputError: there is none, or it is too short to be one.
    """
    token = os.environ.get(TOKEN_VARIABLE, "")
    if len(token) < MIN_TOKEN_LENGTH:
        raise InputError(f"--control needs {TOKEN_VARIABLE} with {MIN_TOKEN_LENGTH} characters or more in it")
    return token.encode()


class ControlChannel:
    """Listens for a harness: it makes two connections, for events and for commands."""

    def __init__(self, address: Address) -> None:
        """Raises InputError if there is no token, BindError if the address cannot be listened on."""
        self._token = control_token()
        try:
            self._listener = Listener(address)
        except OSError as error:
            where = f"{address[0]}:{address[1]}"
            raise BindError(f"cannot listen on {where}: {error.strerror}: choose another --control") from None
        host, port = self._listener.address
        self.address: Address = (str(host), int(port))

    def start(self, connected: Connected) -> None:
        """Accept harnesses from now on. `connected` is called in a thread of its own."""
        where = "{}:{}".format(*self.address)
        print(
            f"!!! FAULT CONTROL IS ON at {where}: whoever holds {TOKEN_VARIABLE} can read and change this server's\n"
            "!!! KV cache and requests. For tests only, never in production.",
            file=sys.stderr,
            flush=True,
        )
        threading.Thread(target=self._accept_all, args=(connected,), name="control", daemon=True).start()

    def _accept_all(self, connected: Connected) -> None:
        waiting: Connection | None = None
        while True:
            accepted = self._accept()
            if accepted is None:
                continue
            if waiting is None or _has_gone(waiting):
                waiting = accepted
            else:
                connected(waiting, accepted)
                waiting = None

    def _accept(self) -> Connection | None:
        """The next connection whose holder knows the token; None if it does not, or is too slow to prove it."""
        try:
            connection = self._listener.accept()
        except OSError as error:
            logger.warning("fault control: %s", error)
            return None
        try:
            _limit(connection, _HANDSHAKE_S)
            deliver_challenge(connection, self._token)
            answer_challenge(connection, self._token)
            _limit(connection, 0)
        except (AuthenticationError, EOFError, OSError) as error:
            logger.warning("fault control: a connection was refused (%s)", type(error).__name__)
            connection.close()
            return None
        return connection


def _has_gone(waiting: Connection) -> bool:
    """A harness says nothing before both connections are there: what can be read then is that it has left."""
    try:
        return waiting.poll()
    except OSError:
        return True


def _limit(connection: Connection, seconds: float) -> None:
    """How long a read or a write may take; 0: as long as it likes."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            same.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6)))
