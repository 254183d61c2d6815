"""A producer that stops, dies or comes back as another process, while its consumer reads from it over real NIXL."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

Tokens = Callable[..., list[int]]
pytestmark = pytest.mark.xdist_group("local-failures")  # its servers are started once
READS = 6


class Failing:
    """A consumer, and a producer that can be started again behind the same id and port."""

    def __init__(self, new_server: Callable[..., Any]) -> None:
        self._new_server = new_server
        self.mute = socket.create_server(("127.0.0.1", 0))
        self.producer = self._producer(0)
        self.consumer = new_server(
            "engine", "--role", "consumer", "--port", 0, "--kv-checksum-mode", "enforce", "--load-timeout-ms", 500,
            "--peer", f"producer={self.producer.url}", "--peer", f"mute=http://127.0.0.1:{self.mute.getsockname()[1]}",
        )  # fmt: skip
        assert self.consumer.url

    def _producer(self, port: int) -> Any:
        options = ("--kv-checksum-mode", "enforce", "--lease-ms", 600_000)
        return self._new_server("engine", "--role", "producer", "--port", port, *options)

    def restart(self) -> None:
        port = self.producer.port
        self.producer.end()
        self.producer = self._producer(port)
        assert self.producer.port == port

    def prefill(self, name: str) -> tuple[str, dict[str, Any]]:
        """A prompt that the producer has prefilled, and what it says of it."""
        prompt = f"{name} " * 20
        return prompt, self.producer.prefill(prompt)

    def reads_under_way(self, pool: ThreadPoolExecutor, count: int, name: str) -> dict[str, Future[httpx.Response]]:
        """The producer is stopped, so that the reads of these loads are posted and none of them can end."""
        prefilled = [self.prefill(f"{name}{number}") for number in range(count)]
        before = self.consumer.metric("loads_in_flight")
        self.producer.signal(signal.SIGSTOP)
        asked = {
            prompt: pool.submit(self.consumer.ask, prompt, kv_transfer_params=params) for prompt, params in prefilled
        }
        self.consumer.until(lambda server: server.metric("loads_in_flight") == before + count)
        return asked


@pytest.fixture(scope="module")
def failing(new_server: Callable[..., Any]) -> Iterator[Failing]:
    found = Failing(new_server)
    yield found
    found.mute.close()


@pytest.fixture(scope="module")
def new_server(server_class: type[Any]) -> Iterator[Callable[..., Any]]:
    with ExitStack() as ending:

        def begin(*arguments: object) -> Any:
            server = server_class(*arguments)
            ending.callback(server.end)
            return server

        yield begin


def served_right(failing: Failing, name: str, tokens_alone: Tokens, tokens_of: Tokens) -> bool:
    prompt, params = failing.prefill(name)
    answer = failing.consumer.ask(prompt, kv_transfer_params=params)
    if answer.status_code != 200:
        return False
    assert tokens_of(answer) == tokens_alone(prompt)
    assert answer.json()["kv_load"]["verdict"] == "verified"
    return True


def test_a_producer_killed_with_reads_under_way(failing: Failing, tokens_alone: Tokens, tokens_of: Tokens) -> None:
    """Every load fails, none hangs, no block is lost, and the consumer reads from the producer's successor."""
    assert served_right(failing, "before", tokens_alone, tokens_of)
    with ThreadPoolExecutor(READS) as pool:
        asked = failing.reads_under_way(pool, READS, "killed")
        failing.producer.signal(signal.SIGKILL)
        for prompt, future in asked.items():
            answer = future.result()
            if answer.status_code == 200:  # its bytes had been sent before the producer was stopped
                assert tokens_of(answer) == tokens_alone(prompt)
            else:
                assert answer.status_code == 500
                assert answer.json()["error"]["type"] == "kv_load_error"
    failing.consumer.until_free()
    assert failing.consumer.metric("loads_in_flight") == 0
    assert failing.consumer.ask("alone").status_code == 200
    failing.restart()
    assert served_right(failing, "after", tokens_alone, tokens_of)
    failing.consumer.until_free()


def test_a_producer_that_is_down_when_it_is_needed(failing: Failing, tokens_alone: Tokens, tokens_of: Tokens) -> None:
    prompt, params = failing.prefill("down")
    failing.producer.signal(signal.SIGKILL)
    failing.producer.wait()
    for number in range(3):
        headers = {"x-request-id": f"down-{number}"}
        answer = failing.consumer.ask(prompt, kv_transfer_params=params, headers=headers)
        assert (answer.status_code, answer.json()["kv_load"]["reason"]) == (500, "load_failed")
    failing.consumer.until_free()
    failing.restart()
    assert served_right(failing, "up", tokens_alone, tokens_of)


def test_another_producer_behind_the_same_id(failing: Failing, tokens_alone: Tokens, tokens_of: Tokens) -> None:
    """The agent that the consumer knows is of a process that has gone: at most one load pays for that."""
    assert served_right(failing, "old", tokens_alone, tokens_of)
    failing.restart()
    if not served_right(failing, "new", tokens_alone, tokens_of):
        assert served_right(failing, "newer", tokens_alone, tokens_of)
    failing.consumer.until_free()


def test_a_producer_that_stands_still(failing: Failing, tokens_alone: Tokens, tokens_of: Tokens) -> None:
    """Its loads end with an error by the deadline, and keep their blocks; further ones are refused. Then it goes on."""
    assert served_right(failing, "running", tokens_alone, tokens_of)
    late, late_params = failing.prefill("late")
    with ThreadPoolExecutor(2) as pool:
        asked = failing.reads_under_way(pool, 2, "still")
        for future in asked.values():
            answer = future.result()
            assert (answer.status_code, answer.json()["kv_load"]["reason"]) == (500, "request_ended")
            assert "not done after 0.5 s" in answer.json()["error"]["message"]
    assert failing.consumer.metric("loads_in_flight") == 2
    assert failing.consumer.metric("free_blocks") < failing.consumer.metric("blocks")
    refused = failing.consumer.ask(late, kv_transfer_params=late_params, headers={"x-request-id": "refused"})
    assert (refused.status_code, refused.json()["kv_load"]["reason"]) == (500, "load_failed")
    assert failing.consumer.ask("alone").status_code == 200
    failing.producer.signal(signal.SIGCONT)
    failing.consumer.until(lambda server: server.metric("loads_in_flight") == 0)
    failing.consumer.until_free()
    assert served_right(failing, "going on", tokens_alone, tokens_of)


def test_a_peer_that_takes_the_call_and_says_nothing(failing: Failing, tokens_alone: Tokens) -> None:
    """The engine serves others meanwhile; the load fails by its own deadline."""
    prompt, params = failing.prefill("mute")
    answered = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        silent = pool.submit(failing.consumer.ask, prompt, kv_transfer_params=params | {"remote_engine_id": "mute"})
        silent.add_done_callback(lambda _: answered.set())
        failing.consumer.until(lambda server: server.metric("loads_in_flight") == 1 or answered.is_set())
        assert failing.consumer.ask("meanwhile").status_code == 200
        assert silent.result().status_code == 500
    failing.consumer.until_free()
