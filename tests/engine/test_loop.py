"""The engine's thread: requests in, chunks out, and nobody left waiting when it ends."""

import queue
import threading

import pytest

from engine.checksum.policy import ChecksumSettings
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import RequestError
from engine.loop import STOPPING, EngineLoop, EngineStoppedError
from engine.request import FinishReason, Request
from engine.seams import Hold, Seams

PATIENCE = 60


class Told:
    """What a listener is told, in order."""

    def __init__(self):
        self.items = queue.Queue()

    def __call__(self, item):
        self.items.put(item)

    def next(self):
        return self.items.get(timeout=PATIENCE)

    def last(self):
        """Tokens of all chunks up to the last one, and the last one."""
        tokens = []
        while True:
            item = self.next()
            if isinstance(item, Exception):
                raise item
            tokens += item.token_ids
            if item.output is not None or item.crashed:
                return tokens, item


def new_engine(seams=None, name="E", **options):
    settings = ChecksumSettings(kv_checksum_mode="off")
    return EngineCore(EngineConfig(name, checksum=settings, **options), seams or Seams())


def running(engine, **options):
    loop = EngineLoop(engine, **options)
    loop.start()
    return loop


@pytest.fixture
def seams():
    return Seams()


@pytest.fixture
def loop(seams):
    loop = running(new_engine(seams))
    yield loop
    loop.stop()


def submit(loop, name, tokens=(1, 2, 3), max_tokens=4):
    told, request = Told(), Request(name, list(tokens), max_tokens)
    loop.submit(request, told, told)
    return told, request


def test_tokens_come_as_they_are_sampled(loop, tools):
    told, _ = submit(loop, "r")
    tokens, last = told.last()
    assert tokens == list(tools.tokens_alone((1, 2, 3), 4))
    assert last.output.token_ids == tuple(tokens)
    assert last.output.finish_reason is FinishReason.LENGTH


def test_a_request_that_cannot_run_is_refused(loop):
    told, _ = submit(loop, "r", max_tokens=0)
    assert isinstance(told.next(), RequestError)


def test_aborting_ends_that_request_and_no_other_of_its_id(loop, seams):
    open_ = threading.Event()
    seams.on("step.start", lambda event: Hold(open_.is_set, "a test"))
    first, request = submit(loop, "same", max_tokens=20)
    second, refused = submit(loop, "same")
    assert isinstance(second.next(), RequestError)
    loop.abort(refused)
    third, other = submit(loop, "other")
    loop.abort(other)
    assert third.last()[1].output.finish_reason is FinishReason.ABORT
    open_.set()
    assert first.last()[1].output.finish_reason is FinishReason.LENGTH
    loop.abort(request)
    again, _ = submit(loop, "same")
    assert again.last()[1].output.finish_reason is FinishReason.LENGTH


def test_stopping_ends_what_is_left_and_refuses_what_comes(seams):
    loop = running(new_engine(seams))
    seams.on("step.start", lambda event: Hold(lambda: False, "a test"))
    told, _ = submit(loop, "r")
    started = threading.Event()
    loop.post(started.set)
    assert started.wait(PATIENCE)
    loop.stop()
    output = told.last()[1].output
    assert (output.finish_reason, output.error) == (FinishReason.ABORT, STOPPING)
    assert not loop.alive
    refused, _ = submit(loop, "late")
    error = refused.next()
    assert isinstance(error, EngineStoppedError)
    assert str(error) == STOPPING
    loop.stop()


def test_a_crash_ends_every_request_and_refuses_what_comes(seams, caplog):
    def fail(event):
        raise RuntimeError("planted")

    loop = running(new_engine(seams))
    open_ = threading.Event()
    seams.on("step.start", lambda event: Hold(open_.is_set, "a test"))
    seams.on("step.end", fail)
    first, request = submit(loop, "a")
    second, _ = submit(loop, "b")
    open_.set()
    assert first.last()[1].crashed
    assert second.last()[1].crashed
    assert loop.crashed == "RuntimeError: planted"
    late, _ = submit(loop, "c")
    assert str(late.next()) == "RuntimeError: planted"
    loop.abort(request)
    assert not loop.alive
    assert "planted" in caplog.text


def test_what_is_posted_while_the_thread_ends_is_answered(seams):
    """It comes to the inbox when the thread has taken its last look at it, but for one."""
    loop = running(new_engine(seams))
    seams.on("step.start", lambda event: Hold(lambda: False, "a test"))
    told, late = submit(loop, "r")[0], Told()
    seams.on("request.ended", lambda event: loop.submit(Request("late", [1], 1), late, late))
    started = threading.Event()
    loop.post(started.set)
    assert started.wait(PATIENCE)
    loop.stop()
    assert told.last()[1].output.finish_reason is FinishReason.ABORT
    assert isinstance(late.next(), EngineStoppedError)


def test_requests_of_an_engine_that_is_replaced_are_aborted(loop, seams, tools):
    seams.on("step.start", lambda event: Hold(lambda: event.engine != "E", "a test"))
    told, _ = submit(loop, "r")
    other = new_engine(seams, name="F")
    loop.post(lambda: loop.replace(other))
    output = told.last()[1].output
    assert (output.finish_reason, output.error) == (FinishReason.ABORT, "the engine is replaced")
    assert submit(loop, "r")[0].last()[0] == list(tools.tokens_alone((1, 2, 3), 4))


def test_every_request_that_ends_is_counted_once(seams):
    counted = []
    loop = running(new_engine(seams), finished=counted.append)
    told = [submit(loop, name)[0] for name in "abc"]
    for one in told:
        one.last()
    loop.stop()
    assert sorted(output.request_id for output in counted) == ["a", "b", "c"]


def test_between_steps_is_called_while_nothing_runs():
    called = threading.Event()
    loop = running(new_engine(), between_steps=called.set)
    assert called.wait(PATIENCE)
    loop.stop()


def test_an_engine_that_is_held_in_its_thread_does_not_hold_up_the_end(monkeypatch, caplog):
    monkeypatch.setattr("engine.loop._STOP_S", 0.01)
    inside, release = threading.Event(), threading.Event()

    def wait():
        inside.set()
        release.wait(PATIENCE)

    loop = running(new_engine())
    loop.post(wait)
    assert inside.wait(PATIENCE)
    loop.stop()
    assert "does not stop by itself" in caplog.text
    release.set()
