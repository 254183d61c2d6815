"""An engine's server: what clients get, and that what they send or leave undone never harms anybody else."""

import json

import pytest

from engine.server.schema import MAX_BODY_BYTES

ID = "x-request-id"
LONG = {"prompt": [7] * 30, "max_tokens": 400}


def tokens_of(answer):
    return answer["choices"][0]["token_ids"]


def streamed_tokens(events):
    return [token for event in events if event for token in tokens_of(event)]


def test_a_completion(http, served, tools):
    answer = http.within(http.ask(served.app, {"prompt": [5, 6, 7], "max_tokens": 4}, [(ID, "mine")]))
    assert answer.status == 200
    assert answer.json["id"] == "cmpl-mine"
    assert tokens_of(answer.json) == list(tools.tokens_alone((5, 6, 7), 4))
    assert answer.json["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert answer.json["kv_load"] == {"verdict": "no_load", "reason": None, "recomputed": False}
    assert served.blocks_in_use == 0


def test_a_streamed_completion_says_the_same(http, served, tools):
    answer = http.within(http.ask(served.app, {"prompt": [5, 6, 7], "max_tokens": 4, "stream": True}))
    assert answer.status == 200
    assert streamed_tokens(answer.events) == list(tools.tokens_alone((5, 6, 7), 4))
    assert answer.events[-1] is None
    assert [e["choices"][0]["finish_reason"] for e in answer.events[:-1]] == [None, None, None, "length"]


def test_health_models_and_metrics(http, served):
    for path, status in (("/health", 200), ("/v1/models", 200), ("/metrics", 200), ("/kv_transfer/agent", 404)):
        assert http.within(http.ask(served.app, b"", method="GET", path=path)).status == status


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/completions", 405),
        ("PUT", "/v1/completions", 405),
        ("POST", "/health", 405),
        ("DELETE", "/metrics", 405),
        ("GET", "/", 404),
        ("GET", "/v1/../../etc/passwd", 404),
        ("POST", "/v1/chat/completions", 404),
        ("BREW", "/v1/completions", 405),
    ],
)
def test_other_paths_and_methods(http, served, method, path, status):
    answer = http.within(http.ask(served.app, b"{}", method=method, path=path))
    assert answer.status == status
    assert answer.json["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "x": NaN}',
        b"\xff" * 100,
        {"prompt": "a", "max_tokens": 0},
        {"prompt": "a", "temperature": 1},
        {"prompt": []},
        {"prompt": [1] * 1000, "max_tokens": 1000},  # more than the engine's blocks hold
        {"prompt": "x" * 1_000_000},
    ],
)
def test_hostile_bodies_are_refused(http, served, body):
    answer = http.within(http.ask(served.app, body))
    assert answer.status == 400
    assert answer.json["error"]["type"] == "invalid_request_error"
    assert served.idle
    assert served.loop.alive


@pytest.mark.parametrize("chosen", ["", " ", "x" * 129, "a\tb", "\x7f", "\xe9", "a\x00b"])
def test_request_ids_that_cannot_be_used(http, served, chosen):
    expected = 200 if chosen == " " else 400
    assert http.within(http.ask(served.app, {"prompt": "a", "max_tokens": 1}, [(ID, chosen)])).status == expected


def test_headers_that_mean_nothing(http, served):
    headers = [("content-type", "image/png"), ("content-length", "-5"), ("x-" + "a" * 500, "\xff\xfe"), ("te", "??")]
    assert http.within(http.ask(served.app, {"prompt": "a", "max_tokens": 1}, headers)).status == 200


def test_a_large_body_is_refused_before_it_has_come(http, served):
    async def work():
        announced = http.exchange(served.app, headers=[("content-length", str(10 * 2**20))])
        await announced.task
        assert (announced.status, announced.num_received) == (413, 0)
        unannounced = http.exchange(served.app)
        part = b" " * 2**20
        for _ in range(10):
            unannounced.body(part, more=True)
        await unannounced.task
        assert unannounced.status == 413
        assert unannounced.num_received == MAX_BODY_BYTES // len(part) + 1

    http.within(work())


def test_ten_megabytes_of_parameters(http, served):
    body = {"prompt": "a", "kv_transfer_params": {"do_remote_prefill": True, "x": "y" * 10 * 2**20}}
    assert http.within(http.ask(served.app, body)).status == 413


def test_a_client_that_leaves_while_it_sends(http, served):
    async def work():
        exchange = http.exchange(served.app)
        exchange.body(b'{"prompt": ', more=True)
        exchange.leave()
        await exchange.task
        assert exchange.status == 499

    http.within(work())
    assert served.idle


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_the_first_token(http, served, stream):
    async def work():
        served.last_step = 0
        exchange = http.exchange(served.app)
        exchange.body(json.dumps(LONG | {"stream": stream}).encode())
        await http.until(lambda: served.engine.scheduler.num_unfinished)
        exchange.leave()
        await exchange.task
        assert exchange.status == 499
        await http.until(lambda: not served.engine.scheduler.num_unfinished)
        served.last_step = http.ever
        await http.until(lambda: served.idle and not served.blocks_in_use)

    http.within(work())
    assert served.metric("requests_total", finish_reason="abort") == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_after_the_first_token(http, served, stream):
    """At that moment no step runs, so the request cannot end by itself."""

    async def work():
        served.last_step = 3
        exchange = http.exchange(served.app)
        exchange.body(json.dumps(LONG | {"stream": stream}).encode())
        if stream:
            await exchange.until_sent(2)
        else:
            await http.until(lambda: served.metric("ttft_seconds_count"))
        exchange.leave()
        await exchange.task
        await http.until(lambda: not served.engine.scheduler.num_unfinished)
        served.last_step = http.ever
        await http.until(lambda: served.idle and not served.blocks_in_use)

    http.within(work())
    assert served.metric("requests_total", finish_reason="abort") == 1


def test_a_client_that_leaves_between_the_first_token_and_the_stream(http, served):
    """The stream's generator has not been started then, and nothing in it would run."""

    async def work():
        served.last_step = 3
        exchange = http.exchange(served.app)
        exchange.reads.clear()
        exchange.body(json.dumps(LONG | {"stream": True}).encode())
        await http.until(lambda: served.metric("ttft_seconds_count"))
        exchange.leave()
        await exchange.task
        await http.until(lambda: not served.engine.scheduler.num_unfinished)
        served.last_step = http.ever
        await http.until(lambda: served.idle and not served.blocks_in_use)

    http.within(work())
    assert served.metric("requests_total", finish_reason="abort") == 1


def test_a_slow_reader_holds_nobody_up(http, served, tools):
    async def work():
        slow = http.exchange(served.app)
        slow.reads.clear()
        slow.body(json.dumps({"prompt": [9, 9], "max_tokens": 50, "stream": True}).encode())
        for number in range(3):
            other = await http.ask(served.app, {"prompt": [number], "max_tokens": 5})
            assert tokens_of(other.json) == list(tools.tokens_alone((number,), 5))
        await http.until(lambda: served.idle)
        assert slow.sent == []
        slow.reads.set()
        await slow.task
        assert streamed_tokens(slow.events) == list(tools.tokens_alone((9, 9), 50))

    http.within(work())


def test_of_two_requests_with_one_id_the_second_is_refused(http, served, tools):
    async def work():
        served.last_step = 0
        first = http.exchange(served.app, headers=[(ID, "same")])
        first.body(json.dumps({"prompt": [1, 2, 3], "max_tokens": 20}).encode())
        await http.until(lambda: served.engine.scheduler.num_unfinished)
        for stream in (False, True):
            second = await http.ask(served.app, {"prompt": [4], "max_tokens": 20, "stream": stream}, [(ID, "same")])
            assert second.status == 400
            assert "in use" in second.json["error"]["message"]
        served.last_step = http.ever
        await first.task
        assert tokens_of(first.json) == list(tools.tokens_alone((1, 2, 3), 20))
        again = await http.ask(served.app, {"prompt": [4], "max_tokens": 3}, [(ID, "same")])
        assert tokens_of(again.json) == list(tools.tokens_alone((4,), 3))

    http.within(work())


def test_the_second_of_an_id_leaves_and_the_first_goes_on(http, served, tools):
    """The engine has not even looked at the second when its client leaves: what ends must not be the first."""

    async def work():
        served.last_step = 0
        first = http.exchange(served.app, headers=[(ID, "same")])
        first.body(json.dumps({"prompt": [1, 2, 3], "max_tokens": 20}).encode())
        await http.until(lambda: served.engine.scheduler.num_unfinished)
        second = http.exchange(served.app, headers=[(ID, "same")])
        second.body(json.dumps({"prompt": [4], "max_tokens": 20}).encode())
        second.leave()
        await second.task
        assert second.status in (400, 499)
        served.last_step = http.ever
        await first.task
        assert tokens_of(first.json) == list(tools.tokens_alone((1, 2, 3), 20))

    http.within(work())
    assert served.metric("requests_total", finish_reason="length") == 1


def crash(served):
    def fail(event):
        raise RuntimeError("planted")

    served.seams.on("step.end", fail)


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_crashes_before_the_first_token(http, served, stream, caplog):
    async def work():
        crash(served)
        answer = await http.ask(served.app, {"prompt": "a", "stream": stream})
        assert answer.status == 503
        assert "crashed" in answer.json["error"]["message"]
        health = await http.ask(served.app, b"", method="GET", path="/health")
        assert (health.status, health.json) == (503, {"status": "crashed", "error": "RuntimeError: planted"})
        later = await http.ask(served.app, {"prompt": "a", "stream": stream})
        assert later.status == 503

    http.within(work())
    assert "planted" in caplog.text


def test_an_engine_that_crashes_in_a_stream(http, served, caplog):
    async def work():
        served.last_step = 3
        exchange = http.exchange(served.app)
        exchange.body(json.dumps(LONG | {"stream": True}).encode())
        await exchange.until_sent(2)
        crash(served)
        served.last_step = http.ever
        await exchange.task
        assert "crashed" in exchange.events[-1]["error"]["message"]
        assert None not in exchange.events

    http.within(work())
    assert "planted" in caplog.text


def test_stopping_ends_streams_with_an_error(http, served):
    async def work():
        served.last_step = 3
        streamed, whole, waiting = http.exchange(served.app), http.exchange(served.app), http.exchange(served.app)
        streamed.body(json.dumps(LONG | {"stream": True}).encode())
        await streamed.until_sent(2)
        whole.body(json.dumps(LONG).encode())
        waiting.body(json.dumps(LONG | {"stream": True}).encode())
        await http.until(lambda: served.engine.scheduler.num_unfinished == 3)
        served.loop.stop()
        for exchange in (streamed, whole, waiting):
            await exchange.task
        last = streamed.events[-2]
        assert last["error"]["message"] == "the server is stopping"
        assert last["choices"][0]["finish_reason"] == "abort"
        assert streamed.events[-1] is None
        assert (whole.status, waiting.status) == (503, 503)
        assert (await http.ask(served.app, {"prompt": "a"})).status == 503

    http.within(work())
