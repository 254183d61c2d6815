from __future__ import annotations

import errno
import json
import logging
import os
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from harness import runner
from harness.errors import HistoryError, RunError
from harness.history import History, read_cells
from harness.plan import Cell, plan_cells
from harness.rundir import CELLS_DIR, HISTORY_FILE, TIMING_FILE, Options, create
from harness.runner import judge_run, run_cell, run_cells
from harness.targets import TARGETS
from scenarios.words import Policy, Result

POLICIES = (Policy.OFF, Policy.FAIL_OPEN)
Runs = Callable[..., tuple[list[Cell], Path]]


@pytest.fixture
def plan(scenario_of: Callable[..., Any], clean: dict[str, Any], tmp_path: Path) -> Runs:
    """A plan of six cells (two scenarios, two policies, twins for one) and a folder to run it in."""

    def make(name: str = "run") -> tuple[list[Cell], Path]:
        cells = plan_cells([scenario_of("clean", **clean), scenario_of()], POLICIES, 3, TARGETS["sim"].provides)
        options = Options(name, "sim", 3, POLICIES, {})
        return cells, create(tmp_path, options, [cell.id for cell in cells], None, [], datetime.now(UTC))

    return make


def run(cells: list[Cell], run_dir: Path, jobs: int = 1, progress: Callable[[Cell], None] | None = None) -> Any:
    return run_cells(cells, "sim", run_dir, jobs, progress or (lambda cell: None))


def ids(run_dir: Path) -> list[str]:
    return [lines[0]["id"] for lines in read_cells(run_dir / HISTORY_FILE)]


def judged(run_dir: Path) -> Any:
    return judge_run(run_dir, Options("run", "sim", 3, POLICIES, {}))


def test_one_process_and_two_leave_the_same_bytes(plan: Runs) -> None:
    (cells, one), (_, two) = plan("one"), plan("two")
    told: list[str] = []
    assert run(cells, one, 1, lambda cell: told.append(cell.id)) == (cells, False)
    assert run(cells, two, 2) == (cells, False)
    assert told == ids(one) == [cell.id for cell in cells]
    assert (one / HISTORY_FILE).read_bytes() == (two / HISTORY_FILE).read_bytes()
    for cell in cells:
        path = Path(CELLS_DIR, cell.id, HISTORY_FILE)
        assert (one / path).read_bytes() == (two / path).read_bytes()
    assert judged(one) == judged(two)


def test_the_order_of_a_plan_and_what_else_is_in_it_change_no_cell(plan: Runs) -> None:
    (cells, whole), (_, part) = plan("whole"), plan("part")
    run(cells, whole)
    run([cells[4], cells[1]], part)
    for cell in (cells[4], cells[1]):
        path = Path(CELLS_DIR, cell.id, HISTORY_FILE)
        assert (whole / path).read_bytes() == (part / path).read_bytes()


def test_seconds_are_kept_apart_from_the_history(plan: Runs) -> None:
    cells, run_dir = plan()
    run(cells, run_dir)
    timing = [json.loads(line) for line in (run_dir / TIMING_FILE).read_text().splitlines()]
    assert [line["cell"] for line in timing] == [cell.id for cell in cells]
    assert all(line["seconds"] > 0 for line in timing)


@pytest.mark.parametrize("after", [0, 1, 4])
def test_ctrl_c_keeps_the_cells_that_finished(plan: Runs, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    cells, run_dir = plan()
    started: list[str] = []
    original = TARGETS["sim"].run

    def interrupted(cell: Cell, history: History) -> None:
        started.append(cell.id)
        if len(started) > after:
            history.add("cell", id=cell.id)
            raise KeyboardInterrupt
        original(cell, history)

    monkeypatch.setattr(TARGETS["sim"], "run", interrupted)
    assert run(cells, run_dir) == (cells[:after], True)
    assert ids(run_dir) == [cell.id for cell in cells[:after]]
    assert (run_dir / CELLS_DIR / cells[after].id).exists()
    result = judged(run_dir)
    assert (result.interrupted, result.exit_code, len(result.cells)) == (True, 130, after)


def test_ctrl_c_between_two_cells(plan: Runs) -> None:
    cells, run_dir = plan()

    def stop(cell: Cell) -> None:
        raise KeyboardInterrupt

    assert run(cells, run_dir, 1, stop) == (cells[:1], True)
    assert judged(run_dir).exit_code == 130


def test_a_target_that_raises_makes_its_cell_unknown_and_the_rest_goes_on(
    plan: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells, run_dir = plan()
    original = TARGETS["sim"].run

    def broken(cell: Cell, history: History) -> None:
        if cell.id == "flip--off":
            history.add("cell", **_head(cell))
            raise IndexError("at 0x7f0000000000 in /some/where/file.py")
        original(cell, history)

    monkeypatch.setattr(TARGETS["sim"], "run", broken)
    assert run(cells, run_dir) == (cells, False)
    results = {cell.id: cell for cell in judged(run_dir).cells}
    assert [cell_id for cell_id, cell in results.items() if cell.result is not Result.PASS] == ["flip--off"]
    assert results["flip--off"].result is Result.UNKNOWN
    assert results["flip--off"].why == ("a checker crashed: harness: IndexError: at 0x... in file.py",)
    assert judged(run_dir).exit_code == 2


def _head(cell: Cell) -> dict[str, Any]:
    return {
        "id": cell.id,
        "target": "sim",
        "scenario": cell.scenario.to_plain(),
        "policy": str(cell.policy),
        "role": str(cell.role),
        "seed": cell.seed,
        "twin": cell.twin,
        "missing": [],
        "repeats": None,
    }


def test_an_engines_logger_is_quiet_only_while_a_cell_runs(plan: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    cells, run_dir = plan()
    levels: list[int] = []
    monkeypatch.setattr(TARGETS["sim"], "run", lambda cell, history: levels.append(logging.getLogger("engine").level))
    before = logging.getLogger("engine").level
    run_cell(cells[0], "sim", run_dir / CELLS_DIR / "x")
    assert levels == [logging.CRITICAL]
    assert logging.getLogger("engine").level == before


def test_a_full_disk_is_one_line_and_no_cell(plan: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(History):
        def add(self, event: str, **fields: Any) -> None:
            if len(self.lines) == 10:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().add(event, **fields)

    cells, run_dir = plan()
    monkeypatch.setattr(runner, "History", Full)
    with pytest.raises(RunError, match=r"cells/clean--off: cannot be written \(No space left on device\)") as caught:
        run(cells, run_dir)
    assert caught.value.exit_code == 70
    assert ids(run_dir) == []


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_cell_whose_folder_cannot_be_made_is_one_line(plan: Runs, jobs: int) -> None:
    cells, run_dir = plan()
    (run_dir / CELLS_DIR / cells[0].id).touch()
    with pytest.raises(RunError, match=r"clean--off: cannot be written \(File exists\)"):
        run(cells, run_dir, jobs)


def test_a_worker_that_dies_fails_the_run_and_keeps_what_finished(
    plan: Runs, scenario_of: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool cannot say which cell killed it, so no cell is blamed."""
    pools: list[ProcessPoolExecutor] = []

    class Kept(ProcessPoolExecutor):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            pools.append(self)

    def kill(cell: Cell) -> None:
        for pid in list(pools[0]._processes or ()):
            os.kill(pid, signal.SIGKILL)

    workload = {"requests": 8, "prompt_tokens": 200, "output_tokens": 8}
    cells = plan_cells(
        [scenario_of(f"s{n}", workload=workload) for n in range(8)], POLICIES, 3, TARGETS["sim"].provides
    )
    options = Options("killed", "sim", 3, POLICIES, {})
    run_dir = create(tmp_path, options, [cell.id for cell in cells], None, [], datetime.now(UTC))
    monkeypatch.setattr(runner, "ProcessPoolExecutor", Kept)
    with pytest.raises(RunError, match="a worker process died") as caught:
        run(cells, run_dir, 2, kill)
    assert caught.value.exit_code == 70
    assert 1 <= len(ids(run_dir)) < len(cells)
    assert judged(run_dir).exit_code == 130


def test_more_jobs_than_cells(plan: Runs) -> None:
    cells, run_dir = plan()
    assert run(cells[:1], run_dir, 64) == (cells[:1], False)


# ---- judging what is stored


def test_a_run_of_which_cells_are_missing_was_interrupted(plan: Runs) -> None:
    """Whatever became of its results.json: a part of a run never counts as the whole."""
    cells, run_dir = plan()
    run(cells[:2], run_dir)
    result = judged(run_dir)
    assert (result.interrupted, result.exit_code) == (True, 130)


@pytest.mark.parametrize("change", ["twice", "unplanned", "order"])
def test_a_history_that_is_not_of_the_plan_is_refused(plan: Runs, change: str) -> None:
    cells, run_dir = plan()
    run(cells, run_dir)
    path = run_dir / HISTORY_FILE
    text = path.read_text()
    if change == "twice":
        path.write_text(text + (run_dir / CELLS_DIR / cells[0].id / HISTORY_FILE).read_text())
    elif change == "order":
        first = (run_dir / CELLS_DIR / cells[0].id / HISTORY_FILE).read_text()
        path.write_text(text.removeprefix(first) + first)
    else:
        path.write_text(text.replace('"id":"flip--off"', '"id":"flop--off"'))
    with pytest.raises(HistoryError, match="cells"):
        judged(run_dir)


def test_a_twin_is_run_again_through_a_scenario_that_names_it(plan: Runs, tmp_path: Path) -> None:
    cells, run_dir = plan()
    run(cells, run_dir)
    options = Options("run", "sim", 3, POLICIES, {"clean": "c.yaml", "flip": "f.yaml"})
    for cell in judge_run(run_dir, options).cells:
        source = "c.yaml" if cell.scenario == "clean" else "f.yaml"
        assert cell.rerun == f"kvchaos run {source} --policy {cell.policy} --seed 3 --target sim"
