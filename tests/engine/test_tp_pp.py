"""TP x PP: tokens, stored KV and payloads do not depend on it, and every pair of sizes transfers and verifies.

Every pair of (TP, PP) runs through the engine at one layout. Layouts, block sizes, kernel blocks and prefix hits are
varied pairwise on top, and the full product is on worker records alone (tests/engine/checksum/test_ranks.py).
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from engine.cache import KVMemory
from engine.checksum.payload import PayloadLimits, decode
from engine.checksum.verdict import VerdictStatus
from engine.config import PRESETS, EngineConfig, ModelConfig
from engine.connectors.base import TransferResults
from engine.errors import StartupError
from engine.request import Request
from engine.seams import Seams

WORLDS = [(tp, pp) for tp in (1, 2, 4) for pp in (1, 2)]
LIMITS = PayloadLimits(4096, 1, 1000)


def ranks(tp_size, pp_size):
    return {"tp_size": tp_size, "pp_size": pp_size}


# ---- one engine


@pytest.mark.parametrize("model", ["tiny", "small"])
def test_tokens_and_stored_kv_are_the_same_for_every_world(tools, model):
    prompts = [tools.prompt(f"p{n}", n, max_tokens=6) for n in (1, 16, 47, 90)]
    tokens, kv = tools.serve(prompts, model=PRESETS[model])
    assert tokens["p47"] == tools.tokens_alone(prompts[2].token_ids, 6, model=PRESETS[model])
    for world in WORLDS[1:]:
        got_tokens, got_kv = tools.serve(prompts, model=PRESETS[model], **ranks(*world))
        assert got_tokens == tokens, world
        assert all(np.array_equal(got_kv[name], stored) for name, stored in kv.items()), world


def test_four_stages(tools):
    prompts = [tools.prompt("p", 50)]
    small = {"model": PRESETS["small"]}
    one, four = tools.serve(prompts, **small), tools.serve(prompts, pp_size=4, **small)
    assert one[0] == four[0]
    assert np.array_equal(one[1]["p"], four[1]["p"])


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_kernel_blocks_change_nothing(tools, layout):
    prompts = [tools.prompt(f"p{n}", n, max_tokens=4) for n in (5, 16, 70)]
    wanted = tools.serve(prompts)
    got = tools.serve(prompts, layout=layout, kernel_block_splits=2, max_batched_tokens=13)
    assert got[0] == wanted[0]
    assert all(np.array_equal(got[1][name], stored) for name, stored in wanted[1].items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp_size": 3}, "tp is 3: use 1, 2 or 4"),
        ({"pp_size": 8}, "pp is 8: use 1, 2 or 4"),
        ({"pp_size": 4}, "pp is 4: the 2 layers of tiny cannot be split evenly over it"),
        ({"tp_size": 0}, "tp is 0"),
        ({"kernel_block_splits": 3}, "kernel_block_splits is 3"),
        ({"kernel_block_splits": 2, "block_size": 5}, "a block_size .now 5. that it divides"),
    ],
)
def test_what_does_not_divide_is_refused(options, message):
    with pytest.raises(StartupError, match=message):
        EngineConfig("e", **options)


def test_heads_that_do_not_divide_are_refused():
    odd = ModelConfig("odd", 2, 64, 6, 3, 16, 128)
    with pytest.raises(StartupError, match="the 6 heads and 3 KV heads of odd cannot be split evenly"):
        EngineConfig("e", model=odd, tp_size=2)


def test_each_rank_holds_its_layers_and_heads(new_world):
    world = new_world(producer=ranks(4, 2))
    caches = world.p.memory._caches
    held = [(c.shard.layers.start, tuple(c.heads), c.replica) for c in caches]
    assert held == [(layer, (head,), replica) for layer in (0, 1) for head in (0, 1) for replica in (0, 1)]
    assert all(len(cache.layers) == 1 and cache.num_kv_heads == 1 for cache in caches)


# ---- transfers


def transfer(tools, new_world, producer, consumer, prompts=None, **both):
    """Serve prompts through a pair under fail-closed. Returns the world, and P's payload of each."""
    texts = {}
    seams = Seams()
    seams.on("producer.params_leave", lambda e: texts.__setitem__(e.request_id, e.params["kv_checksums"]))
    world = new_world("enforce", seams=seams, producer=producer, consumer=consumer, **both)
    prompts = prompts or [tools.prompt("a", 40)]
    for prompt in prompts:
        world.run([prompt])
        answer = world.answers[prompt.request_id]
        assert answer.verdict.status is VerdictStatus.VERIFIED, (producer, consumer, answer.verdict)
        assert answer.token_ids == tools.tokens_alone(prompt.token_ids, prompt.max_tokens)
    return world, texts


@pytest.mark.req("DEF-1", "DEF-7", "PRO-5", "CON-3", "CON-5", "EXT-1")
@pytest.mark.parametrize(("p", "d"), list(itertools.product(WORLDS, WORLDS)), ids=str)
def test_every_pair_of_worlds_verifies(tools, new_world, p, d):
    transfer(tools, new_world, ranks(*p), ranks(*d), prompts=[tools.prompt("a", 37)])


def pairwise_cases():
    """Worlds, layouts, block sizes and kernel blocks of both sides: each two values of two axes meet."""
    axes = {
        "p": WORLDS, "d": WORLDS, "p_layout": ["HND", "NHD"], "d_layout": ["HND", "NHD"], "p_size": [8, 16, 32],
        "d_size": [8, 16, 32], "p_splits": [1, 2], "d_splits": [1, 2], "prefix": [0, 32],
    }  # fmt: skip
    names = list(axes)
    wanted = {
        ((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in range(len(axes[a])) for y in
        range(len(axes[b]))
    }  # fmt: skip
    rng = np.random.default_rng(0)
    cases = []
    while wanted:
        tries = [tuple(int(rng.integers(len(axes[name]))) for name in names) for _ in range(50)]

        def pairs(case):
            return set(itertools.combinations(zip(names, case, strict=True), 2))

        best = max(tries, key=lambda case: len(pairs(case) & wanted))
        wanted -= pairs(best)
        if pairs(best):
            cases.append({name: axes[name][index] for name, index in zip(names, best, strict=True)})
    return cases


CASES = pairwise_cases()


@pytest.mark.req("DEF-7", "DEF-6", "EXT-2", "CON-1")
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())).replace(" ", ""))
def test_layouts_block_sizes_and_kernel_blocks_verify_pairwise(tools, new_world, case):
    prefix = tools.prompt("shared", 64).token_ids[: case["prefix"]]
    prompts = [tools.prompt(f"r{n}", n, prefix=prefix) for n in ((45, 57) if case["prefix"] else (45,))]
    sides = [
        {"layout": case[f"{s}_layout"], "block_size": case[f"{s}_size"], "kernel_block_splits": case[f"{s}_splits"]}
        | ranks(*case[s])
        for s in "pd"
    ]
    world, _ = transfer(tools, new_world, *sides, prompts=prompts)
    assert len(world.answers) == len(prompts)


def test_the_pairwise_cases_are_few_and_the_prefix_is_hit(tools, new_world):
    loads = len(WORLDS) ** 2 + sum(2 if case["prefix"] else 1 for case in CASES)
    assert loads <= 120
    starts = []
    seams = Seams()
    seams.on("consumer.load_scheduled", lambda event: starts.append(event.groups[0].start))
    world = new_world(seams=seams, consumer=ranks(2, 2))
    shared = tools.prompt("shared", 32).token_ids
    world.run([tools.prompt("r1", 45, prefix=shared)])
    world.run([tools.prompt("r2", 57, prefix=shared)])
    assert starts == [0, 2]


@pytest.mark.req("PRO-9", "FPR-1")
def test_the_payload_is_the_same_for_every_world_but_for_tp_size(tools, new_world):
    payloads = {}
    for world in WORLDS:
        _, texts = transfer(tools, new_world, ranks(*world), ranks(1, 1))
        payloads[world] = decode(texts["a"], LIMITS)
    assert {world: payload.tp_size for world, payload in payloads.items()} == {world: world[0] for world in WORLDS}
    rest = {(payload.num_tokens, payload.groups) for payload in payloads.values()}
    assert len(rest) == 1


@pytest.mark.req("CON-2", "CON-3")
def test_ranks_hear_of_a_load_one_after_the_other_and_it_is_judged_when_all_have(tools, new_world):
    world = new_world(consumer=ranks(2, 1))
    seen = []
    world.seams.on("consumer.load_finished", lambda event: seen.append("finished"))
    world.seams.on("worker.record_leaves", lambda event: seen.append((event.engine, event.record.tp_rank)))
    world.seams.on("consumer.verified", lambda event: seen.append("verified"))
    world.load(tools.prompt("a", 40))
    seen.clear()
    while len(world.fabric.ready()) == 1:
        world.fabric.ready()[0]()
    notices = world.fabric.ready()
    assert len(notices) == 3, "one to each rank of D, one to P"
    notices[1]()
    tools.one_step(world.d)
    assert seen == ["finished", ("D", 1)], "that rank sums at once"
    world.deliver()
    tools.one_step(world.d)
    assert seen == ["finished", ("D", 1), ("D", 0), "verified"]


def test_a_producer_frees_when_all_of_its_ranks_have_heard(tools, new_world):
    world = new_world(producer=ranks(1, 2))
    world.load(tools.prompt("a", 20))
    while len(world.fabric.ready()) == 1:
        world.fabric.ready()[0]()
    to_d, *to_p = world.fabric.ready()
    assert len(to_p) == 2
    to_p[0]()
    tools.one_step(world.p)
    assert world.p.connector.num_leases == 1
    to_p[1]()
    tools.one_step(world.p)
    assert world.p.connector.num_leases == 0
    to_d()


def test_a_connector_that_knows_no_ranks_tells_all_at_once(tools, new_world, monkeypatch):
    class Old(type(new_world().d._executor._ranks.connector)):
        def poll(self):
            return super().poll()

    results = Old("D", KVMemory(*new_world(consumer=ranks(2, 1)).d.memory._caches), new_world().fabric).poll_ranks(2)
    assert results == (TransferResults(), TransferResults())


# ---- replicas


def flip(memory, blocks, head=0):
    token = memory.slots(blocks.block_ids[:1])[0, head, 3].copy()
    token[5] ^= 1
    memory.write_slot(0, head, blocks.block_ids[0], 3, token)


@pytest.mark.req("EXT-1", "VER-1")
@pytest.mark.parametrize("replica", [0, 1])
def test_every_replica_on_d_is_checked(tools, new_world, replica):
    world = new_world("log", consumer=ranks(4, 1))
    world.seams.on("consumer.load_finished", lambda event: flip(event.memory.replica(replica), event.groups[0], head=1))
    verdict = world.run([tools.prompt("a", 40)])["a"].verdict
    assert (verdict.status, verdict.groups[0].differing) == (VerdictStatus.MISMATCH, (0,))


@pytest.mark.req("EXT-1", "VER-4")
def test_without_ext_1_replicas_make_a_load_unverified_and_a_mismatch_still_wins(tools, new_world):
    base = new_world("log").p.config.checksum
    checksum = replace(base, check_replicas=False)
    world = new_world(consumer=ranks(4, 1), checksum=checksum)
    verdict = world.run([tools.prompt("a", 40)])["a"].verdict
    assert (verdict.status, verdict.reason) == (VerdictStatus.UNVERIFIED, "replica_unchecked")
    world = new_world(consumer=ranks(4, 1), checksum=checksum)
    world.seams.on("consumer.load_finished", lambda event: flip(event.memory.replica(0), event.groups[0]))
    assert world.run([tools.prompt("a", 40)])["a"].verdict.status is VerdictStatus.MISMATCH
    world = new_world(consumer=ranks(2, 1), producer=ranks(4, 1), checksum=checksum)
    assert world.run([tools.prompt("a", 40)])["a"].verdict.status is VerdictStatus.VERIFIED


@pytest.mark.req("EXT-1")
def test_p_sums_replica_0_alone(tools, new_world):
    """Replica 1 is wrong on P: what D reads from it differs, what it reads from replica 0 does not."""
    for consumer, status in ((ranks(1, 1), VerdictStatus.VERIFIED), (ranks(4, 1), VerdictStatus.MISMATCH)):
        world = new_world("log", producer=ranks(4, 1), consumer=consumer)
        world.seams.on("producer.kv_final", lambda event: flip(event.memory.replica(1), event.groups[0]))
        assert world.run([tools.prompt("a", 40)])["a"].verdict.status is status


def test_a_write_goes_to_every_replica_unless_one_is_asked_for(new_world):
    memory = new_world(consumer=ranks(4, 2)).d.memory
    data = np.arange(memory.bytes_per_token, dtype=np.uint8)
    memory.write_slot(1, 1, 3, 2, data)
    assert [replica.slots((3,))[1, 1, 2].tolist() for replica in memory.replicas] == [data.tolist()] * 2
    memory.replica(1).write_slot(1, 1, 3, 2, data[::-1])
    assert memory.slots((3,))[1, 1, 2].tolist() == data.tolist()
    assert memory.replica(1).slots((3,))[1, 1, 2].tolist() == data[::-1].tolist()
    with pytest.raises(ValueError, match="replica 2: each head has 2"):
        memory.replica(2)
    with pytest.raises(ValueError, match="no rank holds layer 2"):
        memory.write_slot(2, 0, 1, 0, data)


# ---- block sizes


@pytest.mark.req("EXT-2", "DEF-6", "VER-2")
@pytest.mark.parametrize(("p", "d"), [(8, 32), (32, 8), (16, 32), (32, 16)])
def test_other_block_sizes_are_compared_and_a_flip_is_found(tools, new_world, p, d):
    world = new_world("log", producer={"block_size": p}, consumer={"block_size": d})
    world.seams.on("consumer.load_finished", lambda event: flip(event.memory, event.groups[0]))
    group = world.run([tools.prompt("a", 45)])["a"].verdict.groups[0]
    assert (group.status, group.not_compared) == (VerdictStatus.MISMATCH, ())
    assert group.differing == tuple(range(max(1, p // d)))


@pytest.mark.req("EXT-2", "VER-2")
def test_without_ext_2_they_are_not(tools, new_world):
    checksum = replace(new_world("log").p.config.checksum, compare_block_sizes=False)
    world = new_world(producer={"block_size": 8}, checksum=checksum)
    verdict = world.run([tools.prompt("a", 45)])["a"].verdict
    assert (verdict.status, verdict.reason) == (VerdictStatus.UNVERIFIED, "other_block_size")


def test_a_request_of_one_rank_and_one_of_many_name_the_same_blocks(new_world):
    request = Request("r", [1] * 20, 1)
    plans = [new_world(producer=ranks(*world)).p.scheduler.kv for world in ((1, 1), (4, 2))]
    for kv in plans:
        kv.admit(request, kv.no_prefix, 20)
    assert plans[0].blocks(request, 0, 20) == plans[1].blocks(request, 0, 20)
