"""The client: time counts from when a request was to be sent, and a failure is a result."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from harness.overhead.client import Answer, Ask, MonotonicClock, ask, make_client
from harness.overhead.sse import Reading, error_of

URL = "http://p/v1/completions"
BODY = json.dumps({"prompt": [1, 2], "max_tokens": 3}).encode()


@pytest.fixture
def send(clock: Any, server: Any, in_virtual_time: Callable[..., Any]) -> Callable[..., Any]:
    """Send a request that was to be sent at `intended`, when the clock has reached `at`."""

    def run(intended: float = 0.0, at: float = 0.0) -> Answer:
        async def work() -> Answer:
            await clock.sleep_until(at)
            async with make_client(60, server) as client:
                return await ask(client, clock, Ask(URL, BODY, "r1", intended))

        return in_virtual_time(work())

    return run


def test_what_an_answer_says(send: Callable[..., Answer], server: Any) -> None:
    answer = send(intended=2.0)
    assert answer == Answer(2.0, 3.0, 3.5, 1.0, 0.25, 3, 200, "", "not_checked")
    assert [(seen.at, seen.url, seen.request_id) for seen in server.seen] == [(2.0, URL, "r1")]


def test_a_client_that_is_late_counts_its_own_delay(send: Callable[..., Answer]) -> None:
    answer = send(intended=1.0, at=5.0)
    assert (answer.sent_s, answer.first_token_s, answer.ttft_s) == (5.0, 6.0, 5.0)


def test_an_event_without_a_token_is_not_the_first_one(
    send: Callable[..., Answer], server: Any, streamed: Callable[..., httpx.Response]
) -> None:
    parts = (b": hello\n\n", b'data: {"choices": []}\n\n', b'data: {"choices": [{"text": ""}]}\n\n')
    server.answer = lambda seen: streamed(*parts, b"data: [DONE]\n\n")
    assert send().error == "the stream ended without a token"


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ((), "the stream ended without a token"),
        ((b'data: {"choices": [{"text": "a"}]}\n\n',), "the stream broke off after 1 tokens"),
        ((b"data: <html>\n\n",), "an event is no JSON object: <html>"),
        ((b'data: [1]\n\ndata: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n',), "an event is no JSON object: [1]"),
        ((b'data: {"choices": [{"text": "a"}]}\n\n', b'data: {"error": {"message": "gone\\naway"}}\n\n'), "gone away"),
        ((b'data: {"error": "half \\ud83d"}\n\n',), "half \\ud83d"),
    ],
)
def test_a_stream_that_is_no_good(
    send: Callable[..., Answer], server: Any, streamed: Any, parts: tuple[bytes, ...], why: str
) -> None:
    server.answer = lambda seen: streamed(*parts)
    answer = send()
    assert (answer.error, answer.ttft_s, answer.status) == (why, None, 200)


@pytest.mark.parametrize(
    ("scripted", "status", "why"),
    [
        (httpx.ConnectError("no route"), 0, "ConnectError: no route"),
        (httpx.ReadTimeout(""), 0, "ReadTimeout:"),
        (httpx.Response(400, json={"error": {"message": "too long"}}), 400, "HTTP 400: too long"),
        (httpx.Response(502, content=b"<p>bad\n gateway"), 502, "HTTP 502: <p>bad gateway"),
        (httpx.Response(500, json=["x"]), 500, "HTTP 500: ['x']"),
    ],
)
def test_a_request_that_fails(send: Callable[..., Answer], server: Any, scripted: Any, status: int, why: str) -> None:
    server.answer = lambda seen: scripted
    answer = send()
    assert (answer.status, answer.error, answer.ttft_s, answer.output_tokens) == (status, why, None, 0)


def test_a_stream_that_breaks_in_the_middle(send: Callable[..., Answer], server: Any, streamed: Any) -> None:
    server.answer = lambda seen: streamed(
        b'data: {"choices": [{"text": "a"}]}\n\n', error=httpx.RemoteProtocolError("cut")
    )
    answer = send()
    assert (answer.error, answer.ttft_s, answer.output_tokens) == ("RemoteProtocolError: cut", None, 1)


def test_tokens_of_one_event_are_all_counted() -> None:
    reading = Reading()
    reading.line('data: {"choices": [{"token_ids": [1, 2], "text": "ab"}]}', 1.0)
    reading.line('data: {"choices": [{"token_ids": [3], "text": ""}]}', 4.0)
    reading.line("data: [DONE]", 5.0)
    assert (reading.tokens, reading.first_s, reading.itl_s, reading.end()) == (3, 1.0, 1.5, "")


@pytest.mark.parametrize("body", ['{"choices": 1}', '{"choices": [1]}', '{"choices": [{}]}', '{"kv_load": 3}'])
def test_odd_events_hold_no_token(body: str) -> None:
    reading = Reading()
    reading.line(f"data: {body}", 1.0)
    assert (reading.tokens, reading.verdict, reading.error) == (0, "", "")


@pytest.mark.parametrize(("body", "text"), [({"error": "x"}, "x"), ({"error": {}}, "None"), ({}, "None"), (3, "3")])
def test_errors_in_any_form(body: Any, text: str) -> None:
    assert error_of(body) == text


def test_the_real_clock_goes_on() -> None:
    clock = MonotonicClock()
    early = clock.now()
    asyncio.run(clock.sleep_until(early - 1))
    assert clock.now() >= early >= 0
