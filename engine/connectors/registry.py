"""The connectors by name, and what builds one: how docs/extending.md lets others add theirs."""

from __future__ import annotations

from typing import Any, Protocol

from engine.cache import KVMemory
from engine.clock import Clock
from engine.config import EngineConfig
from engine.connectors.base import SchedulerConnector, WorkerConnector
from engine.connectors.fabric import Fabric
from engine.connectors.multi import MultiConnector
from engine.connectors.offload import OFFLOAD
from engine.connectors.pull import PULL
from engine.connectors.push import PUSH
from engine.extensions import Registry, lacks

GROUP = "kvchaos.connectors"
API_VERSION = 1


class ConnectorFactory(Protocol):
    """Builds both sides of a connector. One instance serves every engine of a process, so it keeps nothing of them.

    One whose producer writes into the consumer's blocks also says `transfer = "push"`.
    """

    @property
    def API_VERSION(self) -> int:  # noqa: N802 - a constant in every implementation
        """The version of this Protocol (and of all that it names) that the connector was written for."""
        ...

    @property
    def name(self) -> str: ...

    @property
    def summary(self) -> str:
        """One line for `kvchaos list connectors`."""
        ...

    def scheduler(self, config: EngineConfig, clock: Clock) -> SchedulerConnector:
        """The side beside the scheduler of one engine, producer or consumer."""
        ...

    def worker(self, config: EngineConfig, memory: KVMemory, fabric: Fabric) -> WorkerConnector:
        """The side beside a worker of one engine. It attaches `memory` to the fabric, for others to read."""
        ...


def _check(extension: Any) -> str | None:
    return lacks(extension, texts=("name", "summary"), methods=("scheduler", "worker"))


def transfer_of(factory: ConnectorFactory) -> str:
    """Who moves the KV: in a `pull` (the default) D reads it, in a `push` P writes it. A proxy has to know."""
    return str(getattr(factory, "transfer", "pull"))


OFFLOAD_PULL = MultiConnector(
    "offload_pull", "what is in host memory is loaded from there, unchecked, all else as pull does", (OFFLOAD, PULL)
)
PULL_OFFLOAD = MultiConnector(
    "pull_offload", "as pull; what no producer sends is loaded from host memory if it is there", (PULL, OFFLOAD)
)
_OWN: tuple[ConnectorFactory, ...] = (PULL, PUSH, OFFLOAD, OFFLOAD_PULL, PULL_OFFLOAD)
CONNECTORS: Registry[ConnectorFactory] = Registry(
    GROUP, "connector", API_VERSION, {connector.name: connector for connector in _OWN}, _check
)
