"""The P/D proxy's server, between engines that are played: what it forwards, and what clients see of failures."""

import asyncio
import json

import httpx
import pytest

from engine.seams import Change, Hold, Seams
from engine.server.proxy_app import ProxyServer

ID = "x-request-id"
PARAMS = {
    "do_remote_prefill": True,
    "remote_engine_id": "P",
    "remote_block_ids": [[1]],
    "kv_checksums": "AA==",
    "new": 1,
}


class Parts(httpx.AsyncByteStream):
    """A stream's body: bytes, an error to raise, or an event to wait for."""

    def __init__(self, *parts):
        self.parts = parts
        self.closed = False

    async def __aiter__(self):
        for part in self.parts:
            if isinstance(part, asyncio.Event):
                await part.wait()
            elif isinstance(part, Exception):
                raise part
            else:
                yield part

    async def aclose(self):
        self.closed = True


class Behind:
    """The engines behind a proxy. `producer` and `consumer` take a request's body and give the answer."""

    def __init__(self):
        self.seen = []
        self.ids = []
        self.cancelled = []
        self.seams = Seams()
        self.polled = 0
        self.producer = lambda body: httpx.Response(200, json={"kv_transfer_params": PARAMS})
        self.consumer = lambda body: httpx.Response(200, json={"choices": []})
        self.server = ProxyServer("http://p:1", "http://d:2/", self.seams, self._poll, httpx.MockTransport(self._take))
        self.app = self.server.app

    def _poll(self):
        self.polled += 1

    async def _take(self, request):
        body = json.loads(request.content)
        self.seen.append(body)
        self.ids.append(request.headers[ID])
        assert request.url.path == "/v1/completions"
        answer = (self.producer if request.url.host == "p" else self.consumer)(body)
        if not isinstance(answer, httpx.Response):
            try:
                answer = await answer
            except asyncio.CancelledError:
                self.cancelled.append(request.url.host)
                raise
        return answer


@pytest.fixture
def behind():
    return Behind()


def test_a_prompt_goes_to_the_producer_and_then_to_the_consumer(http, behind):
    answer = http.within(http.ask(behind.app, {"prompt": "a", "max_tokens": 9}, [(ID, "mine")]))
    assert (answer.status, answer.json) == (200, {"choices": []})
    to_p, to_d = behind.seen
    assert to_p == {
        "prompt": "a",
        "max_tokens": 1,
        "stream": False,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
    }
    assert to_d == {"prompt": "a", "max_tokens": 9, "kv_transfer_params": PARAMS}
    assert behind.ids == ["mine", "mine"]


@pytest.mark.req("POL-6")
@pytest.mark.parametrize("asked", [True, False])
def test_both_engines_hear_what_a_request_asks_of_its_checksums(http, behind, asked):
    http.within(http.ask(behind.app, {"prompt": "a", "kv_checksum": asked}))
    assert [body["kv_checksum"] for body in behind.seen] == [asked, asked]


@pytest.mark.req("WIR-3")
def test_what_the_proxy_does_not_know_goes_to_both(http, behind):
    """Keys of the request, and of its parameters; of what the producer answered every key goes on."""
    unknown = {"top_k": 5, "x": {"y": [None, "\u00e9", 1e300]}, "stop": ["\U0001f600"]}
    given = {"trace": "t", "new": 2}
    http.within(http.ask(behind.app, {"prompt": "a", "kv_transfer_params": given} | unknown))
    to_p, to_d = behind.seen
    for body in (to_p, to_d):
        assert {key: body[key] for key in unknown} == unknown
    assert to_p["kv_transfer_params"] == given | {"do_remote_decode": True, "do_remote_prefill": False}
    assert to_d["kv_transfer_params"] == PARAMS | {"trace": "t"}


def test_a_client_cannot_say_what_only_an_engine_may(http, behind):
    behind.producer = lambda body: httpx.Response(200, json={"kv_transfer_params": None})
    mine = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "P",
        "remote_request_id": "another's",
        "remote_block_ids": [[5]],
        "kv_checksums": "AAAA",
    }
    assert http.within(http.ask(behind.app, {"prompt": "a", "kv_transfer_params": mine})).status == 200
    assert [body["kv_transfer_params"] for body in behind.seen] == [
        {"do_remote_decode": True, "do_remote_prefill": False},
        {},
    ]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[" * 100_000,
        b'{"prompt": "\\udfff"}',
        b'{"prompt": "a", "x": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a", "x": NaN}',
        b'{"prompt": "a", "x": 1e999}',
        {"prompt": "a", "temperature": 1},
        {"prompt": "a", "kv_transfer_params": []},
    ],
)
def test_hostile_bodies_reach_no_engine(http, behind, body):
    answer = http.within(http.ask(behind.app, body))
    assert answer.status == 400
    assert answer.json["error"]["type"] == "invalid_request_error"
    assert behind.seen == []


def test_a_large_body_is_refused_before_it_has_come(http, behind):
    async def work():
        exchange = http.exchange(behind.app, headers=[("content-length", str(10 * 2**20))])
        await exchange.task
        assert (exchange.status, exchange.num_received) == (413, 0)

    http.within(work())


@pytest.mark.parametrize(("path", "status"), [("/health", 200), ("/nowhere", 404), ("/v1/completions", 405)])
def test_other_paths_and_methods(http, behind, path, status):
    assert http.within(http.ask(behind.app, b"", method="GET", path=path)).status == status


def raising(error):
    def fail(body):
        raise error

    return fail


FAILURES = [
    (raising(httpx.ConnectError("refused")), 502, "the {} cannot be reached (ConnectError)"),
    (raising(httpx.ReadTimeout("slow")), 502, "the {} cannot be reached (ReadTimeout)"),
    (lambda body: httpx.Response(500, json={"error": {"message": "KV load failed: x"}}), 500, "KV load failed: x"),
    (lambda body: httpx.Response(503, json={"error": {"message": "crashed"}}), 503, "crashed"),
    (lambda body: httpx.Response(400, json={"error": {"message": "too long"}}), 400, "too long"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("side", ["producer", "consumer"])
@pytest.mark.parametrize(("fail", "status", "message"), FAILURES)
def test_an_engine_that_fails_before_the_first_token(http, behind, side, fail, status, message, stream):
    setattr(behind, side, fail)
    answer = http.within(http.ask(behind.app, {"prompt": "a", "stream": stream}))
    assert answer.status == status
    assert answer.json["error"]["message"] == message.format(side)


@pytest.mark.parametrize(
    "content", [b"<html>", b"[]", b'{"kv_transfer_params": 5}', b"", b'{"kv_transfer_params": "x"}']
)
def test_a_producer_that_is_none(http, behind, content):
    behind.producer = lambda body: httpx.Response(200, content=content)
    answer = http.within(http.ask(behind.app, {"prompt": "a"}))
    assert answer.status == 502
    assert len(behind.seen) == 1


def streaming(*parts):
    stream = Parts(*parts)
    return stream, lambda body: httpx.Response(200, stream=stream, headers={"content-type": "text/event-stream"})


ONE, TWO = b'data: {"n": 1}\n\n', b'data: {"n": 2}\n\n'


def test_a_stream_is_relayed_event_by_event(http, behind):
    _, behind.consumer = streaming(ONE[:5], ONE[5:] + TWO[:3], TWO[3:], b"data: [DONE]\n\n")
    answer = http.within(http.ask(behind.app, {"prompt": "a", "stream": True}))
    assert answer.events == [{"n": 1}, {"n": 2}, None]
    assert [m["body"] for m in answer.sent[1:4]] == [ONE, TWO, b"data: [DONE]\n\n"]


def test_a_consumer_that_breaks_off_in_an_event(http, behind):
    """What it had begun is left out, and an error follows: the stream stays one that can be read."""
    stream, behind.consumer = streaming(ONE, TWO[:7], httpx.RemoteProtocolError("peer closed"))
    answer = http.within(http.ask(behind.app, {"prompt": "a", "stream": True}))
    assert answer.status == 200
    assert answer.events[0] == {"n": 1}
    assert answer.events[1]["error"]["message"] == "the consumer broke off (RemoteProtocolError)"
    assert len(answer.events) == 2
    assert stream.closed


@pytest.mark.parametrize("side", ["producer", "consumer"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_the_first_token(http, behind, side, stream):
    """The connection to the engine is closed, which ends the request there."""

    async def work():
        setattr(behind, side, lambda body: asyncio.Event().wait())
        exchange = http.exchange(behind.app)
        exchange.body(json.dumps({"prompt": "a", "stream": stream}).encode())
        await http.until(lambda: len(behind.seen) == (1 if side == "producer" else 2))
        exchange.leave()
        await exchange.task
        assert exchange.status == 499
        assert behind.cancelled == ["p" if side == "producer" else "d"]

    http.within(work())


def test_a_client_that_leaves_in_a_stream(http, behind):
    async def work():
        stream, behind.consumer = streaming(ONE, asyncio.Event())
        exchange = http.exchange(behind.app)
        exchange.body(b'{"prompt": "a", "stream": true}')
        await exchange.until_sent(2)
        exchange.leave()
        await exchange.task
        assert stream.closed

    http.within(work())


def test_a_client_that_leaves_before_the_stream_has_begun(http, behind):
    async def work():
        stream, behind.consumer = streaming(ONE, asyncio.Event())
        exchange = http.exchange(behind.app)
        exchange.reads.clear()
        exchange.body(b'{"prompt": "a", "stream": true}')
        await http.until(lambda: len(behind.seen) == 2)
        exchange.leave()
        await exchange.task
        assert stream.closed or exchange.status == 499

    http.within(work())


def test_a_client_that_leaves_while_the_consumers_answer_comes(http, behind):
    async def work():
        stream, behind.consumer = streaming(b'{"choices"', asyncio.Event())
        exchange = http.exchange(behind.app)
        exchange.body(b'{"prompt": "a"}')
        await http.until(lambda: len(behind.seen) == 2)
        exchange.leave()
        await exchange.task
        assert exchange.status == 499
        assert stream.closed

    http.within(work())


def test_stopping_ends_what_is_under_way(http, behind):
    async def work():
        stream, behind.consumer = streaming(ONE, asyncio.Event())
        streamed = http.exchange(behind.app)
        streamed.body(b'{"prompt": "a", "stream": true}')
        await streamed.until_sent(2)
        behind.producer = lambda body: asyncio.Event().wait()
        waiting = http.exchange(behind.app)
        waiting.body(b'{"prompt": "b"}')
        await http.until(lambda: len(behind.seen) == 3)
        await behind.server.stop()
        await streamed.task
        await waiting.task
        assert streamed.events == [{"n": 1}, {"error": {"message": "the server is stopping", "type": "server_error"}}]
        assert stream.closed
        assert waiting.status == 503

    http.within(work())


def test_parameters_can_be_changed_and_held_on_their_way(http, behind):
    """Held ones are offered at the seam again, as the simulator does."""
    offered, released = [], []

    def handler(event):
        offered.append(dict(event.params))
        if len(offered) == 1:
            return Hold(lambda: bool(released), "a test")
        return Change(type(event)(event.request_id, {**event.params, "changed": True}))

    behind.seams.on("proxy.params_pass", handler)

    async def work():
        exchange = http.exchange(behind.app)
        exchange.body(b'{"prompt": "a"}')
        await http.until(lambda: offered)
        assert len(behind.seen) == 1
        released.append(True)
        await exchange.task

    http.within(work())
    assert offered == [PARAMS, PARAMS]
    assert behind.seen[1]["kv_transfer_params"] == PARAMS | {"changed": True}


def test_the_harness_is_served_while_the_proxy_runs(http, behind):
    async def work():
        async with behind.app.router.lifespan_context(behind.app):
            await http.until(lambda: behind.polled > 2)

    http.within(work())
