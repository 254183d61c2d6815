"""P's scheduler: the sends whose sums are on their way, and the payload once every worker has reported (PRO)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvchaos_vllm.log import get_logger
from kvchaos_vllm.payload import Payload, PayloadGroup, encode
from kvchaos_vllm.records import GroupBlocks, WorkerRecord, WorldShape, merge_records

logger = get_logger(__name__)


@dataclass(slots=True, eq=False)
class _PendingSend:
    step_id: int
    groups: Mapping[int, GroupBlocks]
    records: list[WorkerRecord] = field(default_factory=list)


class ProducerChecksums:
    """The sends of one producer that are being summed, by request id."""

    def __init__(self, world: WorldShape) -> None:
        self._world = world
        self._pending: dict[str, _PendingSend] = {}

    def register(self, request_id: str, step_id: int, groups: Mapping[int, GroupBlocks]) -> None:
        """This step finishes the request's prompt. A later prefill of the request replaces an earlier (PRO-8)."""
        self._pending[request_id] = _PendingSend(step_id, groups)

    def add(self, records: Iterable[tuple[int, WorkerRecord]]) -> None:
        """Workers' records, each with the step that finished the prompt; those of a replaced prefill are dropped."""
        for step_id, record in records:
            pending = self._pending.get(record.request_id)
            if pending is not None and pending.step_id == step_id:
                pending.records.append(record)

    def is_pending(self, request_id: str) -> bool:
        """Whether the request's prompt was finished by some step."""
        return request_id in self._pending

    def is_complete(self, request_id: str) -> bool:
        """Whether every worker has reported the request."""
        pending = self._pending.get(request_id)
        return pending is not None and len(pending.records) >= self._world.size

    def take(self, request_id: str) -> str | None:
        """The encoded payload of a request that finished normally, or None with a warning (PRO-6, PRO-7)."""
        pending = self._pending.pop(request_id)
        merge = merge_records(pending.groups, pending.records, self._world)
        if merge.missing or merge.other_blocks:
            what = "some worker did not report" if merge.missing else "a worker checksummed other blocks"
            logger.warning("request %s: no KV checksums are sent, %s", request_id, what)
            return None
        groups = tuple(
            PayloadGroup(g, m.fingerprint, m.blocks.block_size, m.blocks.start, m.values)
            for g, m in sorted(merge.groups.items())
        )
        num_tokens = max((blocks.num_tokens for blocks in pending.groups.values()), default=0)
        if not num_tokens:
            logger.warning("request %s: no KV checksums are sent, no KV cache group can be checksummed", request_id)
            return None
        return encode(Payload(self._world.tp_size, num_tokens, groups))

    def drop(self, request_id: str) -> None:
        """The request ended otherwise: nothing is sent (PRO-6)."""
        self._pending.pop(request_id, None)

    @property
    def num_pending(self) -> int:
        return len(self._pending)
