"""Servers inside the test's process: their applications are called as uvicorn calls them, without a network."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from engine.checksum.policy import ChecksumSettings
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.loop import EngineLoop
from engine.seams import Hold, Seams
from engine.server.app import EngineServer
from engine.server.metrics import EngineMetrics

EVER = 2**63
GONE = {"type": "http.disconnect"}
PATIENCE = 60  # seconds until a test gives up; none of them waits that long


def within(work):
    """Run a coroutine in an event loop of its own."""

    async def bounded():
        return await asyncio.wait_for(work, PATIENCE)

    return asyncio.run(bounded())


async def until(condition):
    """Let others run until it holds."""
    while not condition():
        await asyncio.to_thread(threading.Event().wait, 0.002)


class Exchange:
    """One request to an application, told in ASGI messages: what the client sends, when it reads, when it leaves."""

    def __init__(self, app, method="POST", path="/v1/completions", headers=()):
        self.messages = asyncio.Queue()
        self.sent = []
        self.left = False
        self.num_received = 0
        self.reads = asyncio.Event()
        self.reads.set()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in headers],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self):
        # As uvicorn does: once it has left, every later call says so too.
        message = GONE if self.left and self.messages.empty() else await self.messages.get()
        self.num_received += 1
        return message

    async def _send(self, message):
        await self.reads.wait()
        self.sent.append(message)

    def body(self, data, more=False):
        self.messages.put_nowait({"type": "http.request", "body": data, "more_body": more})

    def leave(self):
        self.left = True
        self.messages.put_nowait(GONE)

    @property
    def status(self):
        return next((m["status"] for m in self.sent if m["type"] == "http.response.start"), None)

    @property
    def data(self):
        return b"".join(m.get("body", b"") for m in self.sent if m["type"] == "http.response.body")

    @property
    def json(self):
        return json.loads(self.data)

    @property
    def events(self):
        """The events of a stream; its end as None."""
        texts = [part.removeprefix("data: ") for part in self.data.decode().split("\n\n") if part]
        return [None if text == "[DONE]" else json.loads(text) for text in texts]

    async def until_sent(self, count=1):
        await until(lambda: len(self.sent) >= count)


async def ask(app, body, headers=(), **options):
    """A whole request; `body` is bytes, or JSON's."""
    exchange = Exchange(app, headers=headers, **options)
    exchange.body(body if isinstance(body, bytes) else json.dumps(body).encode())
    await exchange.task
    return exchange


class Served:
    """An engine in its loop, with its server. No step after `last_step` is executed: the test says how far it goes."""

    def __init__(self, engine, seams, between=lambda: None, describe=None, **options):
        self.engine = engine
        self.last_step = EVER
        seams.on("step.start", lambda event: Hold(lambda: event.step_id <= self.last_step, "a test"))
        self.metrics = EngineMetrics(lambda: engine)
        self.loop = EngineLoop(engine, between, self.metrics.finished, **options)
        self.app = EngineServer(engine.config.engine_id, self.loop, self.metrics, describe).app

    def __enter__(self):
        self.loop.start()
        return self

    def __exit__(self, *_):
        self.loop.stop()

    @property
    def idle(self):
        scheduler = self.engine.scheduler
        return not scheduler.num_unfinished and not scheduler.num_loading

    @property
    def blocks_in_use(self):
        scheduler = self.engine.scheduler
        return self.engine.config.num_blocks - 1 - scheduler.kv.pool.num_free

    def metric(self, name, **labels):
        return self.metrics.registry.get_sample_value(f"kvchaos_{name}", labels)


class ServedPair:
    """D behind its server, P beside it on a simulated fabric. D's thread delivers what is on the wire."""

    def __init__(self, new_world, tools, deliver=True, load_timeout_s=None, **options):
        self.world = new_world(**options)
        self._tools = tools
        self.deliver = threading.Event()
        if deliver:
            self.deliver.set()
        self.d = Served(self.world.d, self.world.seams, self._between, load_timeout_s=load_timeout_s)

    def _between(self):
        if self.deliver.is_set():
            self.world.deliver()

    def prefilled(self, name="r", length=40, max_tokens=4):
        """A prompt that P has prefilled: a request's body for D, and its right tokens."""
        prompt = self._tools.prompt(name, length, max_tokens)
        params = self.world.run_producer(prompt)
        body = {"prompt": list(prompt.token_ids), "max_tokens": max_tokens, "kv_transfer_params": params}
        return body, list(self._tools.tokens_alone(prompt.token_ids, max_tokens))


class ServerTools:
    ever = EVER
    within = staticmethod(within)
    until = staticmethod(until)
    exchange = Exchange
    ask = staticmethod(ask)
    served = Served


@pytest.fixture(scope="session")
def http():
    """The functions and classes of this file, by name."""
    return ServerTools


@pytest.fixture
def served():
    """A server whose engine has no connector, with blocks for one long request at a time."""
    settings = ChecksumSettings(kv_checksum_mode="off")
    seams = Seams()
    with Served(EngineCore(EngineConfig("E", num_blocks=64, checksum=settings), seams), seams) as found:
        found.seams = seams
        yield found


@pytest.fixture
def served_pair(new_world, tools):
    """Make a pair whose consumer is served: `served_pair(mode=..., deliver=False, ...)`."""
    started = []

    def make(**options):
        pair = ServedPair(new_world, tools, **options)
        started.append(pair.d)
        pair.d.__enter__()
        return pair

    yield make
    for found in started:
        found.loop.stop()
