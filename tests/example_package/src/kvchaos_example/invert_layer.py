"""One layer of a load arrives with every bit inverted, as from a transport that gets an encoding wrong."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from engine.seams import LoadFinished, Seams
from faults.base import Fault, FaultParams, When, digest
from faults.moments import MOMENTS


class InvertLayerWhen(When):
    at: Literal["before_verify"] = Field("before_verify", description="D was told that the load is finished.")


class InvertLayerParams(FaultParams):
    kind: Literal["invert_layer"]
    when: InvertLayerWhen
    layer: Annotated[int, Field(ge=0, description="Counted from 0.")] = 0


class InvertLayer(Fault[InvertLayerParams]):
    """Inverts every bit of one layer of what D has loaded."""

    API_VERSION = 1
    kind = "invert_layer"
    params_model = InvertLayerParams

    @classmethod
    def needs(cls, params: FaultParams) -> frozenset[str]:
        return frozenset({MOMENTS[params.when.at]})

    def attach(self, seams: Seams) -> None:
        seams.on(MOMENTS[self.params.when.at], self._invert)

    def _invert(self, event: LoadFinished) -> None:
        layer, memory = self.params.layer, event.memory
        if event.request_id != self.context.request_id or layer >= memory.num_layers:
            return
        for blocks in event.groups.values():
            before = memory.tokens(blocks)[layer]
            for head, tokens in enumerate(before):
                for token, data in enumerate(tokens):
                    block_id, slot = blocks.block_ids[token // blocks.block_size], token % blocks.block_size
                    memory.write_slot(layer, head, block_id, slot, ~data)
            after = memory.tokens(blocks)[layer]
            self.record(MOMENTS[self.params.when.at], f"layer {layer} is inverted", digest(before), digest(after))
