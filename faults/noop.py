"""Nothing happens: the fault of the clean twin. Its evidence is that its moment was reached."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from engine.seams import Seams
from faults.base import Fault, FaultParams, When
from faults.levers import CHECKSUMS
from faults.moments import MOMENTS, is_moment

Moment = Literal[
    "before_checksum", "after_checksum", "params_pass", "before_read", "mid_read", "in_flight", "after_read",
    "carrier_pass", "before_verify", "after_verify",
]  # fmt: skip


class NoopWhen(When):
    at: Moment = Field(description="Any moment of a load.")


class NoopParams(FaultParams):
    kind: Literal["noop"]
    when: NoopWhen


class Noop(Fault[NoopParams]):
    """Reaches its moment and leaves everything as it is."""

    kind = "noop"
    params_model = NoopParams

    @classmethod
    def needs(cls, params: FaultParams) -> frozenset[str]:
        own = {CHECKSUMS} if params.when.at == "carrier_pass" else set()  # there is nothing to pass without
        return frozenset({MOMENTS[params.when.at], *own})

    def attach(self, seams: Seams) -> None:
        seams.on(MOMENTS[self.params.when.at], self._reached)

    def _reached(self, event: Any) -> None:
        at = self.params.when.at
        if is_moment(at, event, self.context.request_id) and not self.context.evidence:
            self.record(MOMENTS[at], f"{at} was reached, nothing was done")
