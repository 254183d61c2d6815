"""Every kind of model through a pair of engines: what is kept of each request, transferred, checked and found out."""

from dataclasses import replace

import numpy as np
import pytest

from engine.blocks import NULL_BLOCK
from engine.checksum.verdict import VerdictStatus
from engine.config import PRESETS, EngineConfig
from engine.core import EngineCore
from engine.request import FinishReason, Request
from engine.seams import Seams

KINDS = ["tiny-window", "tiny-shared", "tiny-mla", "tiny-indexed", "tiny-hybrid", "tiny-skips"]
SKIPPED = {"tiny-skips": {1, 2}}
VERIFIED, MISMATCH, UNVERIFIED = VerdictStatus.VERIFIED, VerdictStatus.MISMATCH, VerdictStatus.UNVERIFIED


def groups_of(name):
    return len(EngineCore(EngineConfig("e", PRESETS[name])).memory.groups)


def alone(tools, prompt, name):
    return tools.tokens_alone(prompt.token_ids, prompt.max_tokens, model=PRESETS[name])


# ---- one engine


@pytest.mark.parametrize("name", KINDS)
def test_tokens_and_what_is_kept_depend_on_the_prompt_alone(tools, name):
    prompts = [tools.prompt(f"p{n}", n, max_tokens=5) for n in (1, 16, 47, 90)]
    tokens, kv = tools.serve(prompts, model=PRESETS[name])
    variants = [
        {"max_batched_tokens": 7, "steps_in_flight": 4},
        {"tp_size": 4, "layout": "NHD"},
        {"tp_size": 2, "pp_size": 2, "kernel_block_splits": 2},
        {"block_size": 8, "max_batched_tokens": 33},
    ]
    for options in variants:
        got_tokens, got_kv = tools.serve(prompts, model=PRESETS[name], **options)
        assert got_tokens == tokens, options
        assert all(np.array_equal(got_kv[prompt], stored) for prompt, stored in kv.items()), options


def test_blocks_out_of_the_window_are_given_back(tools):
    """Prompt and output are 160 tokens, the window 24: two blocks and one for the token that comes."""
    seams, most = Seams(), []
    engine = EngineCore(EngineConfig("e", PRESETS["tiny-window"], prefix_caching=False, max_batched_tokens=16), seams)

    def look(event):
        windowed = event.tables[1]
        most.append(sum(block_id != NULL_BLOCK for block_id in windowed))
        first = max(0, event.first_position - 23)
        assert NULL_BLOCK not in windowed[first // 16 :], "what it reads is there"

    seams.on("worker.forward", look)
    prompt = tools.prompt("a", 130, max_tokens=30)
    engine.add_request(Request("a", list(prompt.token_ids), prompt.max_tokens))
    outputs = []
    while not outputs:
        outputs = engine.step()
    assert outputs[0].token_ids == alone(tools, prompt, "tiny-window")
    assert max(most) <= 4
    engine.scheduler.kv.release(10**6)
    assert tools.blocks_in_use(engine) == 0


def test_a_prefix_is_hit_where_every_group_has_what_it_reads(tools):
    model = PRESETS["tiny-window"]
    shared = tools.prompt("shared", 96).token_ids
    prompts = [tools.prompt(f"h{n}", n, prefix=shared) for n in (100, 120)]
    engine = EngineCore(EngineConfig("one", model, num_blocks=128))
    for prompt, tokens in zip(prompts, (0, 96), strict=True):
        request = Request(prompt.request_id, list(prompt.token_ids), prompt.max_tokens)
        prefix = engine.scheduler.kv.cached_prefix(request)
        assert prefix.num_tokens == tokens
        if tokens:
            assert prefix.tables[1][:4] == (NULL_BLOCK,) * 4, "the window needs the last two blocks alone"
            assert NULL_BLOCK not in prefix.tables[1][4:]
        engine.add_request(request)
        outputs = []
        while not outputs:
            outputs = engine.step()
        assert outputs[0].token_ids == alone(tools, prompt, "tiny-window")


def test_a_prefix_that_a_window_has_lost_is_not_hit(tools):
    """Another request has taken a block of the window group: the shorter prefix that is whole is used."""
    engine = EngineCore(EngineConfig("one", PRESETS["tiny-window"], num_blocks=64))
    prompt = tools.prompt("a", 80)
    engine.add_request(Request("a", list(prompt.token_ids), 1))
    while engine.scheduler.num_unfinished or engine.steps_in_flight:
        engine.step()
    kv = engine.scheduler.kv
    again = Request("b", [*prompt.token_ids, 1], 1)
    whole = kv.cached_prefix(again)
    assert whole.num_tokens == 80
    kv.pool._forget(whole.tables[1][-1])
    shorter = kv.cached_prefix(again)
    assert shorter.num_tokens == 64
    assert shorter.tables[0] == whole.tables[0][:4]


def test_a_recurrent_model_shares_no_prefix(tools):
    engine = EngineCore(EngineConfig("one", PRESETS["tiny-hybrid"]))
    prompt = tools.prompt("a", 40)
    engine.add_request(Request("a", list(prompt.token_ids), 1))
    while engine.scheduler.num_unfinished:
        engine.step()
    assert engine.scheduler.kv.cached_prefix(Request("b", list(prompt.token_ids), 1)).num_tokens == 0


# ---- a pair


@pytest.mark.req("DEF-1", "DEF-7", "EXT-1", "EXT-5", "EXT-9", "FPR-3", "BLK-3", "VER-5")
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    "sides", [({}, {}), ({"tp_size": 4}, {"pp_size": 2}), ({"pp_size": 2}, {"tp_size": 4})], ids=str
)
def test_every_kind_verifies_between_worlds(tools, new_world, name, sides):
    world = new_world("enforce", producer=sides[0], consumer=sides[1] | {"layout": "NHD"}, model=PRESETS[name])
    prompts = [tools.prompt(f"p{n}", n) for n in (1, 33, 90)]
    for prompt in prompts:
        answer = world.run([prompt])[prompt.request_id]
        assert (answer.verdict.status, answer.token_ids) == (VERIFIED, alone(tools, prompt, name))
        compared = {group.group_id: group.not_compared for group in answer.verdict.groups}
        assert compared == dict.fromkeys(set(range(groups_of(name))) - SKIPPED.get(name, set()), ())
    assert all(tools.blocks_in_use(engine) == 0 for engine in world.engines)


@pytest.mark.req("VER-1", "EXT-5", "EXT-9", "GAP-3")
@pytest.mark.parametrize(("name", "group"), [(name, group) for name in KINDS for group in range(groups_of(name))])
def test_a_changed_byte_in_any_cache_of_a_group_is_found(tools, new_world, name, group):
    """Unless the group is skipped on both sides (GAP-3)."""
    for row in range(new_world(model=PRESETS[name]).d.memory.group(group).num_layers):
        world = new_world("log", model=PRESETS[name])

        def flip(event, row=row):
            memory, blocks = event.memory.group(group), event.groups[group]
            token = memory.slots(blocks.block_ids[-1:])[row, 0, 0].copy()
            token[3] ^= 16
            memory.write_slot(row, 0, blocks.block_ids[-1], 0, token)

        world.seams.on("consumer.load_finished", flip)
        verdict = world.run([tools.prompt("a", 70)])["a"].verdict
        assert verdict.status is (VERIFIED if group in SKIPPED.get(name, ()) else MISMATCH), row
        wrong = [judged.group_id for judged in verdict.groups if judged.differing]
        assert wrong == ([] if group in SKIPPED.get(name, ()) else [group])


@pytest.mark.req("EXT-5", "VER-5", "FPR-2")
def test_without_ext_5_states_are_left_out_and_the_rest_verifies(tools, new_world):
    base = new_world("enforce").p.config.checksum
    world = new_world(checksum=replace(base, checksum_states=False), model=PRESETS["tiny-hybrid"])
    verdict = world.run([tools.prompt("a", 40)])["a"].verdict
    assert (verdict.status, [group.group_id for group in verdict.groups]) == (VERIFIED, [1])


@pytest.mark.req("EXT-9", "FPR-2", "VER-3")
def test_without_ext_9_a_layer_with_two_caches_cannot_be_checked(tools, new_world):
    base = new_world("log").p.config.checksum
    world = new_world(checksum=replace(base, several_caches=False), model=PRESETS["tiny-indexed"])
    verdict = world.run([tools.prompt("a", 40)])["a"].verdict
    assert (verdict.status, verdict.reason) == (UNVERIFIED, "no_group")


@pytest.mark.req("EXT-9")
def test_latents_and_keys_of_an_indexer_that_change_places_are_found(tools, new_world):
    """Each cache of a layer has a factor of its own, so their sum does not stay what it was."""
    world = new_world("log", model=PRESETS["tiny-indexed"])

    def exchange(event):
        block = event.groups[0].block_ids[0]
        latent, key = event.memory.slots((block,))[:2]
        for slot in range(16):
            event.memory.write_slot(0, 0, block, slot, key[0, slot])
            event.memory.write_slot(1, 0, block, slot, latent[0, slot])

    world.seams.on("consumer.load_finished", exchange)
    assert world.run([tools.prompt("a", 40)])["a"].verdict.groups[0].differing == (0,)


@pytest.mark.req("BLK-2", "VER-5")
def test_a_group_with_an_inner_null_block_on_p_is_left_out_there(tools, new_world):
    """P then counts as skipping it, and D does not: unverified, while the other group verifies."""
    world = new_world("log", model=PRESETS["tiny-window"])
    prompt = tools.prompt("a", 70)
    blocks = world.p.scheduler.kv._groups[1].blocks
    world.p.scheduler.kv._groups[1].blocks = lambda table, *args: blocks([0, 0, table[2], 0, table[4]], *args)
    verdict = world.run([prompt])["a"].verdict
    assert (verdict.status, verdict.reason) == (UNVERIFIED, "one_side_only")
    assert [group.status for group in verdict.groups] == ["verified", "unverified"]


@pytest.mark.req("BLK-3", "CON-1")
def test_only_the_blocks_of_the_window_are_loaded(tools, new_world):
    world = new_world(model=PRESETS["tiny-window"])
    landed, seen = {0: set(), 1: set()}, {}
    world.seams.on("transfer.op_landed", lambda event: landed[event.op.group].add(event.op.position))
    world.seams.on("consumer.load_scheduled", lambda event: seen.update(event.groups))
    answer = world.run([tools.prompt("a", 150)])["a"]
    assert answer.verdict.status is VERIFIED
    assert (seen[0].start, len(seen[0].block_ids)) == (0, 10)
    assert (seen[1].start, len(seen[1].block_ids)) == (7, 3), "cdiv(24, 16) + 1"
    assert landed == {0: set(range(10)), 1: {7, 8, 9}}


def test_what_p_does_not_have_cannot_be_loaded(tools, new_world):
    """A window of smaller blocks ends further back: D's first block is not all there, and the load fails."""
    sides = {"producer": {"block_size": 8, "max_batched_tokens": 8}, "consumer": {"block_size": 32}}
    world = new_world(load_failure="recompute", model=PRESETS["tiny-window"], num_blocks=128, **sides)
    prompt = tools.prompt("a", 120)
    world.load(prompt)
    answer = world.finish()["a"]
    assert (answer.verdict.reason, answer.recomputed) == ("load_failed", True)
    assert answer.token_ids == alone(tools, prompt, "tiny-window")


@pytest.mark.parametrize("name", KINDS)
def test_a_failed_check_is_computed_again_on_d(tools, new_world, name):
    world = new_world("enforce", "recompute", model=PRESETS[name])

    def spoil(event):
        memory = event.memory.group(0)
        memory.fill(event.groups[0].block_ids, b"POISONED")

    world.seams.on("consumer.load_finished", spoil)
    prompt = tools.prompt("a", 60, max_tokens=6)
    answer = world.run([prompt])["a"]
    assert (answer.verdict.status, answer.recomputed) == (MISMATCH, True)
    assert answer.token_ids == alone(tools, prompt, name)


@pytest.mark.parametrize("name", ["tiny-window", "tiny-hybrid", "tiny-indexed"])
def test_preemption_leaves_right_tokens_and_nothing_behind(tools, name):
    seams, preempted = Seams(), []
    seams.on("request.preempted", preempted.append)
    sizes = {"num_blocks": groups_of(name) * 8 + 2, "max_model_len": 52, "block_size": 8}
    engine = EngineCore(EngineConfig("e", PRESETS[name], **sizes), seams)
    prompts = [tools.prompt(f"p{n}", 24 + n, max_tokens=24) for n in range(4)]
    for prompt in prompts:
        engine.add_request(Request(prompt.request_id, list(prompt.token_ids), prompt.max_tokens))
    outputs = {}
    for _ in range(3000):
        outputs |= {output.request_id: output for output in engine.step()}
    assert preempted
    for prompt in prompts:
        assert outputs[prompt.request_id].token_ids == alone(tools, prompt, name)
        assert outputs[prompt.request_id].finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
    assert tools.blocks_in_use(engine) == 0
