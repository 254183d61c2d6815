"""What a connector is: a part beside the scheduler that decides, and a part beside the ranks that moves bytes.

The scheduler's side may tell the ranks' side something with every step (`step_message`, `take_message`), in words
that only the connector knows. What the ranks learn comes back as `TransferResults`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from engine.checksum.records import GroupBlocks
from engine.request import Request


class Carrier(StrEnum):
    """How the checksums of a request travel (CAR-1).

    `KV_TRANSFER_PARAMS`: generic code adds them to P's parameters, and reads them from D's. `CONNECTOR`: generic code
    gives them to P's connector (`carry_checksums`), whose workers on D hand them over with their results, at the latest
    with those that report the load finished.
    """

    KV_TRANSFER_PARAMS = "kv_transfer_params"
    CONNECTOR = "connector"


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """One load, from D's scheduler to its workers: which blocks of P go into which blocks of D.

    `part` says which of a MultiConnector's sub-connectors loads it, and which of that one's, if it is one as well.
    """

    request_id: str
    groups: Mapping[int, GroupBlocks]
    remote_engine_id: str
    remote_request_id: str
    remote_block_ids: Mapping[int, tuple[int, ...]]
    part: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TransferResults:
    """What a connector learnt since it was last asked: request ids.

    `checksums` are those that the connector itself carried (`Carrier.CONNECTOR`), encoded, by D's request id.
    """

    finished_sending: frozenset[str] = frozenset()
    finished_receiving: frozenset[str] = frozenset()
    failed_receiving: frozenset[str] = frozenset()
    checksums: Mapping[str, str] = field(default_factory=dict)


class SchedulerConnector(ABC):
    """The scheduler's side of a connector."""

    def kv_checksum_carrier(self, request: Request, receiving: bool) -> Carrier | None:
        """How this request's checksums travel; None (the default) when they do not (CAR-1, CAR-3)."""
        return None

    def has_carrier(self) -> bool:
        """Whether this kind of connector can carry checksums at all: it overrides `kv_checksum_carrier`."""
        return type(self).kv_checksum_carrier is not SchedulerConnector.kv_checksum_carrier

    def carry_checksums(self, request: Request, text: str) -> None:
        """P: bring these encoded checksums to D. Called after `request_finished`, for `Carrier.CONNECTOR` alone.

        Raises:
            NotImplementedError: it named that carrier and has none.
        """
        raise NotImplementedError(f"{type(self).__name__} names Carrier.CONNECTOR: let it override carry_checksums")

    @property
    def has_message(self) -> bool:
        """Whether there is something that the workers' side must be told: then a step is planned for it."""
        return False

    def step_message(self) -> Any:
        """What the workers' side is told with the step that is being planned; None (the default): nothing."""
        return None

    @abstractmethod
    def check_params(self, request: Request) -> None:
        """Raise RequestError if `kv_transfer_params` cannot be used."""

    @abstractmethod
    def matched_tokens(self, request: Request, num_local_tokens: int) -> int:
        """D: how many prompt tokens beyond the local ones a load would bring. 0: no load.

        Asked whenever a request that has not tried a load is about to run, whatever its parameters.
        """

    @abstractmethod
    def plan_load(self, request: Request, groups: Mapping[int, GroupBlocks]) -> LoadSpec:
        """D: the load that fills these freshly allocated blocks."""

    def load_ended(self, request_id: str) -> None:
        """D: a load that it planned has finished or failed. Nothing (the default) if it keeps nothing of loads."""
        return

    @abstractmethod
    def request_finished(self, request: Request, block_ids: Mapping[int, Sequence[int]]) -> dict[str, Any] | None:
        """P: parameters for the consumer; then the blocks are held until sent or expired. None: nothing is held.

        Empty parameters: there is no consumer to tell, and the blocks are held all the same.
        """

    @abstractmethod
    def sent(self, request_id: str) -> bool:
        """P: a consumer has read the request's blocks. False if they are not held any more."""

    @abstractmethod
    def expired(self) -> list[str]:
        """P: requests whose lease has ended since the last call; their blocks are held no more."""

    @property
    @abstractmethod
    def num_leases(self) -> int:
        """P: requests whose blocks are held for a consumer."""

    def holds_lease(self, request_id: str) -> bool:
        """P: whether this request's blocks are held for a consumer. False (the default): it cannot say."""
        return False

    def end_lease(self, request_id: str) -> None:
        """P: let the request's lease end now, as if its time had passed. Raises KeyError if it holds none."""
        raise KeyError(request_id)


class WorkerConnector(ABC):
    """The ranks' side of a connector: it moves the KV of all ranks of an engine, which live in one process."""

    def take_message(self, message: Any) -> None:
        """Take what the scheduler's side said with this step; before anything else of the step."""
        return

    @abstractmethod
    def start_loads(self, loads: Sequence[LoadSpec]) -> None:
        """Post the transfers of these loads; returns at once."""

    @abstractmethod
    def poll(self) -> TransferResults:
        """What finished or failed since the last call."""

    def poll_ranks(self, num_ranks: int) -> tuple[TransferResults, ...]:
        """What each rank learnt since the last call. As it is here, all learn everything at once."""
        return (self.poll(),) * num_ranks
