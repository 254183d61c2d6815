"""What checksums cost an engine, by stage: seconds of the engine's thread on the host's clock. Nobody waits to read it.

A worker's are `ChecksumTimes`, the scheduler's `StageTimes`. Two readings of a clock around a stage are all that is
needed to add up what a request pays; a tracing library would cost more than some stages do.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class Stage(StrEnum):
    """Where the time of a request's checksums goes, in the order in which it happens."""

    SUM = "sum"
    COPY = "copy"
    ENCODE = "encode"
    DECODE = "decode"
    COMPARE = "compare"


@dataclass(slots=True, eq=False)
class ChecksumTimes:
    """Of one worker: seconds on the host's clock, which nobody waits to read.

    Where sums run on the host, `start_s` is all of it. Where they run on a device, `start_s` is the time to launch
    them, and `wait_s` how long the finaliser then waited for what the step had not hidden; the device's own time is
    in neither. `tokens_read` counts tokens whose KV was read in order to sum it, `tokens_kept` those whose block's sum
    was still known (EXT-8).
    """

    records: int = 0
    tokens_read: int = 0
    tokens_kept: int = 0
    start_s: float = 0.0
    wait_s: float = 0.0


class StageTimes:
    """Seconds by stage, and characters of payload that left or arrived, of one engine's scheduler."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys((Stage.ENCODE, Stage.DECODE, Stage.COMPARE), 0.0)
        self.payload_bytes_sent = 0
        self.payload_bytes_received = 0

    @contextlib.contextmanager
    def measure(self, stage: Stage) -> Iterator[None]:
        """Count the time of this block, also when it raises."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += time.perf_counter() - began
