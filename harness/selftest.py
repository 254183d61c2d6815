"""The selftest: would anybody notice? Each mutant is put in alone, and its killers and its control are tried.

First all of these must be content without any mutant, else nothing can be concluded.
"""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import TypeVar

from engine.errors import EXIT_SOFTWARE
from harness.errors import CheckerError
from harness.mutants import MUTANTS
from harness.mutants.base import Mutant
from harness.mutants.bench import Bench
from harness.mutants.trial import State, Trial, notice, try_mutant, unique_probes
from harness.runner import _interrupts_wait, _prepare_worker, _quiet_engines

EXIT_SURVIVED = 1

T = TypeVar("T")
Advance = Callable[[str], None]


class SelftestError(CheckerError):
    """The selftest cannot conclude anything."""


@dataclass(frozen=True, slots=True)
class SelftestResult:
    """All trials, in the order of the mutants."""

    seed: int
    trials: tuple[Trial, ...]

    def of(self, *states: State) -> tuple[Trial, ...]:
        """The trials that came out in one of these ways."""
        return tuple(trial for trial in self.trials if trial.state in states)

    @property
    def exit_code(self) -> int:
        """1 a mutant survived or its control noticed it (wins over 70); 70 one was never reached; 0 all were killed."""
        if self.of(State.SURVIVED, State.CONTROL_NOTICED):
            return EXIT_SURVIVED
        return EXIT_SOFTWARE if self.of(State.NEVER_REACHED) or not self.trials else 0


def run_selftest(
    mutants: Sequence[Mutant], seed: int = 0, jobs: int = 1, advance: Advance = lambda _: None
) -> SelftestResult:
    """Try mutants, in this process or (those of `MUTANTS`) in several. `advance` is told of each step.

    Raises:
        SelftestError: a killer or a control is not content without any mutant, or a worker process died.
    """
    probes = list(unique_probes(mutants))
    names = [mutant.name for mutant in mutants]
    if jobs == 1:
        by_name = {mutant.name: mutant for mutant in mutants}
        known = unique_probes(mutants)
        with _quiet_engines():
            _check_baseline(_here(lambda name: notice(Bench(seed), known[name]), probes, advance))
            trials = _here(lambda name: try_mutant(by_name[name], seed), names, advance)
    else:
        if strange := [mutant.name for mutant in mutants if mutant not in MUTANTS]:
            raise SelftestError(f"{', '.join(strange)}: not of harness/mutants, which other processes know")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["harness.selftest"])
        pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_start_worker)
        try:
            _check_baseline(_elsewhere(pool, _baseline_of, probes, seed, advance))
            trials = _elsewhere(pool, _trial_of, names, seed, advance)
        except BrokenProcessPool as error:
            raise SelftestError(f"a worker process died ({error}): was memory short? try fewer --jobs") from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    return SelftestResult(seed, tuple(trials[name] for name in names))


def _check_baseline(found: dict[str, str | None]) -> None:
    bad = [f"{name}: {how}" for name, how in found.items() if how is not None]
    if bad:
        raise SelftestError("\n".join(["not as it should be without any mutant, so nothing can be concluded:", *bad]))


def _here(work: Callable[[str], T], names: Sequence[str], advance: Advance) -> dict[str, T]:
    done: dict[str, T] = {}
    for name in names:
        done[name] = work(name)
        advance(name)
    return done


def _elsewhere(
    pool: ProcessPoolExecutor, work: Callable[[str, int], T], names: Sequence[str], seed: int, advance: Advance
) -> dict[str, T]:
    with _interrupts_wait():
        futures = {pool.submit(work, name, seed): name for name in names}
    done: dict[str, T] = {}
    for future in as_completed(futures):
        done[futures[future]] = future.result()
        advance(futures[future])
    return done


def _start_worker() -> None:
    _prepare_worker()
    logging.getLogger("engine").setLevel(logging.CRITICAL)


def _baseline_of(probe: str, seed: int) -> str | None:
    return notice(Bench(seed), unique_probes(MUTANTS)[probe])


def _trial_of(mutant: str, seed: int) -> Trial:
    return try_mutant(next(m for m in MUTANTS if m.name == mutant), seed)
