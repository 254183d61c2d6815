"""A delay that an overhead study plants in a producer, to prove that it would have seen checksums of that cost.

It strikes only requests that are summed, in the engine's thread, right after their sums: where checksums cost their
time, and before the first token. A server has it only when it is started with `--plant-delay`.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable

from engine.errors import InputError
from engine.seams import BlocksAllocated, BlocksToChecksum, Checksummed, RequestEnded, Seams

logger = logging.getLogger(__name__)
MAX_SECONDS = 60.0
_UNITS = {"%": 0.01, "ms": 0.001}


class PlantedDelay:
    """Sleeps `seconds` and `fraction` of the time since the request was admitted, once for each that is summed."""

    def __init__(
        self,
        seconds: float = 0.0,
        fraction: float = 0.0,
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not all(math.isfinite(x) and x >= 0 for x in (seconds, fraction)) or not (seconds or fraction):
            raise ValueError(f"a delay of {seconds} s and {fraction} of the time so far: one must be positive")
        self._seconds = seconds
        self._fraction = fraction
        self._sleep = sleep
        self._now = now
        self._admitted: dict[str, float] = {}
        self._summed: set[str] = set()

    def attach(self, seams: Seams) -> None:
        """Plant it in an engine."""
        logger.warning("A DELAY IS PLANTED in every request that is summed (%s): for a study, never for users", self)
        seams.on("blocks.allocated", self._admit)
        seams.on("producer.blocks_to_checksum", self._choose)
        seams.on("producer.checksummed", self._strike)
        seams.on("request.ended", self._forget)

    def __str__(self) -> str:
        return f"{self._seconds * 1000:g} ms" if self._seconds else f"{self._fraction:.2%} of its time so far"

    def _admit(self, event: BlocksAllocated) -> None:
        # Only the first blocks of a request: it gets more while it grows.
        self._admitted.setdefault(event.request_id, self._now())

    def _choose(self, event: BlocksToChecksum) -> None:
        self._summed.add(event.request_id)

    def _strike(self, event: Checksummed) -> None:
        if event.request_id not in self._summed:
            return
        self._summed.discard(event.request_id)
        now = self._now()
        so_far = now - self._admitted.get(event.request_id, now)
        self._sleep(min(self._seconds + self._fraction * so_far, MAX_SECONDS))

    def _forget(self, event: RequestEnded) -> None:
        self._admitted.pop(event.request_id, None)
        self._summed.discard(event.request_id)


def parse_delay(text: str) -> PlantedDelay:
    """Read `50ms`, or `5%` of the time that a request has spent in the engine.

    Raises:
        InputError: it is neither.
    """
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)(ms|%)", text)
    value = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if match is None or not 0 < value <= MAX_SECONDS:
        raise InputError(f"--plant-delay {text}: use milliseconds, such as 50ms, or a percentage, such as 5%")
    return PlantedDelay(seconds=value) if match[2] == "ms" else PlantedDelay(fraction=value)
