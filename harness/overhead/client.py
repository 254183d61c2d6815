"""Sends one streamed completion and times it from the moment that it was *to be* sent.

Whatever makes the client late (its event loop, a full backlog of connections, a server that does not accept) is time
that a user waits, so it counts. A request that fails gives a result like any other.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Protocol

import httpx

from harness.overhead.sse import Reading, error_of, one_line

REQUEST_ID_HEADER = "x-request-id"
# A connection a request: one that is kept alive would save some requests, and not others, the time to connect.
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=0)


class Clock(Protocol):
    """What a study takes its times from."""

    def now(self) -> float:
        """Seconds since an arbitrary moment; never goes back."""
        ...

    async def sleep_until(self, moment: float) -> None:
        """Return as soon as `now()` is `moment` or later."""
        ...


class MonotonicClock:
    """Real time in seconds since the clock was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start

    async def sleep_until(self, moment: float) -> None:
        await asyncio.sleep(max(0.0, moment - self.now()))


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: where to, what (the body as JSON), and when (seconds of the study's clock)."""

    url: str
    body: bytes
    request_id: str
    intended_s: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a request. The fields are those of `rows.Row`."""

    sent_s: float
    first_token_s: float | None
    end_s: float
    ttft_s: float | None
    itl_s: float | None
    output_tokens: int
    status: int
    error: str
    verdict: str


def make_client(timeout_s: float, transport: httpx.AsyncBaseTransport | None = None) -> httpx.AsyncClient:
    """The client of a study. `timeout_s`: for any single step of an answer. `transport`: None for HTTP."""
    return httpx.AsyncClient(timeout=timeout_s, limits=_LIMITS, trust_env=False, transport=transport)


async def ask(client: httpx.AsyncClient, clock: Clock, request: Ask) -> Answer:
    """Wait until it is time, send, and read the stream to its end. Never raises for what a server does."""
    await clock.sleep_until(request.intended_s)
    sent, status, reading = clock.now(), 0, Reading()
    try:
        headers = {REQUEST_ID_HEADER: request.request_id, "content-type": "application/json"}
        async with client.stream("POST", request.url, content=request.body, headers=headers) as response:
            status = response.status_code
            if status != 200:
                reading.error = _refusal(status, await response.aread(), response)
            else:
                async for line in response.aiter_lines():
                    reading.line(line, clock.now())
    except httpx.HTTPError as error:
        reading.error = one_line(f"{type(error).__name__}: {error}")
    return answer_of(reading, status, request.intended_s, sent, clock.now())


def answer_of(reading: Reading, status: int, intended_s: float, sent_s: float, end_s: float) -> Answer:
    """What came of a request whose stream was read to its end. TTFT counts from the intended moment."""
    error = reading.end()
    return Answer(
        sent_s=sent_s,
        first_token_s=reading.first_s,
        end_s=end_s,
        ttft_s=None if error or reading.first_s is None else reading.first_s - intended_s,
        itl_s=reading.itl_s,
        output_tokens=reading.tokens,
        status=status,
        error=error,
        verdict=reading.verdict,
    )


def _refusal(status: int, raw: bytes, response: httpx.Response) -> str:
    try:
        return f"HTTP {status}: {error_of(response.json())}"
    except ValueError:
        return f"HTTP {status}: {one_line(raw.decode(errors='replace'))}"
