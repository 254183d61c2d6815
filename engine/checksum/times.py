"""What checksums cost an engine, by stage: seconds of the engine's thread on the host's clock. Nobody waits to read it.

The workers' stages are in `engine.checksum.worker.ChecksumTimes`, the scheduler's here. Two readings of a clock around
a stage are all that is needed to add up what a request pays; a tracing library would cost more than some stages do.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from enum import StrEnum


class Stage(StrEnum):
    """Where the time of a request's checksums goes, in the order in which it happens."""

    SUM = "sum"
    COPY = "copy"
    ENCODE = "encode"
    DECODE = "decode"
    COMPARE = "compare"


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
