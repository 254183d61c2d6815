"""Keeps a bug of a fault or an oracle apart from a bug of the engine: the first makes a cell unknown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from engine.seams import NAMES, Decision, E, Hold, Outcome, Seams, Stage
from harness.errors import CheckerError
from harness.history import error_text


class GuardedSeams(Seams):
    """Seams whose handlers, and the holds that they return, raise nothing but CheckerError."""

    def on(self, seam: str, handler: Callable[[Any], Decision], stage: Stage = Stage.FAULT) -> None:
        where = f"{getattr(handler, '__qualname__', type(handler).__qualname__)} at {seam}"

        def guarded(event: Any) -> Decision:
            with _blamed(where):
                decision = handler(event)
            return _guarded_hold(decision, where) if isinstance(decision, Hold) else decision

        super().on(seam, guarded, stage)

    def emit(self, event: E) -> Outcome[E]:
        """As `Seams.emit`; a decision that the seam does not take is the handler's bug as well."""
        with _blamed(f"a handler at {NAMES[type(event)]}"):
            return super().emit(event)


def _guarded_hold(hold: Hold, where: str) -> Hold:
    """The engine asks the condition later, outside of any handler."""

    def until() -> bool:
        with _blamed(where):
            return hold.until()

    return Hold(until, hold.why)


@contextmanager
def _blamed(where: str) -> Iterator[None]:
    try:
        yield
    except CheckerError:
        raise
    except Exception as error:
        raise CheckerError(f"{where}: {error_text(error)}") from error
