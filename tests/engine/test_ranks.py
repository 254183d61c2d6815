"""The order of things inside one step, of one rank and of several."""

import numpy as np
import pytest
import torch

from engine.checksum.records import GroupBlocks
from engine.checksum.worker import ChecksumWorker
from engine.config import EngineConfig
from engine.model import Model
from engine.paged import PagedKVCache
from engine.ranks import Ranks
from engine.request import Request
from engine.seams import Seams
from engine.step import ScheduledRequest, StepPlan


@pytest.fixture
def log(monkeypatch):
    """Every write of KV and every sum, in order."""
    entries = []
    write, checksum = PagedKVCache.write, ChecksumWorker.checksum

    def logged_write(self, layer, *args):
        entries.append(f"write {layer}")
        write(self, layer, *args)

    def logged_checksum(self, request_id, groups, **options):
        entries.append(f"sum {request_id}")
        return checksum(self, request_id, groups, **options)

    monkeypatch.setattr(PagedKVCache, "write", logged_write)
    monkeypatch.setattr(ChecksumWorker, "checksum", logged_checksum)
    return entries


def note(world, log, *seams):
    for seam in seams:
        world.seams.on(seam, lambda event, seam=seam: log.append(f"{seam.split('.')[1]} {event.request_id}"))


@pytest.mark.req("PRO-2")
def test_a_prompt_is_summed_after_the_forward_has_written_it(tools, new_world, log):
    world = new_world()
    note(world, log, "producer.kv_final", "producer.checksummed")
    world.p.add_request(Request("a", list(tools.prompt("a", 40).token_ids), 1, {"do_remote_decode": True}))
    tools.one_step(world.p)
    assert log == ["write 0", "write 1", "kv_final a", "sum a", "checksummed a"]


@pytest.mark.req("CON-2")
def test_a_load_is_summed_in_the_step_that_reports_it_and_before_its_first_use(tools, new_world, log):
    world = new_world()
    seams = ("consumer.load_scheduled", "consumer.load_finished", "consumer.first_use", "consumer.verified")
    note(world, log, *seams)
    prompt = tools.prompt("a", 40)
    params = world.run_producer(prompt)
    log.clear()
    world.load(prompt, params)
    assert log == ["load_scheduled a"]
    world.d.add_request(Request("other", [1, 2, 3], 2))
    world.deliver()
    log.clear()
    world.d.schedule()
    world.d.execute()
    assert log == ["write 0", "write 1", "load_finished a", "sum a"], "the forward of the step comes first"
    world.d.collect()
    world.d.schedule()
    world.d.execute()
    assert log[4:] == ["verified a", "first_use a", "write 0", "write 1"]


@pytest.mark.req("CON-1")
def test_a_load_is_announced_before_its_first_byte_moves(tools, new_world, log):
    world = new_world()
    note(world, log, "consumer.load_scheduled", "transfer.op_posted", "transfer.op_landed")
    world.load(tools.prompt("a", 10))
    world.deliver()
    moved = [entry.split()[0] for entry in log if "sum" not in entry and "write" not in entry]
    assert moved == ["load_scheduled", *["op_posted", "op_landed"] * 8]


@pytest.mark.req("CON-2")
def test_a_failed_load_is_not_summed(tools, new_world, log):
    world = new_world(load_failure="recompute")
    note(world, log, "consumer.load_finished")
    world.load(tools.prompt("a", 40), remote_engine_id="nobody")
    log.clear()
    world.finish()
    assert not [entry for entry in log if "load_finished" in entry or "sum" in entry]


def plan(step_id, *requests, ended=()):
    return StepPlan(step_id, requests=requests, ended=ended)


def share(tokens, first=0, count=None, sample=True, name="a", block_ids=(1, 2)):
    return ScheduledRequest(name, 1, tuple(tokens), first, count or len(tokens), (tuple(block_ids),), sample)


@pytest.fixture
def ranks():
    return OneRank(EngineConfig("e"), Seams())


class OneRank(Ranks):
    """Gives the output of its only rank."""

    def execute(self, plan):
        (output,) = super().execute(plan)
        return output


def test_a_token_that_is_not_known_yet_is_the_one_sampled_last(ranks, tools):
    """The scheduler plans both decodes before it has heard of any token."""
    prompt = tools.prompt("a", 20)
    wanted = tools.tokens_alone(prompt.token_ids, 3)
    steps = [share(prompt.token_ids), share((), 20, 1), share((), 21, 1)]
    sampled = [ranks.execute(plan(i, step)).sampled["a"] for i, step in enumerate(steps)]
    assert tuple(sampled) == wanted


def test_only_who_samples_gets_a_token(ranks, tools):
    tokens = tools.prompt("a", 20).token_ids
    half = ranks.execute(plan(1, share(tokens[:10], sample=False), share(tokens, name="b", block_ids=(3, 4))))
    assert set(half.sampled) == {"b"}
    whole = ranks.execute(plan(2, share(tokens[10:], first=10)))
    assert whole.sampled["a"] == half.sampled["b"]


def test_a_step_without_requests_samples_nothing(ranks):
    output = ranks.execute(plan(1))
    assert (output.sampled, output.records) == ({}, ())


def test_the_first_of_equal_maxima_is_taken(ranks, monkeypatch):
    logits = Model.logits
    best = torch.tensor([200, 17, 99])
    monkeypatch.setattr(Model, "logits", lambda self, x: (logits(self, x) * 0).index_fill_(1, best, 1.0))
    assert ranks.execute(plan(1, share([1, 2]))).sampled == {"a": 17}


def test_what_ended_is_forgotten_before_a_new_request_with_its_id_runs(ranks, tools):
    """One plan names the id twice: as ended, and as a new request."""
    ranks.execute(plan(1, share([5, 6, 7])))
    prompt = tools.prompt("a", 20)
    first = ranks.execute(plan(2, share(prompt.token_ids), ended=("a",)))
    second = ranks.execute(plan(3, share((), 20, 1)))
    assert (first.sampled["a"], second.sampled["a"]) == tools.tokens_alone(prompt.token_ids, 2)


def test_the_worker_keeps_nothing_of_what_ended(ranks, tools):
    ranks.execute(plan(1, share([5, 6, 7], name="gone")))
    assert tools.mentions(ranks, {"gone"})
    ranks.execute(plan(2, ended=("gone",)))
    assert tools.mentions(ranks, {"gone"}) == []


def test_a_forward_writes_the_slots_of_its_tokens_and_no_others(ranks, tools):
    ranks.memory.fill(tuple(range(64)), b"POISONED")
    before = ranks.memory.slots(tuple(range(64)))
    tokens = tools.prompt("a", 20).token_ids
    ranks.execute(plan(1, share(tokens, block_ids=(9, 3)), share(tokens[:5], name="b", block_ids=(7,))))
    changed = np.argwhere((ranks.memory.slots(tuple(range(64))) != before).any((0, 1, 3)))[:, 0]
    wanted = [*range(3 * 16, 3 * 16 + 4), *range(7 * 16, 7 * 16 + 5), *range(9 * 16, 10 * 16)]
    assert changed.tolist() == wanted


def test_blocks_named_to_be_summed_may_be_others_than_those_written(ranks):
    """The worker does as it is told: that they are other blocks is for the scheduler to notice."""
    blocks = {0: GroupBlocks(0, 16, 0, (5,), 10)}
    output = ranks.execute(StepPlan(1, kv_final={"a": {}}, checksum_sends={"a": blocks}))
    assert output.records[0].finalise().groups[0].blocks == blocks[0]
