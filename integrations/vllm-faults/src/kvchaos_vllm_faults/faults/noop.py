"""Nothing happens: the fault of a clean twin. Its evidence is that its moment was reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from kvchaos_vllm_faults.blocks import (
    CHECKSUMMED,
    KV_FINAL,
    LOAD_FINISHED,
    PARAMS_PASS,
    READ_DONE,
    READ_POSTED,
    VERIFIED,
    Blocks,
)
from kvchaos_vllm_faults.faults.base import Fault, Read
from kvchaos_vllm_faults.memory import EngineMemory


class Noop(Fault):
    """Reaches its moment and leaves everything as it is."""

    kind = "noop"
    moments: ClassVar[Mapping[str, str]] = {
        "before_checksum": KV_FINAL,
        "after_checksum": CHECKSUMMED,
        "params_pass": PARAMS_PASS,
        "before_read": READ_POSTED,
        "mid_read": READ_POSTED,
        "in_flight": READ_POSTED,
        "after_read": READ_DONE,
        "before_verify": LOAD_FINISHED,
        "after_verify": VERIFIED,
    }

    def on_kv(self, moment: str, blocks: Blocks, memory: EngineMemory) -> None:
        if moment == self.moment:
            self._reached()

    def on_params(self, params: Mapping[str, Any], num_blocks: int) -> Mapping[str, Any]:
        if self.moment == PARAMS_PASS:
            self._reached()
        return params

    def on_read(self, read: Read) -> Sequence[Read]:
        if self.moment == READ_POSTED:
            self._reached()
        return (read,)

    def _reached(self) -> None:
        if not self.num_evidence:
            self.record(f"{self.order.at} was reached, nothing was done")
