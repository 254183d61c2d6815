"""The push connector: who waits for whom, what carries the checksums, and what happens to a push that never comes."""

import dataclasses

import pytest

from engine.checksum.verdict import VerdictStatus
from engine.clock import VirtualClock
from engine.connectors.base import Carrier
from engine.connectors.push import PushScheduler, push_params
from engine.errors import RequestError
from engine.request import FinishReason, Request
from engine.seams import Change, Drop

LOAD_TICKS = 3_000


@pytest.fixture
def world(new_world):
    return new_world(transfer="push", load_ticks=LOAD_TICKS)


@pytest.fixture
def connector():
    return PushScheduler("P", lease_ticks=10, load_ticks=5, clock=VirtualClock())


def request(params, name="r"):
    return Request(name, list(range(40)), 4, params)


SENDS = {"do_remote_decode": True}
LOADS = push_params("P", "r")


@pytest.mark.req("CAR-1", "CAR-4", "EXT-3")
@pytest.mark.parametrize(
    ("params", "sending", "receiving"),
    [
        (None, None, None),
        (SENDS, Carrier.CONNECTOR, None),
        (LOADS, None, Carrier.CONNECTOR),
        (LOADS | SENDS, Carrier.CONNECTOR, None),
    ],
    ids=["none", "producer", "load", "bidirectional"],
)
def test_it_has_a_carrier_of_its_own(connector, params, sending, receiving):
    assert connector.kv_checksum_carrier(request(params), receiving=False) is sending
    assert connector.kv_checksum_carrier(request(params), receiving=True) is receiving
    assert connector.has_carrier()


@pytest.mark.parametrize("name", ["remote_engine_id", "remote_request_id", "do_remote_prefill"])
def test_parameters_that_name_nobody_are_refused(connector, name):
    connector.check_params(request(LOADS))
    with pytest.raises(RequestError, match=name):
        connector.check_params(request(LOADS | {name: 7}))


@pytest.mark.req("EXT-3")
@pytest.mark.parametrize("seed", range(4))
def test_pushed_loads_verify_and_give_the_right_tokens(tools, new_world, seed):
    world = new_world(
        seed=seed, transfer="push", producer={"layout": "NHD", "max_batched_tokens": 16}, consumer={"num_blocks": 20}
    )
    prompts = [tools.prompt(f"r{i}", 9 + 17 * i) for i in range(6)]
    answers = world.run(prompts)
    assert {answers[p.request_id].verdict.status for p in prompts} == {VerdictStatus.VERIFIED}
    assert all(answers[p.request_id].token_ids == tools.tokens_alone(p.token_ids, p.max_tokens) for p in prompts)
    assert [tools.blocks_in_use(engine) for engine in world.engines] == [0, 0]


@pytest.mark.req("EXT-3")
def test_the_checksums_travel_with_the_last_notice_and_not_with_the_parameters(world, tools):
    order = []
    world.seams.on("consumer.load_scheduled", lambda event: order.append("scheduled"))
    world.seams.on("producer.kv_final", lambda event: order.append("final"))
    world.seams.on("transfer.carrier_pass", lambda event: order.append(event.checksums))
    world.seams.on("consumer.payload_decoded", lambda event: order.append("decoded"))
    world.seams.on("consumer.verified", lambda event: order.append("verified"))
    prompt = tools.prompt("a", 40)
    # D schedules its load before P has seen the prompt.
    request_on_d = Request("a", list(prompt.token_ids), prompt.max_tokens, push_params("P", "a"))
    world.d.add_request(request_on_d)
    tools.one_step(world.d)
    world.deliver()
    world.p.add_request(Request("a", list(prompt.token_ids), 1, SENDS))
    for _ in range(200):
        for engine in world.engines:
            engine.step()
        world.deliver()
    sent = next(text for text in order if len(text) > 20)
    assert order == ["scheduled", "final", sent, "decoded", "verified"]
    assert request_on_d.verdict.status is VerdictStatus.VERIFIED
    assert "kv_checksums" not in push_params("P", "a")


@pytest.mark.req("EXT-3")
@pytest.mark.parametrize("mode", ["log", "enforce"])
def test_a_lost_carrier_leaves_the_load_unverified(new_world, tools, mode):
    world = new_world(mode, transfer="push")
    world.seams.on("transfer.carrier_pass", lambda event: Change(dataclasses.replace(event, checksums=None)))
    answer = world.run([tools.prompt("a", 40)])["a"]
    assert (answer.verdict.status, answer.verdict.reason) == (VerdictStatus.UNVERIFIED, "no_checksums")
    assert answer.finish_reason is (FinishReason.ERROR if mode == "enforce" else FinishReason.LENGTH)


@pytest.mark.req("PRO-7", "EXT-3")
def test_a_producer_whose_workers_did_not_report_pushes_without_checksums(world, tools):
    world.seams.on("worker.record_leaves", lambda event: Drop() if event.engine == "P" else None)
    passed = []
    world.seams.on("transfer.carrier_pass", passed.append)
    answer = world.run([tools.prompt("a", 40)])["a"]
    assert (answer.verdict.reason, passed) == ("no_checksums", [])


@pytest.mark.req("EXT-3", "CON-4")
def test_a_load_that_nobody_begins_to_write_fails_in_time(world, tools):
    """P never heard of the request."""
    prompt = tools.prompt("a", 40)
    world.d.add_request(Request("a", list(prompt.token_ids), 4, push_params("P", "nobody")))
    world.act_until(lambda: "a" in world.answers)
    assert world.clock.now > LOAD_TICKS
    assert world.answers["a"].verdict.reason == "load_failed"
    world.settle()
    assert tools.blocks_in_use(world.d) == 0


def test_a_window_that_was_closed_is_not_written_any_more(world, tools):
    """P finishes the prompt after D has given up: nothing moves, and P's lease ends by itself."""
    prompt = tools.prompt("a", 40)
    landed = []
    world.seams.on("transfer.op_landed", landed.append)
    world.d.add_request(Request("a", list(prompt.token_ids), 4, push_params("P", "a")))
    world.act_until(lambda: "a" in world.answers)
    world.p.add_request(Request("a", list(prompt.token_ids), 1, SENDS))
    for _ in range(50):
        world.p.step()
        world.deliver()
    assert (landed, world.p.connector.num_leases) == ([], 1)


def test_who_asks_second_for_a_request_waits_in_vain(world, tools):
    prompt = tools.prompt("a", 40)
    world.arrivals.append(prompt)
    world.d.add_request(Request("b", list(prompt.token_ids), 4, push_params("P", "a")))
    world.act_until(lambda: {"a", "b"} <= set(world.answers))
    reasons = sorted(str(world.answers[name].verdict.reason) for name in ("a", "b"))
    assert reasons == ["None", "load_failed"]
    served = next(answer for answer in world.answers.values() if answer.verdict.reason is None)
    assert served.token_ids == tools.tokens_alone(prompt.token_ids, 4)


def test_an_unknown_producer_is_a_failed_load(world, tools):
    prompt = tools.prompt("a", 40)
    world.d.add_request(Request("a", list(prompt.token_ids), 4, push_params("nobody", "a")))
    world.act_until(lambda: "a" in world.answers)
    assert world.answers["a"].verdict.reason == "load_failed"
    assert world.clock.now < LOAD_TICKS


def test_when_the_producer_fails_the_consumer_answers_for_both(world, tools):
    prompt = tools.prompt("a", 40)
    world.proxy.submit(prompt)
    world.act_until(lambda: world.d.scheduler.num_loading)
    world.p.abort("a", FinishReason.ERROR, "no room")
    world.act_until(lambda: "a" in world.answers)
    assert world.answers["a"].error == "the producer failed: no room"
    world.act_until(lambda: not world.d.scheduler.num_loading)
    assert tools.blocks_in_use(world.d) == 0


def test_a_lease_that_ends_before_the_push_forgets_the_request(world, tools):
    prompt = tools.prompt("a", 40)
    world.run_producer(prompt)
    world.p.connector.end_lease("a")
    world.finish(world.p)
    while world.p.scheduler.has_work:
        world.p.step()
    world.d.add_request(Request("a", list(prompt.token_ids), 4, push_params("P", "a")))
    world.act_until(lambda: "a" in world.answers)
    assert world.answers["a"].verdict.reason == "load_failed"
