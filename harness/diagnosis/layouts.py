"""Blocks whose memory was written in one order and read in another: HND as NHD, packed K and V as separate, kernel
blocks in the wrong order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from harness.diagnosis.compare import Comparison, Ids, Ints, Mask, Row
from harness.diagnosis.finding import Finding, RowSource, fit_cells, place
from harness.diagnosis.words import count

# The order of a block's memory in one layer: p K or V, h heads, s slots.
HND, NHD, PACKED_HND, PACKED_NHD = "phs", "psh", "hsp", "shp"
_AXES = {"h": "heads", "p": "K|V", "s": "slots"}
_NAMES = {HND: "HND", NHD: "NHD", PACKED_HND: "packed HND", PACKED_NHD: "packed NHD"}
_SAMPLE = 4


@dataclass(frozen=True, slots=True, eq=False)
class Reordering:
    """Where D's row at [head, part, slot] of a block stands in P's: three int64 [H, 2, block_size]."""

    kind: str
    text: str
    head: Ints
    part: Ints
    slot: Ints

    @property
    def cell_axes(self) -> tuple[int, ...]:
        """Axes along which nothing moves: it may be true in one layer or head and not in another."""
        heads, parts, _ = np.indices(self.head.shape)
        return (0, *((1,) if (self.head == heads).all() else ()), *((2,) if (self.part == parts).all() else ()))


def reordered(cmp: Comparison) -> list[Finding]:
    """Every reordering that holds somewhere, at D's block size and at P's."""
    findings = []
    for grid in cmp.grids:
        layers, tokens = _sample(cmp, grid)
        wrong = cmp.wrong[layers][..., tokens]
        ids = cmp.ids[layers][..., tokens]
        for reordering in _distinct(cmp.wrong.shape[1], grid):
            predicted, known = _predict(cmp, reordering, layers, tokens, grid)
            if ((predicted == ids) & known & wrong).any():
                findings += _judge(cmp, reordering, grid)
    return findings


def _sample(cmp: Comparison, grid: int) -> tuple[Ints, Ints]:
    """A few layers, and the tokens of a few blocks, that have differing rows."""
    layers = _spread(np.flatnonzero(cmp.wrong.any(axis=(1, 2, 3))))
    blocks = cmp.tokens // grid
    chosen = _spread(np.unique(blocks[cmp.wrong[layers].any(axis=(0, 1, 2))]))
    return layers, np.flatnonzero(np.isin(blocks, chosen))


def _spread(numbers: Ints) -> Ints:
    return numbers[:: max(1, len(numbers) // _SAMPLE)]


def _judge(cmp: Comparison, reordering: Reordering, grid: int) -> list[Finding]:
    every = np.arange(cmp.wrong.shape[0])
    predicted, known = _predict(cmp, reordering, every, np.arange(cmp.num_tokens), grid)
    fit = fit_cells(cmp, predicted, known, reordering.cell_axes, grid)
    if fit is None:
        return []
    where = place(cmp, fit.affected)
    text = reordering.text + ("" if fit.whole else where.text())
    cost = 1 + (0 if fit.whole else where.cost)
    if reordering.kind == "kernel_blocks" and len(np.unique(where.tokens // grid)) == 1:
        cost += 1.5  # of one block it is no more than some tokens exchanged
    source = _source(cmp, reordering, fit.affected, grid)
    return [Finding(reordering.kind, text, cost, fit.explained, fit.excused, source)]


def _predict(cmp: Comparison, new: Reordering, layers: Ints, tokens: Ints, grid: int) -> tuple[Ids, Mask]:
    """Hashes uint64 [layers, H, 2, tokens] of the rows that would stand there, and bool [H, 2, tokens]: known."""
    slots = cmp.tokens[tokens] % grid
    index = cmp.own_index(cmp.tokens[tokens] - slots + new.slot[:, :, slots])
    return cmp.table[layers[:, None, None, None], new.head[:, :, slots], new.part[:, :, slots], index], index >= 0


def _source(cmp: Comparison, new: Reordering, affected: Mask, grid: int) -> RowSource:
    def source(row: Row) -> tuple[int, int, int, int] | None:
        if not affected[row]:
            return None
        layer, head, part, token = row
        slot = int(cmp.tokens[token]) % grid
        at = (head, part, slot)
        index = int(cmp.own_index(cmp.tokens[token] - slot + new.slot[at]))
        return (layer, int(new.head[at]), int(new.part[at]), index) if index >= 0 else None

    return source


def _distinct(heads: int, grid: int) -> Iterator[Reordering]:
    """No two that move the same rows, and none that moves nothing; the well-known ones first."""
    seen = {b"".join(axis.tobytes() for axis in np.indices((heads, 2, grid)))}
    for reordering in (*_memory_orders(heads, grid), *_kernel_blocks(heads, grid)):
        key = b"".join(axis.tobytes() for axis in (reordering.head, reordering.part, reordering.slot))
        if key not in seen:
            seen.add(key)
            yield reordering


def _memory_orders(heads: int, grid: int) -> Iterator[Reordering]:
    sizes = {"h": heads, "p": 2, "s": grid}
    rest = [(HND, NHD), (NHD, HND), (PACKED_HND, "hps"), ("hps", PACKED_HND), (PACKED_NHD, NHD), (NHD, PACKED_NHD)]
    orders = [*_NAMES, "hps", "sph"]
    for written, read in (*rest, *permutations(orders, 2)):
        shape = tuple(sizes[axis] for axis in read)
        memory = np.arange(2 * heads * grid).reshape(shape).transpose([read.index(axis) for axis in "hps"])
        found = dict(zip(written, np.unravel_index(memory, tuple(sizes[axis] for axis in written)), strict=True))
        yield Reordering(_kind(written, read), _text(written, read), found["h"], found["p"], found["s"])


def _kind(written: str, read: str) -> str:
    kinds = {(HND, NHD): "hnd_as_nhd", (NHD, HND): "nhd_as_hnd"}
    packed = (written.endswith("p"), read.endswith("p"))
    by_packing = {(True, False): "packed_as_separate", (False, True): "separate_as_packed"}
    return kinds.get((written, read)) or by_packing.get(packed, "layout")


def _text(written: str, read: str) -> str:
    def shown(order: str) -> str:
        name = _NAMES.get(order)
        return f"{''.join(f'[{_AXES[axis]}]' for axis in order)}{f' ({name})' if name else ''}"

    return f"each block was written as {shown(written)} and read as {shown(read)}"


def _kernel_blocks(heads: int, grid: int) -> Iterator[Reordering]:
    """Blocks of k kernel blocks each, with neighbours exchanged or all in reverse."""
    for parts in (2, 4, 8):
        if grid % parts:
            continue
        size = grid // parts
        slots = np.arange(grid)
        number, rest = slots // size, slots % size
        of = f"kernel blocks of {count(size, 'token')}"
        text = f"the two halves of each block are exchanged ({of})"
        if parts > 2:
            text = f"in each block, neighbouring {of} are exchanged"
        for new, says in (
            ((number ^ 1) * size + rest, text),
            ((parts - 1 - number) * size + rest, f"in each block, the {parts} {of} are in reverse order"),
        ):
            head, part, _ = np.indices((heads, 2, grid))
            yield Reordering("kernel_blocks", says, head, part, np.broadcast_to(new, head.shape).copy())
