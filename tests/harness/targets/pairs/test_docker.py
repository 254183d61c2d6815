"""What is said where target docker cannot start a pair; and what it provides."""

from __future__ import annotations

import gc
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import InputError
from harness.targets.pairs import docker
from harness.targets.pairs.attached import PAIR_VARIABLE
from harness.targets.pairs.docker import check_docker
from harness.targets.pairs.pair import PairError


class Client:
    def close(self) -> None:
        """It had answered."""


@pytest.fixture
def all_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A docker command that does what it is asked, and an engine that answers."""
    command = tmp_path / "docker"
    command.write_text("#!/bin/sh\nexit 0\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(docker, "_client", Client)
    return command


def test_nothing_is_missing(all_there: Path) -> None:
    check_docker()


def test_no_sdk(all_there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=rf"SDK for Python is missing: pip install docker; or set {PAIR_VARIABLE}"):
        check_docker()


def test_no_command(all_there: Path) -> None:
    all_there.unlink()
    with pytest.raises(InputError, match="no docker command: install docker"):
        check_docker()


def test_no_daemon(all_there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> Client:
        raise PairError("no docker engine answers (connection refused)")

    monkeypatch.setattr(docker, "_client", nobody)
    with pytest.raises(InputError, match=r"no docker engine answers \(connection refused\): start the docker daemon"):
        check_docker()


def test_no_compose(all_there: Path) -> None:
    all_there.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(InputError, match="docker has no compose"):
        check_docker()


def test_no_checkout(all_there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker, "compose_file", lambda: None)
    with pytest.raises(InputError, match=r"no docker-compose\.yml beside kvchaos"):
        check_docker()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the SDK leaves its socket open
def test_a_daemon_that_is_not_there_is_a_pair_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    with pytest.raises(PairError, match="no docker engine answers"):
        docker._client()
    gc.collect()


@pytest.mark.parametrize(("pair", "levers"), [(None, True), ("producer=p:1:2 consumer=c:1:2 proxy=x:1:2", False)])
def test_containers_of_somebody_else_have_no_levers(pair: str | None, levers: bool) -> None:
    program = (
        "from harness.targets import TARGETS; from faults.levers import NETWORK, PROCESS, RESTART; "
        "print(sorted(TARGETS['docker'].provides & {NETWORK, PROCESS, RESTART}))"
    )
    environment = {name: value for name, value in os.environ.items() if name != PAIR_VARIABLE}
    environment |= {} if pair is None else {PAIR_VARIABLE: pair}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ("['lever.network', 'lever.process', 'lever.restart']" if levers else "[]")
