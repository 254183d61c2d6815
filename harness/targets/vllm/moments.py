"""What an engine tells of its moments, as events of kvchaos' seams, in the order in which it happened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from engine.cache import KVMemory
from engine.checksum.records import GroupBlocks
from engine.checksum.verdict import GroupVerdict, NotCheckedReason, UnverifiedReason, Verdict, VerdictStatus
from engine.seams import (
    BlocksAllocated,
    Checksummed,
    Completion,
    FirstUse,
    KVFinal,
    LoadFinished,
    LoadScheduled,
    ParamsLeave,
    ParamsPass,
    RecomputeStart,
    RequestEnded,
    Seams,
    Verified,
)
from harness.targets.vllm.snapshot import SnapshotMemory, read_snapshot
from harness.targets.workload import CONSUMER, PRODUCER

Message = Mapping[str, Any]
_WITH_KV: Mapping[str, tuple[type[Any], str]] = {
    "producer.kv_final": (KVFinal, PRODUCER),
    "producer.checksummed": (Checksummed, PRODUCER),
    "consumer.load_scheduled": (LoadScheduled, CONSUMER),
    "consumer.load_finished": (LoadFinished, CONSUMER),
    "consumer.first_use": (FirstUse, CONSUMER),
}


class Moments:
    """Emits the events of one cell. What it has seen of each request stays, for those who need it."""

    def __init__(self, seams: Seams) -> None:
        self._seams = seams
        self.now = 0
        self.final: dict[str, tuple[GroupBlocks, SnapshotMemory]] = {}
        self.verdicts: dict[str, Verdict] = {}
        self.recomputed: set[str] = set()
        self.failed: set[str] = set()
        self.loaded: dict[str, GroupBlocks] = {}

    def tell(self, message: Message) -> None:
        """Emit what an engine told. Events that this does not know are an error of kvchaos."""
        self.now += 1
        event, request = str(message["event"]), str(message.get("request"))
        if event in _WITH_KV:
            self._with_kv(event, request, message)
        elif event == "producer.reused":
            self._reused(request, message)
        elif event == "consumer.verified":
            self._verified(request, message["verdict"])
        elif event == "consumer.recompute_start":
            self.recomputed.add(request)
            self._seams.emit(RecomputeStart(CONSUMER, request))
        elif event == "consumer.load_failed":
            self.failed.add(request)
        elif event == "transfer.completion":
            self._seams.emit(Completion(CONSUMER, request, to_producer=False))
        elif event == "proxy.params_pass":
            self._seams.emit(ParamsPass(request, message["params"]))
        else:
            raise ValueError(f"an engine tells of {event}, which is unknown here")

    def left(self, request: str, params: Mapping[str, Any]) -> None:
        """P has answered."""
        self.now += 1
        self._seams.emit(ParamsLeave(PRODUCER, request, params))

    def ended(self, engine: str, request: str, reason: str) -> None:
        self.now += 1
        self._seams.emit(RequestEnded(engine, request, reason))

    def _with_kv(self, event: str, request: str, message: Message) -> None:
        kind, engine = _WITH_KV[event]
        blocks, memory = read_snapshot(message)
        if event == "producer.kv_final" and memory is not None:
            self.final[request] = blocks, memory
        if event == "consumer.load_scheduled":
            self.loaded[request] = blocks
        # It has what oracles call of the memory; whoever would write to it has no business here.
        self._seams.emit(kind(engine, request, {0: blocks}, cast(KVMemory, memory)))

    def _reused(self, request: str, message: Message) -> None:
        """P's blocks of a request hold a competitor's KV: so that a diagnosis can say whose it is."""
        blocks, memory = read_snapshot(message)
        if memory is not None:
            self._seams.emit(BlocksAllocated(PRODUCER, str(message["competitor"]), blocks.block_ids))
            self.final[request][1].update(memory)

    def _verified(self, request: str, told: Message) -> None:
        verdict = read_verdict(told)
        self.verdicts[request] = verdict
        blocks = self.loaded.get(request)
        groups = {} if blocks is None else {0: blocks}
        self._seams.emit(Verified(CONSUMER, request, verdict, groups, cast(KVMemory, None)))


def read_verdict(told: Message) -> Verdict:
    """A verdict of the protection, which has kvchaos' words. Raises ValueError for one that it does not have."""
    status = VerdictStatus(told["status"])
    reasons: type[NotCheckedReason] | type[UnverifiedReason] = (
        NotCheckedReason if status is VerdictStatus.NOT_CHECKED else UnverifiedReason
    )
    groups = tuple(
        GroupVerdict(
            group["group_id"],
            VerdictStatus(group["status"]),
            None if group["reason"] is None else UnverifiedReason(group["reason"]),
            tuple(group["loaded"]),
            tuple(group["compared"]),
            tuple(group["differing"]),
        )
        for group in told["groups"]
    )
    return Verdict(status, None if told["reason"] is None else reasons(told["reason"]), groups)
