"""A clock that only moves when everybody waits for it, and a server whose every answer is scripted on it."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

_SETTLED = 60  # turns of the event loop after which everybody who can go on has


class VirtualClock:
    """`run` moves time to the next sleeper whenever nothing else can happen."""

    def __init__(self) -> None:
        self._now = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._count = itertools.count()

    def now(self) -> float:
        return self._now

    async def sleep_until(self, moment: float) -> None:
        if moment <= self._now:
            return
        woken = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (moment, next(self._count), woken))
        await woken

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of `work`, at whatever virtual time it ends."""

        async def drive() -> Any:
            task = asyncio.ensure_future(work)
            while not task.done():
                for _ in range(_SETTLED):
                    await asyncio.sleep(0)
                if not task.done():
                    assert self._sleepers, "everybody waits, and nobody for the clock"
                    self._now, _, woken = heapq.heappop(self._sleepers)
                    if not woken.done():
                        woken.set_result(None)
            return await task

        return asyncio.run(drive())


@dataclass(frozen=True)
class Seen:
    """A request as it reached the server."""

    at: float
    url: str
    request_id: str
    body: dict[str, Any]


@dataclass
class Server(httpx.AsyncBaseTransport):
    """Prefills one prompt after another, and decodes beside that: a token every `token_s`.

    `answer(seen)` may give a response or an exception instead; `verdict(seen)` is what it says of the load.
    """

    clock: VirtualClock
    token_s: float = 0.25
    prefill_s: Callable[[Seen], float] = lambda seen: 1.0
    answer: Callable[[Seen], httpx.Response | Exception | None] = lambda seen: None
    verdict: Callable[[Seen], str | None] = lambda seen: "verified" if seen.body.get("kv_checksum") else "not_checked"
    seen: list[Seen] = field(default_factory=list)
    most_at_once: int = 0
    _at_once: int = 0
    _free_at: float = 0.0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(await request.aread())
        seen = Seen(self.clock.now(), str(request.url), request.headers["x-request-id"], body)
        self.seen.append(seen)
        scripted = self.answer(seen)
        if isinstance(scripted, Exception):
            raise scripted
        return scripted if scripted is not None else httpx.Response(200, stream=_Streamed(self._tokens(seen)))

    async def _tokens(self, seen: Seen) -> AsyncIterator[bytes]:
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        first = self._free_at = max(self._free_at, seen.at) + self.prefill_s(seen)
        for number in range(seen.body["max_tokens"]):
            await self.clock.sleep_until(first + number * self.token_s)
            event: dict[str, Any] = {"choices": [{"text": "a"}]}
            verdict = self.verdict(seen)
            yield _event(event if verdict is None else event | {"kv_load": {"verdict": verdict}})
        self._at_once -= 1
        yield b"data: [DONE]\n\n"


class _Streamed(httpx.AsyncByteStream):
    def __init__(self, parts: AsyncIterator[bytes]) -> None:
        self._parts = parts

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._parts:
            yield part


def _event(body: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(body)}\n\n".encode()


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def server(clock: VirtualClock) -> Server:
    return Server(clock)


@pytest.fixture
def in_virtual_time(clock: VirtualClock) -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Run a coroutine to its end; virtual time passes when everybody waits for it."""
    return clock.run


@pytest.fixture
def streamed() -> Callable[..., httpx.Response]:
    """A response that streams these parts, and then ends or raises `error`."""

    async def parts_of(parts: tuple[bytes, ...], error: Exception | None) -> AsyncIterator[bytes]:
        for part in parts:
            yield part
        if error is not None:
            raise error

    def make(*parts: bytes, error: Exception | None = None) -> httpx.Response:
        return httpx.Response(200, stream=_Streamed(parts_of(parts, error)))

    return make
