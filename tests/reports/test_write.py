"""Four files, whole or not at all."""

from __future__ import annotations

import pytest

from reports.errors import ReportError
from reports.files import write_atomically
from reports.results import read_results
from reports.write import REPORT_FILES, write_reports


def test_all_reports_of_a_run(tmp_path, troubled):
    write_reports(tmp_path, troubled)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(REPORT_FILES)
    assert read_results(tmp_path / "results.json") == troubled


def test_the_same_run_gives_the_same_bytes(tmp_path, troubled):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_reports(tmp_path / name, troubled)
    for name in REPORT_FILES:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_folder_that_is_not_there_is_an_error(tmp_path, smoke):
    with pytest.raises(ReportError, match=r"nowhere/results\.json: cannot be written"):
        write_reports(tmp_path / "nowhere", smoke)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "summary.md"
    write_atomically(path, "old\n")

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(ReportError, match="No space left"):
        write_atomically(path, "new\n")
    assert path.read_text() == "old\n"
    assert [p.name for p in tmp_path.iterdir()] == ["summary.md"]


def test_lines_end_the_same_everywhere(tmp_path):
    write_atomically(tmp_path / "x", "a\nb\n")
    assert (tmp_path / "x").read_bytes() == b"a\nb\n"
