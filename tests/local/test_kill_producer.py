"""The producer is killed in the middle of a read that NIXL does, and the pair lives on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.history import History, Line, find_all
from harness.judge import judge
from harness.observe import observe
from harness.plan import plan_cells
from harness.targets.pairs.local import LocalPair
from harness.targets.processes import LOCAL, PairTarget
from reports.results import CellResult
from scenarios.loader import parse_scenario
from scenarios.words import Outcome, Policy, Result, Role, Tokens

WHAT = re.compile(r"P was killed after (\d+) of (\d+) copy operations had landed \((\d+) bytes, as P held them\).*")


class Pairs:
    """A target of this test alone, and the pairs that it made."""

    def __init__(self) -> None:
        self.made: list[LocalPair] = []
        self.target = PairTarget("local", "", self._make, levers=LOCAL.provides)

    def _make(self, load_timeout_ms: int) -> LocalPair:
        self.made.append(LocalPair(load_timeout_ms))
        return self.made[-1]


@pytest.fixture(scope="module")
def pairs() -> Iterator[Pairs]:
    pairs = Pairs()
    yield pairs
    pairs.target.close()


@pytest.fixture(scope="module")
def ran(root: Path, pairs: Pairs) -> list[tuple[list[Line], CellResult]]:
    """The scenario under both fail-closed policies, with its twins."""
    scenario = parse_scenario((root / "scenarios/processes/kill-producer-mid-read.yaml").read_text())
    policies = [Policy.FAIL_CLOSED_FAIL, Policy.FAIL_CLOSED_RECOMPUTE]
    found = []
    for cell in plan_cells([scenario], policies, 1, pairs.target.provides):
        history = History()
        pairs.target.run(cell, history)
        found.append((history.lines, judge(observe(history.lines), "")))
    return found


def test_every_cell_comes_out_as_expected(ran: list[tuple[list[Line], CellResult]]) -> None:
    assert [(result.result, result.why) for _, result in ran] == [(Result.PASS, ())] * 4
    outcomes = [(result.loads[0].outcome, result.loads[0].tokens) for _, result in ran]
    assert outcomes == [
        (Outcome.FAILED, Tokens.NONE),
        (Outcome.RECOMPUTED, Tokens.RIGHT),
        (Outcome.SERVED, Tokens.RIGHT),
        (Outcome.SERVED, Tokens.RIGHT),
    ]


def test_the_evidence_says_how_far_the_read_had_come(ran: list[tuple[list[Line], CellResult]]) -> None:
    for _, result in ran[:2]:
        (evidence,) = result.evidence
        landed, of, size = (int(number) for number in WHAT.fullmatch(evidence.what).groups())
        assert 0 < landed < of
        assert size == landed * 16 * 32  # slots of a block, bytes of one K or V


def test_the_consumer_has_all_its_blocks_and_the_producer_none_to_give(
    ran: list[tuple[list[Line], CellResult]],
) -> None:
    for lines, result in ran:
        pools = {line["engine"]: (line["free"], line["total"]) for line in find_all(lines, "oracle.pool")}
        killed = [line["engine"] for line in find_all(lines, "oracle.engine_killed")]
        twin = result.role is Role.TWIN
        assert (sorted(pools), killed) == ((["consumer", "producer"], []) if twin else (["consumer"], ["producer"]))
        assert all(free == total for free, total in pools.values())


def test_only_the_producer_was_started_again(ran: list[tuple[list[Line], CellResult]], pairs: Pairs) -> None:
    assert len(ran) == 4
    (pair,) = pairs.made
    assert pair.died() is None
    assert pair.killed == frozenset()
