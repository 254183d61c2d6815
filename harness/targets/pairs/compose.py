"""The compose project of a pair: built, brought up and taken down with `docker compose`, under a name of its own.

A guard process takes the project down as soon as this process ends, however that comes about: Ctrl-C, a crash,
SIGKILL. It waits at the other end of a pipe, and an operating system closes the pipes of what has ended.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.targets.pairs.pair import PairError

ENGINE_IMAGE, NET_IMAGE = "kvchaos:local", "kvchaos-net:local"
_FILE = Path(__file__).resolve().parents[3] / "docker-compose.yml"
_UP_S, _DOWN_S, _BUILD_S = 180.0, 60.0, 1800.0
HELPER_LABEL = "kvchaos.project"  # of containers that act on a project's, and are none of its services
# A container that is paused is not stopped by `down` before it has been let go.
_GUARD = f"""cat >/dev/null
docker rm --force $(docker ps --all --quiet --filter label={HELPER_LABEL}=$1)
docker compose -p $1 unpause
docker compose -p $1 kill
exec docker compose -p $1 down --volumes --remove-orphans"""


def compose_file() -> Path | None:
    """The project's docker-compose.yml; None where kvchaos is installed without its checkout."""
    return _FILE if _FILE.is_file() else None


class Project:
    """One compose project, from `up` to `down`."""

    def __init__(self, environment: Mapping[str, str], file: Path = _FILE) -> None:
        """`environment` is what the compose file wants to know, beside what is set here."""
        self.name = f"kvchaos-{secrets.token_hex(4)}"
        self._command = ["docker", "compose", "-p", self.name, "-f", str(file), "--ansi", "never"]
        # `down` leaves what belongs to another profile than the one that is chosen.
        self._environment = os.environ | {"COMPOSE_PROFILES": "chaos"} | dict(environment)
        self._guard: subprocess.Popen[bytes] | None = None

    def up(self, services: Sequence[str]) -> None:
        """Start these and wait until they are healthy. Raises PairError if that does not come."""
        self._guard = subprocess.Popen(
            ["sh", "-c", _GUARD, "guard", self.name],
            cwd="/",  # by its name alone, away from any compose file: what is there goes, of whichever profile it is
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=self._environment,
            start_new_session=True,
        )
        self._run([*("up", "--detach", "--no-build", "--wait"), *services], _UP_S)

    def build(self, service: str) -> None:
        """Build a service's image. Raises PairError if that does not work."""
        self._run(["build", "--quiet", service], _BUILD_S)

    def down(self) -> None:
        """Take everything down; no trouble where nothing is up. Raises PairError if something may be left."""
        guard, self._guard = self._guard, None
        if guard is None or guard.stdin is None:
            return
        guard.stdin.close()
        try:
            code = guard.wait(_DOWN_S)
        except subprocess.TimeoutExpired:
            code = -1
        if code:
            raise PairError(f"the containers of {self.name} may be left: docker compose -p {self.name} down")

    def _run(self, arguments: Sequence[str], timeout_s: float) -> None:
        """In a session of its own: Ctrl-C is for this process, which then takes everything down."""
        what = f"docker compose {arguments[0]}"
        with subprocess.Popen(
            [*self._command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=self._environment,
            start_new_session=True,
        ) as process:
            try:
                printed, complained = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                raise PairError(f"{what} does not end within {timeout_s:.0f} s") from None
            finally:
                if process.poll() is None:
                    # Compose is a process that `docker` has started: it would go on while the guard takes things down.
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if process.returncode:
            said = (complained or printed).strip().splitlines()
            raise PairError(f"{what} failed: {said[-1] if said else f'it ended with {process.returncode}'}")
