from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from harness.targets.pairs.signals import SignalledProcesses


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits for a line, and then ends."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def stopped(process: subprocess.Popen[bytes]) -> bool:
    """Wait for the next time that it is stopped or goes on."""
    found = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WCONTINUED)
    assert found is not None
    return found.si_code == os.CLD_STOPPED


def test_a_killed_process_has_ended_when_kill_returns(child: subprocess.Popen[bytes]) -> None:
    processes = SignalledProcesses({"producer": child})
    assert processes.kill("producer")
    assert child.returncode == -signal.SIGKILL
    assert processes.killed == {"producer"}
    assert not processes.kill("producer")


def test_one_that_ended_by_itself_was_not_killed(child: subprocess.Popen[bytes]) -> None:
    processes = SignalledProcesses({"producer": child})
    child.communicate(b"\n")
    assert not processes.kill("producer")
    assert processes.killed == set()


def test_a_paused_process_goes_on_when_it_is_resumed(child: subprocess.Popen[bytes]) -> None:
    processes = SignalledProcesses({"producer": child})
    processes.pause("producer")
    assert processes.paused == {"producer"}
    assert stopped(child)
    processes.resume("producer")
    assert processes.paused == set()
    assert not stopped(child)


def test_what_was_left_paused_goes_on(child: subprocess.Popen[bytes]) -> None:
    processes = SignalledProcesses({"consumer": child})
    processes.pause("consumer")
    assert stopped(child)
    processes.resume_all()
    assert processes.paused == set()
    assert not stopped(child)


def test_a_paused_process_can_be_killed(child: subprocess.Popen[bytes]) -> None:
    processes = SignalledProcesses({"consumer": child})
    processes.pause("consumer")
    assert processes.kill("consumer")
    assert (processes.killed, processes.paused) == ({"consumer"}, set())
