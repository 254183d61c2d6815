"""The consumer is killed while it has a load, and started again: empty, and maybe in another shape than before.

Other requests wait at the proxy until it is back. The producer still holds their blocks, for a consumer of the old
shape; what the new one reads of them must be right.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from engine.config import Layout
from engine.seams import Hold, OpPosted, ParamsPass, Seams, Verified
from faults.base import Fault, FaultParams, When
from faults.halfway import SEAMS_OF_A_READ, Halfway
from faults.levers import PROCESS, RESTART
from faults.moments import MOMENTS


class RestartConsumerWhen(When):
    at: Literal["mid_read", "after_verify"] = Field(
        description="When D is killed: after some copy operations of the load have landed, or when it was judged."
    )


class RestartConsumerParams(FaultParams):
    kind: Literal["restart_consumer"]
    when: RestartConsumerWhen
    block_size: Annotated[
        int | None, Field(ge=1, le=1024, description="Of the new D; it must be a multiple of the smaller side's.")
    ] = None
    layout: Annotated[Layout | None, Field(description="Of the new D.")] = None


class RestartConsumer(Fault[RestartConsumerParams]):
    """Kills D, starts it again, and lets the other requests go on to it."""

    kind = "restart_consumer"
    params_model = RestartConsumerParams

    @classmethod
    def needs(cls, params: FaultParams) -> frozenset[str]:
        moment = SEAMS_OF_A_READ if params.when.at == "mid_read" else frozenset({MOMENTS[params.when.at]})
        return moment | {"proxy.params_pass", PROCESS, RESTART}

    def attach(self, seams: Seams) -> None:
        self._killed: str | None = None
        self._ready = False
        if self.context.levers.process is None or self.context.levers.restart is None:
            return
        seams.on("proxy.params_pass", self._keep_waiting)
        if self.params.when.at == "mid_read":
            self._read = Halfway(self.context, self._in_the_middle, self.kind)
            self._read.attach(seams)
        else:
            seams.on(MOMENTS[self.params.when.at], self._when_judged)

    def _in_the_middle(self, event: OpPosted) -> bool:
        return self._kill(f"after {self._read.landed(event)}")

    def _when_judged(self, event: Verified) -> None:
        if event.request_id == self.context.request_id and self._killed is None:
            self._kill(f"when its load was judged ({event.verdict.status})")

    def _kill(self, when: str) -> bool:
        process, restart = self.context.levers.process, self.context.levers.restart
        if process is None or restart is None or not process.kill("consumer"):
            return False
        self._shape = restart.start("consumer", self.params.block_size, self.params.layout)
        self._killed = when
        return True

    def _keep_waiting(self, event: ParamsPass) -> Hold | None:
        if event.request_id == self.context.request_id or self._ready:
            return None
        return Hold(self._back, f"{self.kind}: D has not come back")

    def _back(self) -> bool:
        restart = self.context.levers.restart
        if self._ready or self._killed is None or restart is None:
            return self._ready
        self._ready = restart.ready("consumer")
        if self._ready:
            seam = MOMENTS[self.params.when.at]
            self.record(seam, f"D was killed {self._killed}, and started again", "old D", self._shape)
        return self._ready
