"""The lever `Process` over processes that this one has started: by their handles, never by a name."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping

from faults.levers import Side


class SignalledProcesses:
    """`killed` and `paused` name those that a fault has killed, and stopped without going on yet."""

    def __init__(self, processes: Mapping[str, subprocess.Popen[bytes]]) -> None:
        self._processes = dict(processes)
        self.killed: set[str] = set()
        self.paused: set[str] = set()

    def took_over(self, name: str, process: subprocess.Popen[bytes]) -> None:
        """Another process is there for one that was killed."""
        self._processes[name] = process
        self.killed.discard(name)

    def kill(self, side: Side) -> bool:
        """SIGKILL; it has ended when this returns. False if it had ended before."""
        process = self._processes[side]
        if process.poll() is not None:
            return False
        process.kill()
        process.wait()
        self.killed.add(side)
        self.paused.discard(side)
        return True

    def pause(self, side: Side) -> None:
        """SIGSTOP; it has stopped, or had ended, when this returns."""
        process = self._processes[side]
        process.send_signal(signal.SIGSTOP)
        if process.returncode is None:
            # The signal is on its way only; WNOWAIT leaves what is found there to whoever waits for the process.
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        self.paused.add(side)

    def resume(self, side: Side) -> None:
        """SIGCONT; no trouble for one that runs."""
        self._processes[side].send_signal(signal.SIGCONT)
        self.paused.discard(side)

    def resume_all(self) -> None:
        """Let everything that a fault has left stopped go on."""
        for name in sorted(self.paused):
            self._processes[name].send_signal(signal.SIGCONT)
        self.paused.clear()
