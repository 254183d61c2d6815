"""A request may switch its own checksums off where the operator allows it, and nowhere else (POL-6)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.checksum.consumer import CHECKSUMS_PARAM
from engine.checksum.policy import ChecksumPolicy, ChecksumSettings, resolve
from engine.checksum.verdict import NotCheckedReason, Verdict, VerdictStatus
from engine.core import EngineCore
from engine.errors import RequestError
from engine.proxy import Prompt
from engine.request import FinishReason, Request

OFF = Verdict(VerdictStatus.NOT_CHECKED, NotCheckedReason.OFF)


def settings(mode, allowed=True):
    return ChecksumSettings(kv_checksum_mode=mode, allow_checksum_switch=allowed)


def switched(prompt, kv_checksum):
    return Prompt(prompt.request_id, prompt.token_ids, prompt.max_tokens, kv_checksum)


def num_sums(engine):
    return sum(times.records for times in engine.checksum_times)


@pytest.mark.req("POL-6")
@pytest.mark.parametrize("mode", ["log", "enforce"])
@pytest.mark.parametrize("asked", [None, True, False])
def test_both_sides_do_what_the_request_asks(new_world, tools, mode, asked):
    world = new_world(checksum=settings(mode))
    prompt = tools.prompt("r", 40)
    answer = world.run([switched(prompt, asked)])["r"]
    assert answer.token_ids == tools.tokens_alone(prompt.token_ids, prompt.max_tokens)
    sums = 0 if asked is False else 1
    assert (num_sums(world.p), num_sums(world.d)) == (sums, sums)
    assert (CHECKSUMS_PARAM in world.prefilled["r"].kv_transfer_params) == bool(sums)
    assert answer.verdict.status == (VerdictStatus.VERIFIED if sums else VerdictStatus.NOT_CHECKED)
    if not sums:
        assert answer.verdict == OFF


@pytest.mark.req("POL-6", "POL-3")
@pytest.mark.parametrize("mode", ["log", "enforce"])
def test_without_the_operators_word_nobody_switches_anything_off(new_world, tools, mode):
    """Neither on P nor on D, also where the parameters come from elsewhere; and nothing of the request is kept."""
    world = new_world(mode)
    prompt = tools.prompt("r", 40)
    with pytest.raises(RequestError, match="--allow-checksum-switch"):
        world.proxy.submit(switched(prompt, False))
    params = world.run_producer(prompt)
    with pytest.raises(RequestError, match="--allow-checksum-switch"):
        world.d.add_request(Request("r", list(prompt.token_ids), 4, params, kv_checksum=False))
    assert [engine.scheduler.num_unfinished for engine in world.engines] == [0, 0]
    assert world.load(prompt, params).verdict.status is not VerdictStatus.NOT_CHECKED


@pytest.mark.req("POL-6")
def test_what_an_engine_without_checksums_takes(new_world, tools):
    world = new_world("off")
    with pytest.raises(RequestError, match="has no checksums"):
        world.proxy.submit(switched(tools.prompt("a", 40), True))
    answers = world.run([switched(tools.prompt("b", 40), False), tools.prompt("c", 40)])
    assert [answer.verdict for answer in answers.values()] == [OFF, OFF]


@pytest.mark.parametrize("asked", ["false", 0, 1, [], {}])
def test_what_is_no_switch(new_world, tools, asked):
    with pytest.raises(RequestError, match="use true or false"):
        new_world(checksum=settings("log")).proxy.submit(switched(tools.prompt("r", 4), asked))


@pytest.mark.req("POL-6", "VER-3")
def test_one_side_alone_cannot_pass_for_checked(new_world, tools):
    """P was told not to sum, D was told nothing: that is no load which fail-closed may use."""
    world = new_world(checksum=settings("enforce"))
    prompt = tools.prompt("r", 40)
    world.p.add_request(Request("r", list(prompt.token_ids), 1, {"do_remote_decode": True}, kv_checksum=False))
    params = next(iter(world.finish(world.p).values())).kv_transfer_params
    world.load(prompt, dict(params))
    world.deliver()
    answer = world.finish()["r"]
    assert answer.finish_reason is FinishReason.ERROR
    assert answer.verdict.reason == "no_checksums"


@pytest.mark.req("POL-6")
@given(asked=st.lists(st.sampled_from([None, True, False]), min_size=1, max_size=6), seed=st.integers(0, 2**16))
def test_requests_do_not_touch_each_others_checksums(new_world, tools, asked, seed):
    world = new_world(checksum=settings("enforce"), seed=seed)
    prompts = [tools.prompt(f"r{i}", 20 + 7 * i) for i in range(len(asked))]
    answers = world.run([switched(p, a) for p, a in zip(prompts, asked, strict=True)])
    for prompt, wish in zip(prompts, asked, strict=True):
        answer = answers[prompt.request_id]
        assert answer.token_ids == tools.tokens_alone(prompt.token_ids, prompt.max_tokens)
        assert (answer.verdict == OFF) == (wish is False)
        assert (answer.verdict.status is VerdictStatus.VERIFIED) == (wish is not False)
    summed = sum(wish is not False for wish in asked)
    assert (num_sums(world.p), num_sums(world.d)) == (summed, summed)
    assert world.p.scheduler.sends.num_pending == world.d.scheduler.checks.num_pending == 0


def test_a_policy_is_switchable_only_when_it_is_said():
    assert not resolve(ChecksumSettings(kv_checksum_mode="enforce")).switchable
    assert resolve(settings("enforce")) == ChecksumPolicy(True, True, "fail", True)


def test_an_engine_that_lost_its_checksums_refuses_true(tools):
    """Fail-open without a carrier: checksums are disabled at start, and a request that counts on them must hear it."""
    from engine.config import EngineConfig

    engine = EngineCore(EngineConfig("E", checksum=settings("log")))
    with pytest.raises(RequestError, match="has no checksums"):
        engine.add_request(Request("r", [1, 2, 3], 1, None, kv_checksum=True))
