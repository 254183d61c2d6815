"""P's scheduler: which blocks to checksum, and the payload once every worker has reported (PRO-1 to PRO-7)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.checksum.hardened import bound, prompt_binding, to_sum
from engine.checksum.payload import HARDENED, VERSION, Payload, PayloadGroup, encode
from engine.checksum.records import GroupBlocks, WorkerRecord, WorldShape, merge_records
from engine.checksum.times import Stage, StageTimes

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _PendingSend:
    step_id: int
    groups: Mapping[int, GroupBlocks]
    prompt_token_ids: Sequence[int]
    records: list[WorkerRecord] = field(default_factory=list)


class ProducerChecksums:
    """The sends of one producer that are being summed, by request id. `times` is what they cost the scheduler.

    `version` is the one that it sends.
    """

    def __init__(self, world: WorldShape, times: StageTimes | None = None, version: int = VERSION) -> None:
        self._world = world
        self._version = version
        self.times = times or StageTimes()
        self._pending: dict[str, _PendingSend] = {}

    def register(
        self,
        request_id: str,
        step_id: int,
        groups: Mapping[int, GroupBlocks],
        prompt_token_ids: Sequence[int] = (),
    ) -> Mapping[int, GroupBlocks]:
        """The step finishes this request's prompt. A later prefill of the request replaces an earlier (PRO-8).

        Returns the groups as workers are to sum them.
        """
        groups = to_sum(groups, self._version)
        self._pending[request_id] = _PendingSend(step_id, groups, prompt_token_ids)
        return groups

    def add(self, step_id: int, request_id: str, records: list[WorkerRecord]) -> None:
        """Records of a step's output; those of a replaced prefill are dropped."""
        pending = self._pending.get(request_id)
        if pending is not None and pending.step_id == step_id:
            pending.records.extend(records)

    def take(self, request_id: str) -> str | None:
        """The encoded payload of a request that finished normally, or None with a warning (PRO-6, PRO-7)."""
        pending = self._pending.pop(request_id, None)
        if pending is None:
            logger.warning("request %s: no checksums are sent, its prefill was never summed", request_id)
            return None
        with self.times.measure(Stage.ENCODE):
            text = self._encode(request_id, pending)
        self.times.payload_bytes_sent += len(text or "")
        return text

    def _encode(self, request_id: str, pending: _PendingSend) -> str | None:
        merge = merge_records(pending.groups, pending.records, self._world)
        if merge.missing or merge.other_blocks:
            what = "some worker did not report" if merge.missing else "a worker checksummed other blocks"
            logger.warning("request %s: no checksums are sent, %s", request_id, what)
            return None
        groups = tuple(
            PayloadGroup(g, m.fingerprint, m.blocks.block_size, m.blocks.start, m.values)
            for g, m in sorted(merge.groups.items())
        )
        num_tokens = max((blocks.num_tokens for blocks in pending.groups.values()), default=0)
        payload = Payload(self._world.tp_size, num_tokens, groups, self._version)
        if self._version == HARDENED:
            payload = bound(payload, prompt_binding(pending.prompt_token_ids))
        return encode(payload)

    def drop(self, request_id: str) -> None:
        """The request ended otherwise: nothing is sent (PRO-6)."""
        self._pending.pop(request_id, None)

    @property
    def num_pending(self) -> int:
        return len(self._pending)
