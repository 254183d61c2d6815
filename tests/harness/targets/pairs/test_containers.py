"""The lever `Process` over containers, with containers that are none."""

from __future__ import annotations

from typing import Any

import pytest
from docker.errors import APIError, NotFound

from faults.levers import LeverError
from harness.targets.pairs.containers import Containers


class FakeContainer:
    def __init__(self, address: str = "10.1.0.2") -> None:
        self.status = "running"
        self.id = "abc"
        self.asked: list[str] = []
        self.said = b"started\nfailed: no room\n"
        self.next_address = address
        self.attrs: dict[str, Any] = {}
        self.gone = self.broken = False
        self.fails = 0

    def reload(self) -> None:
        if self.gone:
            raise NotFound("no such container")
        self.attrs = {"NetworkSettings": {"Networks": {"p_kv": {"IPAddress": self.next_address}}}}

    def _do(self, what: str, status: str) -> None:
        self.fails -= 1
        if self.broken or self.fails >= 0:
            raise APIError("not now")
        self.asked.append(what)
        self.status = status

    def kill(self, signal: str) -> None:
        self._do(f"kill {signal}", "running")

    def wait(self) -> None:
        self._do("wait", "exited")

    def pause(self) -> None:
        self._do("pause", "paused")

    def unpause(self) -> None:
        self._do("unpause", "running")

    def start(self) -> None:
        self._do("start", "running")

    def logs(self, tail: int) -> bytes:
        return self.said


@pytest.fixture
def container() -> FakeContainer:
    return FakeContainer()


@pytest.fixture
def containers(container: FakeContainer) -> Containers:
    return Containers({"producer": container}, "p_kv")


def test_a_killed_container_has_ended_when_kill_returns(containers: Containers, container: FakeContainer) -> None:
    assert containers.kill("producer")
    assert container.asked == ["kill SIGKILL", "wait"]
    assert containers.killed == {"producer"}
    assert not containers.running("producer")
    assert not containers.kill("producer")


def test_one_that_ended_by_itself_was_not_killed(containers: Containers, container: FakeContainer) -> None:
    container.status = "exited"
    assert not containers.kill("producer")
    assert containers.killed == set()


def test_paused_and_resumed(containers: Containers, container: FakeContainer) -> None:
    containers.resume("producer")
    assert container.asked == []
    containers.pause("producer")
    assert (containers.paused, containers.running("producer")) == ({"producer"}, True)
    containers.resume("producer")
    assert containers.paused == set()
    containers.pause("producer")
    containers.resume_all()
    assert (containers.paused, container.asked) == (set(), ["pause", "unpause", "pause", "unpause"])


@pytest.mark.parametrize(("failures", "paused"), [(4, True), (5, False)])
def test_a_freezer_that_gives_up_is_asked_again(
    containers: Containers, container: FakeContainer, failures: int, paused: bool
) -> None:
    container.fails = failures
    if paused:
        containers.pause("producer")
    else:
        with pytest.raises(LeverError, match="not now"):
            containers.pause("producer")
    assert containers.paused == ({"producer"} if paused else set())


def test_a_paused_container_can_be_killed(containers: Containers) -> None:
    containers.pause("producer")
    assert containers.kill("producer")
    assert (containers.killed, containers.paused) == ({"producer"}, set())


def test_its_address_is_what_it_is_now(containers: Containers, container: FakeContainer) -> None:
    assert containers.address("producer") == "10.1.0.2"
    containers.kill("producer")
    container.next_address = "10.1.0.9"
    containers.start_again("producer")
    assert containers.address("producer") == "10.1.0.9"
    assert containers.killed == {"producer"}
    containers.took_over("producer")
    assert containers.killed == set()


def test_what_docker_refuses_is_a_lever_error(containers: Containers, container: FakeContainer) -> None:
    container.broken = True
    for act in (containers.pause, containers.kill, containers.start_again):
        with pytest.raises(LeverError, match="not now"):
            act("producer")
    assert (containers.killed, containers.paused) == (set(), set())


def test_one_that_was_removed_does_not_run(containers: Containers, container: FakeContainer) -> None:
    container.gone = True
    assert not containers.running("producer")


def test_its_last_words(containers: Containers, container: FakeContainer) -> None:
    assert containers.last_line("producer") == "failed: no room"
    container.said = b"\n"
    assert containers.last_line("producer") == "it said nothing"
