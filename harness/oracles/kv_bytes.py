"""The bytes oracle: digests of P's KV when it is final and when it is summed, of D's when a load has finished and
when it is first read.

Per position it keeps a digest per (layer, head), and the checksum of those bytes by the cell's version of the
definition, from which the known gaps are predicted. Positions count grid blocks of `grid` tokens, the smaller of the
two sides' block sizes, so that both sides can be compared. Replicas of a head (EXT-1) that agree count as one.

D computes the last prompt token again before it reads it, so what it reads of a load of the whole prompt is one token
less: `first_use` leaves that token out, and `to_be_read` is P's KV at KV final without it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from engine.cache import KVMemory
from engine.checksum.records import GroupBlocks
from engine.seams import Checksummed, FirstUse, KVFinal, LoadFinished, Seams, Stage
from harness.history import History
from kernels import definition, definition_v2

KV_FINAL, CHECKSUMMED, LOAD_FINISHED, FIRST_USE = "kv_final", "checksummed", "load_finished", "first_use"
TO_BE_READ = "to_be_read"
EVENT = "oracle.kv"


class BytesOracle:
    """Writes what it sees into the history; the judge compares."""

    def __init__(self, history: History, grid: int, version: int = 1) -> None:
        self._history = history
        self._grid = grid
        self._version = version
        self._prompts: dict[str, int] = {}

    def attach(self, seams: Seams) -> None:
        """Before any fault at P's KV final; after every fault everywhere else."""
        seams.on("producer.kv_final", self._kv_final, Stage.BEFORE)
        seams.on("producer.checksummed", self._checksummed, Stage.BEFORE)
        seams.on("consumer.load_finished", self._load_finished, Stage.AFTER)
        seams.on("consumer.first_use", self._first_use, Stage.AFTER)

    def _kv_final(self, event: KVFinal) -> None:
        self._prompts[event.request_id] = max(blocks.num_tokens for blocks in event.groups.values())
        self._see(KV_FINAL, event.request_id, event.groups, event.memory)
        self._see(TO_BE_READ, event.request_id, event.groups, event.memory, leave_out=1)

    def _checksummed(self, event: Checksummed) -> None:
        self._see(CHECKSUMMED, event.request_id, event.groups, event.memory)

    def _load_finished(self, event: LoadFinished) -> None:
        self._see(LOAD_FINISHED, event.request_id, event.groups, event.memory)

    def _first_use(self, event: FirstUse) -> None:
        loaded = max(blocks.num_tokens for blocks in event.groups.values())
        whole = loaded >= self._prompts.get(event.request_id, 0)
        self._see(FIRST_USE, event.request_id, event.groups, event.memory, leave_out=int(whole))

    def _see(
        self, at: str, request_id: str, groups: Mapping[int, GroupBlocks], memory: KVMemory, leave_out: int = 0
    ) -> None:
        for group_id, blocks in groups.items():
            held = memory.group(group_id)
            grid = min(self._grid, held.block_size)
            first_token = blocks.start * blocks.block_size
            # A recurrent state is read as it arrived.
            less = 0 if held.spec.is_state else leave_out
            replicas = [_cut(replica.tokens(blocks), less) for replica in held.replicas]
            kv = [replica for n, replica in enumerate(replicas) if n == 0 or (replica != replicas[0]).any()]
            self._history.add(
                EVENT,
                at=at,
                request=request_id,
                group=group_id,
                grid=grid,
                start=first_token // grid,
                digests=_joined([grid_digests(replica, grid) for replica in kv]),
                sums=_joined([grid_sums(replica, held.factors, grid, first_token, self._version) for replica in kv]),
            )


def _cut(kv: npt.NDArray[np.uint8], leave_out: int) -> npt.NDArray[np.uint8]:
    """Without the last `leave_out` tokens."""
    return kv[:, :, : kv.shape[2] - leave_out]


def _joined(by_replica: list[list[str]]) -> list[str]:
    """One text a grid block: that of replica 0, and of each replica that has another one."""
    return ["|".join(dict.fromkeys(texts)) for texts in zip(*by_replica, strict=True)]


def grid_sums(
    kv: npt.NDArray[np.uint8], factors: Sequence[tuple[int, int]], grid: int, first_token: int, version: int = 1
) -> list[str]:
    """Per grid block of uint8 [layers, heads, tokens, bytes] its checksum, 16 hex digits.

    `factors` are those of each layer: its number, and that of its first head.
    """
    tokens = kv.shape[2]
    if not tokens:
        return []
    checksums = {1: definition, 2: definition_v2}[version].block_checksums
    whole_blocks = np.pad(kv, ((0, 0), (0, 0), (0, -tokens % grid), (0, 0)))
    sums = np.zeros(-(-tokens // grid), dtype=np.uint64)
    for first_head in sorted({first for _, first in factors}):
        # Of caches with one layer number each is summed by itself: the definition takes a number once.
        rows = [row for row, (_, first) in enumerate(factors) if first == first_head]
        numbers = [factors[row][0] for row in rows]
        sums += checksums(whole_blocks[rows], numbers, first_head, grid, first_token, first_token + tokens)
    return [f"{int(value):016x}" for value in sums]


def grid_digests(kv: npt.NDArray[np.uint8], grid: int) -> list[str]:
    """Per grid block of uint8 [layers, heads, tokens, bytes]: 8 hex digits a (layer, head), concatenated."""
    layers, heads, tokens, _ = kv.shape

    def digest(layer: int, head: int, start: int) -> str:
        data = np.ascontiguousarray(kv[layer, head, start : start + grid]).tobytes()
        return hashlib.blake2b(data, digest_size=4).hexdigest()

    return [
        "".join(digest(layer, head, start) for layer in range(layers) for head in range(heads))
        for start in range(0, tokens, grid)
    ]
