"""Producer, consumer and proxy over real NIXL: what clients get, and that no client harms another."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

TEXT = "Forty-two bytes of a prompt, give or take, and some more of it so that it fills a few blocks."
Tokens = Callable[..., list[int]]
pytestmark = pytest.mark.xdist_group("local-servers")  # its servers are started once


def raw(server: Any, data: bytes, wait: bool = True) -> bytes:
    """What a server answers to these bytes on a connection of their own."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(data)
        if not wait:
            return b""
        answer = b""
        while part := connection.recv(65536):
            answer += part
            if b"\r\n\r\n" in answer and b"connection: close" not in answer.lower():
                break
    return answer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.req("WIR-3")
def test_a_prompt_through_the_proxy(trio: Any, tokens_alone: Tokens, tokens_of: Tokens, stream: bool) -> None:
    prompt = f"{TEXT} {stream}"
    answer = trio.proxy.ask(prompt, stream=stream, unknown={"a": 1}, kv_transfer_params={"new": [1]})
    assert answer.status_code == 200
    assert tokens_of(answer) == tokens_alone(prompt)
    assert trio.consumer.metric('loads_total{reason="",verdict="verified"}') >= 1
    for server in (trio.producer, trio.consumer):
        server.until_free()


def test_many_prompts_at_once(trio: Any, tokens_alone: Tokens, tokens_of: Tokens) -> None:
    prompts = [f"{number} {TEXT * (number % 3)}" for number in range(12)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: trio.proxy.ask(prompt, stream=len(prompt) % 2 == 0), prompts))
    assert [tokens_of(answer) for answer in answers] == [tokens_alone(prompt) for prompt in prompts]
    for server in (trio.producer, trio.consumer):
        server.until_free()


def head(length: object, extra: str = "") -> bytes:
    return f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n{extra}\r\n".encode()


HOSTILE = {
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20, (400,)),
    "an endless line": (b"GET /" + b"a" * 200_000, (400, 414, 431)),
    "endless headers": (b"GET /health HTTP/1.1\r\n" + b"x-a: " + b"y" * 200_000, (400, 431)),
    "headers of garbage": (b"GET /health HTTP/1.1\r\nHost: x\r\n\xff\xfe\x00: \x01\r\n\r\n", (200, 400)),
    "a length that is none": (head("ten"), (400,)),
    "two lengths": (head(5, "Content-Length: 6\r\n"), (400,)),
    "a negative length": (head(-1), (400,)),
    "malformed JSON": (head(9) + b'{"prompt"', (400,)),
    "no UTF-8": (head(4) + b"\xff\xfe\xfd\xfc", (400,)),
    "ten announced megabytes": (head(10 * 2**20) + b" " * 1000, (413,)),
    "ten megabytes in chunks": (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        + b"100000\r\n" + b" " * 2**20 + b"\r\n" * 1
        + (b"100000\r\n" + b" " * 2**20 + b"\r\n") * 5,
        (413,),
    ),
    "a chunk of garbage": (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        (400,),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("name", ["consumer", "proxy"])
def test_hostile_bytes(trio: Any, name: str, kind: str) -> None:
    data, statuses = HOSTILE[kind]
    server = getattr(trio, name)
    try:
        answer = raw(server, data)
    except ConnectionError:  # it hung up while the rest was still being sent
        answer = b""
    if answer:
        assert int(answer.split(b" ", 2)[1]) in statuses, answer[:300]
    else:
        assert kind in ("ten announced megabytes", "ten megabytes in chunks", "an endless line", "endless headers")
    assert server.get("/health").status_code == 200


def test_clients_that_leave_at_every_moment(trio: Any, tokens_alone: Tokens, tokens_of: Tokens) -> None:
    """Before the body, in it, before the first token, and in the stream; at the proxy and at both engines."""
    body = json.dumps({"prompt": TEXT, "max_tokens": 3000, "stream": True}).encode()
    for server in trio.all:
        raw(server, head(len(body)), wait=False)
        raw(server, head(len(body)) + body[:20], wait=False)
        raw(server, head(len(body)) + body, wait=False)
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            connection.sendall(head(len(body)) + body)
            assert connection.recv(100)
    assert tokens_of(trio.proxy.ask(TEXT)) == tokens_alone(TEXT)
    for server in (trio.producer, trio.consumer):
        server.until(lambda engine: not engine.metric("unfinished_requests"))
        server.until_free()
    assert trio.producer.metric("leases") == 0


def test_a_slow_reader(trio: Any, tokens_alone: Tokens, tokens_of: Tokens) -> None:
    body = json.dumps({"prompt": TEXT, "max_tokens": 3000, "stream": True}).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", trio.proxy.port))
        connection.sendall(head(len(body)) + body)
        assert connection.recv(1)
        assert tokens_of(trio.proxy.ask("another")) == tokens_alone("another")
    trio.consumer.until_free()


def test_two_requests_with_one_id(trio: Any, tokens_alone: Tokens, tokens_of: Tokens) -> None:
    """Whichever comes second is refused, or served when the first has ended; nobody gets the other's answer."""
    prompts = {name: f"{name} {TEXT}" for name in ("one", "two")}
    headers = {"x-request-id": "same"}
    with ThreadPoolExecutor(2) as pool:
        futures = {n: pool.submit(trio.proxy.ask, p, 200, headers=headers) for n, p in prompts.items()}
        answers = {name: future.result() for name, future in futures.items()}
    assert {answer.status_code for answer in answers.values()} <= {200, 400}
    served = {name: answer for name, answer in answers.items() if answer.status_code == 200}
    assert served
    for name, answer in served.items():
        assert tokens_of(answer) == tokens_alone(prompts[name], 200)
    for server in (trio.producer, trio.consumer):
        server.until_free()


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({"remote_engine_id": "stranger"}, 500),
        ({"remote_engine_id": "ghost"}, 500),
        ({"remote_engine_id": "consumer"}, 500),
        ({"remote_block_ids": [[-1] * 6]}, 500),
        ({"remote_block_ids": [[0] * 6]}, 500),
        ({"remote_block_ids": [[256] * 6]}, 500),
        ({"remote_block_ids": [[2**63] * 6]}, 500),
        ({"remote_block_ids": [[1]]}, 500),
        ({"remote_block_ids": [[True] * 6]}, 400),
        ({"remote_block_ids": "all"}, 400),
        ({"remote_request_id": "\u0000\u2028" * 1000}, 200),
    ],
)
def test_hostile_references(trio: Any, tokens_alone: Tokens, tokens_of: Tokens, changed: Any, status: int) -> None:
    prompt = f"{TEXT} {changed}"[:95]
    params = trio.producer.prefill(prompt)
    answer = trio.consumer.ask(prompt, kv_transfer_params=params | changed)
    assert answer.status_code == status, answer.text
    if status == 500:
        assert answer.json()["kv_load"]["reason"] == "load_failed"
    assert tokens_of(trio.proxy.ask(prompt)) == tokens_alone(prompt)
    trio.consumer.until_free()


def test_references_that_are_used_up(trio: Any, tokens_alone: Tokens, tokens_of: Tokens) -> None:
    """Consumed, and expired with its blocks in others' hands: right or refused, never another prompt's KV."""
    first = "r" * 60
    params = trio.producer.prefill(first)
    assert tokens_of(trio.consumer.ask(first, kv_transfer_params=params)) == tokens_alone(first)
    trio.producer.until(lambda server: server.metric("leases") == 0)
    for number in range(8):  # through the whole pool, so that every block has been written anew
        trio.producer.ask([number] * 600, 1)
    second = "s" + first[1:]
    for prompt in (first, second):
        answer = trio.consumer.ask(prompt, kv_transfer_params=params, headers={"x-request-id": f"again-{prompt[:1]}"})
        if answer.status_code == 200:  # from its own prefix cache
            assert tokens_of(answer) == tokens_alone(prompt)
        else:
            assert answer.json()["kv_load"]["verdict"] == "mismatch"
    assert answer.status_code == 500
    trio.consumer.until_free()


def test_the_real_status_of_an_engine_that_refuses(trio: Any) -> None:
    for options in ({"max_tokens": 4090}, {"max_tokens": 8, "stream": True, "headers": {"x-request-id": "\x7f"}}):
        answer = trio.proxy.ask(TEXT, **options)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"]
    trio.producer.until_free()


STRANGER = """
import base64, os, sys
from nixl._api import nixl_agent, nixl_agent_config
agent = nixl_agent("stranger", nixl_agent_config(backends=["UCX"]))
for metadata in sys.argv[1:]:
    name = agent.add_remote_agent(base64.b64decode(metadata)).decode()
    for note in (b"", b"\\xff\\xfe\\x00", b"\\x01", b"\\x01\\xff", b"nobody", b"r" * 1_000_000):
        agent.send_notif(name, note)
print("told")
sys.stdout.flush()
os._exit(0)
"""


def test_notices_of_a_stranger(trio: Any, environment: dict[str, str], tokens_alone: Tokens, tokens_of: Tokens) -> None:
    found = [server.get("/kv_transfer/agent").json()["metadata"] for server in (trio.producer, trio.consumer)]
    done = subprocess.run(
        [sys.executable, "-c", STRANGER, *found], env=environment, capture_output=True, text=True, timeout=120
    )
    assert "told" in done.stdout, done.stderr
    assert tokens_of(trio.proxy.ask(TEXT)) == tokens_alone(TEXT)


def test_the_proxy_and_a_client_that_gives_up_soon(trio: Any) -> None:
    """The consumer ends the request; what the producer holds for it goes with its lease at the latest."""
    for _ in range(3):
        with pytest.raises(httpx.TimeoutException):
            httpx.post(
                f"{trio.proxy.url}/v1/completions",
                json={"prompt": TEXT, "max_tokens": 3500},
                timeout=httpx.Timeout(0.2, connect=30),
                trust_env=False,
            )
    for server in (trio.producer, trio.consumer):
        server.until(lambda engine: not engine.metric("unfinished_requests"))
        server.until_free()


def test_signals_with_requests_under_way(trio: Any) -> None:
    """The last test of these servers: what cannot finish in time is told, and each of them ends with 0."""
    body = {"prompt": "go on", "max_tokens": 4000, "stream": True}
    waiting = httpx.Timeout(120)
    with (
        httpx.stream("POST", f"{trio.proxy.url}/v1/completions", json=body, timeout=waiting) as relayed,
        httpx.stream("POST", f"{trio.consumer.url}/v1/completions", json=body, timeout=waiting) as direct,
        ThreadPoolExecutor(1) as pool,
    ):
        whole = pool.submit(trio.consumer.ask, "go on and on", 4000)
        streams = {trio.proxy: relayed.iter_lines(), trio.consumer: direct.iter_lines()}
        for lines in streams.values():
            assert next(lines).startswith("data: ")
        trio.consumer.until(lambda server: server.metric("unfinished_requests") == 3)
        for server, lines in streams.items():
            server.signal(signal.SIGTERM)
            errors = [line for line in lines if '"error"' in line]
            assert len(errors) == 1
            assert '"the server is stopping"' in errors[0]
            assert server.wait() == 0
        answer = whole.result()
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "the server is stopping")
    trio.producer.until_free()
    trio.producer.signal(signal.SIGINT)
    assert trio.producer.wait() == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{trio.producer.url}/health", trust_env=False)
