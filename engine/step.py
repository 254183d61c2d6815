"""What one step carries from the scheduler to the workers and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.checksum.pending import PendingRecord
from engine.checksum.records import GroupBlocks, WorkerRecord
from engine.connectors.base import LoadSpec, TransferResults


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """A request's share of a step: `num_tokens` tokens from position `first_position` on; `tables` as the request's.

    `token_ids` is one short when the last token is still being sampled by an earlier step; the worker knows it.
    `loaded` names the blocks of a remote load that this step reads for the first time. `history` are all tokens that
    are known of the request, where there is a speculator that guesses from them.
    """

    request_id: str
    epoch: int
    token_ids: tuple[int, ...]
    first_position: int
    num_tokens: int
    tables: tuple[tuple[int, ...], ...]
    sample: bool
    loaded: Mapping[int, GroupBlocks] | None = None
    history: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.first_position + self.num_tokens


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The scheduler's output of one step.

    `kv_final` names, per request whose KV a consumer will read, the blocks that this step completes; of those,
    `checksum_sends` are to be checksummed (PRO-1). `checksum_writes` names blocks that this step fills and whose sums
    are kept for later (EXT-8). Of the loads that start, `checksum_loads` are to be checksummed
    when they have finished (CON-1). `ended` names requests that no later step knows. `message` is what the connector's
    side beside the scheduler tells that beside the workers.
    """

    step_id: int
    requests: tuple[ScheduledRequest, ...] = ()
    loads: tuple[LoadSpec, ...] = ()
    kv_final: Mapping[str, Mapping[int, GroupBlocks]] = field(default_factory=dict)
    checksum_sends: Mapping[str, Mapping[int, GroupBlocks]] = field(default_factory=dict)
    checksum_writes: Mapping[str, Mapping[int, GroupBlocks]] = field(default_factory=dict)
    checksum_loads: frozenset[str] = frozenset()
    ended: tuple[str, ...] = ()
    message: Any = None


@dataclass(slots=True, eq=False)
class StepDraft:
    """A step while it is being planned. `budget` is how many more tokens fit in."""

    step_id: int
    budget: int
    requests: list[ScheduledRequest] = field(default_factory=list)
    loads: list[LoadSpec] = field(default_factory=list)
    kv_final: dict[str, Mapping[int, GroupBlocks]] = field(default_factory=dict)
    checksum_sends: dict[str, Mapping[int, GroupBlocks]] = field(default_factory=dict)
    checksum_writes: dict[str, Mapping[int, GroupBlocks]] = field(default_factory=dict)
    checksum_loads: set[str] = field(default_factory=set)

    def to_plan(self, ended: list[str], message: Any) -> StepPlan:
        """The finished plan."""
        return StepPlan(
            step_id=self.step_id,
            requests=tuple(self.requests),
            loads=tuple(self.loads),
            kv_final=self.kv_final,
            checksum_sends=self.checksum_sends,
            checksum_writes=self.checksum_writes,
            checksum_loads=frozenset(self.checksum_loads),
            ended=tuple(ended),
            message=message,
        )


@dataclass(frozen=True, slots=True)
class RankOutput:
    """What one worker returns at once; its records still wait for the device (PRO-3)."""

    sampled: Mapping[str, int]
    records: tuple[PendingRecord, ...]
    transfers: TransferResults
    accepted: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The merged output of all workers, as the scheduler gets it.

    `accepted` are the tokens that follow the sampled one, with the KV of all but the last (`engine.speculator`).
    """

    sampled: Mapping[str, int]
    records: Mapping[str, list[WorkerRecord]]
    transfers: TransferResults
    accepted: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
