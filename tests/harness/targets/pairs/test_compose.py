"""The compose project of a pair, and its guard, with a `docker` that only writes down what it is asked."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from harness.targets.pairs.compose import Project, compose_file
from harness.targets.pairs.pair import PairError

DOCKER = """#!/bin/sh
echo "$@" >> "$ASKED"
case " $* " in *" $FAILS "*) echo "it is full" >&2; exit 1;; esac
"""
PATIENCE = 60  # seconds until a test gives up; none of them waits that long


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a line for each time that docker was called."""
    (tmp_path / "docker").write_text(DOCKER)
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    monkeypatch.setenv("FAILS", "-")
    return tmp_path / "asked"


def test_what_goes_up_comes_down_whatever_is_paused(asked: Path) -> None:
    project = Project({})
    project.up(["producer", "proxy"])
    up = asked.read_text()
    assert f"-p {project.name} " in up
    assert up.endswith(" up --detach --no-build --wait producer proxy\n")
    project.down()
    by_name = f"compose -p {project.name}"
    assert asked.read_text().removeprefix(up).splitlines() == [
        f"ps --all --quiet --filter label=kvchaos.project={project.name}",
        "rm --force",
        f"{by_name} unpause",
        f"{by_name} kill",
        f"{by_name} down --volumes --remove-orphans",
    ]
    project.down()
    assert len(asked.read_text().splitlines()) == 6


def test_projects_never_have_the_same_name() -> None:
    assert Project({}).name != Project({}).name


def test_what_did_not_come_up_is_taken_down_and_says_why(asked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAILS", "up")
    project = Project({})
    with pytest.raises(PairError, match="docker compose up failed: it is full"):
        project.up(["producer"])
    project.down()
    assert " down " in asked.read_text()


def test_what_cannot_be_taken_down_is_named(asked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAILS", "down")
    project = Project({})
    project.up(["producer"])
    with pytest.raises(PairError, match=f"docker compose -p {project.name} down"):
        project.down()


def test_the_guard_takes_it_down_when_the_harness_is_killed(asked: Path) -> None:
    """SIGKILL: nobody is left who could say anything, but the pipe closes."""
    os.mkfifo(asked)
    heard = os.open(asked, os.O_RDWR)
    program = (
        "import os, signal; from harness.targets.pairs.compose import Project; "
        "Project({}).up(['producer']); os.kill(os.getpid(), signal.SIGKILL)"
    )
    process = subprocess.Popen([sys.executable, "-c", program])
    said = b""
    while b" down " not in said:
        assert select.select([heard], [], [], PATIENCE)[0], said
        said += os.read(heard, 4096)
    os.close(heard)
    assert process.wait(PATIENCE) == -9
    assert said.index(b" up ") < said.index(b" kill\n") < said.index(b" down ")


def test_what_compose_does_ends_with_an_interrupt(asked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`docker` runs compose as a process of its own, which must not go on alone. Nobody ever writes to `never`."""
    held, never = tmp_path / "held", tmp_path / "never"
    os.mkfifo(held)
    os.mkfifo(never)
    (tmp_path / "docker").write_text(f"#!/bin/sh\nsh -c 'exec 3>{held}; echo up >&3; cat {never}'\n")
    reader = os.open(held, os.O_RDONLY | os.O_NONBLOCK)

    def interrupt() -> None:
        select.select([reader], [], [], PATIENCE)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    project = Project({})
    with pytest.raises(KeyboardInterrupt):
        project.build("producer")
    thread.join()
    assert os.read(reader, 10) == b"up\n"
    assert select.select([reader], [], [], PATIENCE)[0], "compose goes on"
    assert os.read(reader, 10) == b""
    os.close(reader)


def test_the_compose_file_is_that_of_the_checkout(root: Path) -> None:
    assert compose_file() == root / "docker-compose.yml"
