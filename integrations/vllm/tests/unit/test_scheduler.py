"""The scheduler's half against stand-ins for vLLM's objects, with workers that sum what the test gives them."""

from __future__ import annotations

import logging

import pytest
import torch
from kvchaos_vllm.blocks import GroupShape
from kvchaos_vllm.orders import Answer, PendingRecord, PendingSums
from kvchaos_vllm.payload import PayloadLimits, decode
from kvchaos_vllm.records import GroupBlocks, WorldShape
from kvchaos_vllm.scheduler import SchedulerChecksums
from kvchaos_vllm.settings import ChecksumPolicy
from kvchaos_vllm.verdict import NotCheckedReason, UnverifiedReason, VerdictStatus
from stand_ins import GROUP, Output, Request, Step

OPEN = ChecksumPolicy(enabled=True, fail_closed=False)
CLOSED = ChecksumPolicy(enabled=True, fail_closed=True)
LIMITS = PayloadLimits.for_engine(1024, (4,))


def engine(policy=CLOSED, groups=(GROUP,), tp=1, pp=1):
    return SchedulerChecksums(policy, WorldShape(tp, pp), groups, max_model_len=1024)


def record(step_id, request_id, groups, *, tp=0, pp=0, add=0):
    """A worker's record; its sums are the block positions plus `add`."""
    sums = {
        g: PendingSums(blocks, 7, torch.tensor([p + add for p in blocks.positions], dtype=torch.int64))
        for g, blocks in groups.items()
    }
    return PendingRecord(step_id, request_id, tp, pp, sums)


def answer(*, sends=(), loads=()):
    made = Answer()
    for one in sends:
        made.add_send(one)
    for one in loads:
        made.add_load(one)
    return made


def produce(p, request_id="p", prompt=10, tables=((4, 5, 6),), workers=1, add=0):
    """A whole prefill in one step on P: gives the parameters that its connector answers with."""
    request = Request(request_id, prompt, {"do_remote_decode": True})
    p.allocated(request, tables, 0)
    orders = p.orders(Step().new(request_id, [list(t) for t in tables], 0, prompt), {})
    params = {"do_remote_prefill": True, "remote_request_id": request_id}
    p.finished(request_id, params)
    made = [record(orders.step_id, request_id, orders.sends[request_id], tp=w, add=add) for w in range(workers)]
    p.received(Output(), answer(sends=made))
    return params


def consume(d, params, request_id="d", prompt=10, tables=((7, 8, 9),), local=0, loaded=None):
    """A load starts on D: gives the orders of its step."""
    request = Request(request_id, prompt, dict(params))
    d.matched(request_id, local)
    d.allocated(request, tables, prompt - local)
    wanted = {g: list(table)[local // 4 :] for g, table in enumerate(tables)}
    return d.orders(Step(), {request_id: wanted if loaded is None else loaded})


def finish(d, orders, request_id="d", *, add=0, **output):
    """Every worker reports the load finished: gives the output as the connector leaves it."""
    made = Output(finished_recving={request_id}, **output)
    d.received(made, answer(loads=[record(orders.step_id, request_id, orders.loads[request_id], add=add)]))
    return made


# ---- P


def test_the_step_that_finishes_the_prompt_names_its_blocks_and_the_sums_leave_with_the_parameters():
    p = engine()
    params = produce(p, prompt=10)
    payload = decode(params["kv_checksums"], LIMITS)
    assert (payload.tp_size, payload.num_tokens) == (1, 10)
    (group,) = payload.groups
    assert (group.group_id, group.fingerprint, group.block_size, group.start) == (0, 7, 4, 0)
    assert group.values.tolist() == [0, 1, 2]
    assert p.producer.num_pending == 0


def test_a_prompt_in_chunks_is_summed_once_at_its_end():
    p = engine()
    p.allocated(Request("r", 10, {"do_remote_decode": True}), [[4]], 0)
    assert p.orders(Step().new("r", [[4]], 0, 4), {}).sends == {}
    assert p.orders(Step().cached("r", [[5]], 4, 4), {}).sends == {}
    last = p.orders(Step().cached("r", [[6]], 8, 2), {})
    assert last.sends == {"r": {0: GroupBlocks(0, 4, 0, (4, 5, 6), 10)}}
    assert p.orders(Step().cached("r", None, 10, 1), {}).sends == {}


def test_a_prompt_that_was_partly_in_the_prefix_cache_is_summed_whole():
    p = engine()
    p.allocated(Request("r", 10, {"do_remote_decode": True}), [[4, 5, 6]], 0)
    sends = p.orders(Step().new("r", [[4, 5, 6]], 8, 2), {}).sends
    assert sends["r"][0].block_ids == (4, 5, 6)


def test_a_prefill_after_a_preemption_replaces_the_one_before(caplog):
    p = engine()
    p.allocated(Request("r", 6, {"do_remote_decode": True}), [[4, 5]], 0)
    first = p.orders(Step().new("r", [[4, 5]], 0, 6), {})
    again = p.orders(Step().cached("r", [[8, 9]], 0, 6, resumed=True), {})
    assert again.sends["r"][0].block_ids == (8, 9)
    params = {"do_remote_prefill": True}
    p.received(Output(), answer(sends=[record(first.step_id, "r", first.sends["r"], add=50)]))
    p.finished("r", params)
    p.received(Output(), answer(sends=[record(again.step_id, "r", again.sends["r"])]))
    assert decode(params["kv_checksums"], LIMITS).groups[0].values.tolist() == [0, 1]


def test_the_workers_sums_are_added_up_and_all_of_them_are_needed(caplog):
    params = produce(engine(tp=2), workers=2, add=1)
    assert decode(params["kv_checksums"], LIMITS).groups[0].values.tolist() == [2, 4, 6]
    with caplog.at_level(logging.WARNING):
        params = produce(engine(tp=2), workers=1)
    assert "kv_checksums" not in params
    assert "no KV checksums are sent, some worker did not report" in caplog.text


def test_a_request_that_was_aborted_sends_nothing_and_leaves_nothing():
    p = engine()
    p.allocated(Request("r", 6, {"do_remote_decode": True}), [[4, 5]], 0)
    p.orders(Step().new("r", [[4, 5]], 0, 6), {})
    p.finished("r", None)
    assert p.producer.num_pending == 0
    assert p.orders(Step().cached("r", [[6]], 6, 1), {}).sends == {}


def test_a_request_that_is_not_for_another_engine_is_not_summed():
    p = engine()
    for params in (None, {}, {"do_remote_decode": False}):
        p.allocated(Request("r", 6, params), [[4, 5]], 0)
        assert p.orders(Step().new("r", [[4, 5]], 0, 6), {}).sends == {}
        p.finished("r", None)


def test_a_prompt_that_was_never_summed_is_warned_of(caplog):
    p = engine()
    p.allocated(Request("r", 6, {"do_remote_decode": True}), [[4, 5]], 0)
    with caplog.at_level(logging.WARNING):
        p.finished("r", {"do_remote_prefill": True})
    assert "request r: no KV checksums are sent, its prompt was never summed" in caplog.text


# ---- D


def test_a_clean_load_is_verified_and_its_end_is_let_through(verdicts):
    d = engine()
    orders = consume(d, produce(engine()))
    assert orders.loads == {"d": {0: GroupBlocks(0, 4, 0, (7, 8, 9), 10)}}
    output = finish(d, orders)
    assert output.finished_recving == {"d"}
    [(request_id, verdict)] = verdicts
    assert (request_id, verdict.status) == ("d", VerdictStatus.VERIFIED)
    assert verdict.groups[0].compared == (0, 1, 2)
    assert d.consumer.num_pending == 0


def test_with_a_local_prefix_only_what_is_loaded_is_compared(verdicts):
    d = engine()
    orders = consume(d, produce(engine()), local=8)
    assert orders.loads["d"][0] == GroupBlocks(0, 4, 2, (9,), 10)
    assert finish(d, orders).finished_recving == {"d"}
    assert verdicts[0][1].groups[0].compared == (2,)


def test_fail_closed_keeps_a_bad_load_unfinished_until_the_workers_report_it_as_failed(verdicts, caplog):
    d = engine()
    orders = consume(d, produce(engine()))
    with caplog.at_level(logging.ERROR):
        output = finish(d, orders, add=1)
    assert output.finished_recving is None
    assert verdicts[0][1].status is VerdictStatus.MISMATCH
    assert "request d: KV checksum mismatch, block positions by group: {0: [0, 1, 2]}" in caplog.text
    assert d.orders(Step(), {}).failed == {"d"}
    assert d.orders(Step(), {}).failed == frozenset()
    output = Output(finished_recving={"d"}, failed_recving={"d"})
    d.received(output, None)
    assert output.finished_recving == {"d"}
    assert len(verdicts) == 1


def test_other_loads_of_the_same_step_are_let_through(verdicts):
    d, params = engine(), produce(engine())
    one = consume(d, params, "one", tables=((7, 8, 9),))
    two = consume(d, params, "two", tables=((11, 12, 13),))
    output = Output(finished_recving={"one", "two", "unknown"})
    bad = record(one.step_id, "one", one.loads["one"], add=1)
    d.received(output, answer(loads=[bad, record(two.step_id, "two", two.loads["two"])]))
    assert output.finished_recving == {"two", "unknown"}


def test_fail_open_only_logs(verdicts):
    d = engine(OPEN)
    orders = consume(d, produce(engine()))
    assert finish(d, orders, add=1).finished_recving == {"d"}
    assert verdicts[0][1].status is VerdictStatus.MISMATCH
    assert d.orders(Step(), {}).failed == frozenset()


@pytest.mark.parametrize(
    ("text", "reason"),
    [(None, UnverifiedReason.NO_CHECKSUMS), ("nonsense", UnverifiedReason.INVALID), (3, UnverifiedReason.INVALID)],
)
def test_a_load_without_usable_checksums_fails_too_and_the_reason_is_warned_of_once(verdicts, caplog, text, reason):
    d = engine()
    params = {"do_remote_prefill": True} | ({} if text is None else {"kv_checksums": text})
    with caplog.at_level(logging.WARNING):
        for request_id in ("one", "two"):
            orders = consume(d, params, request_id)
            assert finish(d, orders, request_id).finished_recving is None
    assert [(v.status, v.reason) for _, v in verdicts] == [(VerdictStatus.UNVERIFIED, reason)] * 2
    assert caplog.text.count(f"KV loads cannot be verified: {reason}") == 1


def test_a_load_that_failed_by_itself_is_not_compared(verdicts):
    d, params = engine(), produce(engine())
    orders = consume(d, params)
    assert finish(d, orders, add=1, failed_recving={"d"}).finished_recving == {"d"}
    orders = consume(d, params, "e")
    d.received(Output(invalid_block_ids={8}), None)
    assert finish(d, orders, "e", add=1).finished_recving == {"e"}
    orders = consume(d, params, "f")
    assert finish(d, orders, "f", add=1, invalid_block_ids={99}).finished_recving is None
    reasons = [NotCheckedReason.LOAD_FAILED, NotCheckedReason.LOAD_FAILED, None]
    assert [verdict.reason for _, verdict in verdicts] == reasons


def test_a_request_that_ended_meanwhile_is_not_compared_and_its_end_is_let_through(verdicts):
    d = engine()
    orders = consume(d, produce(engine()))
    d.finished("d", None)
    assert finish(d, orders, add=1).finished_recving == {"d"}
    assert verdicts[0][1].reason is NotCheckedReason.REQUEST_ENDED


def test_a_request_that_ended_because_its_load_failed_says_so(verdicts):
    """With the policy `fail` vLLM ends the request before it tells the connector of the step's output."""
    d = engine()
    orders = consume(d, produce(engine()))
    d.finished("d", None)
    assert finish(d, orders, add=1, failed_recving={"d"}).finished_recving == {"d"}
    assert verdicts[0][1].reason is NotCheckedReason.LOAD_FAILED
    assert d.consumer.num_pending == 0


def test_a_request_that_ended_before_its_load_began_leaves_nothing(verdicts):
    d = engine()
    d.allocated(Request("d", 10, produce(engine())), [[7, 8, 9]], 10)
    d.finished("d", None)
    assert d.consumer.num_pending == 0
    assert d.orders(Step(), {"d": {0: [7, 8, 9]}}).loads == {}
    assert verdicts[0][1].reason is NotCheckedReason.REQUEST_ENDED


def test_a_request_that_ends_between_its_verdict_and_its_failure_is_still_reported_by_the_workers(verdicts):
    d = engine()
    orders = consume(d, produce(engine()))
    assert finish(d, orders, add=1).finished_recving is None
    d.finished("d", None)
    assert d.orders(Step(), {}).failed == {"d"}
    output = Output(finished_recving={"d"}, failed_recving={"d"})
    d.received(output, None)
    assert output.finished_recving == {"d"}


def test_records_arrive_step_by_step_and_are_kept_until_the_load_has_finished_everywhere(verdicts):
    d = engine(tp=2)
    orders = consume(d, produce(engine(), add=1))
    groups = orders.loads["d"]
    d.received(Output(), answer(loads=[record(orders.step_id, "d", groups, tp=1, add=1)]))
    assert verdicts == []
    zeros = PendingRecord(orders.step_id, "d", 0, 0, {0: PendingSums(groups[0], 7, torch.zeros(3, dtype=torch.int64))})
    output = Output(finished_recving={"d"})
    d.received(output, answer(loads=[zeros]))
    assert output.finished_recving == {"d"}
    assert verdicts[0][1].status is VerdictStatus.VERIFIED


def test_a_worker_that_did_not_report_makes_the_load_unverified(verdicts):
    d = engine(tp=2)
    orders = consume(d, produce(engine()))
    assert finish(d, orders).finished_recving is None
    assert verdicts[0][1].reason is UnverifiedReason.WORKERS_MISSING


@pytest.mark.parametrize("loaded", [{0: [7, 8]}, {0: [8, 9]}, {0: [7, 9, 8]}, {}, {1: [7, 8, 9]}])
def test_a_connector_that_loads_other_blocks_than_the_request_needs_is_not_trusted(verdicts, loaded):
    d = engine()
    orders = consume(d, produce(engine()), loaded=loaded)
    assert finish(d, orders).finished_recving is None
    assert verdicts[0][1].reason is UnverifiedReason.OTHER_BLOCKS


def test_blocks_that_are_loaded_though_the_tokens_are_cached_are_compared_too(verdicts):
    """A group may have lost a block of the prefix that another still has."""
    d = engine()
    orders = consume(d, produce(engine()), local=8, loaded={0: [8, 9]})
    assert orders.loads["d"][0] == GroupBlocks(0, 4, 1, (8, 9), 10)
    assert finish(d, orders).finished_recving == {"d"}
    assert verdicts[0][1].groups[0].compared == (1, 2)


def test_a_load_of_which_the_connector_says_nothing_is_not_trusted(verdicts):
    d = engine()
    d.allocated(Request("d", 10, produce(engine())), [[7, 8, 9]], 10)
    orders = d.orders(Step(), {})
    assert finish(d, orders).finished_recving is None
    assert verdicts[0][1].reason is UnverifiedReason.OTHER_BLOCKS


def test_a_load_from_a_decoder_has_no_carrier(verdicts):
    p = engine()
    p.allocated(Request("r", 10, {"do_remote_decode": True, "remote_block_ids": [[1]]}), [[4, 5, 6]], 8)
    assert p.orders(Step(), {}).loads == {}
    output = Output(finished_recving={"r"})
    p.received(output, None)
    assert output.finished_recving == {"r"}
    [(_, verdict)] = verdicts
    assert (verdict.status, verdict.reason) == (VerdictStatus.NOT_CHECKED, NotCheckedReason.NO_CARRIER)


def test_a_request_that_is_wholly_in_the_prefix_cache_loads_nothing(verdicts):
    d = engine()
    d.allocated(Request("d", 10, produce(engine())), [[7, 8, 9]], 0)
    assert d.orders(Step(), {}).loads == {}
    assert verdicts == []


def test_windows_and_whole_attention_are_judged_apart(verdicts):
    groups = (GroupShape(0, 4), GroupShape(1, 4, window=4))
    p, d = engine(groups=groups), engine(groups=groups)
    params = produce(p, prompt=16, tables=((4, 5, 6, 7), (0, 0, 8, 9)))
    assert [(g.group_id, g.start, len(g.values)) for g in decode(params["kv_checksums"], LIMITS).groups] == [
        (0, 0, 4),
        (1, 2, 2),
    ]
    orders = consume(d, params, prompt=16, tables=((1, 2, 3, 4), (0, 0, 5, 6)), loaded={0: [1, 2, 3, 4], 1: [5, 6]})
    assert finish(d, orders).finished_recving == {"d"}
    assert [group.compared for group in verdicts[0][1].groups] == [(0, 1, 2, 3), (2, 3)]


# ---- the switch


def test_a_request_may_not_switch_checksums_off_unless_it_was_allowed(verdicts, caplog):
    params = produce(engine()) | {"kv_checksum": False}
    d = engine()
    with caplog.at_level(logging.WARNING):
        orders = consume(d, params)
    assert "requests may not switch checksums off here" in caplog.text
    assert finish(d, orders, add=1).finished_recving is None


def test_where_it_was_allowed_neither_side_sums_the_request(verdicts):
    policy = ChecksumPolicy(enabled=True, fail_closed=True, switchable=True)
    p, d = engine(policy), engine(policy)
    p.allocated(Request("r", 10, {"do_remote_decode": True, "kv_checksum": False}), [[4, 5, 6]], 0)
    assert p.orders(Step().new("r", [[4, 5, 6]], 0, 10), {}).sends == {}
    params = {"do_remote_prefill": True}
    p.finished("r", params)
    assert "kv_checksums" not in params
    assert consume(d, params | {"kv_checksum": False}).loads == {}
    output = Output(finished_recving={"d"})
    d.received(output, None)
    assert output.finished_recving == {"d"}
    assert verdicts[0][1].reason is NotCheckedReason.OFF


def test_counts_are_of_requests_by_status_and_reason(verdicts):
    d, params = engine(OPEN), produce(engine())
    for request_id, add in (("a", 0), ("b", 0), ("c", 1)):
        finish(d, consume(d, params, request_id), request_id, add=add)
    finish(d, consume(d, {"do_remote_prefill": True}, "e"), "e")
    assert dict(d.consumer.counts) == {
        (VerdictStatus.VERIFIED, None): 2,
        (VerdictStatus.MISMATCH, None): 1,
        (VerdictStatus.UNVERIFIED, UnverifiedReason.NO_CHECKSUMS): 1,
    }
