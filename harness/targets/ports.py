"""Ports on this machine's loopback for servers that a target starts."""

from __future__ import annotations

import contextlib
import random
import socket

HOST = "127.0.0.1"
_PORTS = range(20_000, 30_000)  # below what systems hand out to connections


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens to, and that no connection gets by itself: with one that is taken no engine starts."""
    found: list[int] = []
    for port in random.sample(_PORTS, len(_PORTS)):
        with contextlib.suppress(OSError), socket.create_server((HOST, port)):
            found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"no free ports between {_PORTS.start} and {_PORTS.stop - 1}")
