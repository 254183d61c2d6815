"""Servers that start, refuse to start, and stop: exit codes, and what they say."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TOKEN = "0123456789abcdef"


def test_an_address_that_is_taken(start: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        engine = start("engine", "--role", "producer", "--port", port)
        proxy = start("proxy", "--producer", "http://x", "--consumer", "http://y", "--port", port)
        for server in (engine, proxy):
            assert server.wait() == 70
            said = [line for line in server.lines if line]
            assert said == [
                f"kvchaos: cannot listen on 127.0.0.1:{port}: Address already in use: choose another --port"
            ]


def test_nixl_that_is_not_there(start: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl" / "__init__.py").write_text("raise ImportError('libucp.so.0: cannot open')\n")
    server = start("engine", "--role", "producer", "--port", 0, PYTHONPATH=str(tmp_path))
    assert server.wait() == 70
    (line,) = [line for line in server.lines if line]
    assert line.startswith("kvchaos: NIXL cannot be imported (libucp.so.0: cannot open)")
    assert "kvchaos doctor" in line


@pytest.mark.parametrize("token", [None, "", "short"])
@pytest.mark.parametrize(
    "arguments",
    [
        ("engine", "--role", "producer", "--port", "0"),
        ("proxy", "--producer", "http://p", "--consumer", "http://c", "--port", "0"),
    ],
)
def test_control_without_a_token(
    kvchaos_main: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: Any, arguments: Any, token: str | None
) -> None:
    if token is None:
        monkeypatch.delenv("KVCHAOS_CONTROL_TOKEN", raising=False)
    else:
        monkeypatch.setenv("KVCHAOS_CONTROL_TOKEN", token)
    assert kvchaos_main("serve", *arguments, "--control", "127.0.0.1:0") == 64
    assert "KVCHAOS_CONTROL_TOKEN" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["", "7000", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:99999", ":7000", "h:-1"])
def test_control_addresses_that_are_none(
    kvchaos_main: Callable[..., int], monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("KVCHAOS_CONTROL_TOKEN", TOKEN)
    arguments = ("proxy", "--producer", "http://p", "--consumer", "http://c", "--port", "0")
    assert kvchaos_main("serve", *arguments, "--control", address) == 64


@pytest.mark.parametrize("url", ["", "p", "ftp://p", "http://", "http://p:x", "http://[", "p:8100"])
def test_urls_that_are_none(kvchaos_main: Callable[..., int], url: str) -> None:
    for sides in (("--producer", url, "--consumer", "http://c"), ("--producer", "http://p", "--consumer", url)):
        assert kvchaos_main("serve", "proxy", "--port", "0", *sides) == 64
    assert kvchaos_main("serve", "engine", "--role", "consumer", "--port", "0", "--peer", f"p={url}") == 64


def test_the_control_channel(start: Callable[..., Any]) -> None:
    """It says that it is on, lets only those in who know the token, and survives those who do not."""
    from multiprocessing import AuthenticationError
    from multiprocessing.connection import Client

    from harness.remote.harness_side import EngineLink

    sides = ("--producer", "http://127.0.0.1:9", "--consumer", "http://127.0.0.1:9")
    proxy = start("proxy", "--port", 0, "--control", "127.0.0.1:0", *sides, KVCHAOS_CONTROL_TOKEN=TOKEN)
    address = ("127.0.0.1", int(proxy.says(r"!!! FAULT CONTROL IS ON at 127\.0\.0\.1:(\d+)")[1]))
    proxy.says("never in production")
    assert proxy.url
    with pytest.raises(AuthenticationError):
        Client(address, authkey=b"wrong" * 5)
    with socket.create_connection(address) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    Client(address, authkey=TOKEN.encode()).close()  # one of the two connections of a harness that then died
    link = EngineLink("proxy", address, TOKEN.encode())
    link.call("subscribe", [])
    link.close()
    again = EngineLink("proxy", address, TOKEN.encode())
    again.call("subscribe", [])
    again.close()
    assert proxy.get("/health").status_code == 200


def test_without_control_there_is_no_channel(start: Callable[..., Any]) -> None:
    sides = ("--producer", "http://127.0.0.1:9", "--consumer", "http://127.0.0.1:9")
    proxy = start("proxy", "--port", 0, *sides, KVCHAOS_CONTROL_TOKEN=TOKEN)
    assert proxy.url
    assert not [line for line in proxy.lines if "CONTROL" in line]
    answer = proxy.ask("a")
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        502,
        "the producer cannot be reached (ConnectError)",
    )
    proxy.signal(signal.SIGINT)
    assert proxy.wait() == 0


@pytest.fixture
def kvchaos_main(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command in this process: for what is refused before anything is started."""
    from harness.cli import main

    def run(*arguments: str) -> int:
        monkeypatch.setattr("sys.argv", ["kvchaos", *arguments])
        monkeypatch.setattr(os, "_exit", lambda code: pytest.fail("a server was started"))
        with pytest.raises(SystemExit) as stopped:
            main()
        assert isinstance(stopped.value.code, int)
        return stopped.value.code

    return run
