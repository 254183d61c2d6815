"""Words and numbers as a person reads them, and text that is safe to show in any of the reports.

What a report shows comes from engines under attack. A terminal escape in an error message, a NUL in a name or half
a surrogate pair must neither break a file nor change what a reader sees.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# Control characters, direction overrides, line separators, surrogates and U+FFFE/F: what XML 1.0 cannot hold, what a
# terminal obeys, and what makes text look like other text. Tab, CR and LF too: a report's text is one line.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def visible(text: str) -> str:
    """`text` on one line, with every character that is not for reading written as an escape."""
    return _UNSAFE.sub(lambda match: match.group().encode("unicode_escape").decode("ascii"), text)


def clip(text: str, limit: int) -> str:
    """`text`, or its first characters and how many more there are."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text) - limit} more characters)"


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """`1 cell`, `2 cells`, `0 cells`."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def listed(items: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} and {items[-1]}"


def ranges(positions: Sequence[int]) -> str:
    """Block positions as `0-5, 7`, in the order given; `none` if there are none."""
    runs: list[list[int]] = []
    for position in positions:
        if runs and position == runs[-1][1] + 1:
            runs[-1][1] = position
        else:
            runs.append([position, position])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs) or "none"
