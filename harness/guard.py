"""Keeps a bug of a fault or an oracle apart from a bug of the engine: the first makes a cell unknown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.seams import Decision, Seams, Stage
from harness.errors import CheckerError


class GuardedSeams(Seams):
    """Seams whose handlers raise nothing but CheckerError."""

    def on(self, seam: str, handler: Callable[[Any], Decision], stage: Stage = Stage.FAULT) -> None:
        def guarded(event: Any) -> Decision:
            try:
                return handler(event)
            except Exception as error:
                where = getattr(handler, "__qualname__", repr(handler))
                raise CheckerError(f"{where} at {seam}: {type(error).__name__}: {error}") from error

        super().on(seam, guarded, stage)
