"""Several ranks as one: whose word counts when a transfer ends, and when records are waited for."""

import pytest

from engine.checksum.pending import PendingRecord
from engine.checksum.records import WorkerRecord, WorldShape
from engine.connectors.base import TransferResults
from engine.executor import Executor, TransferAggregator
from engine.seams import Change, Drop, RecordArrives, RecordLeaves, Seams
from engine.step import RankOutput, StepPlan

NOTHING = TransferResults()


def received(*names):
    return TransferResults(finished_receiving=frozenset(names))


def failed(*names):
    return TransferResults(failed_receiving=frozenset(names))


def sent(*names):
    return TransferResults(finished_sending=frozenset(names))


# ---- transfers


@pytest.mark.req("CON-3")
@pytest.mark.parametrize("kind", [sent, received])
def test_a_transfer_is_finished_when_every_rank_says_so(kind):
    aggregator = TransferAggregator(3)
    assert aggregator.merge((kind("a", "b"), kind("a"), NOTHING)) == NOTHING
    assert aggregator.merge((NOTHING, NOTHING, kind("a"))) == kind("a")
    assert aggregator.merge((NOTHING, kind("b"), kind("b"))) == kind("b")
    assert aggregator.merge((NOTHING, NOTHING, NOTHING)) == NOTHING


def test_one_rank_is_believed_at_once():
    aggregator = TransferAggregator(1)
    results = TransferResults(frozenset("a"), frozenset("b"), frozenset("c"))
    assert aggregator.merge((results,)) == results


def test_a_failure_waits_for_the_ranks_that_still_write():
    """The shape of vllm-project/vllm#56104: blocks given back at the first failure are written by the others."""
    aggregator = TransferAggregator(3)
    assert aggregator.merge((failed("a"), NOTHING, NOTHING)) == NOTHING
    assert aggregator.merge((NOTHING, received("a"), NOTHING)) == NOTHING
    assert aggregator.merge((NOTHING, NOTHING, received("a"))) == failed("a")


def test_a_failure_of_all_ranks_is_one_failure():
    aggregator = TransferAggregator(2)
    assert aggregator.merge((failed("a"), failed("a"))) == failed("a")


def test_the_end_of_one_load_says_nothing_of_the_next_with_its_id():
    aggregator = TransferAggregator(2)
    aggregator.merge((failed("a"), received("a")))
    assert aggregator.merge((received("a"), NOTHING)) == NOTHING
    assert aggregator.merge((NOTHING, received("a"))) == received("a")


def test_a_rank_that_says_it_twice_counts_once():
    aggregator = TransferAggregator(2)
    assert aggregator.merge((received("a"), NOTHING)) == NOTHING
    assert aggregator.merge((received("a"), NOTHING)) == NOTHING
    assert aggregator.merge((NOTHING, received("a"))) == received("a")


# ---- steps


class Event:
    waited = 0

    def synchronize(self):
        self.waited += 1


class Rank:
    """A rank that reports what it is told to."""

    def __init__(self, tp_rank=0, sampled=None, transfers=NOTHING):
        self.tp_rank, self.sampled, self.transfers = tp_rank, sampled or {}, transfers
        self.steps, self.events = [], []

    def execute(self, plan):
        self.steps.append(plan.step_id)
        self.events.append(Event())
        records = (PendingRecord("a", self.tp_rank, 0, {}, self.events[-1]),)
        return RankOutput(self.sampled, records, self.transfers)


class AllRanks:
    def __init__(self, ranks):
        self.ranks = ranks

    def execute(self, plan):
        return tuple(rank.execute(plan) for rank in self.ranks)


def executor(*ranks, seams=None):
    return Executor("e", WorldShape(len(ranks), 1), AllRanks(ranks), seams or Seams())


def test_every_rank_runs_every_step_and_outputs_come_in_order():
    ranks = Rank(0, {"a": 5}), Rank(1, {"a": 6})
    engine = executor(*ranks)
    assert engine.next_output is None
    for step_id in (1, 2):
        engine.execute(StepPlan(step_id))
    assert [rank.steps for rank in ranks] == [[1, 2], [1, 2]]
    assert (engine.num_executed, engine.next_output.step_id) == (2, 1)
    plan, output = engine.collect()
    assert (plan.step_id, output.sampled) == (1, {"a": 5})
    assert engine.next_output.step_id == 2


def test_the_world_needs_its_workers():
    engine = Executor("e", WorldShape(2, 1), AllRanks([Rank()]), Seams())
    with pytest.raises(ValueError, match="1 ranks for a world of 2"):
        engine.execute(StepPlan(1))


@pytest.mark.req("PRO-3", "CON-6")
def test_nobody_waits_for_records_before_the_output_is_collected():
    ranks = Rank(0), Rank(1)
    engine = executor(*ranks)
    engine.execute(StepPlan(1))
    engine.execute(StepPlan(2))
    assert [event.waited for rank in ranks for event in rank.events] == [0, 0, 0, 0]
    engine.collect()
    assert [event.waited for rank in ranks for event in rank.events] == [1, 0, 1, 0]


@pytest.mark.req("PRO-5")
def test_the_records_of_all_ranks_reach_the_scheduler():
    engine = executor(Rank(0), Rank(1), Rank(2))
    engine.execute(StepPlan(1))
    _, output = engine.collect()
    assert [record.tp_rank for record in output.records["a"]] == [0, 1, 2]


@pytest.mark.parametrize("seam", ["worker.record_leaves", "worker.record_arrives"])
def test_one_rank_s_record_can_be_lost(seam):
    seams = Seams()
    seams.on(seam, lambda event: Drop() if event.record.tp_rank == 1 else None)
    engine = executor(Rank(0), Rank(1), seams=seams)
    engine.execute(StepPlan(1))
    _, output = engine.collect()
    assert [record.tp_rank for record in output.records["a"]] == [0]


def test_a_record_that_left_changed_arrives_changed():
    seams, arrived = Seams(), []
    other = WorkerRecord("b", 7, 0, {})
    seams.on("worker.record_leaves", lambda event: Change(RecordLeaves(event.engine, other)))
    seams.on("worker.record_arrives", arrived.append)
    engine = executor(Rank(0), seams=seams)
    engine.execute(StepPlan(1))
    _, output = engine.collect()
    assert arrived == [RecordArrives("e", other)]
    assert output.records == {"b": [other]}


@pytest.mark.req("EXT-3")
def test_checksums_that_any_rank_was_brought_are_passed_on():
    aggregator = TransferAggregator(2)
    first = aggregator.merge((TransferResults(checksums={"a": "x"}), TransferResults(checksums={"b": "y"})))
    assert first.checksums == {"a": "x", "b": "y"}
    assert aggregator.merge((TransferResults(), TransferResults())).checksums == {}
