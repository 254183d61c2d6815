"""P's answer to a request whose KV a consumer will read, and the blocks that it holds until then (PRO-6).

The blocks leave the request when it ends and are held until the consumer says that it has read them, or until their
lease has ended: from then on they may be reused, whatever the consumer still does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from engine.checksum.consumer import CHECKSUMS_PARAM
from engine.checksum.producer import ProducerChecksums
from engine.connectors.base import Carrier, SchedulerConnector
from engine.kv_manager import KVManager
from engine.request import Request
from engine.seams import ParamsLeave, Seams


class Leases:
    """The leases of one engine by request id. `sends` is asked only where checksums are on."""

    def __init__(
        self,
        engine: str,
        connector: SchedulerConnector | None,
        sends: ProducerChecksums,
        enabled: bool,
        kv: KVManager,
        seams: Seams,
    ) -> None:
        self._engine = engine
        self._connector = connector
        self._sends = sends
        self._enabled = enabled
        self._kv = kv
        self._seams = seams
        self._held: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._held

    def grant(self, request: Request) -> Mapping[str, Any] | None:
        """What the consumer of a request that ended normally is told; then its blocks are held. None: no consumer."""
        if self._connector is None:
            return None
        params = self._connector.request_finished(request, dict(enumerate(request.tables)))
        if params is None:
            return None
        self._held[request.request_id], request.tables = request.held_block_ids, []
        if not params:
            return None
        wanted = self._enabled and not request.switches_checksum_off
        carrier = self._connector.kv_checksum_carrier(request, receiving=False) if wanted else None
        text = None if carrier is None else self._sends.take(request.request_id)
        if text is not None and carrier is Carrier.KV_TRANSFER_PARAMS:
            params[CHECKSUMS_PARAM] = text
        elif text is not None:
            self._connector.carry_checksums(request, text)
        return self._seams.emit(ParamsLeave(self._engine, request.request_id, params)).event.params

    def free_sent(self, request_ids: Iterable[str], last_step: int) -> None:
        """Consumers say that they have read these requests; what is not held any more is ignored."""
        for request_id in sorted(request_ids):
            if self._connector is not None and self._connector.sent(request_id):
                self._free(request_id, last_step)

    def free_expired(self, last_step: int) -> None:
        """Give back the blocks whose lease has ended."""
        if self._connector is not None:
            for request_id in self._connector.expired():
                self._free(request_id, last_step)

    def _free(self, request_id: str, last_step: int) -> None:
        self._kv.free(request_id, self._held.pop(request_id), last_step)
