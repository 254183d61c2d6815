"""What one step carries from the scheduler to the workers and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.checksum.records import GroupBlocks, WorkerRecord
from engine.checksum.worker import PendingRecord
from engine.connectors.base import LoadSpec, TransferResults


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """A request's share of a step: `num_tokens` tokens from position `first_position` on.

    `token_ids` is one short when the last token is still being sampled by an earlier step; the worker knows it.
    `loaded` names the blocks of a remote load that this step reads for the first time.
    """

    request_id: str
    epoch: int
    token_ids: tuple[int, ...]
    first_position: int
    num_tokens: int
    block_ids: tuple[int, ...]
    sample: bool
    loaded: Mapping[int, GroupBlocks] | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The scheduler's output of one step.

    `kv_final` names, per request whose KV a consumer will read, the blocks that this step completes; of those,
    `checksum_sends` are to be checksummed (PRO-1). `checksum_loads` says whether finished loads are summed.
    """

    step_id: int
    requests: tuple[ScheduledRequest, ...]
    loads: tuple[LoadSpec, ...]
    kv_final: Mapping[str, Mapping[int, GroupBlocks]]
    checksum_sends: Mapping[str, Mapping[int, GroupBlocks]]
    checksum_loads: bool
    ended: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RankOutput:
    """What one worker returns at once; its records still wait for the device (PRO-3)."""

    sampled: Mapping[str, int]
    records: tuple[PendingRecord, ...]
    transfers: TransferResults


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The merged output of all workers, as the scheduler gets it."""

    sampled: Mapping[str, int]
    records: Mapping[str, list[WorkerRecord]]
    transfers: TransferResults
