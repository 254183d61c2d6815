"""Runs a study: measures capacity, then blocks of every cell in turn, until each cell is known well enough.

When to stop is decided by how wide a cell's interval is (or by the time limit), never by where it lies: a study that
goes on until it likes its result proves nothing. Cells take turns so that each gets the same time: a machine that
changes in the middle of a study changes under all of them.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum

import httpx

from harness.overhead import arrivals
from harness.overhead.accounts import Accounts
from harness.overhead.client import Answer, Ask, Clock, ask
from harness.overhead.design import CAPACITY_REQUESTS, SLOTS, Cell, Design, Load, arms, prompt, prompt_id
from harness.overhead.routes import Route, StudyError, check_arms
from harness.overhead.rows import ARM_OFF, ARM_ON, Row

BEFORE = -1  # The block of rows that were sent before the first block.
_LEAD_S = 0.02  # From the moment that a slot is planned to its first request: making its bodies must not make it late.
_EVERY = 2  # A mirrored pair of blocks.


class Stop(StrEnum):
    """Why a cell got no further blocks."""

    PRECISE = "precise"
    BLOCKS = "blocks"
    TIME = "time"
    INTERRUPTED = "interrupted"


@dataclass(slots=True, eq=False)
class Progress:
    """What a study knows of one cell while it runs. Times in seconds."""

    blocks: int = 0
    spent_s: float = 0.0
    longest_s: float = 0.0
    stop: Stop = Stop.INTERRUPTED
    finished: bool = False


@dataclass(frozen=True, slots=True)
class Instruments:
    """What a study works with. `keep` gets each row when it is known; `tag` makes request ids differ between studies.

    `enough(rows, cell)` says whether the cell's interval is narrow enough. `say` is told what goes on, line by line.
    `accounts` books what the engines say that checksums cost; None: nobody asks them.
    """

    client: httpx.AsyncClient
    clock: Clock
    keep: Callable[[Row], None]
    enough: Callable[[Sequence[Row], Cell], bool]
    accounts: Accounts | None = None
    say: Callable[[str], None] = lambda text: None
    model: str = "kvchaos"
    tag: str = field(default_factory=lambda: secrets.token_hex(3))


class Study:
    """One study. `rows`, `progress` and `capacity` (requests a second) say what it found, also if `run` is cut off."""

    def __init__(self, design: Design, routes: Mapping[str, Route], instruments: Instruments) -> None:
        self.design = design
        self.rows: list[Row] = []
        self.progress = {cell.id: Progress() for cell in design.cells}
        self.capacity: dict[str, float] = {}
        self._routes = routes
        self._with = instruments

    async def run(self) -> None:
        """Send everything.

        Raises:
            StudyError: nothing answers, or the arms do not differ as they should.
        """
        await self._try_both_arms()
        for cell in self.design.high_cells:
            self.capacity[cell.id] = await self._measure_capacity(cell)
            self._with.say(f"{cell.id}: capacity {self.capacity[cell.id]:.3g} requests a second")
        while True:
            waiting = [cell for cell in self.design.cells if not self.progress[cell.id].finished]
            if not waiting:
                return
            await self._turn(min(waiting, key=lambda cell: self.progress[cell.id].spent_s))

    async def _try_both_arms(self) -> None:
        """One request an arm, so that a server that cannot be used is found out before a study's time is spent."""
        cell = self.design.cells[0]
        for slot, arm in enumerate((ARM_OFF, ARM_ON)):
            (row,) = await self._slot(cell, BEFORE, slot, arm, arrivals.alone())
            if not row.ok:
                raise StudyError(f"{self._routes[arm].url} does not answer: {row.error}")
            check_arms(self.design.kind, [row])

    async def _measure_capacity(self, cell: Cell) -> float:
        """Requests a second without checksums, from a burst: how many there were over how long they took."""
        rows = await self._slot(cell, BEFORE, SLOTS, ARM_OFF, (0.0,) * CAPACITY_REQUESTS)
        answered = [row for row in rows if row.ok]
        if len(answered) < len(rows):
            wrong = next(row.error for row in rows if not row.ok)
            raise StudyError(
                f"{cell.id}: {len(rows) - len(answered)} of {len(rows)} requests at once were not answered ({wrong}): "
                "the engines have too few blocks or sequences for this load, or need more time"
            )
        return len(rows) / (max(row.end_s for row in rows) - min(row.intended_s for row in rows))

    async def _turn(self, cell: Cell) -> None:
        """One block of this cell, or the end of it."""
        design, progress, clock = self.design, self.progress[cell.id], self._with.clock
        begun = clock.now()
        if begun + progress.longest_s > design.time_limit_s:
            self._finish(cell, Stop.TIME)
            return
        rows = await self._block(cell, progress.blocks)
        took = clock.now() - begun
        progress.blocks += 1
        progress.spent_s += took
        progress.longest_s = max(progress.longest_s, took)
        check_arms(design.kind, rows)
        if not any(row.ok for row in rows):
            raise StudyError(f"{cell.id}: no request of block {progress.blocks - 1} was answered: {rows[0].error}")
        self._judge(cell, progress.blocks - design.warmup_blocks)

    def _judge(self, cell: Cell, counted: int) -> None:
        """Say whether the cell needs more than these blocks. A mirrored pair is never split."""
        if counted < self.design.min_blocks or counted % _EVERY:
            return
        if self._with.enough([row for row in self.rows if row.cell == cell.id], cell):
            self._finish(cell, Stop.PRECISE)
        elif counted >= self.design.max_blocks:
            self._finish(cell, Stop.BLOCKS)

    def _finish(self, cell: Cell, stop: Stop) -> None:
        progress = self.progress[cell.id]
        progress.stop, progress.finished = stop, True
        self._with.say(f"{cell.id}: ends after {progress.blocks} blocks ({stop})")

    async def _block(self, cell: Cell, block: int) -> list[Row]:
        rows: list[Row] = []
        for slot, arm in enumerate(arms(block)):
            # The same in all four slots: load that came in another pattern would differ by more than the arm.
            rows += await self._slot(cell, block, slot, arm, self._offsets(cell, block))
        return rows

    def _offsets(self, cell: Cell, block: int) -> tuple[float, ...]:
        if cell.load is Load.LOW:
            return arrivals.alone()
        rate = self.capacity[cell.id] * self.design.utilisation
        return arrivals.at_rate(rate, self.design.count(cell), self.design.seed_of("arrivals", cell.id, block))

    async def _slot(self, cell: Cell, block: int, slot: int, arm: str, offsets: Sequence[float]) -> list[Row]:
        """Send one slot and wait for all of its answers, so that none of its load reaches the next arm."""
        design, clock, accounts = self.design, self._with.clock, self._with.accounts
        idle = arrivals.pause(design.seed_of("pause", cell.id, block, slot), design.pause_s)
        await clock.sleep_until(clock.now() + idle)
        if accounts is not None:
            await accounts.open()
        bodies = [self._body(cell, block, slot, index, arm) for index in range(len(offsets))]
        start = clock.now() + _LEAD_S
        sending = [
            self._send(cell, block, slot, arm, index, body, start + offset)
            for index, (body, offset) in enumerate(zip(bodies, offsets, strict=True))
        ]
        rows = list(await asyncio.gather(*sending))
        if accounts is not None:
            await accounts.close(rows)
        return rows

    def _body(self, cell: Cell, block: int, slot: int, index: int, arm: str) -> bytes:
        body = {
            "model": self._with.model,
            "prompt": prompt(self.design, cell, block, slot, index),
            "max_tokens": self.design.output_tokens,
            "temperature": 0,
            "stream": True,
            **self._routes[arm].extra,
        }
        return json.dumps(body).encode()

    async def _send(self, cell: Cell, block: int, slot: int, arm: str, index: int, body: bytes, intended: float) -> Row:
        name = prompt_id(cell, block, index)
        request = Ask(self._routes[arm].url, body, f"{self._with.tag}-{name}-s{slot}", intended)
        answer = await ask(self._with.client, self._with.clock, request)
        row = self._row(cell, block, slot, arm, name, request, answer)
        self.rows.append(row)
        self._with.keep(row)
        return row

    def _row(self, cell: Cell, block: int, slot: int, arm: str, name: str, request: Ask, answer: Answer) -> Row:
        return Row(
            study=str(self.design.kind),
            block=block,
            slot=slot,
            arm=arm,
            cell=cell.id,
            prompt_tokens=cell.prompt_tokens,
            load=str(cell.load),
            prompt_id=name,
            request_id=request.request_id,
            warmup=int(block < self.design.warmup_blocks),
            intended_s=request.intended_s,
            **asdict(answer),
        )
