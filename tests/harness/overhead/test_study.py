"""A study on a scripted server in virtual time: what it sends when, what it keeps, and why it ends."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest

from harness.overhead.client import make_client
from harness.overhead.design import Cell, Design, Kind, Load
from harness.overhead.routes import StudyError, for_kind, switched, two_servers
from harness.overhead.rows import Row
from harness.overhead.study import BEFORE, Instruments, Stop, Study

LOW, HIGH = Load.LOW, Load.HIGH
SMALL = {"lengths": (40,), "loads": (LOW,), "min_blocks": 2, "max_blocks": 4, "output_tokens": 2}


class Runner:
    """Runs designs; `study` is the last one, `kept` what it kept as it went."""

    def __init__(self, clock: Any, server: Any, in_virtual_time: Callable[..., Any]) -> None:
        self.clock, self.server, self.in_virtual_time = clock, server, in_virtual_time
        self.kept: list[Row] = []
        self.routes = switched("http://p", "kv_checksum")
        self.keep: Callable[[Row], None] = self.kept.append

    def __call__(
        self, enough: Callable[[Sequence[Row], Cell], bool] = lambda rows, cell: False, **changes: Any
    ) -> Study:
        design = Design(**(SMALL | changes))

        async def work() -> None:
            async with make_client(60, self.server) as client:
                instruments = Instruments(client, self.clock, self.keep, enough, tag="t")
                self.study = Study(design, for_kind(design.kind, self.routes), instruments)
                await self.study.run()

        self.in_virtual_time(work())
        return self.study

    def sent(self, cell: str, block: int) -> list[Any]:
        return [seen for seen in self.server.seen if f"-{cell}-b{block}-" in seen.request_id]


@pytest.fixture
def run(clock: Any, server: Any, in_virtual_time: Callable[..., Any]) -> Runner:
    return Runner(clock, server, in_virtual_time)


def of(study: Study, cell: str) -> list[Row]:
    return [row for row in study.rows if row.cell == cell and row.block != BEFORE]


def test_a_block_sends_its_prompts_four_times_and_switches_arms(run: Runner) -> None:
    run()
    for block, order in ((0, "ABBA"), (1, "BAAB")):
        sent = run.sent("40tok-low", block)
        assert "".join("B" if seen.body["kv_checksum"] else "A" for seen in sent) == order
        assert len({tuple(seen.body["prompt"]) for seen in sent}) == 1
    assert run.sent("40tok-low", 0)[0].body["prompt"] != run.sent("40tok-low", 1)[0].body["prompt"]


def test_low_load_has_one_request_in_flight(run: Runner) -> None:
    run()
    assert run.server.most_at_once == 1


def test_a_slow_server_does_not_slow_arrivals_down(run: Runner) -> None:
    """Arm B takes ten times as long, and its requests arrive in the same pattern as those of arm A."""
    run.server.prefill_s = lambda seen: 10.0 if seen.body["kv_checksum"] else 1.0
    run(loads=(HIGH,), high_requests=6)
    patterns = defaultdict(set)
    for row in of(run.study, "40tok-high"):
        slot = [other for other in run.study.rows if (other.block, other.slot) == (row.block, row.slot)]
        first = min(other.sent_s for other in slot)
        patterns[row.block, row.arm].add(tuple(round(other.sent_s - first, 9) for other in sorted(slot, key=_sent)))
    for block in {block for block, _ in patterns}:
        assert len(patterns[block, "A"]) == 1
        assert patterns[block, "A"] == patterns[block, "B"]
    assert len({frozenset(pattern) for pattern in patterns.values()}) > 1


def _sent(row: Row) -> float:
    return row.sent_s


def test_waiting_behind_others_counts(run: Runner) -> None:
    """The server takes one at a time: TTFT is the wait since the intended moment and one's own prefill."""
    run(loads=(HIGH,), high_requests=6, utilisation=0.99)
    for row in of(run.study, "40tok-high"):
        slot = sorted((o for o in run.study.rows if (o.block, o.slot) == (row.block, row.slot)), key=_sent)
        free = 0.0
        for other in slot:
            free = max(free, other.intended_s) + 1.0
            assert other.ttft_s == pytest.approx(free - other.intended_s)


def test_the_rate_at_high_load_comes_from_the_measured_capacity(run: Runner) -> None:
    """Six at once, one after another, 1 s each, and the last one's second token 0.25 s later."""
    study = run(loads=(HIGH,), high_requests=64, utilisation=0.5)
    assert study.capacity == {"40tok-high": pytest.approx(6 / 6.25)}
    gaps = []
    for block in range(study.progress["40tok-high"].blocks):
        times = sorted(row.intended_s for row in of(study, "40tok-high") if (row.block, row.slot) == (block, 0))
        gaps += [late - early for early, late in itertools.pairwise(times)]
    mean = 6.25 / 6 / 0.5
    assert sum(gaps) / len(gaps) == pytest.approx(mean, abs=5 * mean / len(gaps) ** 0.5)


def test_an_arm_begins_when_the_one_before_has_ended(run: Runner) -> None:
    run(loads=(LOW, HIGH))
    slots: dict[tuple[str, int, int], list[Row]] = defaultdict(list)
    for row in run.study.rows:
        slots[row.cell, row.block, row.slot].append(row)
    order = sorted(slots.values(), key=lambda rows: rows[0].intended_s)
    for before, after in itertools.pairwise(order):
        assert max(row.end_s for row in before) < min(row.intended_s for row in after)


def test_warm_up_and_what_is_before_the_first_block_are_marked(run: Runner) -> None:
    study = run(loads=(HIGH,), warmup_blocks=2)
    assert {row.block for row in study.rows if row.warmup} == {BEFORE, 0, 1}
    assert {row.block for row in study.rows if not row.warmup} == {2, 3, 4, 5}


def test_a_failed_request_stays_a_row(run: Runner) -> None:
    run.server.answer = lambda seen: (
        httpx.Response(503, json={"error": {"message": "full"}}) if "-b2-p0-s1" in seen.request_id else None
    )
    study = run()
    failed = [row for row in study.rows if not row.ok]
    assert [(row.block, row.slot, row.arm, row.status, row.error) for row in failed] == [
        (2, 1, "B", 503, "HTTP 503: full")
    ]
    assert len([row for row in study.rows if row.block == 2]) == 4
    assert run.kept == study.rows


def test_it_stops_when_it_is_precise_and_only_after_a_mirrored_pair(run: Runner) -> None:
    asked: list[int] = []

    def enough(rows: Sequence[Row], cell: Cell) -> bool:
        asked.append(len({row.block for row in rows if not row.warmup}))
        return len(asked) == 3

    study = run(enough, min_blocks=3, max_blocks=20)
    assert asked == [4, 6, 8]
    assert study.progress["40tok-low"].stop is Stop.PRECISE
    assert study.progress["40tok-low"].blocks == 8 + 1


def test_it_stops_at_the_most_blocks(run: Runner) -> None:
    assert run().progress["40tok-low"].stop is Stop.BLOCKS
    assert run.study.progress["40tok-low"].blocks == 4 + 1


def test_no_block_begins_that_would_end_too_late(run: Runner) -> None:
    study = run(time_limit_s=40.0, max_blocks=400)
    assert study.progress["40tok-low"].stop is Stop.TIME
    assert 35 < run.clock.now() <= 40.0


def test_cells_take_turns_by_the_time_they_have_had(run: Runner) -> None:
    """A long prompt takes four times as long: the short one gets about four blocks for each of its."""
    run.server.prefill_s = lambda seen: len(seen.body["prompt"]) / 40
    study = run(lengths=(40, 160), max_blocks=400, time_limit_s=400.0)
    spent = {cell: progress.spent_s for cell, progress in study.progress.items()}
    assert spent["40tok-low"] == pytest.approx(spent["160tok-low"], rel=0.15)
    cells = [row.cell for row in study.rows if row.slot == 3]
    assert cells[:12].count("160tok-low") >= 2


def test_an_aa_study_never_asks_for_checksums(run: Runner) -> None:
    study = run(kind=Kind.AA)
    assert {seen.body["kv_checksum"] for seen in run.server.seen} == {False}
    assert {row.arm for row in study.rows} == {"A", "B"}
    assert {row.study for row in study.rows} == {"aa"}


def test_two_servers_instead_of_a_switch(run: Runner) -> None:
    run.routes = two_servers("http://off/", "http://on")
    run.server.verdict = lambda seen: None
    study = run()
    urls = {seen.request_id: seen.url for seen in run.server.seen}
    assert all("kv_checksum" not in seen.body for seen in run.server.seen)
    where = {"A": "http://off/v1/completions", "B": "http://on/v1/completions"}
    assert all(urls[row.request_id] == where[row.arm] for row in study.rows)


@pytest.mark.parametrize(
    ("verdict", "kind", "why"),
    [
        ("verified", Kind.OVERHEAD, "was to go without checksums, and its load is verified"),
        ("not_checked", Kind.OVERHEAD, "was to go with checksums, and its load is not_checked"),
        ("verified", Kind.AA, "was to go without checksums"),
        ("no_load", Kind.OVERHEAD, "was to go with checksums, and its load is no_load"),
    ],
)
def test_a_server_that_ignores_the_switch_is_found_out(run: Runner, verdict: str, kind: Kind, why: str) -> None:
    run.server.verdict = lambda seen: verdict
    with pytest.raises(StudyError, match=why):
        run(kind=kind)
    assert len(run.kept) <= 2


def test_a_server_that_says_nothing_of_loads_is_believed(run: Runner) -> None:
    run.server.verdict = lambda seen: None
    assert run().progress["40tok-low"].finished


def test_a_server_that_does_not_answer_at_all(run: Runner) -> None:
    run.server.answer = lambda seen: httpx.ConnectError("refused")
    with pytest.raises(StudyError, match=r"http://p/v1/completions does not answer: ConnectError: refused"):
        run()
    assert [row.error for row in run.kept] == ["ConnectError: refused"]


def test_a_server_that_dies_in_the_middle(run: Runner) -> None:
    run.server.answer = lambda seen: httpx.ConnectError("gone") if run.clock.now() > 20 else None
    with pytest.raises(StudyError, match=r"no request of block \d was answered: ConnectError: gone"):
        run()
    assert any(row.ok for row in run.kept)


def test_a_pool_that_is_too_small_is_found_out_before_the_first_block(run: Runner) -> None:
    run.server.answer = lambda seen: httpx.Response(503, json={}) if "-p5-" in seen.request_id else None
    with pytest.raises(StudyError, match=r"1 of 6 requests at once were not answered .*too few blocks"):
        run(loads=(HIGH,))


def test_what_was_kept_when_it_is_cut_off(run: Runner) -> None:
    """Cancelled in the middle of a slot, as Ctrl-C does: every answer so far is a row, and none is half a row."""

    def keep(row: Row) -> None:
        run.kept.append(row)
        if len(run.kept) == 20:
            raise asyncio.CancelledError

    run.keep = keep
    with pytest.raises(asyncio.CancelledError):
        run(loads=(HIGH,), high_requests=4)
    assert run.kept == run.study.rows
    assert run.study.progress["40tok-high"].stop is Stop.INTERRUPTED
