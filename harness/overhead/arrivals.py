"""When requests are to be sent: fixed before the first one is, so that a slow server cannot slow its own load down.

A client that waits for an answer before it sends on (a closed loop) sends less to a slower server, and its times leave
out just the waits that a user would have had. Here the schedule is open: times come from a seed and a rate alone.
"""

from __future__ import annotations

import random
from itertools import accumulate


def at_rate(rate: float, count: int, seed: int) -> tuple[float, ...]:
    """Offsets in seconds of `count` arrivals, the first at 0: a Poisson process of `rate` arrivals a second.

    Raises:
        ValueError: the rate or the count is not positive.
    """
    if rate <= 0 or count < 1:
        raise ValueError(f"{count} arrivals at {rate:g} a second: use positive numbers")
    rng = random.Random(seed)
    return tuple(accumulate((rng.expovariate(rate) for _ in range(count - 1)), initial=0.0))


def alone() -> tuple[float, ...]:
    """One arrival: it finds the engines idle."""
    return (0.0,)


def pause(seed: int, shortest_s: float) -> float:
    """How long to leave the engines alone between two slots: 1 to 2 times `shortest_s`.

    Drawn anew each time, or the slots could keep step with something periodic in a server and one arm always meet it.
    """
    return shortest_s * (1 + random.Random(seed).random())
