"""Who hears of verdicts."""

from __future__ import annotations

import logging

import pytest
from kvchaos_vllm import observer
from kvchaos_vllm.verdict import NO_LOAD


def test_everybody_hears_until_unsubscribed(verdicts):
    observer.notify("a", NO_LOAD)
    again = []

    def note(request_id, verdict):
        again.append(request_id)

    observer.subscribe(note)
    observer.notify("b", NO_LOAD)
    observer.unsubscribe(note)
    observer.notify("c", NO_LOAD)
    assert [request_id for request_id, _ in verdicts] == ["a", "b", "c"]
    assert again == ["b"]
    with pytest.raises(ValueError, match="not in list"):
        observer.unsubscribe(note)


def test_one_that_raises_is_logged_and_the_others_hear(verdicts, caplog):
    def broken(request_id, verdict):
        raise RuntimeError("a bug in the callback")

    observer._callbacks.insert(0, broken)
    with caplog.at_level(logging.ERROR):
        observer.notify("a", NO_LOAD)
    observer.unsubscribe(broken)
    assert [request_id for request_id, _ in verdicts] == ["a"]
    assert "a bug in the callback" in caplog.text
