"""The lever `Process` over containers, and what a pair must know of each: its address, its state, its last words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from docker.errors import APIError, NotFound  # type: ignore[import-untyped] # it has no types

from faults.levers import LeverError, Side

# Where a process does not reach its freezing point in time, the kernel gives up and the container goes on: "unable to
# freeze", seen with cgroups v1 on a machine with more to do than it can.
_FREEZES = 5
Container = Any  # docker.models.containers.Container


class Containers:
    """`killed` and `paused` name those that a fault has killed, and paused without letting them go on yet."""

    def __init__(self, containers: Mapping[str, Container], network: str) -> None:
        """By service name; `network` is where they reach each other."""
        self._containers = dict(containers)
        self._network = network
        self.killed: set[str] = set()
        self.paused: set[str] = set()

    def kill(self, side: Side) -> bool:
        """SIGKILL; it has ended when this returns. False if it had ended before."""
        container = self._containers[side]
        if not self.running(side):
            return False
        try:
            container.kill("SIGKILL")
            container.wait()
        except APIError as error:
            raise LeverError(f"the {side}'s container cannot be killed: {error.explanation or error}") from None
        self.killed.add(side)
        self.paused.discard(side)
        return True

    def pause(self, side: Side) -> None:
        """The freezer: as SIGSTOP, for all processes of the container."""
        for attempts_left in reversed(range(_FREEZES)):
            try:
                self._do(side, "pause")
                break
            except LeverError:
                if not attempts_left:
                    raise
        self.paused.add(side)

    def resume(self, side: Side) -> None:
        """No trouble for one that runs."""
        if side in self.paused:
            self._do(side, "unpause")
            self.paused.discard(side)

    def resume_all(self) -> None:
        """Let everything that a fault has left paused go on."""
        for name in sorted(self.paused):
            self._do(name, "unpause")
        self.paused.clear()

    def start_again(self, name: str) -> None:
        """Start one that was killed. Raises LeverError if it cannot be started."""
        self._do(name, "start")

    def took_over(self, name: str) -> None:
        """One that was killed answers again."""
        self.killed.discard(name)

    def running(self, name: str) -> bool:
        """Whether it runs, paused or not."""
        container = self._containers[name]
        try:
            container.reload()
        except NotFound:
            return False
        return container.status in ("running", "paused")

    def address(self, name: str) -> str:
        """Its IP address on the pair's network, as it is now: one that was started again may have another."""
        container = self._containers[name]
        container.reload()
        return str(container.attrs["NetworkSettings"]["Networks"][self._network]["IPAddress"])

    def container_id(self, name: str) -> str:
        return str(self._containers[name].id)

    def last_line(self, name: str) -> str:
        """What it said last."""
        try:
            lines = self._containers[name].logs(tail=1).decode("utf-8", "replace").strip().splitlines()
        except APIError:
            lines = []
        return lines[-1] if lines else "it said nothing"

    def _do(self, name: str, what: str) -> None:
        try:
            getattr(self._containers[name], what)()
        except APIError as error:
            raise LeverError(f"docker {what} {name}: {error.explanation or error}") from None
