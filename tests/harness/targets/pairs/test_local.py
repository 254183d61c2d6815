"""How a pair of processes comes into being and ends; what real ones do is in tests/local."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from harness.targets.pairs.local import LocalPair


class Started:
    """A process that does as it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def terminate(self) -> None:
        self.told.append("terminate")

    def wait(self, timeout: float | None = None) -> int:
        self.told.append("wait")
        return 0


def test_what_was_started_before_a_start_failed_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Started()

    def spawn(self: LocalPair, name: str, *arguments: Any) -> Any:
        if name != "producer":
            raise OSError("no more processes")
        return SimpleNamespace(name=name, process=process)

    monkeypatch.setattr(LocalPair, "_spawn", spawn)
    with pytest.raises(OSError, match="no more processes"):
        LocalPair()
    assert process.told == ["terminate", "wait"]
