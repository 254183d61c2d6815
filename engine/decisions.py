"""What a handler of a seam may decide, and in which order handlers are asked. `engine.seams` hands these on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Generic, TypeVar

E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class Change(Generic[E]):
    """Go on with this event instead."""

    event: E


@dataclass(frozen=True, slots=True)
class Drop:
    """Go on as if it had not happened."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Wait until `until()` is true. `why` is what a report says when it never is."""

    until: Callable[[], bool]
    why: str


Decision = Change[Any] | Drop | Hold | None
Handler = Callable[[Any], Decision]

CHANGE, DROP, HOLD = "change", "drop", "hold"


class Stage(IntEnum):
    """The order of handlers at one seam."""

    BEFORE = 0
    FAULT = 1
    AFTER = 2
