"""What the tests share. `stand_ins.py` has stand-ins for vLLM's objects."""

from __future__ import annotations

from typing import Any

import pytest
from kvchaos_vllm import consumer, observer


@pytest.fixture
def verdicts(monkeypatch):
    """Verdicts told to observers, in order; nothing has been warned of before."""
    told: list[tuple[str, Any]] = []
    monkeypatch.setattr(consumer, "_warned", set())

    def note(request_id, verdict):
        told.append((request_id, verdict))

    observer.subscribe(note)
    yield told
    observer.unsubscribe(note)
