"""`kvchaos run --target docker` as a process: whatever becomes of it, no container and no network is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import docker
import pytest

pytestmark = pytest.mark.docker
PATIENCE = 180  # seconds until a test gives up


@pytest.fixture
def left() -> Iterator[Callable[[], list[str]]]:
    """Names of the containers and networks that are there now and were not before."""
    client = docker.from_env()

    def names() -> set[str]:
        containers = [container.name for container in client.containers.list(all=True, ignore_removed=True)]
        return {name for name in (*containers, *(n.name for n in client.networks.list())) if "kvchaos-" in name}

    before = names()
    yield lambda: sorted(names() - before)
    client.close()


def start(root: Path, runs: Path) -> subprocess.Popen[str]:
    scenario = root / "scenarios/smoke/clean-transfer.yaml"
    command = [sys.executable, "-m", "harness.cli", "run", scenario, "--target", "docker", "--runs-dir", runs, "--json"]
    return subprocess.Popen(
        [*map(str, command)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        start_new_session=True,
        # What a shell starts in the background ignores Ctrl-C, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_after_a_run(root: Path, tmp_path: Path, left: Callable[[], list[str]]) -> None:
    process = start(root, tmp_path)
    out, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert {cell["result"] for cell in json.loads(out)["cells"]} == {"pass"}
    assert left() == []


@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_after_a_run_that_was_ended(
    root: Path, tmp_path: Path, left: Callable[[], list[str]], how: signal.Signals, code: int
) -> None:
    """To the whole process group, as a terminal sends it."""
    process = start(root, tmp_path)
    until(lambda: len(left()) >= 4)
    os.killpg(process.pid, how)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == code
    until(lambda: left() == [])
