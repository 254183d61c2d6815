"""The levers on containers, and that the harness still gets through. No cell is run here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from engine.config import EngineConfig
from faults.levers import NETWORK, LeverError
from harness.targets.pairs.docker import DockerPair

pytestmark = pytest.mark.docker

# Asks the producer for its metrics from inside the consumer's container, and says how that went.
ASK = """
import http.client, sys
try:
    connection = http.client.HTTPConnection("producer", 8000, timeout=2)
    connection.request("GET", "/metrics")
    print(len(connection.getresponse().read()))
except Exception as error:
    print(type(error).__name__)
"""


@pytest.fixture(scope="module")
def pair() -> Iterator[DockerPair]:
    pair = DockerPair()
    try:
        pair.prepare(frozenset({NETWORK}))
        pair.configure(EngineConfig("producer"), EngineConfig("consumer"))
        yield pair
    finally:
        pair.stop()


@pytest.fixture
def healed(pair: DockerPair) -> Iterator[DockerPair]:
    yield pair
    pair.restore()


def ask_producer(pair: DockerPair) -> str:
    """What the consumer's container gets of the producer: a number of bytes, or how it failed."""
    container: Any = pair._containers._containers["consumer"]
    return str(container.exec_run(["python3", "-c", ASK]).output.decode().strip())


def reachable(pair: DockerPair) -> bool:
    """From here, by HTTP and over the control channel."""
    return all(pair.state(name)["free"] == pair.state(name)["total"] for name in ("producer", "consumer"))


def test_a_cut_link_swallows_everything_but_what_is_said_to_and_by_the_harness(healed: DockerPair) -> None:
    assert int(ask_producer(healed)) > 1000
    assert "DROP" in healed.network.cut()
    assert ask_producer(healed) == "TimeoutError"
    assert healed.network.touched() > 0
    assert reachable(healed)
    healed.network.heal()
    assert int(ask_producer(healed)) > 1000


def test_a_reset_link_refuses_at_once(healed: DockerPair) -> None:
    assert "tcp-reset" in healed.network.reset()
    assert ask_producer(healed) == "ConnectionRefusedError"
    assert healed.network.touched() > 0
    assert reachable(healed)
    healed.network.heal()
    assert int(ask_producer(healed)) > 1000


def test_a_slow_link_makes_packets_wait_and_loses_none(healed: DockerPair) -> None:
    how = healed.network.slow(64)
    assert how.split()[0] in ("netem", "tbf")
    assert int(ask_producer(healed)) > 1000
    assert healed.network.touched() > 0
    assert reachable(healed)
    healed.network.heal()
    assert healed.network.touched() == 0


def test_a_link_that_was_changed_can_be_changed_again_only_after_healing(healed: DockerPair) -> None:
    healed.network.cut()
    with pytest.raises(LeverError, match="heal it first"):
        healed.network.reset()


def test_a_paused_producer_answers_when_it_goes_on(healed: DockerPair) -> None:
    healed.processes.pause("producer")
    assert ask_producer(healed) == "TimeoutError"
    assert healed.died() is None
    healed.restore()
    assert int(ask_producer(healed)) > 1000


@pytest.mark.parametrize("name", ["producer", "consumer"])
def test_one_that_was_killed_is_started_again_and_met(healed: DockerPair, name: str) -> None:
    healed.network.cut()
    assert healed.processes.kill(name)
    assert not healed.processes.kill(name)
    assert (healed.killed, healed.died()) == ({name}, None)
    healed.restore()
    assert healed.mend()
    assert healed.killed == set()
    healed.configure(EngineConfig(name, block_size=32))
    assert healed.memory(name).block_size == 32
    assert int(ask_producer(healed)) > 1000
