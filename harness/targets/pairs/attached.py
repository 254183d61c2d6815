"""A pair that runs already, such as the containers of docker-compose.yml: where it is stands in the environment."""

from __future__ import annotations

import os

from engine.errors import InputError
from harness.control import control_token
from harness.targets.pairs.pair import Endpoint, Pair
from harness.targets.workload import CONSUMER, PRODUCER, PROXY

PAIR_VARIABLE = "KVCHAOS_PAIR"
_USAGE = "producer=HOST:PORT:CONTROL_PORT consumer=HOST:PORT:CONTROL_PORT proxy=HOST:PORT:CONTROL_PORT"


def attached_pair() -> Pair:
    """The pair that `KVCHAOS_PAIR` names, with the token of its control channels.

    Raises:
        InputError: the variable or the token is missing or cannot be read.
        PairError: the servers do not come up.
    """
    return Pair(parse_pair(os.environ.get(PAIR_VARIABLE, "")), control_token())


def check_attached() -> None:
    """Raise InputError if the environment does not name a pair."""
    parse_pair(os.environ.get(PAIR_VARIABLE, ""))
    control_token()


def parse_pair(text: str) -> dict[str, Endpoint]:
    """Read `KVCHAOS_PAIR`. Raises InputError if it is not what it should be."""
    endpoints: dict[str, Endpoint] = {}
    for part in text.split():
        name, _, where = part.partition("=")
        host, port, control = [*where.rsplit(":", 2), "", ""][:3]
        if not host or not _is_port(port) or not _is_port(control):
            raise InputError(f"{PAIR_VARIABLE}: {part!r} is no name=HOST:PORT:CONTROL_PORT: use {_USAGE}")
        endpoints[name] = Endpoint(f"http://{host}:{port}", (host, int(control)))
    if set(endpoints) != {PRODUCER, CONSUMER, PROXY}:
        raise InputError(f"{PAIR_VARIABLE} names {', '.join(sorted(endpoints)) or 'nothing'}: use {_USAGE}")
    return endpoints


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and 0 < int(text) < 65536
