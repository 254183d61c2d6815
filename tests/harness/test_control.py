"""The control channel of a server: who is let in, and that nobody else keeps a harness out."""

from __future__ import annotations

import queue
import socket
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection

import pytest

from engine.errors import InputError
from engine.server.running import BindError
from harness import control
from harness.control import ControlChannel, control_token

TOKEN = "0123456789abcdef"
Connected = queue.Queue[tuple[Connection, Connection]]


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> tuple[ControlChannel, Connected]:
    monkeypatch.setenv("KVCHAOS_CONTROL_TOKEN", TOKEN)
    found: Connected = queue.Queue()
    channel = ControlChannel(("127.0.0.1", 0))
    channel.start(lambda events, commands: found.put((events, commands)))
    return channel, found


@pytest.fixture
def client(channel: tuple[ControlChannel, Connected]) -> Callable[..., Connection]:
    return lambda token=TOKEN: Client(channel[0].address, authkey=token.encode())


def comes_through(first: Connection, second: Connection, connected: Connected) -> bool:
    """Whether the server has these two as events and commands."""
    events, commands = connected.get(timeout=60)
    for mine, theirs, word in ((first, events, b"events"), (second, commands, b"commands")):
        mine.send_bytes(word)
        if theirs.recv_bytes() != word:
            return False
    return True


def test_a_harness_makes_two_connections(
    channel: tuple[ControlChannel, Connected], client: Callable[..., Connection], capfd: pytest.CaptureFixture[str]
) -> None:
    assert comes_through(client(), client(), channel[1])
    assert comes_through(client(), client(), channel[1])


def test_it_says_that_it_is_on(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KVCHAOS_CONTROL_TOKEN", TOKEN)
    channel = ControlChannel(("127.0.0.1", 0))
    channel.start(lambda events, commands: None)
    said = capfd.readouterr().err
    assert f"FAULT CONTROL IS ON at 127.0.0.1:{channel.address[1]}" in said
    assert TOKEN not in said


def test_another_token_is_refused(channel: tuple[ControlChannel, Connected], client: Callable[..., Connection]) -> None:
    with pytest.raises(AuthenticationError):
        client("another token of some length")
    assert comes_through(client(), client(), channel[1])


def test_what_speaks_another_language_is_refused(
    channel: tuple[ControlChannel, Connected], client: Callable[..., Connection]
) -> None:
    for words in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100):
        with socket.create_connection(channel[0].address) as stranger:
            stranger.sendall(words)
    assert comes_through(client(), client(), channel[1])


def test_who_says_nothing_keeps_nobody_out(
    channel: tuple[ControlChannel, Connected], client: Callable[..., Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_HANDSHAKE_S", 0.05)
    with socket.create_connection(channel[0].address):
        assert comes_through(client(), client(), channel[1])


def test_half_of_a_harness_that_has_gone_is_no_half_of_the_next(
    channel: tuple[ControlChannel, Connected], client: Callable[..., Connection]
) -> None:
    client().close()
    assert comes_through(client(), client(), channel[1])


@pytest.mark.parametrize("token", [None, "", "fifteen letters"])
def test_there_must_be_a_token(monkeypatch: pytest.MonkeyPatch, token: str | None) -> None:
    if token is None:
        monkeypatch.delenv("KVCHAOS_CONTROL_TOKEN", raising=False)
    else:
        monkeypatch.setenv("KVCHAOS_CONTROL_TOKEN", token)
    with pytest.raises(InputError, match="KVCHAOS_CONTROL_TOKEN"):
        control_token()
    with pytest.raises(InputError):
        ControlChannel(("127.0.0.1", 0))


def test_an_address_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCHAOS_CONTROL_TOKEN", TOKEN)
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(BindError, match="choose another --control"),
    ):
        ControlChannel(taken.getsockname())
