"""A pair in containers that kvchaos starts itself, with levers on them. The harness stays on the host.

Its containers are on an internal network of their own, which leads nowhere; on Linux the host reaches them there by
their addresses.
"""

from __future__ import annotations

import importlib.util
import secrets
import shutil
import subprocess
from collections.abc import Collection
from typing import Any

from engine.errors import InputError
from faults.levers import NETWORK, LeverError
from harness.control import TOKEN_VARIABLE
from harness.targets.pairs.attached import PAIR_VARIABLE
from harness.targets.pairs.compose import ENGINE_IMAGE, HELPER_LABEL, NET_IMAGE, Project, compose_file
from harness.targets.pairs.pair import PATIENT_MS, Endpoint, Pair, PairError
from harness.targets.workload import CONSUMER, PRODUCER, PROXY

_SERVICES = (PRODUCER, CONSUMER, PROXY)
_PORT, _CONTROL_PORT = 8000, 9000
_NETWORK = "kv"
_INSTEAD = f"; or set {PAIR_VARIABLE} to a pair that runs already"


def check_docker() -> None:
    """Raise InputError where no pair can be started in containers, with what to do."""
    if importlib.util.find_spec("docker") is None:
        raise InputError(f"target docker: the docker SDK for Python is missing: pip install docker{_INSTEAD}")
    if shutil.which("docker") is None:
        raise InputError(f"target docker: there is no docker command: install docker with compose{_INSTEAD}")
    try:
        _client().close()
    except PairError as error:
        raise InputError(f"target docker: {error}: start the docker daemon{_INSTEAD}") from None
    if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode:
        raise InputError(f"target docker: docker has no compose: install its compose plugin (v2){_INSTEAD}")
    if compose_file() is None:
        raise InputError(f"target docker: no docker-compose.yml beside kvchaos: run it from a checkout{_INSTEAD}")


def _client() -> Any:
    """Raises PairError if no engine answers."""
    import docker  # type: ignore[import-untyped] # it has no types
    from docker.errors import DockerException  # type: ignore[import-untyped]

    try:
        return docker.from_env()  # asks the engine for its version
    except DockerException as error:
        raise PairError(f"no docker engine answers ({error})") from None


class DockerPair(Pair):
    """Three containers from construction to `stop`, in a compose project of its own."""

    def __init__(self, load_timeout_ms: int = PATIENT_MS) -> None:
        from harness.targets.pairs.containers import Containers
        from harness.targets.pairs.network import ContainerNetwork

        token = secrets.token_hex(16)
        self._client = _client()
        self._project = Project({TOKEN_VARIABLE: token, "LOAD_TIMEOUT_MS": str(load_timeout_ms)})
        self._build_unless_there(ENGINE_IMAGE, PRODUCER)
        try:
            self._project.up(_SERVICES)
            self._containers = Containers(self._find_containers(), f"{self._project.name}_{_NETWORK}")
            self.processes = self._containers
            self.network = self._links = ContainerNetwork(self._run_in, self._containers.address)
            super().__init__({name: self._endpoint(name) for name in _SERVICES}, token.encode())
        except BaseException:
            self._take_down()
            raise

    def prepare(self, levers: frozenset[str]) -> None:
        if NETWORK in levers:
            self._build_unless_there(NET_IMAGE, "net")

    def restore(self) -> None:
        for name in self.killed:
            self._links.forget(name)
        super().restore()

    def died(self) -> str | None:
        for name in _SERVICES:
            if name not in self.killed and not self._containers.running(name):
                return f"the {name}'s container has ended: {self._containers.last_line(name)}"
        return None

    def mend(self) -> bool:
        gone = {name for name in _SERVICES if not self._containers.running(name)}
        if not gone or gone != self.killed:
            return False
        self.revive(gone)
        return True

    def revive(self, names: Collection[str]) -> None:
        for name in sorted(names):
            self._links.forget(name)
            try:
                self._containers.start_again(name)
            except LeverError as error:
                raise PairError(str(error)) from None
            self._endpoints[name] = self._endpoint(name)
        self._meet_again(names)
        for name in names:
            self._containers.took_over(name)

    def stop(self) -> None:
        """Hang up, and take the project down."""
        super().stop()
        self._take_down()

    def _take_down(self) -> None:
        self._project.down()
        self._client.close()

    def _give_up_if_hopeless(self, waiting: set[str], deadline: float) -> None:
        for name in sorted(waiting):
            if not self._containers.running(name):
                raise PairError(f"the {name}'s container has ended: {self._containers.last_line(name)}")
        super()._give_up_if_hopeless(waiting, deadline)

    def _endpoint(self, name: str) -> Endpoint:
        address = self._containers.address(name)
        return Endpoint(f"http://{address}:{_PORT}", (address, _CONTROL_PORT))

    def _find_containers(self) -> dict[str, Any]:
        labels = [f"com.docker.compose.project={self._project.name}"]
        found = self._client.containers.list(filters={"label": labels}, ignore_removed=True)
        return {container.labels["com.docker.compose.service"]: container for container in found}

    def _build_unless_there(self, image: str, service: str) -> None:
        if not self._client.images.list(name=image):
            self._project.build(service)

    def _run_in(self, side: str, script: str) -> str:
        from docker.errors import DockerException

        try:
            helper = self._client.containers.create(
                NET_IMAGE,
                ["sh", "-c", script],
                network_mode=f"container:{self._containers.container_id(side)}",
                cap_add=["NET_ADMIN"],
                user="root",
                labels={HELPER_LABEL: self._project.name},
            )
            try:
                helper.start()
                code = helper.wait()["StatusCode"]
                printed, said = (
                    helper.logs(stdout=out, stderr=not out).decode("utf-8", "replace") for out in (True, False)
                )
            finally:
                helper.remove(force=True)
        except DockerException as error:
            raise LeverError(f"the {side}'s network cannot be changed: {error}") from None
        if code:
            lines = said.strip().splitlines()
            raise LeverError(
                f"the {side}'s network cannot be changed: {lines[-1] if lines else f'it ended with {code}'}"
            )
        return str(printed)
