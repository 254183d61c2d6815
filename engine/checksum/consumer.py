"""D's scheduler: what a load should hold, what its workers found, and the verdict (CON-1 to CON-6, VER-4).

What P sent comes with the parameters, before the load starts, or with the connector's own messages, at the latest when
the load is reported as finished (EXT-3).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.checksum.hardened import as_summed, to_sum, unbound
from engine.checksum.payload import Payload, PayloadInvalid, PayloadLimits, decode
from engine.checksum.records import GroupBlocks, WorkerRecord, WorldShape, merge_records
from engine.checksum.times import Stage, StageTimes
from engine.checksum.verdict import (
    NotCheckedReason,
    UnverifiedReason,
    Verdict,
    VerdictStatus,
    judge_load,
    not_checked,
)
from engine.request import Request
from engine.seams import PayloadDecoded, Seams

logger = logging.getLogger(__name__)
CHECKSUMS_PARAM = "kv_checksums"
_warned: set[str] = set()


@dataclass(slots=True, eq=False)
class _PendingLoad:
    """`payload` None: the connector has not brought it yet."""

    step_id: int
    limits: PayloadLimits
    prompt_token_ids: Sequence[int]
    payload: Payload | UnverifiedReason | None
    groups: Mapping[int, GroupBlocks]
    records: list[WorkerRecord] = field(default_factory=list)


class ConsumerChecksums:
    """The loads of one consumer that will be judged, by request id.

    `counts` counts requests (VER-4). `times` is what they cost the scheduler. `version` is this engine's own.
    """

    def __init__(
        self,
        engine: str,
        world: WorldShape,
        max_model_len: int,
        seams: Seams,
        times: StageTimes | None = None,
        *,
        version: int = 1,
        compare_block_sizes: bool = True,
    ) -> None:
        self._engine = engine
        self._world = world
        self._max_model_len = max_model_len
        self._seams = seams
        self.times = times or StageTimes()
        self._version = version
        self._compare_block_sizes = compare_block_sizes
        self._pending: dict[str, _PendingLoad] = {}
        self.counts: Counter[tuple[VerdictStatus, str | None]] = Counter()

    def start(
        self, request: Request, groups: Mapping[int, GroupBlocks], step_id: int, *, brought_later: bool = False
    ) -> Mapping[int, GroupBlocks]:
        """A load starts with this step: decode what P sent, before anything is transferred (CON-1).

        With `brought_later` the connector itself carries the checksums: `bring` is told of them.

        Returns the groups as workers are to sum them, which depends on the version that P sends. Where that is not
        known yet, it is taken to be this engine's own.
        """
        block_sizes = [blocks.block_size for blocks in groups.values()]
        limits = PayloadLimits.for_engine(self._max_model_len, block_sizes).for_request(request.num_prompt_tokens)
        pending = _PendingLoad(step_id, limits, request.prompt_token_ids, None, groups)
        self._pending[request.request_id] = pending
        if brought_later:
            pending.groups = to_sum(groups, self._version)
            return pending.groups
        self.bring(request.request_id, request.param(CHECKSUMS_PARAM))
        if isinstance(pending.payload, Payload):
            pending.groups = to_sum(groups, pending.payload.version, pending.payload.num_tokens)
        return pending.groups

    def bring(self, request_id: str, text: Any) -> None:
        """What P sent for a load, as it arrived; None if nothing did. The first that arrives counts."""
        pending = self._pending.get(request_id)
        if pending is not None and pending.payload is None:
            with self.times.measure(Stage.DECODE):
                self.times.payload_bytes_received += len(text) if isinstance(text, str) else 0
                payload = _decode(request_id, text, pending)
            pending.payload = self._seams.emit(PayloadDecoded(self._engine, request_id, payload)).event.payload

    def add(self, step_id: int, request_id: str, records: list[WorkerRecord]) -> None:
        """Workers' records of a load, kept until it is judged (CON-3); those of steps before it are of another's."""
        pending = self._pending.get(request_id)
        if pending is not None and pending.step_id <= step_id:
            pending.records.extend(records)

    def judge(self, request_id: str) -> Verdict:
        """The verdict of a load that every worker reported finished."""
        self.bring(request_id, None)
        pending = self._pending.pop(request_id, None)
        if pending is None or pending.payload is None:
            return self._count(request_id, not_checked(NotCheckedReason.NO_CARRIER))
        with self.times.measure(Stage.COMPARE):
            merge = as_summed(merge_records(pending.groups, pending.records, self._world))
            payload = _of_version(pending.payload, pending.groups)
            verdict = judge_load(payload, pending.groups, merge, self._compare_block_sizes)
        return self._count(request_id, verdict)

    def drop(self, request_id: str) -> None:
        """The load failed or its request ended: it is not compared (CON-2, CON-4)."""
        self._pending.pop(request_id, None)

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def _count(self, request_id: str, verdict: Verdict) -> Verdict:
        self.counts[verdict.status, verdict.reason] += 1
        if verdict.status is VerdictStatus.MISMATCH:
            bad = {g.group_id: list(g.differing) for g in verdict.groups if g.differing}
            logger.error("request %s: KV checksum mismatch, block positions by group: %s", request_id, bad)
        elif verdict.status is VerdictStatus.UNVERIFIED and verdict.reason is not None:
            if verdict.reason not in _warned:
                _warned.add(verdict.reason)
                logger.warning("KV loads cannot be verified: %s (logged once per reason)", verdict.reason)
            logger.debug("request %s: load unverified: %s", request_id, verdict.reason)
        return verdict


def _decode(request_id: str, text: Any, pending: _PendingLoad) -> Payload | UnverifiedReason:
    if text is None:
        return UnverifiedReason.NO_CHECKSUMS
    try:
        return unbound(decode(text, pending.limits), pending.prompt_token_ids)
    except PayloadInvalid as error:
        logger.debug("request %s: %s", request_id, error)
        return UnverifiedReason.INVALID


def _of_version(payload: Payload | UnverifiedReason, groups: Mapping[int, GroupBlocks]) -> Payload | UnverifiedReason:
    """What P sent, if it is of the version that the workers summed by: they may have had to guess (VER-3)."""
    if isinstance(payload, Payload) and any(blocks.version != payload.version for blocks in groups.values()):
        return UnverifiedReason.INVALID
    return payload
