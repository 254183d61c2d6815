"""The proxy gives a load the parameters of another one: all of them, only the block ids, or only the checksums.

Recipe S13 of docs/incidents.md (near vllm-project/vllm#51681, sgl-project/sglang#17259). Nothing binds parameters to a
prompt: another request's whole parameters verify (GAP-5). Two faults, each naming the other's load, exchange them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from engine.checksum.consumer import CHECKSUMS_PARAM
from engine.seams import Change, Hold, ParamsLeave, ParamsPass, Seams
from faults.base import Fault, FaultParams, When
from faults.levers import CHECKSUMS
from faults.moments import MOMENTS
from faults.params import BLOCK_IDS_PARAM, params_digest


class SwapParamsWhen(When):
    at: Literal["params_pass"] = Field("params_pass", description="The proxy forwards the parameters.")


class SwapParamsParams(FaultParams):
    """Prompts of equal length, or the connector refuses the load or D compares less."""

    kind: Literal["swap_params"]
    when: SwapParamsWhen
    how: Literal["whole", "ids_only", "checksums_only"] = Field(
        "whole", description="Which of the other load's parameters go on: all, its block ids, or its kv_checksums."
    )
    other_load: int = Field(ge=1, description="Whose parameters are used.")


class SwapParams(Fault[SwapParamsParams]):
    """Waits until the other load's parameters have left P, and puts them in the place of this load's."""

    kind = "swap_params"
    params_model = SwapParamsParams

    @classmethod
    def needs(cls, params: FaultParams) -> frozenset[str]:
        checksums = {CHECKSUMS} if getattr(params, "how", None) == "checksums_only" else set()
        return frozenset({"producer.params_leave", MOMENTS[params.when.at], *checksums})

    def attach(self, seams: Seams) -> None:
        self._other = self.context.requests[self.params.other_load]
        self._theirs: Mapping[str, Any] | None = None
        seams.on("producer.params_leave", self._remember)
        seams.on(MOMENTS[self.params.when.at], self._pass)

    def _remember(self, event: ParamsLeave) -> None:
        if event.request_id == self._other:
            self._theirs = event.params

    def _pass(self, event: ParamsPass) -> Change[ParamsPass] | Hold | None:
        if event.request_id != self.context.request_id:
            return None
        if self._theirs is None:
            return Hold(lambda: self._theirs is not None, f"{self.kind}: P has not answered {self._other}")
        part = {"ids_only": BLOCK_IDS_PARAM, "checksums_only": CHECKSUMS_PARAM}.get(self.params.how)
        params = dict(self._theirs)
        if part is not None:
            params = {**event.params, **{key: value for key, value in self._theirs.items() if key == part}}
        before, after = params_digest(event.params), params_digest(params)
        if before != after:
            what = f"{part or 'all parameters'} of {self._other} take the place of the load's own"
            self.record(MOMENTS[self.params.when.at], what, before, after)
        return Change(ParamsPass(event.request_id, params))
