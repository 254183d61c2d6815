"""Markdown that is made by code: tables whose cells cannot break them, and what such a page says of itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def generated(source: str, target: str) -> str:
    """The first lines after a page's title: that nobody should edit it, and how to make it anew."""
    return f"<!-- Generated from {source} by `make {target}`: edit that, not this. -->"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table; nothing if it has no row."""
    lines = [f"| {' | '.join(map(_cell, row))} |" for row in rows]
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *lines] if lines else []


def code(text: object) -> str:
    return f"`{text}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|") or "-"
