"""P's lease ends early and a competing prefill takes the blocks: before, in the middle of, or after D's read.

Armed on both sides: on D it lets the read wait, on P it says what the competitor did to the request's blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from kvchaos_vllm_faults.blocks import READ_DONE, READ_POSTED, Blocks
from kvchaos_vllm_faults.faults.base import Fault, Read


class EarlyReuse(Fault):
    """Before and in the middle of a read, that read (or its second half) is held until P's blocks were reused."""

    kind = "early_reuse"
    moments: ClassVar[Mapping[str, str]] = {
        "before_read": READ_POSTED,
        "mid_read": READ_POSTED,
        "after_read": READ_DONE,
    }

    @property
    def holds_when_read(self) -> bool:
        """Whether the load is held after its read, before anything looks at what arrived."""
        return self.moment == READ_DONE

    def on_read(self, read: Read) -> Sequence[Read]:
        if self.order.at == "before_read":
            return (replace(read, hold=True),)
        if self.order.at == "mid_read":
            half = len(read.local) // 2
            return (replace(read.part(0, half), tells=False), replace(read.part(half, len(read.local)), hold=True))
        return (read,)

    def on_reuse(self, competitor: str, before: Mapping[int, str], after: Mapping[int, str], ids: Blocks) -> None:
        for position, block_id in zip(ids.positions, ids.block_ids, strict=True):
            if before[position] != after[position]:
                what = f"{competitor} overwrote P's block {block_id} (block position {position}) after the lease ended"
                self.record(what, before[position], after[position])
