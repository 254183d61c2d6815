"""Planning without workers: outputs are made up, so that every order of planning and arrival can be scripted."""

import pytest

from engine.checksum.policy import ChecksumPolicy
from engine.checksum.records import WorldShape
from engine.config import EngineConfig
from engine.connectors.base import TransferResults
from engine.errors import RequestError
from engine.request import FinishReason, Request, Status
from engine.scheduler import Scheduler
from engine.seams import Seams
from engine.step import StepOutput
from engine.tokenizer import EOS

OFF = ChecksumPolicy(enabled=False, fail_closed=False, load_failure="fail")


def new_scheduler(seams=None, **options):
    options = {"block_size": 4, "num_blocks": 9, "max_batched_tokens": 8} | options
    return Scheduler(EngineConfig("e", **options), OFF, WorldShape(1, 1), None, seams or Seams())


def add(scheduler, name, length, max_tokens=3):
    request = Request(name, [hash_free(name, i) for i in range(length)], max_tokens)
    scheduler.add_request(request)
    return request


def hash_free(name, i):
    """Different tokens for different names, so that nothing is shared by accident."""
    return (31 * i + 7 * sum(name.encode())) % 256


def arrive(scheduler, plan, token=1, **tokens):
    """The output of a plan arrives: every request that samples gets its token."""
    sampled = {r.request_id: tokens.get(r.request_id, token) for r in plan.requests if r.sample}
    return scheduler.update(plan, StepOutput(sampled, {}, TransferResults()))


def shares(plan):
    """Per request: first position, tokens, whether it samples."""
    return {r.request_id: (r.first_position, r.num_tokens, r.sample) for r in plan.requests}


def step(scheduler, token=1):
    plan = scheduler.schedule()
    arrive(scheduler, plan, token)
    return plan


def drain(scheduler, *in_flight, token=1):
    """Let what is in flight arrive, then plan and take steps until every request has ended. Returns the plans."""
    plans = []
    for plan in in_flight:
        arrive(scheduler, plan, token)
    for _ in range(500):
        if not scheduler.num_unfinished:
            return plans
        plan = scheduler.schedule()
        if plan is not None:
            plans.append(plan)
            arrive(scheduler, plan, token)
    raise AssertionError("no progress")


# ---- batching


def test_a_prompt_is_prefilled_in_chunks_and_sampled_from_at_its_end():
    scheduler = new_scheduler()
    request = add(scheduler, "a", 18)
    plans = [step(scheduler) for _ in range(4)]
    assert [shares(plan)["a"] for plan in plans] == [(0, 8, False), (8, 8, False), (16, 2, True), (18, 1, True)]
    given = [token for plan in plans for token in plan.requests[0].token_ids]
    assert given == [*request.prompt_token_ids, 1]
    assert request.output_token_ids == [1, 1]


def test_the_budget_is_shared_in_order():
    scheduler = new_scheduler()
    for name, length in (("a", 3), ("b", 3), ("c", 5)):
        add(scheduler, name, length)
    assert shares(step(scheduler)) == {"a": (0, 3, True), "b": (0, 3, True), "c": (0, 2, False)}
    assert shares(step(scheduler)) == {"a": (3, 1, True), "b": (3, 1, True), "c": (2, 3, True)}


def test_a_budget_of_one_token_makes_progress():
    scheduler = new_scheduler(max_batched_tokens=1)
    add(scheduler, "a", 3, 2)
    add(scheduler, "b", 2, 1)
    assert [shares(plan) for plan in drain(scheduler)] == [
        {"a": (0, 1, False)}, {"a": (1, 1, False)}, {"a": (2, 1, True)}, {"a": (3, 1, True)},
        {"b": (0, 1, False)}, {"b": (1, 1, True)},
    ]  # fmt: skip


def test_no_more_requests_run_than_there_are_seats():
    scheduler = new_scheduler(max_num_seqs=2)
    for name in "abc":
        add(scheduler, name, 1, 2)
    assert set(shares(step(scheduler))) == {"a", "b"}
    assert set(shares(step(scheduler))) == {"a", "b"}
    assert set(shares(step(scheduler))) == {"c"}


def test_ends_by_length_or_by_eos():
    scheduler = new_scheduler()
    a, b = add(scheduler, "a", 2, 1), add(scheduler, "b", 2, 5)
    arrive(scheduler, scheduler.schedule(), a=3, b=EOS)
    assert (a.finish_reason, a.output_token_ids) == (FinishReason.LENGTH, [3])
    assert (b.finish_reason, b.output_token_ids) == (FinishReason.STOP, [EOS])
    assert [output.request_id for output in scheduler.take_finished()] == ["a", "b"]
    assert scheduler.take_finished() == []
    assert not scheduler.has_work


def test_eos_as_the_last_token_is_a_stop():
    scheduler = new_scheduler()
    request = add(scheduler, "a", 2, 1)
    step(scheduler, EOS)
    assert request.finish_reason is FinishReason.STOP


def test_with_nothing_to_do_there_is_no_step():
    scheduler = new_scheduler()
    assert scheduler.schedule() is None
    add(scheduler, "a", 2, 1)
    plan = scheduler.schedule()
    assert scheduler.schedule() is None, "all that can be computed is in flight"
    arrive(scheduler, plan)
    assert scheduler.schedule().ended == ("a",), "the workers are told"
    assert scheduler.schedule() is None


# ---- steps in flight


def test_a_decode_is_planned_before_its_token_is_known():
    scheduler = new_scheduler()
    request = add(scheduler, "a", 2, 3)
    plans = [scheduler.schedule() for _ in range(3)]
    assert [shares(plan)["a"] for plan in plans] == [(0, 2, True), (2, 1, True), (3, 1, True)]
    assert [len(plan.requests[0].token_ids) for plan in plans] == [2, 0, 0]
    assert scheduler.schedule() is None, "three outputs are on their way, as many as are wanted"
    for token, plan in enumerate(plans):
        arrive(scheduler, plan, token)
    assert request.output_token_ids == [0, 1, 2]
    assert request.finish_reason is FinishReason.LENGTH


def test_what_was_in_flight_after_eos_is_dropped_and_its_blocks_wait_for_it():
    scheduler = new_scheduler()
    request = add(scheduler, "a", 4, 6)
    plans = [scheduler.schedule() for _ in range(3)]
    arrive(scheduler, plans[0], EOS)
    assert request.finish_reason is FinishReason.STOP
    assert scheduler.kv.pool.num_free == 6, "two steps in flight still write its blocks"
    arrive(scheduler, plans[1])
    assert scheduler.kv.pool.num_free == 6
    arrive(scheduler, plans[2])
    assert scheduler.kv.pool.num_free == 8
    assert request.output_token_ids == [EOS]
    assert len(scheduler.take_finished()) == 1


def test_blocks_are_cached_when_they_are_written_and_not_before():
    scheduler = new_scheduler()
    add(scheduler, "a", 8, 2)
    twin = Request("twin", [*[hash_free("a", i) for i in range(8)], 5], 1)
    plan = scheduler.schedule()
    assert scheduler.kv.cached_prefix(twin).num_tokens == 0
    arrive(scheduler, plan)
    assert len(scheduler.kv.cached_prefix(twin).tables[0]) == 2


def test_a_full_block_of_output_is_cached_with_its_last_token_computed():
    scheduler = new_scheduler()
    request = add(scheduler, "a", 3, 4)
    step(scheduler)
    assert not scheduler.kv.pool.is_cached(request.block_ids[0]), "its fourth token is sampled, not computed"
    step(scheduler)
    assert scheduler.kv.pool.is_cached(request.block_ids[0])


# ---- preemption


def three_in_a_full_pool():
    """a and b hold 4 blocks each of 8, and both are about to need another."""
    scheduler = new_scheduler(max_batched_tokens=32, prefix_caching=False)
    a, b = add(scheduler, "a", 16, 5), add(scheduler, "b", 15, 5)
    c = add(scheduler, "c", 4, 2)
    return scheduler, a, b, c


def test_the_youngest_is_preempted_and_comes_back_first():
    scheduler, a, b, c = three_in_a_full_pool()
    first = scheduler.schedule()
    assert shares(first) == {"a": (0, 16, True), "b": (0, 15, True)}
    arrive(scheduler, first)
    assert scheduler.schedule() is None, "a needs a fifth block: b gives up its own"
    assert (b.status, b.block_ids, b.num_computed_tokens) == (Status.WAITING, [], 0)
    second = scheduler.schedule()
    assert shares(second)["a"] == (16, 1, True)
    assert "c" not in shares(second), "nobody overtakes b"
    drain(scheduler, second)
    assert [len(r.output_token_ids) for r in (a, b, c)] == [5, 5, 2]


def test_output_of_a_preempted_request_is_dropped_and_its_blocks_wait_for_it():
    scheduler, _, b, _ = three_in_a_full_pool()
    first, second = scheduler.schedule(), scheduler.schedule()
    assert second is None or "b" not in shares(second)
    assert b.status is Status.WAITING
    assert scheduler.kv.num_fenced == 4
    arrive(scheduler, first, 9)
    assert b.output_token_ids == []
    assert scheduler.kv.num_fenced == 0
    drain(scheduler, token=2)
    assert b.output_token_ids == [2] * 5


def test_blocks_behind_the_fence_are_waited_for_before_more_are_taken_away():
    scheduler = new_scheduler(max_batched_tokens=40, prefix_caching=False)
    a, b, c = add(scheduler, "a", 12, 9), add(scheduler, "b", 8, 9), add(scheduler, "c", 8, 9)
    plans = [scheduler.schedule() for _ in range(5)]
    assert [set(shares(plan)) for plan in plans] == [{"a", "b", "c"}, {"a"}, {"a"}, {"a"}, {"a"}]
    assert c.status is Status.WAITING, "b took the blocks of c and waits for them to come through the fence"
    assert (a.status, b.status, scheduler.kv.num_fenced) == (Status.RUNNING, Status.RUNNING, 2)
    drain(scheduler, *plans)
    assert [len(r.output_token_ids) for r in (a, b, c)] == [9, 9, 9]


def test_a_request_that_runs_alone_waits_for_blocks_that_come_back_by_themselves():
    """Its own blocks would not help it: whoever holds the rest is loading or leased."""
    scheduler = new_scheduler(prefix_caching=False)
    request = add(scheduler, "a", 8, 2)
    scheduler.kv.pool.allocate(6)
    plan = step(scheduler)
    assert shares(plan)["a"] == (0, 8, True)
    assert scheduler.schedule() is None
    assert (request.status, len(request.block_ids)) == (Status.RUNNING, 2)
    scheduler.kv.pool.free([5])
    assert shares(step(scheduler))["a"] == (8, 1, True)


def test_a_preempted_request_computes_its_output_again_too():
    scheduler = new_scheduler(max_batched_tokens=32, prefix_caching=False)
    a, b = add(scheduler, "a", 14, 8), add(scheduler, "b", 12, 8)
    for _ in range(10):
        plan = scheduler.schedule()
        if b.status is Status.WAITING:
            break
        arrive(scheduler, plan, 3)
    assert b.status is Status.WAITING
    assert b.output_token_ids
    known = b.all_token_ids
    again = [r for plan in drain(scheduler) for r in plan.requests if r.request_id == "b"]
    assert [(r.first_position, r.token_ids, r.sample) for r in again[:1]] == [(0, tuple(known), True)]
    assert [len(r.output_token_ids) for r in (a, b)] == [8, 8]


# ---- ids and aborts


@pytest.mark.parametrize("busy", ["waiting", "running"])
def test_an_id_in_use_is_refused(busy):
    scheduler = new_scheduler()
    first = add(scheduler, "a", 2)
    in_flight = [scheduler.schedule()] if busy == "running" else []
    with pytest.raises(RequestError, match="request a: the id is in use"):
        add(scheduler, "a", 3)
    assert scheduler.num_unfinished == 1
    drain(scheduler, *in_flight)
    assert len(first.output_token_ids) == 3


def test_a_refused_request_leaves_nothing_behind():
    scheduler = new_scheduler()
    with pytest.raises(RequestError):
        add(scheduler, "a", 33)
    assert not scheduler.has_work
    assert scheduler.take_finished() == []
    add(scheduler, "a", 3)


def test_output_in_flight_is_not_taken_for_a_new_request_with_the_id_of_an_aborted_one():
    scheduler = new_scheduler()
    old = add(scheduler, "a", 2)
    plan = scheduler.schedule()
    scheduler.abort("a")
    new = add(scheduler, "a", 3)
    arrive(scheduler, plan, 9)
    assert (old.output_token_ids, new.output_token_ids, new.num_placeholders) == ([], [], 0)
    following = scheduler.schedule()
    assert following.ended == ("a",)
    arrive(scheduler, following, 4)
    assert new.output_token_ids == [4]


@pytest.mark.parametrize("planned", [0, 1, 2], ids=["waiting", "one step in flight", "two steps in flight"])
def test_an_abort_ends_a_request_once_and_gives_its_blocks_back(planned):
    scheduler = new_scheduler()
    request = add(scheduler, "a", 12, 5)
    plans = [scheduler.schedule() for _ in range(planned)]
    scheduler.abort("a")
    scheduler.abort("a")
    assert request.finish_reason is FinishReason.ABORT
    (output,) = scheduler.take_finished()
    assert (output.finish_reason, output.error, output.kv_transfer_params) == ("abort", "aborted", None)
    for plan in plans:
        assert scheduler.kv.num_fenced
        arrive(scheduler, plan)
    assert scheduler.kv.pool.num_free == 8
    assert request.output_token_ids == []
    assert not scheduler.has_work


def test_an_abort_between_steps_gives_blocks_back_although_nothing_more_is_scheduled():
    scheduler = new_scheduler()
    add(scheduler, "a", 5)
    step(scheduler)
    scheduler.abort("a")
    assert (scheduler.kv.pool.num_free, scheduler.kv.num_fenced) == (8, 0)


def test_an_abort_of_nobody_is_ignored():
    scheduler = new_scheduler()
    scheduler.abort("nobody")
    assert scheduler.take_finished() == []


def test_every_end_and_preemption_is_announced_once():
    events = []
    seams = Seams()
    for seam in ("request.ended", "request.preempted"):
        seams.on(seam, events.append)
    scheduler = new_scheduler(seams, max_batched_tokens=32, prefix_caching=False)
    add(scheduler, "a", 16, 2)
    add(scheduler, "b", 15, 4)
    drain(scheduler)
    assert [(type(e).__name__, e.request_id) for e in events] == [
        ("Preempted", "b"),
        ("RequestEnded", "a"),
        ("RequestEnded", "b"),
    ]
    assert [e.finish_reason for e in events[1:]] == ["length", "length"]
