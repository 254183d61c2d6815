"""The rows of an overhead study: one a request that was sent, in `rows.csv`, written the moment it is known.

Everything that a study says is made from these rows, so whoever doubts a figure can count again. A request that failed
is a row like any other: leaving it out would make an engine that refuses work look fast.
"""

from __future__ import annotations

import csv
import io
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Self

from engine.errors import InputError

ROWS_FILE = "rows.csv"
ARM_OFF, ARM_ON = "A", "B"


@dataclass(frozen=True, slots=True)
class Row:
    """One request. Times are seconds of a monotonic clock since the study began; `ttft_s` and `itl_s` are durations.

    Attributes:
        study: what the rows together are, such as `overhead` or `aa`.
        block: number of the ABBA block within its cell from 0, or -1 before the first; slot: 0 to 3, its place in it.
        arm: `A` checksums off, `B` on. In an A/A study both are off and the labels stay.
        cell: prompt length and load level, such as `8000tok-low`.
        load: `low` or `high`.
        prompt_tokens: length of the prompt. prompt_id: the prompt, which the four slots of a block share.
        warmup: 1 for a row that no estimate may use.
        intended_s: when the request was to be sent, fixed beforehand; sent_s: when it was.
        first_token_s: when the first token arrived; None if none did. end_s: when the answer or the error was complete.
        ttft_s: first_token_s - intended_s; None after an error.
        itl_s: mean time between two tokens; None with fewer than two tokens.
        status: of HTTP, or 0 without an answer; error: empty if none.
        verdict: what the engine says of the KV load, if it does.
    """

    study: str
    block: int
    slot: int
    arm: str
    cell: str
    prompt_tokens: int
    load: str
    prompt_id: str
    request_id: str
    warmup: int
    intended_s: float
    sent_s: float
    first_token_s: float | None
    end_s: float
    ttft_s: float | None
    itl_s: float | None
    output_tokens: int
    status: int
    error: str
    verdict: str

    @property
    def ok(self) -> bool:
        """Answered in full: the row can say something about time."""
        return not self.error and self.ttft_s is not None


COLUMNS = tuple(field.name for field in fields(Row))
_KINDS = {field.name: str(field.type) for field in fields(Row)}


class RowsError(InputError):
    """A file of rows cannot be read."""


class RowsFile:
    """Writes rows to a new file; each is with the operating system when `append` returns, so Ctrl-C loses none."""

    def __init__(self, path: Path) -> None:
        """Make the file, with its header.

        Raises:
            InputError: it is there already, or cannot be written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("x", encoding="utf-8", newline="")
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise InputError(f"{path}: cannot be made ({reason}): choose another place for the rows") from None
        self._write(COLUMNS)

    def append(self, row: Row) -> None:
        """Write one row."""
        self._write(_cells(row))

    def close(self) -> None:
        """Close the file; what was appended stays."""
        self._file.close()

    def _write(self, cells: tuple[str, ...]) -> None:
        line = io.StringIO()
        csv.writer(line, lineterminator="\n").writerow(cells)
        self._file.write(line.getvalue())
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def read_rows(path: Path) -> tuple[Row, ...]:
    """All rows of a file, in its order. A last line that was cut off (the writer was killed) is left out.

    Raises:
        RowsError: it is missing, or holds something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RowsError(f"{path}: cannot be read ({error}): give the {ROWS_FILE} of a study") from None
    lines = list(csv.reader(io.StringIO(text, newline="")))
    if not lines or tuple(lines[0]) != COLUMNS:
        raise RowsError(f"{path}: its first line is not that of a {ROWS_FILE}: {','.join(COLUMNS)}")
    if not text.endswith("\n"):
        lines.pop()
    return tuple(_row(cells, path, number) for number, cells in enumerate(lines[1:], 2))


def _cells(row: Row) -> tuple[str, ...]:
    # The shortest text that reads back as the same float: figures made from the file are those of the study itself.
    return tuple(
        "" if value is None else repr(value) if isinstance(value, float) else str(value) for value in astuple(row)
    )


def _row(cells: list[str], path: Path, number: int) -> Row:
    try:
        values = {name: _value(_KINDS[name], text) for name, text in zip(COLUMNS, cells, strict=True)}
        return Row(**values)  # type: ignore[arg-type]
    except ValueError as error:
        raise RowsError(f"{path}:{number}: no row of a study ({error})") from None


def _value(kind: str, text: str) -> str | int | float | None:
    if kind == "str":
        return text
    if kind == "int":
        return int(text)
    if kind == "float | None" and not text:
        return None
    return float(text)
