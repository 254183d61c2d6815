"""The moments of a load at which a scenario may say `at:`, and the seam where each is reached."""

from __future__ import annotations

from typing import Any

from engine.seams import Completion, OpPosted

MOMENTS = {
    "before_checksum": "producer.kv_final",
    "after_checksum": "producer.checksummed",
    "params_pass": "proxy.params_pass",
    "before_read": "transfer.op_posted",
    "mid_read": "transfer.op_posted",
    "in_flight": "transfer.op_posted",
    "after_read": "transfer.completion",
    "carrier_pass": "transfer.carrier_pass",
    "before_verify": "consumer.load_finished",
    "after_verify": "consumer.verified",
}


def is_moment(at: str, event: Any, request_id: str) -> bool:
    """Whether an event of the moment's seam is that moment of this request."""
    if event.request_id != request_id:
        return False
    if isinstance(event, OpPosted):
        return event.op.index == (event.num_ops // 2 if at == "mid_read" else 0)
    if isinstance(event, Completion):
        return not event.to_producer
    return True
