"""Kept sums: the same numbers, fewer reads, and never the sum of what a block held before (EXT-8)."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from engine.checksum.consumer import CHECKSUMS_PARAM
from engine.checksum.policy import TRIGGERS, ChecksumSettings, resolve
from engine.checksum.records import GroupBlocks
from engine.checksum.verdict import VerdictStatus
from engine.checksum.when import KeptSums, filled_blocks, only_filled, written_blocks
from engine.connectors.base import LoadSpec
from engine.errors import StartupError
from engine.proxy import Prompt
from engine.request import FinishReason, Request
from engine.step import ScheduledRequest, StepPlan

SIZE = 4
EAGER = ("cache", "on_write")


class Memory:
    """Blocks whose contents are numbers, summed so that position, tokens and contents all count."""

    def __init__(self, num_blocks=16):
        self.contents = list(range(100, 100 + num_blocks))
        self.reads = []

    def value(self, block_id, position, tokens, version=1):
        return version * (self.contents[block_id] * 1000 + position * 10 + tokens)

    def read(self, blocks):
        self.reads.append(blocks.block_ids)
        values = []
        for index, block_id in enumerate(blocks.block_ids):
            position = blocks.start + index
            tokens = max(0, min(SIZE, blocks.tokens_to_sum - position * SIZE))
            values.append(self.value(block_id, position, tokens, blocks.version))
        return torch.tensor(values, dtype=torch.int64)


@pytest.fixture
def memory():
    return Memory()


@pytest.fixture
def kept():
    return KeptSums(16, torch.device("cpu"))


def blocks(*ids, tokens=None, start=0, **options):
    return GroupBlocks(0, SIZE, start, ids, (start + len(ids)) * SIZE if tokens is None else tokens, **options)


@pytest.mark.req("EXT-8")
def test_a_full_block_is_read_once(memory, kept):
    first = kept.sums(blocks(3, 5, 7, tokens=10), memory.read)
    assert memory.reads == [(3, 5, 7)]
    assert kept.num_kept == 2
    again = kept.sums(blocks(3, 5, 7, tokens=10), memory.read)
    assert memory.reads[1:] == [(7,)]
    assert torch.equal(first, again)


@pytest.mark.parametrize("other", [blocks(5, 3), blocks(3, 5, start=1), blocks(3, 5, version=2)])
def test_only_at_the_same_position_and_of_the_same_version(memory, kept, other):
    kept.sums(blocks(3, 5), memory.read)
    assert torch.equal(kept.sums(other, memory.read), Memory().read(other))
    assert memory.reads == [(3, 5), other.block_ids]


def test_what_is_between_kept_blocks_is_read_in_runs(memory, kept):
    kept.sums(blocks(2, start=1), memory.read)
    kept.sums(blocks(5, start=4), memory.read)
    memory.reads.clear()
    wanted = blocks(1, 2, 3, 4, 5, 6, tokens=22)
    assert torch.equal(kept.sums(wanted, memory.read), Memory().read(wanted))
    assert memory.reads == [(1,), (3, 4), (6,)]


def test_a_block_that_is_written_is_read_again(memory, kept):
    kept.sums(blocks(3, 5, 7), memory.read)
    memory.contents[5] = 1
    kept.forget([5])
    memory.reads.clear()
    assert torch.equal(kept.sums(blocks(3, 5, 7), memory.read), memory.read(blocks(3, 5, 7)))
    assert memory.reads[0] == (5,)
    kept.forget([])
    assert kept.num_kept == 3


def test_tokens_that_are_not_summed_keep_nothing(memory, kept):
    """Version 2 sums the last block only as far as both sides go: that is no full block's sum."""
    kept.sums(blocks(3, 5, version=2, sum_tokens=6), memory.read)
    assert kept.num_kept == 1


def test_what_comes_back_is_a_copy(memory, kept):
    kept.sums(blocks(3), memory.read)
    kept.sums(blocks(3), memory.read).zero_()
    assert kept.sums(blocks(3), memory.read).item() == memory.value(3, 0, SIZE)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2**16)), max_size=30))
def test_whatever_is_written_in_between_the_sums_are_those_of_now(actions):
    memory, kept = Memory(), KeptSums(16, torch.device("cpu"))
    for kind, seed in actions:
        rng = random.Random(seed)
        if kind == 0:
            ids = rng.sample(range(16), rng.randint(1, 8))
            kept.forget(ids)
            for block_id in ids:
                memory.contents[block_id] = rng.randrange(10**6)
            continue
        ids = rng.sample(range(16), rng.randint(1, 8))
        start = rng.randint(0, 3)
        tokens = start * SIZE + rng.randint(1, len(ids) * SIZE)
        wanted = blocks(*ids, start=start, tokens=tokens, version=kind)
        assert torch.equal(kept.sums(wanted, memory.read), memory.read(wanted))


# ---- what a step fills and writes


def scheduled(first, count, *block_ids, **options):
    return ScheduledRequest("r", 1, (0,) * count, first, count, ((90, 91), block_ids), False, **options)


def test_the_blocks_that_a_step_writes():
    load = LoadSpec("l", {0: blocks(13), 1: blocks(11, 12, start=2)}, "P", "l", {0: (), 1: ()})
    plan = StepPlan(1, (scheduled(5, 8, 1, 2, 3, 4, 9), scheduled(4, 1, 6, 7)), (load,))
    assert written_blocks(plan, 1, SIZE) == {2, 3, 4, 7, 11, 12}
    assert written_blocks(StepPlan(2), 1, SIZE) == set()
    loads_no_window = LoadSpec("l", {0: blocks(13)}, "P", "l", {0: ()})
    assert written_blocks(StepPlan(3, (), (loads_no_window,)), 1, SIZE) == set()


def test_a_speculator_may_write_all_that_follows():
    plan = StepPlan(1, (scheduled(5, 2, 1, 2, 3, 4, history=(1, 2)),))
    assert written_blocks(plan, 1, SIZE) == {2, 3, 4}


@pytest.mark.parametrize(
    ("first", "stop", "filled"),
    [
        (0, 3, ()),
        (0, 4, (1,)),
        (3, 4, (1,)),
        (3, 9, (1, 2)),
        (4, 14, (2, 3)),
        (12, 14, ()),
        (14, 20, ()),
        (0, 20, (1, 2, 3)),
    ],
)
def test_the_blocks_that_a_step_fills(first, stop, filled):
    """Of a prompt of 14 tokens; later tokens are none of it, nor is its last block ever full."""
    prompt = blocks(1, 2, 3, 4, tokens=14)
    found = filled_blocks(prompt, first, stop)
    assert (() if found is None else found.block_ids) == filled
    assert only_filled({0: prompt}, first, stop) == ({} if found is None else {0: found})
    if found is not None:
        assert (found.start, found.num_tokens) == (filled[0] - 1, filled[-1] * SIZE)


def test_a_trigger_that_there_is_not():
    with pytest.raises(StartupError, match="'later': use prompt_end, cache, on_write"):
        resolve(ChecksumSettings(kv_checksum_trigger="later"))


# ---- a pair of engines


def settings(trigger, mode="enforce", version=1):
    return ChecksumSettings(kv_checksum_mode=mode, kv_checksum_trigger=trigger, kv_checksum_version=version)


def conversation(rng, name, turns):
    """Prompts that grow: each begins with the one before."""
    history, prompts = [], []
    for turn in range(turns):
        history += [rng.randrange(256) for _ in range(rng.randint(1, 40))]
        prompts.append(Prompt(f"{name}{turn}", tuple(history), rng.randint(1, 3)))
    return prompts


def tokens_read(engine):
    return sum(times.tokens_read for times in engine.checksum_times)


def sent(world, prompts, seed):
    """Serve the prompts, in an order and interleaving of this seed. Returns the text that P sent for each."""
    world.rng.seed(seed)
    answers = world.run(prompts)
    for prompt in prompts:
        assert answers[prompt.request_id].verdict.status is VerdictStatus.VERIFIED, prompt.request_id
    return {name: output.kv_transfer_params[CHECKSUMS_PARAM] for name, output in world.prefilled.items()}


@pytest.mark.req("EXT-8", "PRO-9")
@pytest.mark.parametrize("version", [1, 2])
@settings_of_hypothesis(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1))
def test_every_trigger_sends_the_same_text(new_world, version, seed):
    """Small pools and steps, so that blocks are taken away, shared and written again while the sums are kept."""
    rng = random.Random(seed)
    prompts = [p for name in "ab" for p in conversation(rng, name, rng.randint(1, 3))]
    rng.shuffle(prompts)
    sides = {
        "producer": {
            "num_blocks": rng.choice([17, 17, 20, 40]),
            "max_batched_tokens": rng.choice([5, 16, 33, 64]),
            "steps_in_flight": rng.randint(1, 3),
            "max_num_seqs": rng.choice([1, 2, 4]),
        },
        "consumer": {"num_blocks": 64},
        "block_size": rng.choice([8, 16]),
    }
    texts = {}
    for trigger in TRIGGERS:
        world = new_world(checksum=settings(trigger, version=version), seed=seed, **sides)
        texts[trigger] = sent(world, prompts, seed + TRIGGERS.index(trigger))
    assert texts["cache"] == texts["prompt_end"]
    assert texts["on_write"] == texts["prompt_end"]


@pytest.mark.req("EXT-8")
@pytest.mark.parametrize("trigger", TRIGGERS)
def test_a_shared_prefix_is_read_once_or_twice(new_world, tools, trigger):
    world = new_world(checksum=settings(trigger), consumer={"prefix_caching": False})
    first = tools.prompt("a", 48)
    second = tools.prompt("b", 70, prefix=first.token_ids)
    sent(world, [first], 0)
    before = tokens_read(world.p)
    assert before == 48
    sent(world, [second], 0)
    assert tokens_read(world.p) - before == (70 if trigger == "prompt_end" else 70 - 48)
    # What arrives is never known beforehand.
    assert tokens_read(world.d) == 48 + 70


def spoil(memory, block_id):
    token = memory.slots((block_id,))[0, 0, 0].copy()
    token[0] ^= 1
    memory.write_slot(0, 0, block_id, 0, token)


@pytest.mark.req("EXT-8", "GAP-1")
@pytest.mark.parametrize("trigger", TRIGGERS)
def test_a_block_that_changed_after_it_was_summed(new_world, tools, trigger):
    """P's prefix cache goes bad between two prompts. Summed again it looks right; its first sum gives it away."""
    world = new_world(mode="log", checksum=settings(trigger), consumer={"prefix_caching": False})
    first = tools.prompt("a", 48)
    second = tools.prompt("b", 70, prefix=first.token_ids)
    held = {}
    world.seams.on("producer.kv_final", lambda event: held.update({event.request_id: event.groups[0].block_ids}))
    assert world.run([first])["a"].verdict.status is VerdictStatus.VERIFIED
    spoil(world.p.memory, held["a"][1])
    answer = world.run([second])["b"]
    assert held["b"][:3] == held["a"][:3]
    if trigger == "prompt_end":
        assert answer.verdict.status is VerdictStatus.VERIFIED
    else:
        assert answer.verdict.status is VerdictStatus.MISMATCH
        assert answer.verdict.groups[0].differing == (1,)
        assert answer.finish_reason is FinishReason.ERROR


@pytest.mark.req("EXT-8", "GAP-1")
@pytest.mark.parametrize("trigger", TRIGGERS)
def test_a_block_that_changes_while_its_prompt_is_computed(new_world, tools, trigger):
    """Before the prompt's end only sums that were taken as KV was written know what it was."""
    world = new_world(checksum=settings(trigger), producer={"max_batched_tokens": 16, "steps_in_flight": 1})
    spoilt = []

    def after_the_first_step(event):
        if event.first_position == 32 and not spoilt:
            spoilt.append(event.block_ids[0])
            spoil(world.p.memory, event.block_ids[0])

    world.seams.on("worker.forward", lambda event: after_the_first_step(event) if event.engine == "P" else None)
    answer = world.run([tools.prompt("a", 60)])["a"]
    assert spoilt
    seen = trigger == "on_write"
    assert answer.verdict.status is (VerdictStatus.MISMATCH if seen else VerdictStatus.VERIFIED)


@pytest.mark.req("EXT-8")
@pytest.mark.parametrize("trigger", EAGER)
def test_a_block_that_is_given_to_another_prompt_is_summed_anew(new_world, tools, trigger):
    """A pool of one prompt: every prompt takes the blocks whose sums are kept of the one before."""
    world = new_world(checksum=settings(trigger), producer={"num_blocks": 5}, consumer={"num_blocks": 5})
    used = []
    world.seams.on("producer.kv_final", lambda event: used.append(set(event.groups[0].block_ids)))
    for number in range(6):
        sent(world, [tools.prompt(f"r{number}", 60, max_tokens=2)], number)
    assert used[0] == used[-1] == {1, 2, 3, 4}
    (times,) = world.p.checksum_times
    assert (times.tokens_read, times.tokens_kept) == ((360, 0) if trigger == "cache" else (360, 288))


@pytest.mark.req("EXT-8")
@pytest.mark.parametrize("trigger", EAGER)
def test_a_load_takes_the_sums_of_its_blocks_away(new_world, tools, trigger):
    """An engine that was a producer loads into the same blocks: then its own next prompt shares what was loaded."""
    world = new_world(checksum=settings(trigger), producer={"num_blocks": 8}, consumer={"num_blocks": 8})
    (worker,) = world.d._executor._ranks.workers
    kept = worker.checksums._kept[0]
    own = tools.prompt("own", 64)
    world.d.add_request(Request("own", list(own.token_ids), 1, {"do_remote_decode": True}))
    world.finish(world.d)
    world.d.connector.end_lease("own")
    assert kept.num_kept == 4
    other = tools.prompt("other", 96, max_tokens=2)
    assert sent(world, [other], 1)
    table = kept._tables[0, 1]
    assert kept.num_kept == 0, table.positions
