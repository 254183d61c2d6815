"""`kvchaos overhead` on the pair that it starts: both arms are what they say, and nothing outlives it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.overhead.rows import read_rows

PATIENCE = 300
STUDY = [
    sys.executable,
    "-c",
    "from harness.cli import main; main()",
    "overhead",
    "--length",
    "40",
    "--max-blocks",
    "8",
]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Any]:
    """Starts a study; it is killed if a test leaves it."""
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        processes.append(subprocess.Popen([*STUDY, *arguments], cwd=tmp_path, text=True, **pipes))
        return processes[-1]

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.communicate()


def test_requests_with_checksums_are_verified_and_others_are_not_checked(started: Any, tmp_path: Path) -> None:
    process = started("--json")
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode in (0, 1, 2), err
    folder = tmp_path / "runs" / "overhead" / "latest"
    rows = read_rows(folder / "rows.csv")
    assert [row.error for row in rows if not row.ok] == []
    assert {(row.arm, row.verdict) for row in rows} == {("A", "not_checked"), ("B", "verified")}
    assert {row.output_tokens for row in rows} == {4}
    assert [cell["blocks"] for cell in json.loads(out)["cells"]] == [8, 8]
    costs = json.loads((folder / "study.json").read_text())["costs"]
    assert set(costs) == {"40tok-low", "40tok-high"}
    assert all(cell["seconds"]["producer: sum"] > 0 < cell["seconds"]["consumer: sum"] for cell in costs.values())


def test_a_delay_that_is_planted_comes_on_top(started: Any, tmp_path: Path) -> None:
    """300 ms on a request of a few milliseconds: seen by any machine."""
    process = started("--load", "low", "--planted", "300ms")
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err + out
    assert "40tok-low: OVERHEAD" in out
    rows = read_rows(tmp_path / "runs" / "overhead" / "latest" / "rows.csv")
    assert min(row.ttft_s for row in rows if row.arm == "B" and row.ttft_s is not None) > 0.3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_pair_and_keeps_the_rows(started: Any, tmp_path: Path, number: signal.Signals) -> None:
    process = started("--load", "high", "--max-blocks", "10000", "--time-limit", "10000")
    for line in process.stderr:
        if "capacity" in line:
            break
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 3
    process.send_signal(number)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []
    folder = tmp_path / "runs" / "overhead" / "latest"
    assert len(read_rows(folder / "rows.csv")) >= 8
    assert (folder / "report.html").exists()
