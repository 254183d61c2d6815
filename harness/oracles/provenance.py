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
from engine.seams import FirstUse, Forward, OpLanded, Seams, Stage
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
        self._shadows: dict[str, list[_Shadow]] = {}
        self._seen: dict[tuple[str, int], set[int]] = {}
        self._loaded: set[str] = set()
        for engine in (producer, consumer):
            self.begin_again(engine.engine_id, engine.memory)
        self._elsewhere: dict[int, tuple[KVMemory, list[_Shadow]]] = {}

    def begin_again(self, engine_id: str, memory: KVMemory) -> None:
        """Nothing has been written to this engine's memory, which may have another shape than it had before."""
        self._shadows[engine_id] = [_Shadow(m) for m in memory.groups]
        memory.watch(_Eraser(self._shadows[engine_id]))
        if engine_id == self._consumer:
            self._consumer_memory = memory

    def attach(self, seams: Seams) -> None:
        self._history.add(EVENT_ON)
        seams.on("consumer.first_use", self._first_use, Stage.AFTER)
        seams.on("worker.forward", self._forward, Stage.AFTER)
        seams.on("transfer.op_landed", self._landed, Stage.BEFORE)

    def _first_use(self, event: FirstUse) -> None:
        self._loaded.add(event.request_id)

    def _forward(self, event: Forward) -> None:
        prefixes = self._prefixes[event.request_id]
        prefixes.extend(event.first_position, event.token_ids)
        first, end = event.first_position, event.first_position + len(event.token_ids)
        loaded = event.request_id in self._loaded and event.engine == self._consumer
        groups = [(shadow, event.tables[number]) for number, shadow in enumerate(self._shadows[event.engine])]
        wrong = [shadow.foreign(table, prefixes, first, loaded) for shadow, table in groups]
        if event.engine == self._consumer:
            self._loaded.discard(event.request_id)
            for group_id, positions in enumerate(wrong):
                self._report(event.request_id, group_id, positions)
        for shadow, table in groups:
            shadow.write(table, prefixes, first, end, tainted=any(wrong))

    def _report(self, request_id: str, group_id: int, wrong: list[int]) -> None:
        """A line for the first read of a request in a group, and one whenever it reads more that is foreign."""
        seen = self._seen.get((request_id, group_id))
        fresh = sorted(set(wrong) - (seen or set()))
        if seen is None or fresh:
            named = {"group": group_id} if group_id else {}  # lines that name no group are of the first
            self._history.add(EVENT_READ, request=request_id, foreign=fresh, **named)
            self._seen[request_id, group_id] = (seen or set()) | set(fresh)

    def _landed(self, event: OpLanded) -> None:
        op = event.op
        source = slice(op.source_slot, op.source_slot + op.num_slots)
        target = slice(op.target_slot, op.target_slot + op.num_slots)
        moved = self._source(event)[op.group].slots[
            op.source_replica, op.layer, op.part, op.head, op.source_block, source
        ]
        mine = self._target(event)[op.group].slots
        mine[op.target_replica, op.layer, op.part, op.head, op.target_block, target] = moved

    def _source(self, event: OpLanded) -> list[_Shadow]:
        """What an operation reads: an engine, or memory that was copied to before. In doubt it is the producer."""
        if event.source is self._consumer_memory:
            return self._shadows[self._consumer]
        producer = event.source, self._shadows[self._producer]
        return self._elsewhere.get(id(event.source), producer)[1]

    def _target(self, event: OpLanded) -> list[_Shadow]:
        """What an operation writes: an engine, or memory that no engine computes with (a host's)."""
        if event.engine in self._shadows:
            return self._shadows[event.engine]
        if id(event.target) not in self._elsewhere:
            shadows = [_Shadow(memory) for memory in event.target.groups]
            event.target.watch(_Eraser(shadows))
            self._elsewhere[id(event.target)] = event.target, shadows
        return self._elsewhere[id(event.target)][1]


class _Shadow:
    """The identities in one KV cache group of an engine: int64 [replicas, layers, parts, heads, blocks, slots].

    Of a recurrent state only what is transferred is shadowed: the state before a request's last token. It is that of
    the whole prefix up to the token before.
    """

    def __init__(self, memory: KVMemory) -> None:
        self._is_state = memory.spec.is_state
        self._window = memory.spec.window
        shape = (memory.num_replicas, memory.num_layers, memory.num_parts, memory.num_kv_heads)
        self.slots = np.full((*shape, memory.num_blocks, memory.block_size), _NOTHING, dtype=np.int64)

    def foreign(self, table: Sequence[int], prefixes: _Prefixes, first: int, loaded: bool) -> list[int]:
        """Positions before `first` that a forward from there on reads and that are not the request's own."""
        if self._is_state:
            # A state that was computed here is in no slot that anything else could have written.
            wanted = prefixes.values[first - 1] if first else _NOTHING
            return [0] if loaded and first and (self.slots[..., table[0], 0] != wanted).any() else []
        start = 0 if self._window is None else max(0, first - self._window + 1)
        found = self.slots[..., *self._places(table, start, first)]
        wrong = (found != prefixes.array(start, first)).any(axis=(0, 1, 2, 3))
        return (start + np.flatnonzero(wrong)).tolist()

    def write(self, table: Sequence[int], prefixes: _Prefixes, first: int, end: int, tainted: bool) -> None:
        """A forward has written positions from `first` to `end`."""
        if self._is_state:
            before_last = prefixes.values[end - 2] if end > 1 else _NOTHING
            self.slots[..., table[0], 0] = _CHANGED if tainted else before_last
            return
        self.slots[..., *self._places(table, first, end)] = _CHANGED if tainted else prefixes.array(first, end)

    def _places(self, table: Sequence[int], start: int, stop: int) -> tuple[Identities, Identities]:
        """Block and slot of each position."""
        positions = np.arange(start, stop)
        size = self.slots.shape[-1]
        return np.asarray(table, dtype=np.int64)[positions // size], positions % size


class _Eraser:
    """Told of every change of KV bytes that is neither a forward nor a copy operation."""

    def __init__(self, shadows: Sequence[_Shadow]) -> None:
        self._shadows = shadows

    def __call__(self, change: SlotChange) -> None:
        slots = self._shadows[change.group].slots
        slots[change.replica, change.layer, :, change.head, change.block_id, change.slot] = _CHANGED
