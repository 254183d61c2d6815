"""`kvchaos` as a process: its surroundings, signals, and what is left of it when it is killed."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.history import read_cells

Write = Callable[..., Path]
MAIN = [sys.executable, "-c", "from harness.cli import main; main()"]
PATIENCE = 90  # seconds until a test gives up; none of them waits that long


def environment(**changes: str) -> dict[str, str]:
    return {"PATH": os.environ.get("PATH", ""), "OMP_NUM_THREADS": "1", **changes}


def start(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    """In a process group of its own, as a shell starts it."""
    return subprocess.Popen(
        [*MAIN, *map(str, arguments)],
        text=True,
        start_new_session=True,
        env=environment(),
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options,
    )


def wait_for(process: subprocess.Popen[str], pattern: str, folder: Path) -> None:
    """Until a file is there: looks again whenever the process says something, and every 20 ms."""
    for _ in range(PATIENCE * 50):
        if next(folder.glob(pattern), None) is not None:
            return
        assert process.poll() is None, process.communicate()
        select.select([process.stderr], [], [], 0.02)
    raise AssertionError(f"no {pattern} in {folder}")


def test_a_strange_place_with_nothing_in_the_environment(write_scenario: Write, tmp_path: Path) -> None:
    """No HOME, no UTF-8, another folder than the project's, and a reader who has left."""
    path = write_scenario(summary="漢字 é ✓")
    read, write = os.pipe()
    os.close(read)
    for arguments, stdout in (
        (("run", path, "--policy", "off"), subprocess.PIPE),
        (("list", "scenarios", path), subprocess.PIPE),
        (("run", path, "--policy", "off"), write),
    ):
        done = subprocess.run(
            [*MAIN, *map(str, arguments)],
            cwd=tmp_path,
            env=environment(LC_ALL="C", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0", PYTHONIOENCODING="ascii"),
            stdout=stdout,
            stderr=subprocess.PIPE,
            timeout=PATIENCE,
        )
        assert (done.returncode, done.stderr) == (0, b"")
    os.close(write)
    assert (tmp_path / "runs" / "latest" / "report.html").exists()


@pytest.mark.parametrize(
    ("jobs", "pattern"),
    [
        (1, "runs/*/*/cells/*"),
        (2, "runs/*/*/manifest.json"),  # the worker processes are only starting
        (2, "runs/*/*/cells/*"),
    ],
)
def test_ctrl_c(kvchaos: Callable[..., Any], root: Path, tmp_path: Path, jobs: int, pattern: str) -> None:
    """To the whole process group, as a terminal sends it."""
    process = start("run", root / "scenarios" / "smoke", "--jobs", jobs, "--json", cwd=tmp_path)
    wait_for(process, pattern, tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (130, "")
    result = json.loads(out)
    assert result["interrupted"] is True
    run_dir = tmp_path / result["run_dir"]
    plan = json.loads((run_dir / "manifest.json").read_text())["plan"]
    cells = list(read_cells(run_dir / "history.jsonl"))
    assert len(cells) == len(result["cells"]) < len(plan)
    assert all(lines[-1]["event"] == "end" or lines[0]["missing"] for lines in cells)
    assert (tmp_path / "runs" / "latest").resolve() == run_dir.resolve()
    assert kvchaos("analyze", run_dir).code == 130


def test_sigterm_keeps_what_has_finished(root: Path, tmp_path: Path) -> None:
    """To the one process, as `kill` and whatever cancels a job send it."""
    process = start("run", root / "scenarios" / "smoke", "--json", cwd=tmp_path)
    wait_for(process, "runs/*/*/cells/*", tmp_path)
    process.terminate()
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (130, "")
    assert json.loads(out)["interrupted"] is True


def test_kill_9_leaves_no_process_and_no_pretence(kvchaos: Callable[..., Any], root: Path, tmp_path: Path) -> None:
    process = start("run", root / "scenarios" / "smoke", "--jobs", 2, cwd=tmp_path)
    wait_for(process, "runs/*/*/cells/*/history.jsonl", tmp_path)
    process.kill()
    # The workers hold the other end of these pipes: this returns when the last one is gone.
    out, _ = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (-signal.SIGKILL, "")
    (run_dir,) = (tmp_path / "runs" / "smoke").iterdir()
    assert not (tmp_path / "runs" / "latest").exists()
    done = kvchaos("analyze", run_dir)
    assert done.code == 64
    assert "history.jsonl: cannot be read (no such file or directory)" in done.err
