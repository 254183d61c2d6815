"""The harness's half of the control channel, with an engine that says what it must not."""

from __future__ import annotations

import threading
from typing import Any

from engine.seams import Seams
from harness.remote.codec import WireError
from harness.remote.harness_side import Dispatcher


class Link:
    """An engine that waits for an answer to something that is no message."""

    engine = "consumer"
    memory = None

    def __init__(self) -> None:
        self.subscribed: list[list[str]] = []
        self.closed = threading.Event()

    def receive(self, memory_of: Any) -> Any:
        raise WireError("not a message of this protocol")

    def call(self, name: str, names: list[str]) -> None:
        self.subscribed.append(names)

    def close(self) -> None:
        self.closed.set()


def test_who_says_something_unknown_is_hung_up_on_and_does_not_wait_for_ever() -> None:
    link = Link()
    dispatcher = Dispatcher({"consumer": link})  # type: ignore[dict-item]
    assert link.closed.wait(60)
    assert "the consumer says something unknown" in str(dispatcher.error)


def test_one_that_has_come_back_is_asked_for_what_is_listened_to_now() -> None:
    dispatcher = Dispatcher({"consumer": (link := Link())})  # type: ignore[dict-item]
    seams = Seams()
    seams.on("request.ended", lambda event: None)
    dispatcher.begin(seams, gone={"consumer"})
    assert link.subscribed == []
    dispatcher.subscribe("consumer")
    assert link.subscribed == [["request.ended"]]
