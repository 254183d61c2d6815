"""P's cache is read as if it were laid out otherwise: other axes, packing, block size, dtype, kernel blocks, addresses.

Recipes S08, S09 of docs/incidents.md (vllm-project/vllm#37703, vllm-project/vllm#57661, sgl-project/sglang#19045,
vllm-project/vllm#42846, LMCache/LMCache#4463). Both sides keep the same block size, so that D compares what
arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from pydantic import Field

from engine.checksum.records import GroupBlocks
from engine.seams import LoadFinished, OpPosted, Seams
from faults.base import Fault, FaultParams, When
from faults.blocks import Bytes, place_of, rearrange_load
from faults.rearrange import hnd_as_nhd, kernel_block_order, other_dtype, packed_as_separate
from faults.redirect import FINISHED, Redirect, Source

_ADDRESSES = ("other_block_size", "offset_overflow")
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class LayoutMismatchWhen(When):
    at: Literal["in_flight"] = Field("in_flight", description="On the way into D.")


class LayoutMismatchParams(FaultParams):
    kind: Literal["layout_mismatch"]
    when: LayoutMismatchWhen
    how: Literal[
        "hnd_as_nhd", "packed_as_separate", "other_block_size", "other_dtype", "kernel_block_order", "offset_overflow"
    ] = Field(
        "hnd_as_nhd",
        description="hnd_as_nhd: heads and slots of a block taken for each other. packed_as_separate: a slot's K and "
        "V lie side by side and are read as a block of K and a block of V. other_block_size: P's addresses computed "
        "with twice its block size, modulo its pool. other_dtype: values converted to the other 16-bit type, and "
        "their bits stored. kernel_block_order: the halves of each block exchanged. offset_overflow: from one block "
        "id of the load on, addresses begin again at the start of P's pool.",
    )
    kv_dtype: Literal["bfloat16", "float16"] = Field(
        "bfloat16", description="What the caches hold, as topology.kv_dtype; other_dtype converts to the other."
    )


class LayoutMismatch(Fault[LayoutMismatchParams]):
    """Reads a whole load with a wrong idea of how P's cache is laid out."""

    kind = "layout_mismatch"
    params_model = LayoutMismatchParams

    @classmethod
    def needs(cls, params: FaultParams) -> frozenset[str]:
        return Redirect.needs if getattr(params, "how", None) in _ADDRESSES else frozenset({FINISHED})

    def attach(self, seams: Seams) -> None:
        if self.params.how in _ADDRESSES:
            request_id = self.context.request_id
            Redirect(request_id, request_id, self._choose, self.record).attach(seams)
        else:
            seams.on(FINISHED, self._misread)

    def _choose(self, load: GroupBlocks, table: GroupBlocks) -> Source:
        if self.params.how == "other_block_size":
            return lambda event: (2 * event.op.source_block % event.source.num_blocks, event.op.source_slot)
        tokens = range(load.start * load.block_size, load.num_tokens, load.block_size)
        places = [place_of(table, token) for token in tokens]
        limit = self.context.rng.choice([place[0] for place in places if place is not None])

        def wrapped(event: OpPosted) -> tuple[int, int] | None:
            block_id = event.op.source_block
            return (block_id - limit, event.op.source_slot) if block_id >= limit else None

        return wrapped

    def _misread(self, event: LoadFinished) -> None:
        if event.request_id != self.context.request_id or self.context.evidence:
            return
        misread: dict[str, Callable[[Bytes], Bytes]] = {
            "hnd_as_nhd": hnd_as_nhd,
            "packed_as_separate": packed_as_separate,
            "kernel_block_order": kernel_block_order,
            "other_dtype": partial(other_dtype, dtype=_DTYPES[self.params.kv_dtype]),
        }
        for block in rearrange_load(event, misread[self.params.how]):
            what = f"{self.params.how}: D's block {block.block_id} (block position {block.position}) was misread"
            self.record(FINISHED, what, block.before, block.after)
