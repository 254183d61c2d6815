"""Real servers: processes on free ports of the loopback, KV over NIXL. None of them outlives its test."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

PATIENCE = 120  # seconds until a test gives up; none of them waits that long
SERVE = [sys.executable, "-c", "from harness.cli import main; main()", "serve"]
BLOCKS = 256


@pytest.fixture(scope="session", autouse=True)
def _nixl() -> None:
    """Not imported here: a process that made an agent may crash when it ends."""
    if importlib.util.find_spec("nixl") is not None:
        return
    why = "NIXL is not installed: pip install --no-deps nixl nixl-cu12, which `make setup` does where it can"
    if os.environ.get("CI"):
        pytest.fail(why)
    pytest.skip(why)


def server_environment(**changes: str) -> dict[str, str]:
    """Of a server. TCP alone, so that a read is under way for a while and a peer that is stopped cannot answer it."""
    inherited = {name: os.environ[name] for name in ("PATH", "HOME", "LD_LIBRARY_PATH") if name in os.environ}
    transport = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo", "NIXL_LOG_LEVEL": "WARN", "UCX_LOG_LEVEL": "fatal"}
    return inherited | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | transport | changes


class Server:
    """A process of `kvchaos serve` from its start until `end`."""

    def __init__(self, *arguments: object, **environ: str) -> None:
        self.arguments = [str(argument) for argument in arguments]
        self.process = subprocess.Popen(
            [*SERVE, *self.arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=server_environment(**environ),
        )
        self.lines: list[str] = []
        self._said = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._said:
                self.lines.append(line.rstrip("\n"))
                self._said.notify_all()
        with self._said:
            self._said.notify_all()

    def says(self, pattern: str) -> re.Match[str]:
        """Wait until it has said this on stderr."""

        def found() -> re.Match[str] | None:
            return next((match for line in self.lines if (match := re.search(pattern, line))), None)

        with self._said:
            self._said.wait_for(lambda: found() or not self._reader.is_alive(), PATIENCE)
            match = found()
        assert match is not None, f"{self.arguments} did not say {pattern!r}:\n" + "\n".join(self.lines)
        return match

    @property
    def url(self) -> str:
        return self.says(r"listens on (http://\S+)")[1]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def wait(self) -> int:
        code = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        assert self.process.stderr is not None
        self.process.stderr.close()

    # ---- what it shows

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=PATIENCE, trust_env=False)

    def metric(self, name: str) -> float:
        """A sample by its name and labels, as the page writes them."""
        for line in self.get("/metrics").text.splitlines():
            if line.startswith(f"kvchaos_{name} "):
                return float(line.rpartition(" ")[2])
        return 0.0

    def until(self, condition: Callable[[Server], bool]) -> None:
        """Look again, every few milliseconds, until it holds."""
        waited = threading.Event()
        for _ in range(PATIENCE * 50):
            if condition(self):
                return
            assert self.process.poll() is None, "\n".join(self.lines)
            waited.wait(0.02)
        raise AssertionError("\n".join([*self.lines, self.get("/metrics").text]))

    def until_free(self) -> None:
        """Until every block is back."""
        self.until(lambda server: server.metric("free_blocks") == server.metric("blocks"))

    def ask(self, prompt: Any, max_tokens: int = 8, **options: Any) -> httpx.Response:
        headers = options.pop("headers", {})
        body = {"prompt": prompt, "max_tokens": max_tokens} | options
        return httpx.post(f"{self.url}/v1/completions", json=body, headers=headers, timeout=PATIENCE, trust_env=False)

    def prefill(self, prompt: Any) -> dict[str, Any]:
        """Let a producer prefill a prompt. Returns what it tells the consumer."""
        answer = self.ask(prompt, 1, kv_transfer_params={"do_remote_decode": True})
        assert answer.status_code == 200, answer.text
        params: dict[str, Any] = answer.json()["kv_transfer_params"]
        return params


@dataclass(frozen=True)
class Trio:
    """A producer, a consumer that reads from it, and the proxy before both."""

    producer: Server
    consumer: Server
    proxy: Server

    @property
    def all(self) -> tuple[Server, Server, Server]:
        return self.producer, self.consumer, self.proxy


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """The environment of a server, for whoever is to meet one."""
    return server_environment()


@pytest.fixture(scope="session")
def server_class() -> type[Server]:
    """For servers that are shared by the tests of a file."""
    return Server


@pytest.fixture
def start() -> Iterator[Callable[..., Server]]:
    """Start a server: `start("engine", "--role", ...)`, with variables of its environment by name."""
    with ExitStack() as ending:

        def begin(*arguments: object, **environ: str) -> Server:
            server = Server(*arguments, **environ)
            ending.callback(server.end)
            return server

        yield begin


@pytest.fixture(scope="module")
def trio() -> Iterator[Trio]:
    """Three servers for the tests of a file: fail-closed, and leases that end while a test waits."""
    with ExitStack() as ending:

        def begin(*arguments: object) -> Server:
            server = Server(*arguments)
            ending.callback(server.end)
            return server

        engine = ("--port", 0, "--kv-checksum-mode", "enforce", "--num-blocks", BLOCKS, "--drain-ms", 100)
        producer = begin("engine", "--role", "producer", "--lease-ms", 1000, *engine)
        peers = ("--peer", f"producer={producer.url}", "--peer", "ghost=http://127.0.0.1:9")
        consumer = begin("engine", "--role", "consumer", "--layout", "NHD", "--load-timeout-ms", 1000, *peers, *engine)
        proxy = begin("proxy", "--port", 0, "--drain-ms", 100, "--producer", producer.url, "--consumer", consumer.url)
        assert proxy.get("/health").status_code == 200
        yield Trio(producer, consumer, proxy)
        for server in (producer, consumer, proxy):
            assert server.process.poll() in (None, 0), "\n".join(server.lines)


@pytest.fixture(scope="session")
def tokens_alone(root: Path) -> Callable[..., list[int]]:
    """The right tokens: greedy, on one engine without P/D, in this process."""
    from engine.checksum.policy import ChecksumSettings
    from engine.config import EngineConfig, preset
    from engine.core import EngineCore
    from engine.request import Request
    from engine.server.schema import parse_completion

    def decode(prompt: Any, max_tokens: int = 8, model: str = "tiny") -> list[int]:
        options: dict[str, Any] = {"num_blocks": BLOCKS, "prefix_caching": False, "model": preset(model)}
        engine = EngineCore(EngineConfig("alone", checksum=ChecksumSettings(kv_checksum_mode="off"), **options))
        engine.add_request(Request("r", parse_completion({"prompt": prompt}).token_ids, max_tokens))
        while True:
            for output in engine.step():
                return list(output.token_ids)

    return decode


@pytest.fixture(scope="session")
def tokens_of() -> Callable[[httpx.Response], list[int]]:
    """The tokens of an answer, streamed or not."""
    import json

    def read(answer: httpx.Response) -> list[int]:
        if "event-stream" not in answer.headers["content-type"]:
            tokens: list[int] = answer.json()["choices"][0]["token_ids"]
            return tokens
        lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        assert lines[-1] == "[DONE]"
        return [token for line in lines[:-1] for token in json.loads(line)["choices"][0]["token_ids"]]

    return read
