"""The connection between producer and consumer is reset (TCP RST) in the middle of the read of one load.

Both ends are told at once, unlike in a partition: the read fails. What had not landed holds poison.
"""

from __future__ import annotations

from typing import Literal

from engine.seams import Seams
from faults.base import Fault, FaultParams
from faults.halfway import HalfwayWhen
from faults.link import NEEDS, LinkHalfway


class ResetConnectionParams(FaultParams):
    kind: Literal["reset_connection"]
    when: HalfwayWhen


class ResetConnection(Fault[ResetConnectionParams]):
    """Poisons D's blocks, holds a copy operation until all before it have landed, and has what follows reset."""

    kind = "reset_connection"
    params_model = ResetConnectionParams

    @classmethod
    def needs(cls, params: FaultParams) -> frozenset[str]:
        return NEEDS

    def attach(self, seams: Seams) -> None:
        what = "packets between P and D were answered with RST"
        LinkHalfway(self, lambda network: network.reset(), what, "reset").attach(seams)
