"""Runs the cells of a plan, in this process or in several, and keeps what they leave.

Each cell writes its own history as it goes. The run's history is put together in plan order, so that one process
and eight give the same bytes.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import torch

from harness.errors import CheckerError
from harness.history import History, Line, read_cells
from harness.judge import judge
from harness.observe import observe
from harness.plan import Cell
from harness.rundir import CELLS_DIR, HISTORY_FILE, TIMING_FILE, Options
from harness.targets import TARGETS
from reports.results import CellResult, RunResult
from scenarios.words import Role

Progress = Callable[[Cell], None]


def run_cell(cell: Cell, target: str, cell_dir: Path) -> float:
    """Run one cell and leave its history in `cell_dir`. Returns the seconds it took."""
    torch.set_num_threads(1)
    # Mismatches are what is looked for: the history has them, and the terminal belongs to the report.
    logging.getLogger("engine").setLevel(logging.CRITICAL)
    started = time.perf_counter()
    cell_dir.mkdir()
    with (cell_dir / HISTORY_FILE).open("w", encoding="utf-8") as stream:
        history = History(stream)
        try:
            TARGETS[target].run(cell, history)
        except Exception as error:  # noqa: BLE001 - not the engine (targets record its crashes): ours, and the rest goes on
            history.add("checker.crashed", error=f"harness: {type(error).__name__}: {error}")
    return time.perf_counter() - started


def run_cells(
    cells: Sequence[Cell], target: str, run_dir: Path, jobs: int, progress: Progress
) -> tuple[list[Cell], bool]:
    """Run all cells. Returns those that finished, in plan order, and whether the run was interrupted."""
    seconds: dict[str, float] = {}
    interrupted = False
    results = _in_this_process if jobs == 1 else _in_processes
    try:
        for cell, took in results(cells, target, run_dir / CELLS_DIR, jobs):
            seconds[cell.id] = took
            progress(cell)
    except KeyboardInterrupt:
        interrupted = True
    finished = [cell for cell in cells if cell.id in seconds]
    _merge(finished, run_dir, seconds)
    return finished, interrupted


def _in_this_process(cells: Sequence[Cell], target: str, cells_dir: Path, jobs: int) -> Iterator[tuple[Cell, float]]:
    for cell in cells:
        yield cell, run_cell(cell, target, cells_dir / cell.id)


def _ignore_interrupts() -> None:
    """Ctrl-C reaches the whole process group; the parent alone decides what it means."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _in_processes(cells: Sequence[Cell], target: str, cells_dir: Path, jobs: int) -> Iterator[tuple[Cell, float]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["harness.targets"])
    pool = ProcessPoolExecutor(min(jobs, len(cells)), mp_context=context, initializer=_ignore_interrupts)
    try:
        futures: dict[Future[float], Cell] = {
            pool.submit(run_cell, cell, target, cells_dir / cell.id): cell for cell in cells
        }
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool as error:
        raise CheckerError(f"a worker process died ({error}): was memory short? try fewer --jobs") from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _merge(finished: Sequence[Cell], run_dir: Path, seconds: dict[str, float]) -> None:
    """Write the run's history and timing, in plan order."""
    with (
        (run_dir / HISTORY_FILE).open("w", encoding="utf-8") as history,
        (run_dir / TIMING_FILE).open("w", encoding="utf-8") as timing,
    ):
        for cell in finished:
            history.write((run_dir / CELLS_DIR / cell.id / HISTORY_FILE).read_text(encoding="utf-8"))
            timing.write(json.dumps({"cell": cell.id, "seconds": round(seconds[cell.id], 6)}) + "\n")


def judge_run(run_dir: Path, options: Options, interrupted: bool) -> RunResult:
    """Judge the stored history of a run."""
    cells = tuple(_judge_cell(lines, options) for lines in read_cells(run_dir / HISTORY_FILE))
    return RunResult(options.name, options.target, options.seed, interrupted, cells)


def _judge_cell(lines: list[Line], options: Options) -> CellResult:
    seen = observe(lines)
    scenario = None if seen.role is Role.TWIN else seen.scenario.name
    return judge(seen, options.rerun(scenario, seen.policy))
