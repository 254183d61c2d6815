"""When a producer sums its blocks (EXT-8): all at the end of a prompt, or some of them earlier, kept until then.

`prompt_end` reads the whole prompt in the step that finishes it. `cache` does the same, and keeps the sum of every full
block, so that the next prompt that shares the block does not read it again. `on_write` sums a block in the step that
fills it and keeps that. What is sent is the same text in all three, as long as no byte changes between a block's sum
and its transfer; if one does, the earlier the sum, the more of such changes D sees.

A kept sum is of what was in the block when it was summed. It dies when the engine writes any slot of the block: a sum
of what was there before must never be sent for what is there now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from engine.checksum.records import GroupBlocks
from engine.step import StepPlan

Read = Callable[[GroupBlocks], torch.Tensor]
_NONE = -1


class _Table:
    """The kept sums of one group by block id: `positions` int64 [blocks] on the host, values on the device."""

    def __init__(self, num_blocks: int, device: torch.device) -> None:
        self.positions = np.full(num_blocks, _NONE, dtype=np.int64)
        self._device = device
        self._values = torch.zeros(num_blocks, dtype=torch.int64, device=device)

    def take(self, ids: npt.NDArray[np.int64]) -> torch.Tensor:
        """A copy of the values of these blocks."""
        # A few numbers on the host: numpy takes them several times faster than torch, which may ask other threads.
        if self._device.type == "cpu":
            return torch.from_numpy(self._values.numpy()[ids])
        return self._values[self._on_device(ids)]

    def put(self, ids: npt.NDArray[np.int64], values: torch.Tensor) -> None:
        """Keep the values of these blocks."""
        if self._device.type == "cpu":
            self._values.numpy()[ids] = values.numpy()
        else:
            self._values[self._on_device(ids)] = values

    def _on_device(self, ids: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(ids).pin_memory().to(self._device, non_blocking=True)


class KeptSums:
    """The sums of full blocks that one worker keeps. Nothing in here waits for the device."""

    def __init__(self, num_blocks: int, device: torch.device) -> None:
        self._num_blocks = num_blocks
        self._device = device
        # Sums of two versions of the definition have nothing to do with each other.
        self._tables: dict[tuple[int, int], _Table] = {}

    def sums(self, blocks: GroupBlocks, read: Read) -> torch.Tensor:
        """The sums of these blocks, int64 [blocks] on the device: those that are kept, and `read` for all others.

        Every full block's sum is kept from now on. A block is looked up by its position as well: its sum at another one
        is another number (DEF-3).
        """
        table = self._table(blocks)
        ids = np.asarray(blocks.block_ids, dtype=np.int64)
        positions = np.arange(blocks.start, blocks.start + len(ids))
        full = (positions + 1) * blocks.block_size <= blocks.tokens_to_sum
        known = full & (table.positions[ids] == positions)
        if not known.any():
            values = read(blocks)
            self._keep(table, ids[full], positions[full], values)
            return values
        values = table.take(ids)
        for first, stop in _runs(~known):
            values[first:stop] = part = read(_cut(blocks, first, stop))
            own = slice(first, first + int(full[first:stop].sum()))
            self._keep(table, ids[own], positions[own], part)
        return values

    @staticmethod
    def _keep(
        table: _Table, ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], values: torch.Tensor
    ) -> None:
        """Of blocks whose values begin with those of these full ones."""
        table.put(ids, values[: len(ids)])
        table.positions[ids] = positions

    def forget(self, block_ids: Iterable[int]) -> None:
        """The engine writes these blocks: what was kept of them is of their past."""
        ids = np.fromiter(block_ids, dtype=np.int64)
        for table in self._tables.values():
            table.positions[ids] = _NONE

    @property
    def num_kept(self) -> int:
        return sum(int((table.positions != _NONE).sum()) for table in self._tables.values())

    def _table(self, blocks: GroupBlocks) -> _Table:
        key = blocks.group_id, blocks.version
        if key not in self._tables:
            self._tables[key] = _Table(self._num_blocks, self._device)
        return self._tables[key]


def written_blocks(plan: StepPlan, group_id: int, block_size: int) -> set[int]:
    """Ids of the blocks of one group that this step's forward, its speculator and its loads write."""
    written: set[int] = set()
    for request in plan.requests:
        table, first = request.tables[group_id], request.first_position // block_size
        # Where a speculator guesses, it may write as far as there are blocks.
        written.update(table[first:] if request.history else table[first : -(-request.end // block_size)])
    for load in plan.loads:
        if group_id in load.groups:
            written.update(load.groups[group_id].block_ids)
    return written


def filled_blocks(blocks: GroupBlocks, first_token: int, stop_token: int) -> GroupBlocks | None:
    """Of a prompt's blocks, all of them, those whose last slot is that of a token in [first_token, stop_token)."""
    size = blocks.block_size
    first = max(first_token // size, blocks.start)
    stop = min(stop_token, blocks.num_tokens) // size
    return _cut(blocks, first - blocks.start, stop - blocks.start) if first < stop else None


def only_filled(groups: Mapping[int, GroupBlocks], first_token: int, stop_token: int) -> Mapping[int, GroupBlocks]:
    """`filled_blocks` of each group that has some."""
    filled = {group_id: filled_blocks(blocks, first_token, stop_token) for group_id, blocks in groups.items()}
    return {group_id: blocks for group_id, blocks in filled.items() if blocks is not None}


def _cut(blocks: GroupBlocks, first: int, stop: int) -> GroupBlocks:
    """Blocks `first` to `stop` of these, and their tokens alone."""
    end = (blocks.start + stop) * blocks.block_size
    return replace(
        blocks,
        start=blocks.start + first,
        block_ids=blocks.block_ids[first:stop],
        num_tokens=min(blocks.num_tokens, end),
        sum_tokens=None if blocks.sum_tokens is None else min(blocks.sum_tokens, end),
    )


def _runs(wanted: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Where consecutive True are: (first, stop)."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], wanted, [False])).astype(np.int8)))
    yield from ((int(first), int(stop)) for first, stop in edges.reshape(-1, 2))
