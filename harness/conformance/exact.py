"""BLK-5: a connector that carries checksums loads exactly the blocks that D allocated for the load.

Everything else is prepared to give it away: P's other blocks hold a poison, D's loaded blocks hold another, and
whatever else D holds must stay as it was.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from engine.checksum.records import GroupBlocks
from engine.connectors.registry import ConnectorFactory
from engine.kv_manager import GROUP
from engine.seams import FirstUse, KVFinal, LoadFinished, LoadScheduled, Stage
from harness.conformance.pair import Pair, make_prompt

NOT_TO_BE_READ, NOT_ARRIVED = b"NOT-READ", b"NO-BYTES"
REQUEST = "r2"


@dataclass(slots=True, eq=False)
class _Watcher:
    """Poisons what must not be read, and compares all of D's blocks when the load has finished."""

    pair: Pair
    final: GroupBlocks | None = None
    loaded: GroupBlocks | None = None
    allocated: GroupBlocks | None = None
    before: list[npt.NDArray[np.uint8]] = field(default_factory=list)
    changed: list[int] = field(default_factory=list)
    finished: bool = False

    def attach(self) -> None:
        seams = self.pair.seams
        seams.on("producer.kv_final", self._is_final)
        seams.on("consumer.load_scheduled", self._prepare, Stage.AFTER)
        seams.on("consumer.load_finished", self._compare)
        seams.on("consumer.first_use", self._is_used)

    def _is_final(self, event: KVFinal) -> None:
        if event.request_id == REQUEST:
            self.final = event.groups[GROUP]

    def _prepare(self, event: LoadScheduled) -> None:
        if event.request_id != REQUEST or self.final is None:
            return
        self.loaded = event.groups[GROUP]
        source = self.pair.producer.memory
        wanted = {self.final.block_ids[position] for position in self.loaded.positions}
        others = tuple(block_id for block_id in range(source.num_blocks) if block_id not in wanted)
        source.fill(others, NOT_TO_BE_READ)
        event.memory.fill(self.loaded.block_ids, NOT_ARRIVED)
        self.before = [event.memory.slots((block_id,)) for block_id in range(event.memory.num_blocks)]

    def _compare(self, event: LoadFinished) -> None:
        if event.request_id != REQUEST or self.loaded is None:
            return
        self.finished = True
        after = [event.memory.slots((block_id,)) for block_id in range(event.memory.num_blocks)]
        self.changed = [
            block_id
            for block_id, (old, new) in enumerate(zip(self.before, after, strict=True))
            if block_id not in self.loaded.block_ids and not np.array_equal(old, new)
        ]

    def _is_used(self, event: FirstUse) -> None:
        if event.request_id == REQUEST:
            self.allocated = event.groups[GROUP]


def exact_blocks_trouble(factory: ConnectorFactory, *, prefix_hit: bool) -> str | None:
    """What a load wrote that it must not write, or did not bring. None: it loaded exactly its blocks."""
    pair = Pair(factory, prefix_caching=True)
    watcher = _Watcher(pair)
    watcher.attach()
    prefix = make_prompt(32) if prefix_hit else ()
    if prefix_hit:
        first = (*prefix, 7)
        pair.load("r1", first, pair.prefill("r1", first) or {})
        pair.settle_producer()
    prompt = make_prompt(57 + len(prefix), seed=1, prefix=prefix)
    params = pair.prefill(REQUEST, prompt)
    if params is None:
        return "P names no parameters for the consumer of a prompt that it was sent with do_remote_decode."
    pair.load(REQUEST, prompt, params)
    loaded = watcher.loaded
    if loaded is None:
        return "D started no load: does matched_tokens say how many tokens one would bring?"
    if prefix_hit and loaded.start == 0:
        return "D loaded a prefix that it holds already: matched_tokens counts tokens beyond the local ones."
    where = f"The load is for D's blocks {_listed(loaded.block_ids)}, block positions {_listed(loaded.positions)}"
    if not watcher.finished:
        return f"{where}, and was never reported as finished."
    allocated, changed = watcher.allocated, watcher.changed
    if allocated is not None and allocated != loaded:
        return f"{where}, but D allocated {_listed(allocated.block_ids)} for it: plan_load must keep its groups."
    if changed:
        return f"{where}, but it changed D's block{_plural(changed)} {_listed(changed)} as well (BLK-5)."
    damage = pair.seen.damage(REQUEST)
    return "\n".join([f"{where}, and must bring exactly what P holds there (BLK-5).", *damage]) if damage else None


def _listed(numbers: tuple[int, ...] | list[int] | range) -> str:
    return ", ".join(map(str, numbers))


def _plural(items: list[int]) -> str:
    return "" if len(items) == 1 else "s"
