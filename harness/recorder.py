"""Writes the events that matter for a timeline into the history."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.checksum.consumer import CHECKSUMS_PARAM
from engine.checksum.verdict import Verdict
from engine.seams import (
    CarrierPass,
    Completion,
    Groups,
    OpLanded,
    ParamsLeave,
    ParamsPass,
    Seams,
    Stage,
    Verified,
)
from faults.base import digest
from harness.history import History


def plain_verdict(verdict: Verdict) -> dict[str, Any]:
    """A verdict as JSON values."""
    return {
        "status": str(verdict.status),
        "reason": None if verdict.reason is None else str(verdict.reason),
        "groups": [
            {
                "group": group.group_id,
                "status": str(group.status),
                "reason": None if group.reason is None else str(group.reason),
                "loaded": list(group.loaded),
                "compared": list(group.compared),
                "not_compared": list(group.not_compared),
                "differing": list(group.differing),
            }
            for group in verdict.groups
        ],
    }


def plain_groups(groups: Groups) -> list[dict[str, Any]]:
    """The blocks of every group as JSON values."""
    return [
        {"group": g, "start": b.start, "blocks": list(b.block_ids), "block_size": b.block_size, "tokens": b.num_tokens}
        for g, b in sorted(groups.items())
    ]


class Recorder:
    """Looks, after every fault, and never decides anything."""

    def __init__(self, history: History, now: Callable[[], int]) -> None:
        self._history = history
        self._now = now
        self._arrived: dict[str, dict[int, set[int]]] = {}

    def attach(self, seams: Seams) -> None:
        for seam in ("producer.kv_final", "producer.checksummed", "consumer.load_scheduled",
                     "consumer.load_finished", "consumer.first_use"):  # fmt: skip
            seams.on(seam, self._blocks(seam), Stage.AFTER)
        for seam in ("request.preempted", "consumer.recompute_start"):
            seams.on(seam, self._request(seam), Stage.AFTER)
        seams.on("request.ended", self._ended, Stage.AFTER)
        seams.on("producer.params_leave", self._params("producer.params_leave"), Stage.AFTER)
        seams.on("proxy.params_pass", self._params("proxy.params_pass"), Stage.AFTER)
        seams.on("transfer.op_landed", self._landed, Stage.AFTER)
        seams.on("transfer.carrier_pass", self._carried("sent"), Stage.BEFORE)
        seams.on("transfer.carrier_pass", self._carried("arrives"), Stage.AFTER)
        seams.on("transfer.completion", self._completion, Stage.AFTER)
        seams.on("consumer.verified", self._verified, Stage.AFTER)

    def _add(self, event: str, **fields: Any) -> None:
        self._history.add(event, t=self._now(), **fields)

    def _blocks(self, seam: str) -> Callable[[Any], None]:
        def record(event: Any) -> None:
            self._add(seam, engine=event.engine, request=event.request_id, groups=plain_groups(event.groups))

        return record

    def _request(self, seam: str) -> Callable[[Any], None]:
        def record(event: Any) -> None:
            self._add(seam, engine=event.engine, request=event.request_id)

        return record

    def _ended(self, event: Any) -> None:
        self._add("request.ended", engine=event.engine, request=event.request_id, reason=str(event.finish_reason))

    def _params(self, seam: str) -> Callable[[Any], None]:
        def record(event: ParamsLeave | ParamsPass) -> None:
            text = event.params.get(CHECKSUMS_PARAM)
            checksums = digest(text.encode()) if isinstance(text, str) else None
            self._add(seam, request=event.request_id, keys=sorted(event.params), kv_checksums=checksums)

        return record

    def _carried(self, what: str) -> Callable[[CarrierPass], None]:
        def record(event: CarrierPass) -> None:
            checksums = None if event.checksums is None else digest(event.checksums.encode())
            self._add(f"transfer.carrier_{what}", request=event.request_id, kv_checksums=checksums)

        return record

    def _landed(self, event: OpLanded) -> None:
        self._arrived.setdefault(event.request_id, {}).setdefault(event.op.group, set()).add(event.op.position)
        # Every operation would drown the rest: the first and the last of a load tell when it was read.
        if event.op.index in (0, event.num_ops - 1):
            self._add("transfer.op_landed", request=event.request_id, index=event.op.index, of=event.num_ops)

    def _completion(self, event: Completion) -> None:
        if not event.to_producer:
            arrived = self._arrived.get(event.request_id) or {0: set()}
            for group, positions in sorted(arrived.items()):
                named = {"group": group} if group else {}  # lines that name no group are of the first
                self._history.add("transfer.landed", request=event.request_id, positions=sorted(positions), **named)
        self._add("transfer.completion", request=event.request_id, to="producer" if event.to_producer else "consumer")

    def _verified(self, event: Verified) -> None:
        self._add("consumer.verified", request=event.request_id, verdict=plain_verdict(event.verdict))
