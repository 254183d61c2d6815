"""D's side of a handover, from the step that starts a load to its verdict and what that does (CON, POL)."""

import logging

import numpy as np
import pytest

from engine.checksum.consumer import CHECKSUMS_PARAM
from engine.checksum.verdict import VerdictStatus
from engine.config import preset
from engine.errors import RequestError
from engine.request import FinishReason, Request, Status

MISMATCH, UNVERIFIED, VERIFIED = VerdictStatus.MISMATCH, VerdictStatus.UNVERIFIED, VerdictStatus.VERIFIED
MODES = ["off", "log", "enforce"]


def corrupt(memory, block_id, slot=0):
    token = memory.slots((block_id,))[1, 1, slot].copy()
    token[7] ^= 0x40
    memory.write_slot(1, 1, block_id, slot, token)


@pytest.fixture
def spoil():
    """Make the first loaded block of request `name` wrong before it is summed."""

    def attach(world, name="a"):
        def flip(event):
            if event.request_id == name:
                corrupt(event.memory, event.groups[0].block_ids[0])

        world.seams.on("consumer.load_finished", flip)

    return attach


# ---- the blocks of a load


@pytest.mark.req("CON-1")
def test_the_step_that_starts_a_load_names_its_blocks(tools, new_world):
    world = new_world()
    decoded = []
    world.seams.on("consumer.payload_decoded", decoded.append)
    prompt = tools.prompt("a", 40)
    params = world.run_producer(prompt)
    world.d.add_request(Request("a", list(prompt.token_ids), 4, params))
    plan = world.d.scheduler.schedule()
    assert [event.request_id for event in decoded] == ["a"], "decoded before anything is transferred"
    (load,) = plan.loads
    assert (load.groups[0].start, load.groups[0].num_tokens, len(load.groups[0].block_ids)) == (0, 40, 3)
    assert plan.checksum_loads == {"a"}
    assert world.fabric.num_pending == 0
    assert plan.requests == ()


@pytest.mark.req("CON-1", "VER-6")
@pytest.mark.parametrize("shared", [16, 33, 48])
def test_with_a_local_prefix_only_the_rest_is_loaded_and_compared(tools, new_world, shared):
    world = new_world()
    prefix = tools.prompt("prefix", shared).token_ids
    first, second = tools.prompt("a", 60, prefix=prefix), tools.prompt("b", 70, prefix=prefix)
    world.run([first])
    copied = []
    world.seams.on("transfer.op_landed", lambda event: copied.append(event.op.position))
    answer = world.run([second])["b"]
    local = shared // 16
    assert answer.verdict.groups[0].loaded == answer.verdict.groups[0].compared == tuple(range(local, 5))
    assert set(copied) == set(range(local, 5))
    assert answer.verdict.status is VERIFIED
    assert answer.token_ids == tools.tokens_alone(second.token_ids, second.max_tokens)


@pytest.mark.req("CON-1")
def test_a_whole_prompt_in_the_cache_still_loads_its_last_block(tools, new_world):
    world = new_world()
    prompt = tools.prompt("a", 48)
    world.run([prompt])
    again = type(prompt)("b", prompt.token_ids, prompt.max_tokens)
    assert world.run([again])["b"].verdict.groups[0].loaded == (2,)
    assert world.answers["b"].token_ids == world.answers["a"].token_ids


@pytest.mark.req("VER-6")
@pytest.mark.parametrize("length", [1, 15, 16, 17, 64])
@pytest.mark.parametrize("mode", MODES)
def test_a_clean_load_serves_the_right_tokens(tools, new_world, length, mode):
    world = new_world(mode)
    prompt = tools.prompt("a", length, max_tokens=1 + length % 3)
    answer = world.run([prompt])["a"]
    assert answer.token_ids == tools.tokens_alone(prompt.token_ids, prompt.max_tokens)
    expected = (VerdictStatus.NOT_CHECKED, "off") if mode == "off" else (VERIFIED, None)
    assert (answer.verdict.status, answer.verdict.reason, answer.recomputed) == (*expected, False)


@pytest.mark.req("CON-5", "DEF-1")
@pytest.mark.parametrize("layouts", [("HND", "HND"), ("HND", "NHD"), ("NHD", "HND"), ("NHD", "NHD")], ids=str)
@pytest.mark.parametrize(
    "options", [{"block_size": 8}, {"block_size": 32}, {"kv_dtype": "float16"}, {"model": "small"}]
)
def test_layouts_do_not_enter_the_comparison(tools, new_world, layouts, options):
    options = options | ({"model": preset("small")} if "model" in options else {})
    world = new_world("enforce", producer={"layout": layouts[0]}, consumer={"layout": layouts[1]}, **options)
    prompts = [tools.prompt(f"r{n}", n) for n in (1, 31, 32, 70)]
    answers = world.run(prompts)
    alone = {k: v for k, v in options.items() if k != "block_size"}
    for prompt in prompts:
        answer = answers[prompt.request_id]
        assert (answer.verdict.status, answer.verdict.groups[0].not_compared) == (VERIFIED, ())
        assert answer.token_ids == tools.tokens_alone(prompt.token_ids, prompt.max_tokens, **alone)


@pytest.mark.req("VER-2", "FPR-1")
def test_sides_of_another_dtype_are_unverified(tools, new_world):
    """Their elements are equally wide: the bytes arrive, and mean something else."""
    world = new_world("enforce", producer={"kv_dtype": "bfloat16"}, consumer={"kv_dtype": "float16"})
    answer = world.run([tools.prompt("a", 40)])["a"]
    assert (answer.verdict.status, answer.verdict.reason) == (UNVERIFIED, "other_layers")
    assert answer.error == "KV load failed: checksums unverified (other_layers)"


def test_a_load_from_the_engine_itself_is_a_load(tools, new_world):
    """What a confused proxy may ask for: D reads its own blocks, finds something else in them, and goes on."""
    world = new_world("enforce", "recompute")
    prompt = tools.prompt("a", 40)
    request = world.load(prompt, remote_engine_id="D", remote_block_ids=[[1, 2, 3]])
    assert request.block_ids == [1, 2, 3]
    world.deliver()
    output = world.finish()["a"]
    assert (output.verdict.status, output.recomputed) == (MISMATCH, True)
    assert output.token_ids == tools.tokens_alone(prompt.token_ids, prompt.max_tokens)


def test_the_last_prompt_token_is_computed_again_and_nothing_else(tools, new_world):
    world = new_world()
    prompt = tools.prompt("a", 40)
    world.load(prompt)
    world.deliver()
    tools.one_step(world.d)
    plan = world.d.scheduler.schedule()
    (scheduled,) = plan.requests
    assert (scheduled.first_position, scheduled.num_tokens, scheduled.sample) == (39, 1, True)
    assert scheduled.token_ids == prompt.token_ids[-1:]
    assert scheduled.loaded[0].block_ids == scheduled.tables[0]


# ---- verdicts and what they do


@pytest.mark.req("POL-2", "VER-1")
def test_fail_open_logs_a_mismatch_and_uses_the_blocks(tools, new_world, spoil, caplog):
    world = new_world("log")
    spoil(world)
    prompt = tools.prompt("a", 40)
    with caplog.at_level(logging.ERROR):
        answer = world.run([prompt])["a"]
    assert (answer.verdict.status, answer.finish_reason) == (MISMATCH, FinishReason.LENGTH)
    assert answer.verdict.groups[0].differing == (0,)
    assert "request a: KV checksum mismatch, block positions by group: {0: [0]}" in caplog.text
    follower = Request("b", [*prompt.token_ids, 1], 1)
    assert world.d.scheduler.kv.cached_prefix(follower).num_tokens == 32, "cached as usual"


@pytest.mark.req("POL-3")
@pytest.mark.parametrize("trouble", ["mismatch", "no_checksums", "invalid"])
def test_fail_closed_fails_the_request(tools, new_world, spoil, trouble):
    world = new_world("enforce", "fail")
    changed = {"no_checksums": {CHECKSUMS_PARAM: None}, "invalid": {CHECKSUMS_PARAM: "x"}}.get(trouble, {})
    if trouble == "mismatch":
        spoil(world)
    world.load(tools.prompt("a", 40), **changed)
    world.deliver()
    output = world.finish()["a"]
    assert (output.finish_reason, output.token_ids, output.recomputed) == (FinishReason.ERROR, (), False)
    wanted = "checksum mismatch in group 0 blocks [0]" if trouble == "mismatch" else f"checksums unverified ({trouble})"
    assert output.error == f"KV load failed: {wanted}"
    assert (output.verdict.reason or output.verdict.status) == trouble
    assert tools.blocks_in_use(world.d) == 0
    assert not any(world.d.scheduler.kv.pool.is_cached(block) for block in range(64))


@pytest.mark.req("POL-3", "POL-4")
@pytest.mark.parametrize("trouble", ["mismatch", "no_checksums"])
def test_fail_closed_recomputes_the_whole_prompt_and_never_loads_again(tools, new_world, spoil, trouble):
    world = new_world("enforce", "recompute")
    prefix = tools.prompt("prefix", 32)
    world.run([prefix])
    spoil(world)
    started, plans = [], []
    world.seams.on("consumer.recompute_start", started.append)
    prompt = tools.prompt("a", 60, prefix=prefix.token_ids)
    request = world.load(prompt, **({CHECKSUMS_PARAM: None} if trouble == "no_checksums" else {}))
    assert request.verdict.groups == ()
    world.deliver()
    tools.one_step(world.d)
    assert [event.request_id for event in started] == ["a"]
    assert (request.status, request.num_computed_tokens, request.block_ids) == (Status.WAITING, 0, [])
    while request.finish_reason is None:
        if (plan := world.d.scheduler.schedule()) is not None:
            plans.append(plan)
            world.d._planned.append(plan)
            world.d.execute()
            world.d.collect()
    computed = [(r.first_position, r.num_tokens) for plan in plans for r in plan.requests]
    assert computed[0] == (0, 60), "from the first token on, although 32 are in the prefix cache"
    assert not any(plan.loads for plan in plans)
    (output,) = world.d.take_finished()
    assert output.recomputed
    assert output.verdict.status is (MISMATCH if trouble == "mismatch" else UNVERIFIED)
    assert output.token_ids == tools.tokens_alone(prompt.token_ids, prompt.max_tokens)


@pytest.mark.req("POL-5")
@pytest.mark.parametrize("load_failure", ["fail", "recompute"])
def test_nobody_shares_a_block_whose_check_is_pending_or_failed(tools, new_world, spoil, load_failure):
    world = new_world("enforce", load_failure)
    spoil(world)
    prompt = tools.prompt("a", 40)
    follower = Request("b", [*prompt.token_ids, 1], 4)
    shared = []

    def look(event):
        shared.append(world.d.scheduler.kv.cached_prefix(follower).tables[0])

    for seam in ("consumer.load_scheduled", "transfer.op_landed", "consumer.load_finished", "consumer.verified"):
        world.seams.on(seam, look)
    request = world.load(prompt)
    loaded = list(request.block_ids)
    world.deliver()
    tools.one_step(world.d)
    assert len(shared) > 4
    assert not any(shared)
    assert not any(map(world.d.scheduler.kv.pool.is_cached, loaded))
    world.d.add_request(follower)
    outputs = world.finish()
    assert outputs["b"].token_ids == tools.tokens_alone([*prompt.token_ids, 1], 4)


@pytest.mark.req("CON-4", "POL-5")
def test_a_request_is_judged_before_it_can_be_scheduled(tools, new_world):
    world = new_world()
    order = []
    world.seams.on("consumer.load_finished", lambda event: order.append("finished"))
    world.seams.on("consumer.verified", lambda event: order.append(event.verdict.status))
    world.seams.on("consumer.first_use", lambda event: order.append("first use"))
    world.load(tools.prompt("a", 40))
    while world.fabric.ready():
        assert not [r for r in world.d.scheduler._running if r.request_id == "a"]
        world.fabric.ready()[0]()
    world.finish()
    assert order == ["finished", VERIFIED, "first use"]


@pytest.mark.req("VER-4")
def test_counters_count_requests(tools, new_world):
    world = new_world("log")
    for name, changed in (("a", {}), ("b", {CHECKSUMS_PARAM: None}), ("c", {CHECKSUMS_PARAM: None})):
        world.load(tools.prompt(name, 20), **changed)
        world.deliver()
        world.finish()
    assert world.d.scheduler.checks.counts == {(VERIFIED, None): 1, (UNVERIFIED, "no_checksums"): 2}


# ---- aborts


@pytest.mark.req("VER-7", "CON-2")
@pytest.mark.parametrize("mode", ["off", "enforce"])
def test_an_aborted_load_keeps_its_blocks_until_the_transport_has_let_go(tools, new_world, mode):
    """The shape of sgl-project/sglang#24527: a late write must not meet a new owner."""
    world = new_world(mode)
    prompt = tools.prompt("a", 40)
    finished = []
    world.seams.on("consumer.load_finished", finished.append)
    world.load(prompt)
    world.fabric.ready()[0]()
    world.d.abort("a")
    (output,) = world.d.take_finished()
    assert (output.finish_reason, output.verdict.reason) == (FinishReason.ABORT, "request_ended")
    assert tools.blocks_in_use(world.d) == 3
    with pytest.raises(RequestError, match="the id is in use"):
        world.d.add_request(Request("a", [1], 1))
    tools.one_step(world.d)
    world.d.add_request(Request("other", list(range(100)), 4))
    assert world.finish()["other"].token_ids == tools.tokens_alone(tuple(range(100)), 4)
    assert tools.blocks_in_use(world.d) == 3
    world.deliver()
    tools.one_step(world.d)
    assert (tools.blocks_in_use(world.d), world.d.scheduler.num_loading) == (0, 0)
    assert finished == [], "not even looked at (CON-2)"
    assert not world.d.scheduler.checks.counts
    assert world.d.take_finished() == []
    world.d.add_request(Request("a", [1], 1))
    assert world.finish()["a"].finish_reason.normal


def test_an_aborted_load_takes_no_seat(tools, new_world):
    world = new_world(consumer={"max_num_seqs": 1})
    world.load(tools.prompt("a", 40))
    world.d.abort("a")
    world.d.add_request(Request("b", [1, 2, 3], 2))
    assert world.finish()["b"].finish_reason is FinishReason.LENGTH


def test_a_load_takes_a_seat(tools, new_world):
    world = new_world(consumer={"max_num_seqs": 1})
    world.load(tools.prompt("a", 40))
    world.d.add_request(Request("b", [1, 2, 3], 2))
    plan = world.d.scheduler.schedule()
    assert plan.requests == ()


@pytest.mark.parametrize("mode", ["off", "enforce"])
def test_an_abort_before_the_load_starts_or_after_it_was_judged(tools, new_world, mode):
    world = new_world(mode)
    prompt = tools.prompt("a", 40)
    params = world.run_producer(prompt)
    world.d.add_request(Request("a", list(prompt.token_ids), 4, params))
    world.d.abort("a")
    assert not world.d.scheduler.has_work
    request = world.load(prompt, params)
    world.deliver()
    tools.one_step(world.d)
    assert request.status is Status.RUNNING
    world.d.abort("a")
    assert tools.blocks_in_use(world.d) == 0
    assert [output.verdict.status for output in world.d.take_finished()] == [
        VerdictStatus.NO_LOAD,
        VERIFIED if mode == "enforce" else VerdictStatus.NOT_CHECKED,
    ]


def test_a_failed_load_of_an_aborted_request_gives_its_blocks_back(tools, new_world):
    world = new_world()
    prompt = tools.prompt("a", 40)
    params = world.run_producer(prompt) | {"remote_engine_id": "nobody"}
    world.d.add_request(Request("a", list(prompt.token_ids), 4, params))
    world.d.schedule()
    world.d.abort("a")
    world.d.execute()
    world.d.collect()
    (output,) = world.d.take_finished()
    assert (output.finish_reason, output.verdict.reason) == (FinishReason.ABORT, "request_ended")
    assert (tools.blocks_in_use(world.d), world.d.scheduler.num_loading) == (0, 0)


# ---- pressure


def test_a_loaded_request_is_not_stuck_behind_one_that_waits_for_its_blocks(tools, new_world):
    """a is preempted for want of blocks that two loaded requests hold: they must run, or all three wait for ever."""
    world = new_world(consumer={"num_blocks": 7, "max_num_seqs": 3}, prefix_caching=False)
    a = Request("a", list(range(30)), 20)
    world.d.add_request(a)
    tools.one_step(world.d)
    prompts = [tools.prompt(name, 30, max_tokens=20) for name in "bc"]
    for prompt in prompts:
        world.load(prompt)
    assert world.d.scheduler.kv.pool.num_free == 0
    world.deliver()
    outputs = world.finish()
    assert [outputs[name].finish_reason for name in "abc"] == ["length"] * 3
    for name, tokens in (("a", tuple(range(30))), ("b", prompts[0].token_ids), ("c", prompts[1].token_ids)):
        assert outputs[name].token_ids == tools.tokens_alone(tokens, 20)


@pytest.mark.req("POL-4")
def test_a_loaded_request_that_is_preempted_computes_its_prompt_itself(tools, new_world):
    world = new_world(consumer={"num_blocks": 5}, prefix_caching=False)
    preempted = []
    world.seams.on("request.preempted", lambda event: preempted.append(event.request_id))
    world.d.add_request(Request("a", list(range(31)), 20))
    tools.one_step(world.d)
    prompt = tools.prompt("b", 32, max_tokens=8)
    world.load(prompt)
    world.deliver()
    outputs = world.finish()
    assert preempted[:1] == ["b"]
    assert outputs["b"].token_ids == tools.tokens_alone(prompt.token_ids, 8)
    assert outputs["b"].verdict.status is VERIFIED
    assert not outputs["b"].recomputed, "preempted is not recomputed"
    assert world.fabric.num_pending == 0


def test_loaded_blocks_are_shared_after_they_are_verified(tools, new_world):
    world = new_world()
    seen = {}
    world.seams.on("consumer.load_finished", lambda event: seen.update({event.request_id: event.groups[0]}))
    prompt = tools.prompt("a", 40)
    world.load(prompt)
    world.deliver()
    tools.one_step(world.d)
    follower = Request("b", [*prompt.token_ids, 1], 4)
    assert world.d.scheduler.kv.cached_prefix(follower).tables[0] == seen["a"].block_ids[:2]
    world.d.add_request(follower)
    assert np.array_equal(world.finish()["b"].token_ids, tools.tokens_alone((*prompt.token_ids, 1), 4))
