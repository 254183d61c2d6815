"""A finished run as data: what the judge found, and nothing else. `results.json` is this, written out.

Frozen dataclasses that hold only JSON values (str enums included), so that `from_json(to_json(x)) == x`.
No wall time, pid, path or address is in here: those are in `timing.jsonl` and `manifest.json`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import Any

from scenarios.words import Outcome, Policy, Result, Role, Tokens, Truth, VerdictStatus


@dataclass(frozen=True, slots=True)
class GroupCoverage:
    """What one KV cache group of a load came to: block positions in the request."""

    group_id: int
    status: VerdictStatus
    reason: str | None
    loaded: tuple[int, ...]
    compared: tuple[int, ...]
    not_compared: tuple[int, ...]
    differing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """One request of a cell: what the engine said about its load, and what the oracles know.

    `load` counts requests from 1, as `when: {load: 2}` does. `corrupted_positions` are the block positions in
    which D's bytes, when the load finished, differ from P's at KV final (tokens [0, N) only).
    """

    load: int
    request_id: str
    faulted: bool
    verdict: VerdictStatus
    reason: str | None
    groups: tuple[GroupCoverage, ...]
    outcome: Outcome
    error: str | None
    delivered: Truth
    read: Truth
    tokens: Tokens
    corrupted_positions: tuple[int, ...]
    num_prompt_tokens: int
    tokens_got: tuple[int, ...]
    tokens_wanted: tuple[int, ...]

    @property
    def truth(self) -> Truth:
        """`corrupted` when the wrong bytes were delivered or read; it never depends on the tokens."""
        if Truth.CORRUPTED in (self.delivered, self.read):
            return Truth.CORRUPTED
        return Truth.NONE if self.delivered is Truth.NONE and self.read is Truth.NONE else Truth.INTACT

    @property
    def served_corrupted(self) -> bool:
        """Answered normally from wrong KV, or with wrong tokens."""
        wrong = self.read is Truth.CORRUPTED or self.tokens is Tokens.WRONG
        return self.outcome is Outcome.SERVED and wrong

    @property
    def silent(self) -> bool:
        """Silent corruption: served wrong, and nothing said mismatch. See `warned`."""
        return self.served_corrupted and self.verdict is not VerdictStatus.MISMATCH

    @property
    def warned(self) -> bool:
        """Silent corruption under an `unverified` verdict: counted apart, somebody was told."""
        return self.silent and self.verdict is VerdictStatus.UNVERIFIED


@dataclass(frozen=True, slots=True)
class Evidence:
    """Proof that a fault happened: what was touched, before and after (digests, never KV bytes)."""

    fault: str
    seam: str
    request_id: str | None
    what: str
    before: str | None
    after: str | None


@dataclass(frozen=True, slots=True)
class Expected:
    """What the scenario says must come out of a load. None: not said, so not judged."""

    verdict: VerdictStatus | None = None
    reason: str | None = None
    outcome: Outcome | None = None
    truth: Truth | None = None
    tokens: Tokens | None = None


@dataclass(frozen=True, slots=True)
class CellResult:
    """One judged cell. `why` has a line for each thing that is not as expected; empty on a pass."""

    id: str
    scenario: str
    summary: str
    faults: tuple[str, ...]
    incidents: tuple[str, ...]
    policy: Policy
    topology: str
    seed: int
    role: Role
    twin: str | None
    expected: Expected | None
    others: Expected | None
    known_gap: str | None
    result: Result
    why: tuple[str, ...]
    loads: tuple[LoadResult, ...]
    violations: tuple[str, ...]
    evidence: tuple[Evidence, ...]
    rerun: str


@dataclass(frozen=True, slots=True)
class Headline:
    """What a run showed, counted over fault cells. `known_gap` counts silent loads that a gap explains."""

    silent_off: int
    warned_fail_open: int
    silent_fail_open: int
    silent_fail_closed: int
    silent_fail_closed_known_gap: int
    loads_off: int
    loads_fail_closed: int


@dataclass(frozen=True, slots=True)
class RunResult:
    """All cells of a run, in plan order."""

    name: str
    target: str
    seed: int
    interrupted: bool
    cells: tuple[CellResult, ...]

    @property
    def totals(self) -> Counter[Result]:
        return Counter(cell.result for cell in self.cells)

    @property
    def exit_code(self) -> int:
        """130 interrupted; 1 a cell failed (wins over 2); 2 something is unknown, or nothing passed; else 0."""
        if self.interrupted:
            return 130
        totals = self.totals
        if totals[Result.FAIL]:
            return 1
        return 0 if totals[Result.PASS] and not totals[Result.UNKNOWN] else 2

    @property
    def headline(self) -> Headline:
        fault_cells = [c for c in self.cells if c.role is Role.FAULT]
        off = [ld for c in fault_cells if c.policy is Policy.OFF for ld in c.loads]
        fail_open = [ld for c in fault_cells if c.policy is Policy.FAIL_OPEN for ld in c.loads]
        closed = [(c, ld) for c in fault_cells if c.policy.fail_closed for ld in c.loads]
        silent_closed = [c for c, ld in closed if ld.silent]
        gaps = sum(c.result is Result.KNOWN_GAP for c in silent_closed)
        return Headline(
            silent_off=sum(ld.silent for ld in off),
            warned_fail_open=sum(ld.warned for ld in fail_open),
            silent_fail_open=sum(ld.silent and not ld.warned for ld in fail_open),
            silent_fail_closed=len(silent_closed) - gaps,
            silent_fail_closed_known_gap=gaps,
            loads_off=len(off),
            loads_fail_closed=len(closed),
        )


def to_json(value: Any) -> Any:
    """A dataclass of this module (or a tuple of them) as plain JSON values."""
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
