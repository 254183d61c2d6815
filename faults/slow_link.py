"""The link from the producer to the consumer is slow while one load is read: late, but right."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from engine.seams import LoadFinished, OpPosted, Seams
from faults.base import Fault, FaultParams, When
from faults.levers import NETWORK
from faults.moments import MOMENTS, is_moment


class SlowLinkWhen(When):
    at: Literal["before_read"] = Field("before_read", description="Before the first copy operation is posted.")


class SlowLinkParams(FaultParams):
    kind: Literal["slow_link"]
    when: SlowLinkWhen
    kbit_s: Annotated[int, Field(ge=8, le=10_000_000, description="What still passes, in kbit/s.")] = 256


class SlowLink(Fault[SlowLinkParams]):
    """Slows the link when the read begins; the evidence is how many packets have had to wait when it has ended."""

    kind = "slow_link"
    params_model = SlowLinkParams

    @classmethod
    def needs(cls, params: FaultParams) -> frozenset[str]:
        return frozenset({MOMENTS[params.when.at], "consumer.load_finished", NETWORK})

    def attach(self, seams: Seams) -> None:
        self._how = ""
        if self.context.levers.network is not None:
            seams.on(MOMENTS[self.params.when.at], self._slow)
            seams.on("consumer.load_finished", self._prove)

    def _slow(self, event: OpPosted) -> None:
        network = self.context.levers.network
        if network is not None and not self._how and is_moment(self.params.when.at, event, self.context.request_id):
            self._how = network.slow(self.params.kbit_s)

    def _prove(self, event: LoadFinished) -> None:
        network = self.context.levers.network
        if network is None or not self._how or event.request_id != self.context.request_id:
            return
        if waited := network.touched():
            what = f"what P sent to D passed at {self.params.kbit_s} kbit/s ({self._how})"
            self.record("consumer.load_finished", what, "0 packets waited", f"{waited} packets waited")
