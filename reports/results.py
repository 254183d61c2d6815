"""A finished run as data: what the judge found, and nothing else. `results.json` is this, written out.

Frozen dataclasses that hold only JSON values (str enums included), so that `from_json(RunResult, to_json(x)) == x`.
No wall time, pid, path or address is in here: those are in `timing.jsonl` and `manifest.json`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults.base import Evidence
from reports.errors import BrokenResultsError
from reports.files import write_atomically
from reports.records import from_json, to_json
from scenarios.words import Outcome, Policy, Result, Role, Tokens, Truth, VerdictStatus

__all__ = [
    "CellResult",
    "Evidence",
    "Expected",
    "GroupCoverage",
    "Headline",
    "LoadResult",
    "RunResult",
    "TimelineEvent",
    "from_json",
    "read_results",
    "to_json",
    "write_results",
]

SCHEMA_VERSION = 1


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
    which D's bytes, when the load finished, differ from P's at KV final (tokens [0, N) only). `damage` says which
    layers, heads and tokens those are, and `diagnosis` what would explain them, best hypothesis first.
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
    damage: str | None = None
    diagnosis: tuple[str, ...] = ()

    @property
    def truth(self) -> Truth:
        """`corrupted` when the wrong bytes were delivered or read; it never depends on the tokens."""
        if Truth.CORRUPTED in (self.delivered, self.read):
            return Truth.CORRUPTED
        return Truth.NONE if self.delivered is Truth.NONE and self.read is Truth.NONE else Truth.INTACT

    @property
    def wrong(self) -> bool:
        """Wrong KV was read, or the tokens are wrong."""
        return self.read is Truth.CORRUPTED or self.tokens is Tokens.WRONG

    @property
    def served_corrupted(self) -> bool:
        """Answered normally from wrong KV, or with wrong tokens."""
        return self.outcome is Outcome.SERVED and self.wrong

    @property
    def answered_wrong(self) -> bool:
        """A client got an answer that is wrong or came from wrong KV, recomputed or not, caught or not."""
        return self.outcome in (Outcome.SERVED, Outcome.RECOMPUTED) and self.wrong

    @property
    def silent(self) -> bool:
        """Silent corruption: served wrong, and nothing said mismatch. See `warned`."""
        return self.served_corrupted and self.verdict is not VerdictStatus.MISMATCH

    @property
    def warned(self) -> bool:
        """Silent corruption under an `unverified` verdict: counted apart, somebody was told."""
        return self.silent and self.verdict is VerdictStatus.UNVERIFIED


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """A moment of a cell (`reports.timeline`).

    `t` is virtual time; `where` is producer, consumer, proxy, transfer, fault, or run for the cell as a whole; `event`
    is the history line's own, for a fault the seam at which it acted.
    """

    t: int
    where: str
    event: str
    request_id: str | None
    what: str


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
    timeline: tuple[TimelineEvent, ...] = ()

    @property
    def judged_loads(self) -> tuple[LoadResult, ...]:
        """The loads that this cell is about: the faulted ones; all of them where no fault was asked for.

        A fault that never touched a load leaves none, which must not look like loads that came out well.
        """
        faulted = tuple(load for load in self.loads if load.faulted)
        return faulted if faulted or (self.faults and self.role is not Role.TWIN) else self.loads

    def expected_of(self, load: LoadResult) -> Expected | None:
        """What must come out of `load`. `expect` is for the faulted loads, or for all of a scenario without fault."""
        if load.faulted:
            return self.expected
        return self.others if self.faults or self.others else self.expected


@dataclass(frozen=True, slots=True)
class Headline:
    """What a run showed, counted over the requests of fault cells (twins and repeats do not count).

    Silent, warned, caught: see `LoadResult`. Under fail-closed only a cell whose *result* is known_gap, with the gap
    named, takes its silent requests out of `silent_fail_closed`; a warned one counts as silent there, because
    fail-closed must not serve it. `caught_yet_wrong_fail_closed` are wrong answers that are not silent: fail-closed
    saw them and a client got them all the same. An unknown cell proves nothing: `unknown_*` count such cells.
    """

    silent_off: int
    warned_fail_open: int
    silent_fail_open: int
    silent_fail_closed: int
    silent_fail_closed_known_gap: int
    loads_off: int
    loads_fail_closed: int
    loads_fail_open: int
    caught_fail_open: int
    caught_yet_wrong_fail_closed: int
    known_gaps: tuple[tuple[str, int], ...]
    unknown_off: int
    unknown_fail_closed: int


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
        cells = [c for c in self.cells if c.role is Role.FAULT]
        off = [c for c in cells if c.policy is Policy.OFF]
        closed = [c for c in cells if c.policy.fail_closed]
        in_off = [ld for c in off for ld in c.loads]
        in_open = [ld for c in cells if c.policy is Policy.FAIL_OPEN for ld in c.loads]
        in_closed = [ld for c in closed for ld in c.loads]
        gaps = _known_gaps(closed)
        explained = sum(gaps.values())
        return Headline(
            silent_off=sum(ld.silent for ld in in_off),
            warned_fail_open=sum(ld.warned for ld in in_open),
            silent_fail_open=sum(ld.silent and not ld.warned for ld in in_open),
            silent_fail_closed=sum(ld.silent for ld in in_closed) - explained,
            silent_fail_closed_known_gap=explained,
            loads_off=len(in_off),
            loads_fail_closed=len(in_closed),
            loads_fail_open=len(in_open),
            caught_fail_open=sum(ld.served_corrupted and not ld.silent for ld in in_open),
            caught_yet_wrong_fail_closed=sum(ld.answered_wrong and not ld.silent for ld in in_closed),
            known_gaps=tuple(sorted(gaps.items(), key=lambda item: (len(item[0]), item[0]))),
            unknown_off=sum(c.result is Result.UNKNOWN for c in off),
            unknown_fail_closed=sum(c.result is Result.UNKNOWN for c in closed),
        )


def _known_gaps(cells: Iterable[CellResult]) -> Counter[str]:
    """Silent requests per gap. A cell that names no gap has none explained."""
    gaps: Counter[str] = Counter()
    for cell in cells:
        silent = sum(ld.silent for ld in cell.loads)
        if cell.result is Result.KNOWN_GAP and cell.known_gap and silent:
            gaps[cell.known_gap] += silent
    return gaps


def write_results(path: Path, run: RunResult) -> None:
    """Write `run` as JSON, with the version of its shape.

    Raises:
        ReportError: the file cannot be written.
    """
    document = {"schema_version": SCHEMA_VERSION, **to_json(run)}
    write_atomically(path, json.dumps(document, indent=1, allow_nan=False) + "\n")


def read_results(path: Path) -> RunResult:
    """Read what `write_results` wrote.

    Raises:
        BrokenResultsError: the file cannot be read, is not JSON, or not of this shape.
    """
    advice = "`kvchaos analyze` writes it anew from the run's history"
    try:
        document = json.loads(path.read_bytes(), object_pairs_hook=_unique, parse_constant=_refuse_constant)
        if not isinstance(document, dict):
            raise BrokenResultsError("the document: not an object")
        version = document.pop("schema_version", None)
        if type(version) is not int or version != SCHEMA_VERSION:
            raise BrokenResultsError(f"schema_version: not {SCHEMA_VERSION}: {version!r:.60}")
        return from_json(RunResult, document)
    except OSError as error:
        reason = error.strerror or str(error)
        raise BrokenResultsError(f"{path}: cannot be read ({reason}): name the results.json of a run") from error
    except BrokenResultsError as error:
        raise BrokenResultsError(f"{path}: {error}; {advice}") from error
    except (ValueError, RecursionError) as error:
        raise BrokenResultsError(f"{path}: not JSON ({error}); {advice}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys occur once: with two, which one counts would depend on the reader."""
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise BrokenResultsError(f"{twice}: written twice")
    return found


def _refuse_constant(name: str) -> None:
    raise BrokenResultsError(f"{name}: not a number that a result may hold")
