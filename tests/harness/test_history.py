from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from harness.errors import HistoryError
from harness.history import History, dump_line, error_text, find_all, read_cells

CELLS = [
    [{"event": "cell", "id": "a"}, {"event": "answer", "t": 1}, {"event": "end"}],
    [{"event": "cell", "id": "b", "text": "line\nbreak \u2028 \x1b[0m é"}, {"event": "end"}],
]


def write(path: Path, cells: list[list[dict]]) -> Path:
    path.write_text("".join(dump_line(line) + "\n" for cell in cells for line in cell), encoding="utf-8")
    return path


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    assert list(read_cells(write(tmp_path / "h", CELLS))) == CELLS


def test_a_line_is_written_and_flushed_as_it_comes() -> None:
    flushed: list[str] = []

    class Stream(io.StringIO):
        def flush(self) -> None:
            flushed.append(self.getvalue())

    history = History(Stream())
    history.add("cell", id="x", b=1, a=[None, True])
    history.add("end")
    assert flushed == ['{"a":[null,true],"b":1,"event":"cell","id":"x"}\n', flushed[0] + '{"event":"end"}\n']
    assert history.lines == [{"event": "cell", "id": "x", "b": 1, "a": [None, True]}, {"event": "end"}]


def test_equal_lines_are_equal_bytes_whatever_the_order_of_fields() -> None:
    assert dump_line({"b": 1, "a": {"d": 2, "c": 3}}) == dump_line({"a": {"c": 3, "d": 2}, "b": 1})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, b"kv"])
def test_what_is_no_json_is_refused(value: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        History(io.StringIO()).add("x", value=value)


def test_an_empty_file_has_no_cells(tmp_path: Path) -> None:
    assert list(read_cells(write(tmp_path / "h", []))) == []


def test_find_all_keeps_the_order() -> None:
    lines = [{"event": "a", "n": 1}, {"event": "b"}, {"event": "a", "n": 2}]
    assert [line["n"] for line in find_all(lines, "a")] == [1, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"event": "cell"}\n{"event": "en', "h:2: not JSON"),
        ('{"event": "cell"}\n\n', "h:2: not JSON"),
        ("garbage", "h:1: not JSON"),
        ('{"event": "answer"}', "h:1: a history begins with a cell line"),
        ('["event"]', "h:1: not an object with an event"),
        ('{"event": 3}', "h:1: not an object with an event"),
        ('{"evnt": "cell"}', "h:1: not an object with an event"),
        ("null", "h:1: not an object with an event"),
        ("[" * 5000, "h:1: not JSON"),
        ('{"event": "cell", "n": ' + "9" * 5000 + "}", "h:1: not JSON"),
    ],
)
def test_a_damaged_file_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "h"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(HistoryError) as caught:
        list(read_cells(path))
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert caught.value.exit_code == 64


def test_a_file_cut_anywhere_is_read_up_to_there_or_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "h", CELLS).read_bytes()
    for length in range(len(whole)):
        path = tmp_path / "cut"
        path.write_bytes(whole[:length])
        try:
            cells = list(read_cells(path))
        except HistoryError:
            continue
        lines = [line for cell in cells for line in cell]
        assert lines == [line for cell in CELLS for line in cell][: len(lines)]


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "h"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(HistoryError, match="cannot be read") as caught:
        list(read_cells(path))
    assert str(caught.value).count(str(path)) == 1


def test_a_folder_is_no_history(tmp_path: Path) -> None:
    with pytest.raises(HistoryError, match="cannot be read"):
        list(read_cells(tmp_path))


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyError("r1"), "KeyError: 'r1'"),
        (ValueError("first\nsecond"), "ValueError: first"),
        (ValueError(), "ValueError"),
        (TypeError("<Request object at 0x7f12ab34cd56> is odd"), "TypeError: <Request object at 0x...> is odd"),
        (OSError(2, "No such file", "/some/where/file.txt"), "FileNotFoundError: [Errno 2] No such file: 'file.txt'"),
        (ValueError("1/2 of /, a//b and and/or"), "ValueError: 1/2 of /, a//b and and/or"),
    ],
)
def test_an_error_is_told_without_addresses_and_folders(error: Exception, text: str) -> None:
    """So that two processes, and two machines, write the same history."""
    assert error_text(error) == text
    json.dumps(error_text(error))
