"""What happened in a cell, a JSON object a line: no wall time, pid, path, address or KV bytes, only digests.

A history is everything that the judge sees, so a stored one can be judged again (`kvchaos analyze`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from harness.errors import HistoryError

Line = dict[str, Any]

_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")
_FOLDERS = re.compile(r"(?<![^\s'\"(<=:])/(?:[^\s/'\"]+/)+(?=[^\s/])")


def dump_line(line: Line) -> str:
    """One line of a history, keys sorted, so that equal lines are equal bytes."""
    return json.dumps(line, sort_keys=True, separators=(",", ":"), allow_nan=False)


class History:
    """The lines of one cell, written as they come."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._stream = stream
        self.lines: list[Line] = []

    def add(self, event: str, **fields: Any) -> None:
        line = {"event": event, **fields}
        self.lines.append(line)
        if self._stream is not None:
            self._stream.write(dump_line(line) + "\n")
            self._stream.flush()


def read_cells(path: Path) -> Iterator[list[Line]]:
    """The cells of a stored history, each as its lines.

    Raises:
        HistoryError: the file is missing, or a line is no JSON object, or no cell begins it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = (getattr(error, "strerror", None) or "not UTF-8").lower()
        raise HistoryError(f"{path}: cannot be read ({reason}): give the folder of a finished run") from None
    cell: list[Line] = []
    for number, raw in enumerate(text.splitlines(), start=1):
        line = _parse(raw, f"{path}:{number}")
        if line["event"] == "cell" and cell:
            yield cell
            cell = []
        elif line["event"] != "cell" and not cell:
            raise HistoryError(f"{path}:{number}: a history begins with a cell line: the file is cut or damaged")
        cell.append(line)
    if cell:
        yield cell


def _parse(raw: str, where: str) -> Line:
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise HistoryError(f"{where}: not JSON ({error}): the file is cut or damaged") from None
    if not isinstance(line, dict) or not isinstance(line.get("event"), str):
        raise HistoryError(f"{where}: not an object with an event: the file is cut or damaged")
    return line


def find_all(lines: Iterable[Line], event: str) -> list[Line]:
    """The lines of one event, in order."""
    return [line for line in lines if line["event"] == event]


def error_text(error: BaseException) -> str:
    """An error in one line, without what differs between two runs: addresses, and the folders of files."""
    first, *_ = str(error).splitlines() or [""]
    told = _FOLDERS.sub("", _ADDRESS.sub("0x...", first))
    return f"{type(error).__name__}: {told}" if told else type(error).__name__
