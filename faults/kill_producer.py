"""The producer is killed (SIGKILL) in the middle of the read of one load.

What had not landed holds poison, never zeros: it must never be used.
"""

from __future__ import annotations

from typing import Literal

from engine.seams import OpPosted, Seams
from faults.base import Fault, FaultParams
from faults.halfway import SEAMS_OF_A_READ, Halfway, HalfwayWhen
from faults.levers import PROCESS
from faults.moments import MOMENTS


class KillProducerParams(FaultParams):
    kind: Literal["kill_producer"]
    when: HalfwayWhen


class KillProducer(Fault[KillProducerParams]):
    """Poisons D's blocks, holds a copy operation until all before it have landed, kills P, and lets D go on."""

    kind = "kill_producer"
    params_model = KillProducerParams

    @classmethod
    def needs(cls, params: FaultParams) -> frozenset[str]:
        return SEAMS_OF_A_READ | {PROCESS}

    def attach(self, seams: Seams) -> None:
        if self.context.levers.process is not None:
            self._read = Halfway(self.context, self._kill, self.kind)
            self._read.attach(seams)

    def _kill(self, event: OpPosted) -> bool:
        process = self.context.levers.process
        landed = self._read.landed(event)
        if process is None or not process.kill("producer"):
            return False
        what = f"P was killed after {landed}, before number {event.op.index} was posted"
        self.record(MOMENTS[self.params.when.at], what, landed.poison, landed.found)
        return True
