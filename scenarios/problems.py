"""What is wrong with scenario files, as data: every problem of every file at once, one line each.

A scenario is written by a person, so its errors name the file, the line, the field, and what to do about it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import InputError

Loc = tuple[str | int, ...]
"""Where a value is in a scenario: keys and list indices from the top."""

MAX_SHOWN = 60
"""Characters of a user's own text that a message repeats."""


@dataclass(frozen=True, slots=True)
class Issue:
    """A problem before its line is known. `also` is where to point if nothing is written at `loc`."""

    loc: Loc
    message: str
    also: tuple[Loc, ...] = ()


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One thing to fix. `line` counts from 1, and is 0 where there is none (a missing file, a plain dict)."""

    file: str
    line: int
    field: str
    message: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        return ": ".join(one_line(part) for part in (where, self.field, self.message) if part)


class ScenarioError(InputError):
    """Scenarios that cannot be used. `problems` is sorted by file and line; `str()` has a line for each."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(sorted(set(problems)))
        super().__init__(self.problems)

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


def field_name(loc: Loc) -> str:
    """`faults[0].when.load`; the top level of a file is `file`."""
    name = ""
    for part in loc:
        name += f"[{part}]" if isinstance(part, int) else f".{clipped(part)}"
    return name.lstrip(".") or "file"


def leaf_name(loc: Loc) -> str:
    """The last key of a location with the indices after it: `block_size`, `incidents[0]`."""
    keys = [index for index, part in enumerate(loc) if isinstance(part, str)]
    return field_name(loc[keys[-1] :] if keys else loc)


def shown(value: Any) -> str:
    """A value as a message repeats it, the way YAML writes it: short and on one line."""
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return repr(clipped(value))
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return clipped(f"[{', '.join(shown(item) for item in value[:MAX_SHOWN])}]")
    return clipped(str(value))


def did_you_mean(word: Any, options: Sequence[str]) -> str:
    """`; did you mean 'pull'?` when one option is close to the word, else nothing."""
    if not isinstance(word, str):
        return ""
    by_lower = {option.lower(): option for option in options}
    close = difflib.get_close_matches(word[:MAX_SHOWN].lower(), list(by_lower), n=1)
    return f"; did you mean {str(by_lower[close[0]])!r}?" if close else ""


def listed(options: Iterable[Any]) -> str:
    """`use 1`, or `use one of 8, 16, 32`."""
    words = [str(option) for option in options]
    if not words:
        return "there is none to use"
    return f"use {words[0]}" if len(words) == 1 else f"use one of {', '.join(words)}"


def clipped(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def one_line(text: str) -> str:
    """Text for one line of a terminal: controls, separators, lone surrogates and what is no character are escaped."""
    safe = text.encode("utf-8", "backslashreplace").decode()
    return "".join(ch if ch.isprintable() else ch.encode("unicode_escape").decode() for ch in safe)
