"""Rows: what is written is what is read, at once, and whatever became of the writer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InputError
from harness.overhead.rows import COLUMNS, Row, RowsError, RowsFile, _cells, _row, read_rows

ROW = Row(
    study="overhead",
    block=3,
    slot=1,
    arm="B",
    cell="1000tok-low",
    prompt_tokens=1000,
    load="low",
    prompt_id="p",
    request_id="r",
    warmup=0,
    intended_s=1.25,
    sent_s=1.250001,
    first_token_s=1.5,
    end_s=2.0,
    ttft_s=0.25,
    itl_s=None,
    output_tokens=1,
    status=200,
    error="",
    verdict="verified",
)
FAILED = replace(ROW, first_token_s=None, ttft_s=None, output_tokens=0, status=0, error='Connect "x", y', verdict="")
HEADER = (
    "study,block,slot,arm,cell,prompt_tokens,load,prompt_id,request_id,warmup,intended_s,sent_s,first_token_s,end_s,"
    "ttft_s,itl_s,output_tokens,status,error,verdict"
)


def test_a_row_is_on_disk_when_it_has_been_appended(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.csv"
    with RowsFile(path) as file:
        for count, row in enumerate((ROW, FAILED), 1):
            file.append(row)
            assert len(path.read_text().splitlines()) == 1 + count
    assert read_rows(path) == (ROW, FAILED)


def test_the_columns_are_those_that_are_promised(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    RowsFile(path).close()
    assert path.read_text() == HEADER + "\n"
    assert ",".join(COLUMNS) == HEADER


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    with RowsFile(path) as file:
        file.append(ROW)
        file.append(FAILED)
    path.write_text(path.read_text()[:-9])
    assert read_rows(path) == (ROW,)


def test_the_rows_of_another_study_are_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    RowsFile(path).close()
    with pytest.raises(InputError, match=r"rows\.csv: cannot be made \(file exists\)"):
        RowsFile(path)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "its first line"),
        ("a,b\n", "its first line"),
        (HEADER + "\noverhead,1\n", r"rows\.csv:2: no row"),
        (HEADER + "\n" + "x," * 19 + "x\n", r"rows\.csv:2: no row"),
    ],
)
def test_what_is_no_file_of_rows(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(text)
    with pytest.raises(RowsError, match=why):
        read_rows(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RowsError, match="cannot be read"):
        read_rows(tmp_path / "rows.csv")


times = st.floats(0, 1e6)


@given(
    sent=times,
    first=st.none() | times,
    itl=st.none() | times,
    error=st.text(st.characters(blacklist_categories=("Cs", "Cc")), max_size=20),
    block=st.integers(-1, 1000),
)
def test_any_row_comes_back(sent: float, first: float | None, itl: float | None, error: str, block: int) -> None:
    row = replace(ROW, sent_s=sent, first_token_s=first, itl_s=itl, error=error, block=block)
    assert _row(list(_cells(row)), Path("rows.csv"), 2) == row


@pytest.mark.parametrize(("row", "ok"), [(ROW, True), (FAILED, False), (replace(ROW, error="broke off"), False)])
def test_a_row_with_an_error_says_nothing_of_time(row: Row, ok: bool) -> None:
    assert row.ok is ok
