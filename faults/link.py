"""Changes the link between the engines in the middle of a load's read; packets that met the change are the proof."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.seams import OpPosted, RequestEnded, Seams
from faults.base import Fault
from faults.halfway import SEAMS_OF_A_READ, Halfway, Landed
from faults.levers import NETWORK, Network

NEEDS: frozenset[str] = SEAMS_OF_A_READ | {"request.ended", NETWORK}


class LinkHalfway:
    """Acts for `fault` on its load. `change` does it and says how; `what` and `word` say what happened, to packets."""

    def __init__(self, fault: Fault[Any], change: Callable[[Network], str], what: str, word: str) -> None:
        self._fault = fault
        self._change = change
        self._what = what
        self._word = word
        self._network = fault.context.levers.network
        self._read = Halfway(fault.context, self._strike, fault.kind)
        self._how: tuple[str, Landed] | None = None

    def attach(self, seams: Seams) -> None:
        if self._network is not None:
            self._read.attach(seams)
            seams.on("request.ended", self._prove)

    def _strike(self, event: OpPosted) -> bool:
        if self._network is None:
            return False
        landed = self._read.landed(event)
        self._how = self._change(self._network), landed
        return True

    def _prove(self, event: RequestEnded) -> None:
        if self._network is None or self._how is None or event.engine != "consumer":
            return
        if event.request_id == self._fault.context.request_id and (packets := self._network.touched()):
            how, landed = self._how
            what = f"{self._what} ({how}) after {landed}"
            self._fault.record("transfer.op_posted", what, f"0 packets {self._word}", f"{packets} packets {self._word}")
