"""The KV of every request as P held it when it was final and as D was given it, and the diagnosis where they differ."""

from __future__ import annotations

from engine.kv_manager import GROUP
from engine.seams import KVFinal, LoadFinished, Seams, Stage
from harness.diagnosis import KVBlocks, diagnose


class SeenKV:
    """Copies by request id, taken before any fault acts at the same seam: what the connector did, and nothing else."""

    def __init__(self) -> None:
        self.final: dict[str, KVBlocks] = {}
        self.delivered: dict[str, KVBlocks] = {}

    def attach(self, seams: Seams) -> None:
        seams.on("producer.kv_final", self._is_final, Stage.BEFORE)
        seams.on("consumer.load_finished", self._is_delivered, Stage.BEFORE)

    def _is_final(self, event: KVFinal) -> None:
        blocks = event.groups[GROUP]
        # With the slots after the last token: a block in the wrong place brings them along.
        kv = event.memory.slots(blocks.block_ids)
        self.final[event.request_id] = KVBlocks(kv, blocks.block_size, blocks.start * blocks.block_size)

    def _is_delivered(self, event: LoadFinished) -> None:
        blocks = event.groups[GROUP]
        kv = event.memory.tokens(blocks)
        self.delivered[event.request_id] = KVBlocks(kv, blocks.block_size, blocks.start * blocks.block_size)

    def damages(self) -> list[str]:
        """Lines for every load that did not deliver what P held."""
        return [line for request_id in self.delivered for line in self.damage(request_id)]

    def damage(self, request_id: str, final_id: str | None = None) -> list[str]:
        """What of one load is wrong and what would explain it; empty if nothing is, or P's KV was not seen.

        `final_id` is P's name of the request, if it is another.
        """
        final_id = final_id or request_id
        if request_id not in self.delivered or final_id not in self.final:
            return []
        others = {name: kv for name, kv in self.final.items() if name != final_id}
        found = diagnose(self.final[final_id], self.delivered[request_id], others)
        if found.damage is None:
            return []
        return [f"{request_id}: D was given other KV than P holds: {found.damage}.", *(f"  {t}" for t in found.texts)]
