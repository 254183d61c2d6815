"""What a server process is made of, as far as it can be seen without one: peers, and an engine to be replaced."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.checksum.policy import ChecksumSettings
from engine.config import EngineConfig
from engine.connectors.nixl_peers import PeerError
from engine.errors import StartupError
from engine.request import Request
from harness import serve
from harness.serve import EngineHost, ServeOptions, peer_fetcher

PEERS = {"P": "http://127.0.0.1:8100/"}


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[str]]:
    """What the peer's server answers: a response, or an error. Returns the URLs that are asked."""

    def set_answer(answer: httpx.Response | Exception) -> list[str]:
        asked: list[str] = []

        @contextmanager
        def stream(method: str, url: str, **options: Any) -> Iterator[httpx.Response]:
            asked.append(url)
            if isinstance(answer, Exception):
                raise answer
            answer.request = httpx.Request(method, url)
            yield answer

        monkeypatch.setattr(httpx, "stream", stream)
        return asked

    return set_answer


def test_a_peer_is_asked_where_it_was_configured(answers: Callable[[Any], list[str]]) -> None:
    asked = answers(httpx.Response(200, json={"engine_id": "P", "x": 1}))
    assert peer_fetcher(PEERS)("P") == {"engine_id": "P", "x": 1}
    assert asked == ["http://127.0.0.1:8100/kv_transfer/agent"]


@pytest.mark.parametrize("name", ["Q", "", "http://127.0.0.1:1", "../P"])
def test_others_are_never_asked(answers: Callable[[Any], list[str]], name: str) -> None:
    asked = answers(httpx.Response(200, json={"engine_id": name}))
    with pytest.raises(PeerError, match="is no peer of this engine"):
        peer_fetcher(PEERS)(name)
    assert asked == []


@pytest.mark.parametrize(
    "answer",
    [
        httpx.ConnectError("refused"),
        httpx.ReadTimeout("slow"),
        httpx.Response(404),
        httpx.Response(500, json={"engine_id": "P"}),
        httpx.Response(200, content=b"<html>"),
        httpx.Response(200, content=b"\xff"),
        httpx.Response(200, json=[]),
        httpx.Response(200, json={}),
        httpx.Response(200, json={"engine_id": "Q"}),
        httpx.Response(200, content=b"[" * 100_000),
        httpx.Response(200, content=b" " * (serve._MAX_DESCRIPTION_BYTES + 1) + b'{"engine_id": "P"}'),
    ],
)
def test_what_is_no_answer_of_that_peer(answers: Callable[[Any], list[str]], answer: Any) -> None:
    answers(answer)
    with pytest.raises(PeerError):
        peer_fetcher(PEERS)("P")


def test_an_answer_that_comes_drop_by_drop(
    answers: Callable[[Any], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part in time, and all of them never."""
    seconds = iter(range(0, 10**6, 2))
    monkeypatch.setattr(serve.time, "monotonic", lambda: next(seconds))
    drops = (b" " * 2**16 for _ in range(4))
    answers(httpx.Response(200, content=drops))
    with pytest.raises(PeerError, match="cannot be asked"):
        peer_fetcher(PEERS)("P")


@pytest.fixture
def net(monkeypatch: pytest.MonkeyPatch, root: Path) -> Any:
    """A NIXL that is played."""
    path = root / "tests" / "engine" / "connectors" / "nixl_fake.py"
    spec = importlib.util.spec_from_file_location("nixl_fake_for_serve", path)
    assert spec is not None
    assert spec.loader is not None
    fake = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fake)
    net = fake.Net()
    monkeypatch.setattr("engine.connectors.nixl_peers._new_agent", lambda name: fake.FakeAgent(net, name))
    return net


def config(name: str, **options: Any) -> EngineConfig:
    return EngineConfig(name, checksum=ChecksumSettings(kv_checksum_mode="log"), **options)


@pytest.fixture
def host(net: Any, monkeypatch: pytest.MonkeyPatch) -> EngineHost:
    """A consumer that reads from a producer in this process."""
    producer = EngineHost(config("P"), ServeOptions("127.0.0.1", 0))
    monkeypatch.setattr(serve, "peer_fetcher", lambda peers: lambda engine_id: producer.describe)
    host = EngineHost(config("D"), ServeOptions("127.0.0.1", 0))
    params = {"do_remote_prefill": True, "remote_engine_id": "P", "remote_request_id": "r", "remote_block_ids": [[1]]}
    host.engine.add_request(Request("r", [1, 2, 3], 1, params))
    return host


def until_posted(host: EngineHost, net: Any) -> None:
    net.at_once = False
    for _ in range(20_000):
        host.engine.step()
        if net.handles:
            return
    raise AssertionError("no read was posted")


def test_an_engine_is_replaced(host: EngineHost, net: Any) -> None:
    before, seen = host.engine, host.describe
    host.configure(config("D", block_size=8, num_blocks=12, layout="NHD").to_plain())
    assert host.engine is not before
    assert host.engine.config.block_size == 8
    (group,), (old,) = host.describe["groups"], seen["groups"]
    assert group["num_blocks"] == 12
    bases = group["ranks"][0]["bases"]
    assert bases != old["ranks"][0]["bases"]
    assert host.metrics.registry.get_sample_value("kvchaos_blocks") == 11
    agent = net.agents[next(name for name in net.agents if name.startswith("D-"))]
    assert [base for base, _, _, _ in agent.regions] == bases


def test_where_an_engine_computes_is_the_server_s_to_say(host: EngineHost) -> None:
    host.configure(config("D").to_plain() | {"device": "cuda"})
    assert host.engine.config.device == "cpu"


def test_an_engine_that_cannot_be_started_replaces_none(host: EngineHost) -> None:
    before = host.engine
    for wrong in ({"block_size": 0}, {"layout": "DNH"}, {"num_blocks": 1}):
        with pytest.raises(StartupError):
            host.configure(config("D").to_plain() | wrong)
    assert host.engine is before


def test_memory_that_a_read_still_writes_is_kept(host: EngineHost, net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_REPLACE_S", 0.0)
    until_posted(host, net)
    before = host.engine
    with pytest.raises(StartupError, match="2 reads do not end"):
        host.configure(config("D").to_plain())
    assert host.engine is before
    for handle in net.handles:
        handle.land()
    host.configure(config("D").to_plain())
    assert host.engine is not before


def test_a_read_that_ends_meanwhile_is_waited_for(host: EngineHost, net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    until_posted(host, net)
    monkeypatch.setattr(serve.time, "sleep", lambda _: [handle.fail() for handle in net.moving])
    before = host.engine
    host.configure(config("D").to_plain())
    assert host.engine is not before


@pytest.mark.parametrize(
    ("host_name", "kept"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False)]
)
def test_the_transport_of_a_local_server_is_local(monkeypatch: pytest.MonkeyPatch, host_name: str, kept: bool) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    serve._keep_transport_local(host_name)
    found = serve.os.environ.pop("UCX_NET_DEVICES", None)
    assert found == ("lo" if kept else None)
    monkeypatch.setenv("UCX_NET_DEVICES", "eth7")
    serve._keep_transport_local(host_name)
    assert serve.os.environ["UCX_NET_DEVICES"] == "eth7"
