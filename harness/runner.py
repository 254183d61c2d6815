"""Runs the cells of a plan, in this process or in several, and keeps what they leave.

Each cell writes its own history as it goes. The run's history is put together in plan order, so that one process
and eight give the same bytes.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from harness.errors import HistoryError, RunError
from harness.history import History, Line, error_text, read_cells
from harness.judge import judge, judge_repeat, not_judged
from harness.observe import CellObservation, observe
from harness.plan import Cell
from harness.rundir import CELLS_DIR, HISTORY_FILE, MANIFEST_FILE, TIMING_FILE, Options, read_manifest
from harness.shards import Shard
from harness.targets import TARGETS
from reports.files import write_atomically
from reports.results import CellResult, RunResult
from reports.timeline import timeline

Progress = Callable[[Cell], None]


def run_cell(cell: Cell, target: str, cell_dir: Path) -> float:
    """Run one cell and leave its history in `cell_dir`. Returns the seconds it took.

    Raises:
        RunError: the history cannot be written.
    """
    torch.set_num_threads(1)
    started = time.perf_counter()
    try:
        cell_dir.mkdir()
        with (cell_dir / HISTORY_FILE).open("w", encoding="utf-8") as stream, _quiet_engines():
            history = History(stream)
            try:
                TARGETS[target].run(cell, history)
            except Exception as error:  # noqa: BLE001 - targets record what engines raise: this is ours, the rest goes on
                history.add("checker.crashed", error=f"harness: {error_text(error)}")
    except OSError as error:
        raise RunError(f"{cell_dir}: cannot be written ({error.strerror}): is there room, and is it yours?") from None
    return time.perf_counter() - started


@contextmanager
def _quiet_engines() -> Iterator[None]:
    """Mismatches are what is looked for: the history has them, and the terminal belongs to the report."""
    logger = logging.getLogger("engine")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def run_cells(
    cells: Sequence[Cell], target: str, run_dir: Path, jobs: int, progress: Progress
) -> tuple[list[Cell], bool]:
    """Run all cells. Returns those that finished, in plan order, and whether the run was interrupted.

    Raises:
        RunError: a cell cannot be written, or a worker process died. What finished is in the run's history.
    """
    seconds: dict[str, float] = {}
    interrupted = False
    results = _in_this_process if jobs == 1 else _in_processes
    try:
        for cell, took in results(cells, target, run_dir / CELLS_DIR, jobs):
            seconds[cell.id] = took
            progress(cell)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        finished = [cell for cell in cells if cell.id in seconds]
        _merge(finished, run_dir, seconds)
    return finished, interrupted


def _in_this_process(cells: Sequence[Cell], target: str, cells_dir: Path, jobs: int) -> Iterator[tuple[Cell, float]]:
    for cell in cells:
        yield cell, run_cell(cell, target, cells_dir / cell.id)


def _in_processes(cells: Sequence[Cell], target: str, cells_dir: Path, jobs: int) -> Iterator[tuple[Cell, float]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["harness.targets"])
    pool = ProcessPoolExecutor(min(jobs, len(cells)), mp_context=context, initializer=_prepare_worker)
    try:
        with _interrupts_wait():
            futures: dict[Future[float], Cell] = {
                pool.submit(run_cell, cell, target, cells_dir / cell.id): cell for cell in cells
            }
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool:
        raise RunError(
            f"{cells_dir.parent}: a worker process died, and the run with it (what finished is kept): "
            "was memory short? try fewer --jobs"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Ctrl-C reaches the whole process group, but this process alone decides what it means.

    Processes that are started in here never get it, not even while they still import what they need; this one gets
    it afterwards.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _prepare_worker() -> None:
    """Ignore Ctrl-C, and do not outlive the process that wanted the results, however it ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_exit_after, args=(parent.sentinel,), daemon=True).start()


def _exit_after(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os._exit(1)


def _merge(finished: Sequence[Cell], run_dir: Path, seconds: dict[str, float]) -> None:
    """Write the run's history and timing, in plan order."""
    histories = [(run_dir / CELLS_DIR / cell.id / HISTORY_FILE).read_text(encoding="utf-8") for cell in finished]
    timing = [json.dumps({"cell": cell.id, "seconds": round(seconds[cell.id], 6)}) + "\n" for cell in finished]
    write_atomically(run_dir / HISTORY_FILE, "".join(histories))
    write_atomically(run_dir / TIMING_FILE, "".join(timing))


def judge_run(run_dir: Path, options: Options) -> RunResult:
    """Judge the stored history of a run. One that lacks cells of its plan was interrupted.

    Raises:
        HistoryError: the history or the manifest cannot be read, or its cells are not those of the plan.
    """
    manifest = read_manifest(run_dir)
    shard = None if manifest["shard"] is None else Shard.parse(manifest["shard"])
    plan = [cell_id for cell_id in manifest["plan"] if shard is None or shard.holds_id(cell_id)]
    histories = list(read_cells(run_dir / HISTORY_FILE))
    seen = [observe(lines) for lines in histories]
    found = [cell.id for cell in seen]
    if found != [cell_id for cell_id in plan if cell_id in set(found)]:
        raise HistoryError(
            f"{run_dir / HISTORY_FILE}: its cells are not those of {MANIFEST_FILE}, each once and in order: "
            "the file is damaged, or of another run"
        )
    by_id = dict(zip(found, histories, strict=True))
    through = {cell.twin: cell.scenario.name for cell in reversed(seen) if cell.twin is not None}
    cells = tuple(_judge_cell(cell, options, through.get(cell.id, cell.scenario.name), by_id) for cell in seen)
    return RunResult(options.name, options.target, options.seed, len(found) < len(plan), cells)


def judge_told(cell: CellObservation, lines: list[Line], rerun: str) -> CellResult:
    """The judgement of one cell, with the timeline of its history. A judge that crashes leaves the cell unknown."""
    try:
        return replace(judge(cell, rerun), timeline=timeline(lines))
    except Exception as error:  # noqa: BLE001 - whatever is wrong with the judge, the other cells are judged
        return not_judged(cell, rerun, f"the judge crashed: {error_text(error)}")


def _judge_cell(
    cell: CellObservation, options: Options, scenario: str, histories: Mapping[str, list[Line]]
) -> CellResult:
    """`scenario` is the one to run again: a twin's first that names it, any other cell's own."""
    rerun = options.rerun(scenario, cell.policy, repeat=cell.repeats is not None)
    result = judge_told(cell, histories[cell.id], rerun)
    return result if cell.repeats is None else judge_repeat(result, histories.get(cell.repeats), histories[cell.id])
