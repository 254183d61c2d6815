"""A whole load is read with a wrong idea of how the cache is laid out: heads and slots taken for each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from kvchaos_vllm_faults.blocks import LOAD_FINISHED, READ_POSTED, Blocks
from kvchaos_vllm_faults.faults.rearrange import Rearranged, Rearrangement
from kvchaos_vllm_faults.memory import Bytes, EngineMemory


def _hnd_as_nhd(fault: Rearranged, kv: Bytes, blocks: Blocks, memory: EngineMemory) -> Bytes:
    """A block lies head by head, and is read slot by slot. Where K and V share a row, they move together."""
    layers, heads, count, slots, width = kv.shape
    parts = 1 if memory.packed else 2
    # As it lies: [layers, part, blocks, heads, slots, bytes]; as it is read: slots and heads taken for each other.
    lying = kv.reshape(layers, heads, count, slots, parts, width // parts).transpose(0, 4, 2, 1, 3, 5)
    read = np.ascontiguousarray(lying).reshape(layers, parts, count, slots, heads, width // parts)
    return read.transpose(0, 4, 2, 3, 1, 5).reshape(kv.shape)


class LayoutMismatch(Rearranged):
    """HND read as NHD."""

    kind = "layout_mismatch"
    moments: ClassVar[Mapping[str, str]] = {"in_flight": READ_POSTED, "before_verify": LOAD_FINISHED}
    hows: ClassVar[Mapping[str, Rearrangement]] = {"hnd_as_nhd": _hnd_as_nhd}
