"""What a YAML scalar means: the core schema of YAML 1.2.

PyYAML follows YAML 1.1, where the policy `off` is the boolean false, `1:30` is ninety and `010` is eight.
"""

from __future__ import annotations

import math
import re

from scenarios.problems import clipped

Scalar = str | int | float | bool | None

_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_WORDS: dict[str, Scalar] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}


def resolve(text: str, plain: bool) -> Scalar:
    """The value of a scalar; only a plain one (no quotes, no block) can be anything but text.

    Raises:
        ValueError: it cannot be kept in JSON; the text says what to do.
    """
    if plain:
        if text in _WORDS:
            return _WORDS[text]
        if _INT.fullmatch(text):
            return _integer(text)
        if _NOT_FINITE.fullmatch(text):
            raise ValueError(f"{text} is not a finite number: use one, or put it in quotes if it is text")
        if _FLOAT.fullmatch(text):
            number = float(text)
            if math.isinf(number):
                raise ValueError(f"{clipped(text)} is too large: use a finite number")
            return number
    if any("\ud800" <= ch <= "\udfff" for ch in text):
        raise ValueError("half of a surrogate pair is not text: write the character itself")
    return text


def _integer(text: str) -> int:
    base = {"0o": 8, "0x": 16}.get(text[:2], 10)
    # Python refuses to convert very long decimals; anything beyond 64 bits is refused here in any case.
    number = int(text, base) if len(text) <= 70 else 1 << 64
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError(f"{clipped(text)} does not fit in 64 bits: use a smaller number")
    return number
