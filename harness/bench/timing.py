"""How the bench measures: every contender in turn, over and over, on the clock of this thread's CPU time.

What others do on the machine changes from second to second. Interleaved, it meets all contenders alike, so ratios hold
where absolute figures do not; and time in which this thread did not run is not counted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

MIN_SAMPLE_S = 2e-4
MAX_CALLS = 1000

Job = Callable[[], object]


def medians(jobs: Mapping[str, Job], rounds: int) -> dict[str, float]:
    """Time jobs in turn.

    Args:
        jobs: by name; each is called often enough in a round that the clock's own cost does not matter.
        rounds: how often each of them is measured, after one call that is not.

    Returns:
        Seconds a call: the median over the rounds.
    """
    calls = {name: _calls_for(job) for name, job in jobs.items()}
    samples: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, job in jobs.items():
            samples[name].append(_time(job, calls[name]))
    return {name: statistics.median(found) for name, found in samples.items()}


def _calls_for(job: Job) -> int:
    job()
    once = max(_time(job, 1), 1e-9)
    return max(1, min(MAX_CALLS, round(MIN_SAMPLE_S / once)))


def _time(job: Job, calls: int) -> float:
    began = time.thread_time()
    for _ in range(calls):
        job()
    return (time.thread_time() - began) / calls
