"""The field types that scenario models share: strict, frozen, and with advice in the author's words."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, ConfigDict

from engine.checksum.policy import EXTENSIONS
from engine.presets import PRESETS
from scenarios.problems import did_you_mean, listed

STRICT = ConfigDict(extra="forbid", frozen=True, strict=True)

_INCIDENT = re.compile(r"[\w.-]+/[\w.-]+#[0-9]+", re.ASCII)
_GAP = re.compile(r"GAP-([1-9]|1[0-3])")
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
MAX_NAME = 100
"""Characters. With a policy after it, a name is the name of a folder."""


def one_of(*allowed: int) -> AfterValidator:
    """Only these integers. (A `Literal[1]` would also take `true` and 1.0, which equal 1 in Python.)"""

    def check(value: int) -> int:
        if value not in allowed:
            raise ValueError(listed(allowed))
        return value

    return AfterValidator(check)


def _matching(pattern: re.Pattern[str], advice: str) -> AfterValidator:
    def check(value: str) -> str:
        if not pattern.fullmatch(value):
            raise ValueError(advice)
        return value

    return AfterValidator(check)


def _extension(value: str) -> str:
    if value not in EXTENSIONS:
        raise ValueError(listed(EXTENSIONS))
    return value


def _model(value: str) -> str:
    if value not in PRESETS:
        raise ValueError(f"{listed(PRESETS)}{did_you_mean(value, list(PRESETS))}")
    return value


def _one_line(value: str) -> str:
    if not value.strip() or value != value.strip() or not value.isprintable():
        raise ValueError("use one line of text, without spaces around it")
    return value


def _short_name(value: str) -> str:
    if len(value) > MAX_NAME:
        raise ValueError(f"use up to {MAX_NAME} characters")
    return value


def _token_range(value: Any) -> tuple[int, int]:
    pair = (value, value) if type(value) is int else value
    if not isinstance(pair, list | tuple) or len(pair) != 2 or any(type(bound) is not int for bound in pair):
        raise ValueError("use a whole number, or two as [lowest, highest]")
    lowest, highest = pair
    if not 1 <= lowest <= highest:
        raise ValueError("use at least 1, and the lower number first")
    return lowest, highest


ModelName = Annotated[str, AfterValidator(_model)]
Name = Annotated[
    str,
    _matching(_NAME, "use small letters, digits and single hyphens, such as stale-read"),
    AfterValidator(_short_name),
]
Incident = Annotated[str, _matching(_INCIDENT, "use owner/repo#123")]
GapId = Annotated[str, _matching(_GAP, "use one of GAP-1 to GAP-13")]
Extension = Annotated[str, AfterValidator(_extension)]
OneLine = Annotated[str, AfterValidator(_one_line)]
TokenRange = Annotated[tuple[int, int], BeforeValidator(_token_range)]
"""A number or two; always two here, lowest and highest."""
