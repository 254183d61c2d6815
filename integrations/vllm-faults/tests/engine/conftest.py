"""A producer and a consumer in processes of their own, spoken to as kvchaos speaks to them."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

TOKEN = "fedcba9876543210"
_HOST = "127.0.0.1"
_PATIENCE_S = 200.0


class Role:
    """One engine's process. `events` are those of its last command."""

    def __init__(self, role: str, port: int, folder: Path, token: str | None) -> None:
        answers, theirs = os.pipe()
        self.log = folder / f"{role}.log"
        environment = {key: value for key, value in os.environ.items() if key != "KVCHAOS_VLLM_FAULT_TOKEN"}
        environment |= {"OMP_NUM_THREADS": "1", "UCX_TLS": "tcp,self,sm", "UCX_NET_DEVICES": "lo"}
        environment |= {} if token is None else {"KVCHAOS_VLLM_FAULT_TOKEN": token}
        command = [sys.executable, "-m", "kvchaos_vllm_faults.engine", "--role", role, "--port", str(port)]
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                [*command, "--answers", str(theirs)],
                stdin=subprocess.PIPE, stdout=output, stderr=output, env=environment, pass_fds=(theirs,), text=True,
            )  # fmt: skip
        os.close(theirs)
        self._answers, self._buffer = answers, b""
        self.events: list[dict[str, Any]] = []

    def ready(self) -> dict[str, Any]:
        return self._receive()["ready"]

    def __call__(self, command: str, **arguments: Any) -> Any:
        self.events = []
        self._send({"id": 1, "command": command, **arguments})
        while "id" not in (message := self._receive()):
            self.events.append(message)
        if "error" in message:
            raise RuntimeError(message["error"])
        return message["result"]

    def stop(self) -> None:
        if self._process.poll() is None:
            self._send({"id": 2, "command": "stop"})
        self._process.stdin.close()
        self._process.wait(30)
        os.close(self._answers)

    def kv(self, event: str) -> np.ndarray:
        """The prompt's bytes that an event of the last command told: uint8 [layers, heads, tokens, bytes_per_token]."""
        (told,) = [message for message in self.events if message["event"] == event]
        raw = np.frombuffer(base64.b64decode(told["kv"]), dtype=np.uint8)
        slots = len(told["block_ids"]) * told["block_size"]
        return raw.reshape(told["layers"], told["heads"], slots, -1)[:, :, : told["num_tokens"]]

    def _send(self, message: dict[str, Any]) -> None:
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], _PATIENCE_S)
            chunk = os.read(self._answers, 1 << 20) if ready else b""
            assert chunk, self.log.read_text()[-2000:]
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)


def _free_ports(count: int) -> list[int]:
    """Below what systems hand out to connections: an engine whose port is taken never starts."""
    found: list[int] = []
    for port in random.sample(range(20_000, 30_000), 100):
        with contextlib.suppress(OSError), socket.create_server((_HOST, port)):
            found.append(port)
    return found[:count]


class Pair:
    """P and D, and one request through both."""

    def __init__(self, folder: Path, token: str | None) -> None:
        ports = _free_ports(2)
        self.producer, self.consumer = (
            Role(role, port, folder, token) for role, port in zip(("producer", "consumer"), ports, strict=True)
        )
        self.about = [role.ready() for role in (self.producer, self.consumer)]

    def prepare(self, mode: str, load_failure: str = "fail") -> None:
        """A policy, no fault, and nothing left of what was."""
        for role in (self.producer, self.consumer):
            role("end_leases")
            role("disarm")
            role("policy", mode=mode, load_failure=load_failure)
            role("reset")

    def arm(self, role: Role, kind: str, at: str, token: str = TOKEN, **params: Any) -> None:
        role("arm", token=token, order={"kind": kind, "request": "r", "at": at, "params": params, "seed": 1})

    def plain(self, prompt: list[int], count: int = 8) -> list[int]:
        """What D gives without P."""
        request = {"name": "plain", "prompt": prompt, "max_tokens": count, "params": None}
        (answer,) = self.consumer("generate", requests=[request])
        return answer["tokens"]

    def transfer(self, prompt: list[int], count: int = 8) -> dict[str, Any]:
        """D's answer after a load from P."""
        return self.decode(prompt, self.prefill(prompt), count)

    def prefill(self, prompt: list[int], count: int = 1) -> dict[str, Any]:
        """The kv_transfer_params of P's answer, which has so many tokens."""
        request = {"name": "r", "prompt": prompt, "max_tokens": count, "params": {"do_remote_decode": True}}
        (answer,) = self.producer("generate", requests=[request])
        return answer["params"]

    def decode(
        self, prompt: list[int], params: dict[str, Any], count: int = 8, patience_s: float = 60
    ) -> dict[str, Any]:
        """D's answer to a prompt with these kv_transfer_params."""
        request = {"name": "r", "prompt": prompt, "max_tokens": count, "params": params}
        (answer,) = self.consumer("generate", requests=[request], patience_s=patience_s)
        return answer

    def stop(self) -> None:
        self.producer.stop()
        self.consumer.stop()


@pytest.fixture(scope="module")
def make_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(token: str | None = TOKEN) -> Pair:
        made.append(Pair(tmp_path_factory.mktemp("roles"), token))
        return made[-1]

    yield make
    for pair in made:
        pair.stop()


@pytest.fixture
def fresh_pair(tmp_path: Path) -> Iterator[Pair]:
    """One that a test may break."""
    made = Pair(tmp_path, TOKEN)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def pair(make_pair: Callable[..., Pair]) -> Pair:
    """One that faults can be armed in."""
    return make_pair()
