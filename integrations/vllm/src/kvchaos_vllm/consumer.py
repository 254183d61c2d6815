"""D's scheduler: what a load should hold, what its workers found, and the verdict (CON-1 to CON-5, VER-4)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from kvchaos_vllm import observer
from kvchaos_vllm.log import get_logger
from kvchaos_vllm.payload import Payload, PayloadInvalid, PayloadLimits, decode
from kvchaos_vllm.records import GroupBlocks, WorkerRecord, WorldShape, merge_records
from kvchaos_vllm.verdict import (
    NotCheckedReason,
    UnverifiedReason,
    Verdict,
    VerdictStatus,
    judge_load,
    not_checked,
)

logger = get_logger(__name__)
CHECKSUMS_PARAM = "kv_checksums"
_warned: set[str] = set()


@dataclass(slots=True, eq=False)
class _PendingLoad:
    """`other_blocks`: groups of which the connector loads other blocks than the request needs (BLK-5).

    `ended`: the request has, though its load goes on.
    """

    payload: Payload | UnverifiedReason
    step_id: int | None = None
    groups: Mapping[int, GroupBlocks] = field(default_factory=dict)
    other_blocks: frozenset[int] = frozenset()
    records: list[WorkerRecord] = field(default_factory=list)
    ended: bool = False


class ConsumerChecksums:
    """The loads of one consumer that will be judged, by request id.

    `counts` counts requests by status and reason (VER-4).
    """

    def __init__(self, world: WorldShape, max_model_len: int, block_sizes: Iterable[int]) -> None:
        self._world = world
        self._limits = PayloadLimits.for_engine(max_model_len, list(block_sizes))
        self._pending: dict[str, _PendingLoad] = {}
        self.counts: Counter[tuple[VerdictStatus, str | None]] = Counter()
        self._untold: Counter[tuple[VerdictStatus, str | None]] = Counter()

    def start(self, request_id: str, text: object, num_prompt_tokens: int) -> None:
        """A load is about to start: decode what arrived as `kv_checksums`, None if nothing did (CON-1)."""
        limits = self._limits.for_request(num_prompt_tokens)
        self._pending[request_id] = _PendingLoad(_decode(request_id, text, limits))

    def begin(
        self, request_id: str, step_id: int, groups: Mapping[int, GroupBlocks], other_blocks: Iterable[int]
    ) -> None:
        """The load starts with this step.

        Args:
            groups: the blocks that it writes. Records that workers make of another step's are of another load.
            other_blocks: groups of which the connector loads other blocks than the request needs (BLK-5).
        """
        pending = self._pending.get(request_id)
        if pending is not None:
            pending.step_id, pending.groups, pending.other_blocks = step_id, groups, frozenset(other_blocks)

    def add(self, records: Iterable[tuple[int, WorkerRecord]]) -> None:
        """Workers' records of loads, with the step that started each, kept until the load is judged (CON-3)."""
        for step_id, record in records:
            pending = self._pending.get(record.request_id)
            if pending is not None and pending.step_id == step_id:
                pending.records.append(record)

    def is_pending(self, request_id: str) -> bool:
        return request_id in self._pending

    def end(self, request_id: str) -> None:
        """The request ended. Why is not known yet: its load may have failed. A load that never began is dropped."""
        pending = self._pending.get(request_id)
        if pending is not None:
            pending.ended = True
            if pending.step_id is None:
                self.drop(request_id, NotCheckedReason.REQUEST_ENDED)

    def has_ended(self, request_id: str) -> bool:
        pending = self._pending.get(request_id)
        return pending is not None and pending.ended

    def pending_with(self, block_ids: Iterable[int]) -> list[str]:
        """The pending loads that write one of these blocks."""
        wanted = set(block_ids)
        return [
            request_id
            for request_id, pending in self._pending.items()
            if any(not wanted.isdisjoint(blocks.block_ids) for blocks in pending.groups.values())
        ]

    def judge(self, request_id: str) -> Verdict:
        """The verdict of a load that every worker reported finished."""
        pending = self._pending.pop(request_id)
        merge = merge_records(pending.groups, pending.records, self._world)
        if pending.other_blocks:
            rest = {g: group for g, group in merge.groups.items() if g not in pending.other_blocks}
            merge = replace(merge, groups=rest, other_blocks=merge.other_blocks | pending.other_blocks)
        return self.tell(request_id, judge_load(pending.payload, pending.groups, merge))

    def drop(self, request_id: str, reason: NotCheckedReason) -> None:
        """The load failed or its request ended: it is not compared (CON-2, CON-4)."""
        if self._pending.pop(request_id, None) is not None:
            self.tell(request_id, not_checked(reason))

    def tell(self, request_id: str, verdict: Verdict) -> Verdict:
        """Count a verdict, log what is worth it, and tell who observes."""
        self.counts[verdict.status, verdict.reason] += 1
        self._untold[verdict.status, verdict.reason] += 1
        if verdict.status is VerdictStatus.MISMATCH:
            bad = {g.group_id: list(g.differing) for g in verdict.groups if g.differing}
            logger.error("request %s: KV checksum mismatch, block positions by group: %s", request_id, bad)
        elif verdict.status is VerdictStatus.UNVERIFIED and verdict.reason is not None:
            if verdict.reason not in _warned:
                _warned.add(verdict.reason)
                logger.warning("KV loads cannot be verified: %s (logged once per reason)", verdict.reason)
            logger.debug("request %s: load unverified: %s", request_id, verdict.reason)
        observer.notify(request_id, verdict)
        return verdict

    def take_counts(self) -> Mapping[tuple[VerdictStatus, str | None], int]:
        """What was counted since the last call, for metrics."""
        taken, self._untold = self._untold, Counter()
        return taken

    @property
    def num_pending(self) -> int:
        return len(self._pending)


def _decode(request_id: str, text: object, limits: PayloadLimits) -> Payload | UnverifiedReason:
    if text is None:
        return UnverifiedReason.NO_CHECKSUMS
    try:
        return decode(text, limits)
    except PayloadInvalid as error:
        logger.debug("request %s: %s", request_id, error)
        return UnverifiedReason.INVALID
