"""The provenance oracle: a shadow of every slot, checked on every attention read of the consumer.

Each (layer, K or V, head, slot) of both engines, in each replica, carries the identity of what was written there: a
hash of the whole token prefix whose KV it is. A forward writes identities, a copy operation moves them, a change by
anything else erases them. When a request reads a slot whose identity is not its own prefix's, it reads foreign or
changed KV, whatever the bytes are and whoever verified them. What it then writes is tainted as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from engine.cache import KVMemory, SlotChange
from engine.seams import Forward, OpLanded, Seams, Stage
from harness.history import History
from harness.oracles.view import EngineView

EVENT_ON, EVENT_READ = "oracle.provenance", "oracle.read"
_NOTHING, _CHANGED = 0, -1

Identities = npt.NDArray[np.int64]


class _Prefixes:
    """Identity of every position of a request: a chain over its tokens, never 0 or negative."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.values: list[int] = []
        self.extend(0, prompt)

    def extend(self, first_position: int, token_ids: Sequence[int]) -> None:
        """Tokens from `first_position` on; what is known already is left alone."""
        for position, token in enumerate(token_ids, start=first_position):
            if position == len(self.values):
                parent = self.values[-1] if self.values else 1
                raw = hashlib.blake2b(f"{parent},{token}".encode(), digest_size=8).digest()
                self.values.append((int.from_bytes(raw, "big") >> 2) + 1)

    def array(self, start: int, stop: int) -> Identities:
        return np.array(self.values[start:stop], dtype=np.int64)


class ProvenanceOracle:
    """Shadows two engines. `prompts` gives the prompt of every request that either will see."""

    def __init__(
        self, history: History, producer: EngineView, consumer: EngineView, prompts: Mapping[str, Sequence[int]]
    ) -> None:
        self._history = history
        self._producer, self._consumer = producer.engine_id, consumer.engine_id
        self._prefixes = {request_id: _Prefixes(prompt) for request_id, prompt in prompts.items()}
        self._shadows: dict[str, Identities] = {}
        self._seen: dict[str, set[int]] = {}
        self._elsewhere: dict[int, tuple[KVMemory, Identities]] = {}
        for engine in (producer, consumer):
            self.begin_again(engine.engine_id, engine.memory)

    def begin_again(self, engine_id: str, memory: KVMemory) -> None:
        """Nothing has been written to this engine's memory, which may have another shape than it had before."""
        self._shadows[engine_id] = shadow_of(memory)
        if engine_id == self._consumer:
            self._consumer_memory = memory

    def attach(self, seams: Seams) -> None:
        self._history.add(EVENT_ON)
        seams.on("worker.forward", self._forward, Stage.AFTER)
        seams.on("transfer.op_landed", self._landed, Stage.BEFORE)

    def _forward(self, event: Forward) -> None:
        prefixes = self._prefixes[event.request_id]
        prefixes.extend(event.first_position, event.token_ids)
        shadow = self._shadows[event.engine]
        block_size = shadow.shape[-1]
        end = event.first_position + len(event.token_ids)
        positions = np.arange(end)
        blocks = np.asarray(event.block_ids)[positions // block_size]
        slots = positions % block_size
        before, own = slice(0, event.first_position), slice(event.first_position, end)
        found = shadow[..., blocks[before], slots[before]]
        wrong = (found != prefixes.array(0, event.first_position)).any(axis=(0, 1, 2, 3))
        if event.engine == self._consumer:
            self._report(event.request_id, np.flatnonzero(wrong).tolist())
        written = _CHANGED if wrong.any() else prefixes.array(event.first_position, end)
        shadow[..., blocks[own], slots[own]] = written

    def _report(self, request_id: str, wrong: list[int]) -> None:
        """A line for the first read of a request, and one whenever it reads more that is foreign."""
        seen = self._seen.get(request_id)
        fresh = sorted(set(wrong) - (seen or set()))
        if seen is None or fresh:
            self._history.add(EVENT_READ, request=request_id, foreign=fresh)
            self._seen[request_id] = (seen or set()) | set(fresh)

    def _landed(self, event: OpLanded) -> None:
        op = event.op
        source = slice(op.source_slot, op.source_slot + op.num_slots)
        target = slice(op.target_slot, op.target_slot + op.num_slots)
        moved = self._source(event)[op.source_replica, op.layer, op.part, op.head, op.source_block, source]
        own = self._target(event)
        own[op.target_replica, op.layer, op.part, op.head, op.target_block, target] = moved

    def _source(self, event: OpLanded) -> Identities:
        """What an operation reads: an engine, or memory that was copied to before. In doubt it is the producer."""
        if event.source is self._consumer_memory:
            return self._shadows[self._consumer]
        return self._elsewhere.get(id(event.source), (event.source, self._shadows[self._producer]))[1]

    def _target(self, event: OpLanded) -> Identities:
        """What an operation writes: an engine, or memory that no engine computes with (a host's)."""
        if event.engine in self._shadows:
            return self._shadows[event.engine]
        return self._elsewhere.setdefault(id(event.target), (event.target, shadow_of(event.target)))[1]


def shadow_of(memory: KVMemory) -> Identities:
    """An empty shadow that follows what is changed from outside: [replicas, layers, K|V, kv_heads, blocks, slots]."""
    heads = memory.num_replicas, memory.num_layers, 2, memory.num_kv_heads
    shape = (*heads, memory.num_blocks, memory.block_size)
    shadow = np.full(shape, _NOTHING, dtype=np.int64)
    memory.watch(_Eraser(shadow))
    return shadow


class _Eraser:
    """Told of every change of KV bytes that is neither a forward nor a copy operation."""

    def __init__(self, shadow: Identities) -> None:
        self._shadow = shadow

    def __call__(self, change: SlotChange) -> None:
        self._shadow[change.replica, change.layer, :, change.head, change.block_id, change.slot] = _CHANGED
