from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import judge

Run = Callable[..., Any]
REPORTS = ("results.json", "junit.xml", "summary.md", "report.html")


@pytest.fixture
def run_dir(kvchaos: Run, write_scenario: Callable[..., Path]) -> Path:
    """A run of four cells that all came out as expected."""
    return Path(kvchaos("run", write_scenario(), "--json").json["run_dir"])


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_it_says_what_the_run_said(kvchaos: Run, run_dir: Path) -> None:
    before = contents(run_dir)
    done = kvchaos("analyze", run_dir)
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[-1] == "Judged differently from results.json: nothing."
    stored = json.loads((run_dir / "results.json").read_text())
    again = kvchaos("analyze", run_dir, "--json").json
    assert again.pop("exit_code") == 0
    assert again == {name: value for name, value in stored.items() if name != "schema_version"}
    assert contents(run_dir) == before


def test_through_latest_and_from_another_folder(
    kvchaos: Run, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    latest = Path("runs/latest").absolute()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert kvchaos("analyze", latest).code == 0
    assert kvchaos("analyze", os.path.relpath(latest)).code == 0


def test_write_makes_the_reports_anew(kvchaos: Run, run_dir: Path) -> None:
    before = contents(run_dir)
    for name in REPORTS:
        (run_dir / name).unlink()
    done = kvchaos("analyze", run_dir)
    assert done.code == 0
    assert "There is no results.json to compare with" in done.out
    assert kvchaos("analyze", run_dir, "--write").code == 0
    assert contents(run_dir) == before


@pytest.mark.parametrize("damage", [b"", b"{", b'{"schema_version": 1}', b"\xff"])
def test_damaged_results_are_no_obstacle(kvchaos: Run, run_dir: Path, damage: bytes) -> None:
    """They say themselves that analyze writes them anew."""
    whole = (run_dir / "results.json").read_bytes()
    (run_dir / "results.json").write_bytes(damage)
    done = kvchaos("analyze", run_dir)
    assert (done.code, done.err) == (0, "")
    assert "Not compared with" in done.out.splitlines()[-1]
    assert kvchaos("analyze", run_dir, "--write").code == 0
    assert (run_dir / "results.json").read_bytes() == whole


def test_another_judge_comes_to_another_result(kvchaos: Run, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "_unexplained", lambda pairs, gap: iter(["planted"]))
    done = kvchaos("analyze", run_dir)
    assert done.code == 1
    changed = done.out.splitlines()[-1]
    assert changed.startswith("Judged differently from results.json: flip--off, flip--fail_open, twin-")


def test_what_was_stopped_stays_stopped(kvchaos: Run, run_dir: Path) -> None:
    """Also if results.json, which says so too, is gone: a part of a run never counts as the whole."""
    lines = (run_dir / "history.jsonl").read_text().splitlines(keepends=True)
    last = max(n for n, line in enumerate(lines) if '"event":"cell"' in line)
    (run_dir / "history.jsonl").write_text("".join(lines[:last]))
    (run_dir / "results.json").unlink()
    done = kvchaos("analyze", run_dir)
    assert done.code == 130
    assert "INTERRUPTED: The run was stopped after 3 cells" in done.out


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("no folder", "no such folder"),
        ("no manifest", "manifest.json: cannot be read (no such file or directory)"),
        ("no history", "history.jsonl: cannot be read (no such file or directory)"),
        ("cut history", "history.jsonl:"),
        ("cut manifest", "manifest.json: cannot be read"),
        ("binary history", "history.jsonl: cannot be read (not utf-8)"),
        ("other cells", "history.jsonl: its cells are not those of manifest.json"),
    ],
)
def test_a_damaged_run_is_64_in_one_line(kvchaos: Run, run_dir: Path, damage: str, message: str) -> None:
    history, manifest = run_dir / "history.jsonl", run_dir / "manifest.json"
    if damage == "no folder":
        shutil.rmtree(run_dir)
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "no history":
        history.unlink()
    elif damage == "cut history":
        history.write_bytes(history.read_bytes()[:-40])
    elif damage == "cut manifest":
        manifest.write_bytes(manifest.read_bytes()[:-40])
    elif damage == "binary history":
        history.write_bytes(b"\xff" * 10)
    else:
        history.write_text(history.read_text().replace("flip--off", "flop--off"))
    for arguments in ((), ("--write",), ("--json",)):
        done = kvchaos("analyze", run_dir, *arguments)
        assert (done.code, done.out) == (64, "")
        (line,) = done.err.splitlines()
        assert message in line


def test_a_file_is_no_run(kvchaos: Run, run_dir: Path) -> None:
    done = kvchaos("analyze", run_dir / "manifest.json")
    assert done.code == 64
    assert "is a file" in done.err


def test_an_empty_history_is_no_pass(kvchaos: Run, run_dir: Path) -> None:
    (run_dir / "history.jsonl").write_text("")
    assert kvchaos("analyze", run_dir).code == 130
