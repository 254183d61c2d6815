"""The proxy between P and D: parameters pass as they are, and every prompt gets one answer."""

import pytest

from engine.checksum.consumer import CHECKSUMS_PARAM
from engine.checksum.verdict import VerdictStatus
from engine.errors import RequestError
from engine.proxy import Prompt
from engine.request import FinishReason
from engine.seams import Change, Hold, ParamsLeave, ParamsPass


@pytest.fixture
def world(new_world):
    return new_world()


def prefill(world, prompt):
    """Submit a prompt and let P answer the proxy."""
    world.proxy.submit(prompt)
    while not world.proxy.ready():
        for output in world.p.step():
            assert world.proxy.prefilled(output) is None


def test_a_prompt_is_one_token_on_p_and_the_rest_on_d(tools, world):
    prompt = tools.prompt("a", 40, max_tokens=7)
    world.proxy.submit(prompt)
    assert (world.proxy.num_pending, world.p.scheduler.num_unfinished, world.proxy.ready()) == (1, 1, [])
    (output,) = world.finish(world.p).values()
    assert len(output.token_ids) == 1
    assert world.proxy.prefilled(output) is None
    assert world.proxy.ready() == ["a"]
    assert world.proxy.forward("a") is None
    assert (world.proxy.num_pending, world.proxy.ready(), world.d.scheduler.num_unfinished) == (0, [], 1)


@pytest.mark.req("WIR-3")
def test_keys_that_it_does_not_know_are_forwarded(tools, world):
    extra = {"kv_checksums_v2": "x", "tenant": {"nested": [1, None, {"deep": True}]}, "": 0}
    sent, arrived = {}, {}

    def add(event):
        sent.update(event.params)
        return Change(ParamsLeave(event.engine, event.request_id, {**event.params, **extra}))

    world.seams.on("producer.params_leave", add)
    add_request = world.d.add_request
    world.d.add_request = lambda request: (arrived.update(request.kv_transfer_params), add_request(request))
    prefill(world, tools.prompt("a", 40))
    world.proxy.forward("a")
    assert CHECKSUMS_PARAM in sent
    assert arrived == sent | extra


def test_parameters_can_be_changed_on_their_way(tools, world):
    """The whole dict lost: D computes the prompt by itself, P holds the blocks until the lease ends."""
    world.seams.on("proxy.params_pass", lambda event: Change(ParamsPass(event.request_id, {})))
    prompt = tools.prompt("a", 40)
    prefill(world, prompt)
    assert world.proxy.forward("a") is None
    output = world.finish()["a"]
    assert output.verdict.status is VerdictStatus.NO_LOAD
    assert output.token_ids == tools.tokens_alone(prompt.token_ids, prompt.max_tokens)
    assert world.p.connector.num_leases == 1


def test_parameters_can_be_held_and_others_overtake(tools, world):
    gate = []
    world.seams.on(
        "proxy.params_pass",
        lambda event: Hold(lambda: bool(gate), "late") if event.request_id == "a" and not gate else None,
    )
    prefill(world, tools.prompt("a", 40))
    world.proxy.submit(tools.prompt("b", 20))
    while "b" not in world.proxy.ready():
        for output in world.p.step():
            world.proxy.prefilled(output)
    assert world.proxy.forward("a") is None
    assert world.proxy.ready() == ["b"]
    world.proxy.forward("b")
    assert (world.proxy.num_pending, world.d.scheduler.num_unfinished) == (1, 1)
    gate.append(1)
    assert world.proxy.ready() == ["a"]
    world.proxy.forward("a")
    assert (world.proxy.num_pending, world.d.scheduler.num_unfinished) == (0, 2)


def test_a_prompt_that_p_cannot_take_is_refused_and_forgotten(world):
    with pytest.raises(RequestError, match="needs a prompt"):
        world.proxy.submit(Prompt("a", (), 4))
    assert world.proxy.num_pending == 0


def test_an_id_in_use_is_refused_and_the_first_prompt_is_served(tools, world):
    prompt = tools.prompt("a", 40)
    world.proxy.submit(prompt)
    with pytest.raises(RequestError, match="the id is in use"):
        world.proxy.submit(tools.prompt("a", 20))
    prefill_rest(world)
    assert world.proxy.forward("a") is None
    world.d.schedule()
    world.d.execute()
    world.d.collect()
    world.deliver()
    assert world.finish()["a"].token_ids == tools.tokens_alone(prompt.token_ids, prompt.max_tokens)


def prefill_rest(world):
    while not world.proxy.ready():
        for output in world.p.step():
            world.proxy.prefilled(output)


def test_an_id_is_in_use_until_it_is_handed_over(tools, new_world):
    """P's lease has ended while the parameters are held: P would take the id again."""
    world = new_world(producer={"lease_ticks": 1})
    prefill(world, tools.prompt("a", 40))
    world.clock.advance(2)
    world.p.schedule()
    assert world.p.connector.num_leases == 0
    with pytest.raises(RequestError, match="request a: the id is in use"):
        world.proxy.submit(tools.prompt("a", 20))
    assert world.proxy.ready() == ["a"]


def test_what_p_could_not_do_is_the_answer(tools, world):
    world.proxy.submit(tools.prompt("a", 40))
    world.p.abort("a")
    (output,) = world.p.take_finished()
    assert world.proxy.prefilled(output) is output
    assert output.finish_reason is FinishReason.ABORT
    assert world.proxy.num_pending == 0


@pytest.mark.req("WIR-2")
def test_what_d_refuses_is_answered(tools, world):
    params = {"do_remote_prefill": True, "remote_engine_id": 5}
    world.seams.on("proxy.params_pass", lambda event: Change(ParamsPass(event.request_id, params)))
    prefill(world, tools.prompt("a", 40))
    answer = world.proxy.forward("a")
    assert (answer.request_id, answer.finish_reason, answer.token_ids) == ("a", FinishReason.ERROR, ())
    assert "kv_transfer_params.remote_engine_id" in answer.error
    assert (world.proxy.num_pending, world.d.scheduler.num_unfinished) == (0, 0)
