"""What an engine does when its harness says what no harness says, or leaves: it goes on alone."""

from __future__ import annotations

from multiprocessing import Pipe
from multiprocessing.connection import Connection

import msgpack
import pytest

from engine.seams import StepStart
from harness.remote.codec import pack, unpack
from harness.remote.engine_side import RemoteSeams


class Harness:
    """The other ends of an engine's two connections."""

    def __init__(self) -> None:
        self.events, events = Pipe()
        self.commands, commands = Pipe()
        self.seams = RemoteSeams("P")
        self.seams.serve_commands({"add": lambda a, b: a + b, "strange": object})
        self.seams.connect(events, commands)

    def command(self, *message: object) -> list[object]:
        send(self.commands, [*message])
        self.seams.poll()
        answer: list[object] = unpack(self.commands.recv_bytes(), lambda engine: engine)
        return answer


def send(connection: Connection, message: object) -> None:
    connection.send_bytes(pack(message, lambda value: None))


@pytest.fixture
def harness() -> Harness:
    return Harness()


def test_commands_are_run(harness: Harness) -> None:
    assert harness.command("add", 1, 2) == ["ok", 3]
    assert harness.command("add", 1)[0] == "error"
    assert harness.command("remove")[0] == "error"
    assert harness.command("subscribe", ["no.such_seam"])[0] == "error"
    assert harness.seams.connected


NONSENSE = [
    b"",
    b"\xc1",
    b"\xff" * 100,
    msgpack.packb({"a": 1}),
    msgpack.packb(5),
    msgpack.packb(["list", []]),
    msgpack.packb(["list", [5]]),
    msgpack.packb(["list", [["list", []]]]),
    msgpack.packb(["tuple", ["add"]]),
    msgpack.packb(["data", "Popen", {"args": "true"}]),
]


@pytest.mark.parametrize("nonsense", NONSENSE)
def test_commands_that_are_none(harness: Harness, nonsense: bytes) -> None:
    harness.commands.send_bytes(nonsense)
    harness.seams.poll()
    assert not harness.seams.connected
    assert not harness.seams.emit(StepStart("P", 1)).holds


def test_an_answer_that_cannot_travel(harness: Harness) -> None:
    send(harness.commands, ["strange"])
    harness.seams.poll()
    assert not harness.seams.connected


@pytest.mark.parametrize("nonsense", NONSENSE[:3])
def test_decisions_that_are_none(harness: Harness, nonsense: bytes) -> None:
    assert harness.command("subscribe", ["step.start"]) == ["ok", None]
    harness.events.send_bytes(nonsense)
    outcome = harness.seams.emit(StepStart("P", 1))
    assert outcome.event == StepStart("P", 1)
    assert not outcome.dropped
    assert not harness.seams.connected


def test_a_harness_that_leaves_while_the_engine_waits(harness: Harness) -> None:
    assert harness.command("subscribe", ["step.start"]) == ["ok", None]
    send(harness.events, ["hold", [[0, "a test"]]])
    (hold,) = harness.seams.emit(StepStart("P", 1)).holds
    harness.events.close()
    harness.commands.close()
    assert hold.until()
    assert not harness.seams.listened("step.start")
