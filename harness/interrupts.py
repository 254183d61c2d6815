"""Signals that would end this process at once: they mean Ctrl-C, so that results are kept and servers are ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP interrupt what is done within; in the main thread only.

    Docker stops a container with SIGTERM, also after Ctrl-C at `docker compose up`. A closed terminal sends SIGHUP.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a script's shell starts what it leaves in background
            raise KeyboardInterrupt
        os.kill(os.getpid(), signal.SIGINT)

    # What is ignored, as SIGHUP is below nohup, stays so.
    wanted = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
