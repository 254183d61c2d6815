"""The network between producer and consumer is cut in the middle of the read of one load: packets vanish, both ways.

Nobody is told: the read neither ends nor fails, until D gives up. What had not landed holds poison.
"""

from __future__ import annotations

from typing import Literal

from engine.seams import Seams
from faults.base import Fault, FaultParams
from faults.halfway import HalfwayWhen
from faults.levers import LOAD_TIMEOUT
from faults.link import NEEDS, LinkHalfway


class PartitionParams(FaultParams):
    kind: Literal["partition"]
    when: HalfwayWhen


class Partition(Fault[PartitionParams]):
    """Poisons D's blocks, holds a copy operation until all before it have landed, cuts the link, and lets D go on."""

    kind = "partition"
    params_model = PartitionParams

    @classmethod
    def needs(cls, params: FaultParams) -> frozenset[str]:
        return NEEDS | {LOAD_TIMEOUT}

    def attach(self, seams: Seams) -> None:
        what = "the link between P and D was cut"
        LinkHalfway(self, lambda network: network.cut(), what, "lost").attach(seams)
