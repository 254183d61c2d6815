"""When P sums a prompt, and what it sends of it: once, by the step that finishes it, also when it starts again."""

import logging

import numpy as np
import pytest

from engine.checksum.payload import PayloadLimits, decode
from engine.checksum.producer import ProducerChecksums
from engine.checksum.records import GroupBlocks, GroupSums, WorkerRecord, WorldShape
from engine.request import Request
from kernels.definition import block_checksums

LIMITS = PayloadLimits.for_engine(1008, [16, 16])
BLOCKS = {0: GroupBlocks(0, 16, 0, (4, 2), 20)}


def record(rank=0, values=(1, 2), blocks=BLOCKS, fingerprint=9):
    sums = {g: GroupSums(b, fingerprint, np.array(values, dtype=np.uint64)) for g, b in blocks.items()}
    return WorkerRecord("r", rank, 0, sums)


# ---- one send by itself


@pytest.mark.req("PRO-5")
def test_the_sums_of_all_workers_are_sent():
    sends = ProducerChecksums(WorldShape(2, 1))
    sends.register("r", 3, BLOCKS)
    sends.add(3, "r", [record(0, (1, 2**64 - 1))])
    sends.add(3, "r", [record(1, (10, 3))])
    payload = decode(sends.take("r"), LIMITS)
    assert (payload.tp_size, payload.num_tokens) == (2, 20)
    (group,) = payload.groups
    assert (group.group_id, group.fingerprint, group.block_size, group.start) == (0, 9, 16, 0)
    assert group.values.tolist() == [11, 2]
    assert sends.num_pending == 0


@pytest.mark.req("PRO-7")
@pytest.mark.parametrize(
    ("records", "says"),
    [
        ([], "some worker did not report"),
        ([record(0)], "some worker did not report"),
        ([record(0), record(0)], "some worker did not report"),
        ([record(0), record(1, blocks={0: GroupBlocks(0, 16, 0, (4, 3), 20)})], "a worker checksummed other blocks"),
    ],
)
def test_an_incomplete_or_other_sum_is_not_sent(records, says, caplog):
    sends = ProducerChecksums(WorldShape(2, 1))
    sends.register("r", 3, BLOCKS)
    sends.add(3, "r", records)
    with caplog.at_level(logging.WARNING):
        assert sends.take("r") is None
    assert caplog.messages == [f"request r: no checksums are sent, {says}"]


@pytest.mark.req("PRO-7")
def test_a_prompt_that_was_never_summed_is_not_sent(caplog):
    with caplog.at_level(logging.WARNING):
        assert ProducerChecksums(WorldShape(1, 1)).take("r") is None
    assert caplog.messages == ["request r: no checksums are sent, its prefill was never summed"]


@pytest.mark.req("PRO-8")
@pytest.mark.parametrize("arrival", ["before the new prefill", "between", "after the new prefill"])
def test_a_new_prefill_replaces_the_pending_send(arrival):
    """Whenever the record of the first prefill arrives, only the second one's values are sent."""
    sends = ProducerChecksums(WorldShape(1, 1))
    old, new = BLOCKS, {0: GroupBlocks(0, 16, 0, (7, 8), 20)}
    sends.register("r", 3, old)
    if arrival == "before the new prefill":
        sends.add(3, "r", [record(values=(1, 2), blocks=old)])
    sends.register("r", 6, new)
    if arrival == "between":
        sends.add(3, "r", [record(values=(1, 2), blocks=old)])
    sends.add(6, "r", [record(values=(3, 4), blocks=new)])
    if arrival == "after the new prefill":
        sends.add(3, "r", [record(values=(1, 2), blocks=old)])
    assert decode(sends.take("r"), LIMITS).groups[0].values.tolist() == [3, 4]


@pytest.mark.req("PRO-8")
def test_only_the_record_of_the_first_prefill_is_no_record_of_the_second():
    sends = ProducerChecksums(WorldShape(1, 1))
    sends.register("r", 3, BLOCKS)
    sends.register("r", 6, BLOCKS)
    sends.add(3, "r", [record()])
    assert sends.take("r") is None


def test_what_is_dropped_or_unknown_leaves_nothing():
    sends = ProducerChecksums(WorldShape(1, 1))
    sends.add(1, "r", [record()])
    sends.register("r", 3, BLOCKS)
    sends.drop("r")
    sends.drop("r")
    assert sends.num_pending == 0


# ---- in an engine


@pytest.fixture
def watched(new_world):
    """A world, and what its seams told of P's prompts."""

    def make(**options):
        world = new_world(**options)
        events = []
        for seam in ("producer.blocks_to_checksum", "producer.kv_final", "producer.checksummed"):
            world.seams.on(seam, events.append)
        return world, events

    return make


def names(events):
    return [(type(event).__name__, event.request_id) for event in events]


@pytest.mark.req("PRO-1", "PRO-4", "BLK-1")
@pytest.mark.parametrize("chunk", [1, 7, 16, 40, 64])
def test_a_prompt_is_summed_once_in_the_step_that_finishes_it(tools, watched, chunk):
    world, events = watched(producer={"max_batched_tokens": chunk})
    prompt = tools.prompt("a", 40)
    world.p.add_request(Request("a", list(prompt.token_ids), 1, {"do_remote_decode": True}))
    for done in range(0, 40, chunk):
        assert not events, done
        plan = world.p.scheduler.schedule()
        last = done + chunk >= 40
        assert set(plan.checksum_sends) == ({"a"} if last else set())
        assert set(plan.kv_final) == set(plan.checksum_sends)
        world.p._planned.append(plan)
        world.p.execute()
        world.p.collect()
    blocks = plan.checksum_sends["a"][0]
    assert (blocks.start, len(blocks.block_ids), blocks.num_tokens) == (0, 3, 40)
    assert names(events) == [("BlocksToChecksum", "a"), ("KVFinal", "a"), ("Checksummed", "a")]


@pytest.mark.req("PRO-4")
def test_decoding_on_sums_nothing_again(tools, watched):
    world, events = watched()
    world.p.add_request(Request("a", list(tools.prompt("a", 40).token_ids), 5, {"do_remote_decode": True}))
    output = world.finish(world.p)["a"]
    assert len(output.token_ids) == 5
    assert names(events) == [("BlocksToChecksum", "a"), ("KVFinal", "a"), ("Checksummed", "a")]
    assert events[0].groups[0].num_tokens == 40


@pytest.mark.req("PRO-1")
@pytest.mark.parametrize("options", [{"mode": "off"}, {"mode": "enforce", "plain": True}], ids=["off", "no consumer"])
def test_nothing_is_summed_that_nobody_will_compare(tools, watched, options):
    plain = options.pop("plain", False)
    world, events = watched(**options)
    params = None if plain else {"do_remote_decode": True}
    world.p.add_request(Request("a", list(tools.prompt("a", 40).token_ids), 1, params))
    plan = world.p.scheduler.schedule()
    assert plan.checksum_sends == {}
    assert set(plan.kv_final) == (set() if plain else {"a"})
    assert events == []
    assert world.p.scheduler.sends.num_pending == 0


@pytest.mark.req("PRO-2", "DEF-8")
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16"])
def test_what_is_sent_is_the_definition_of_what_the_forward_wrote(tools, watched, layout, kv_dtype):
    world, _ = watched(producer={"layout": layout}, kv_dtype=kv_dtype)
    seen = {}

    def look(event):
        seen["kv"] = event.memory.slots(event.groups[0].block_ids)

    world.seams.on("producer.kv_final", look)
    payload = decode(world.run_producer(tools.prompt("a", 40))["kv_checksums"], LIMITS)
    wanted = block_checksums(seen["kv"], [0, 1], 0, 16, 0, 40)
    assert payload.groups[0].values.tolist() == wanted.tolist()


@pytest.mark.req("DEF-1")
def test_what_is_sent_depends_on_the_prompt_alone(tools, new_world):
    prompt = tools.prompt("a", 50)
    variants = [
        {},
        {"layout": "NHD"},
        {"max_batched_tokens": 9, "steps_in_flight": 1},
        {"num_blocks": 20, "prefix_caching": False},
    ]
    sent = {new_world(producer=options).run_producer(prompt)["kv_checksums"] for options in variants}
    assert len(sent) == 1


def values(params):
    return decode(params["kv_checksums"], LIMITS).groups[0].values.tolist()


@pytest.mark.req("PRO-8")
@pytest.mark.parametrize("executed", [True, False])
@pytest.mark.parametrize("arrived", [True, False])
def test_a_request_preempted_in_its_final_prefill_step_sends_its_second_prefill(tools, new_world, executed, arrived):
    """Both prefills write equal KV, so the first one's is spoiled: its values must not be sent."""
    prompt = tools.prompt("b", 40)
    plain = new_world().run_producer(prompt)
    world = new_world(producer={"steps_in_flight": 3})
    spoiled = []

    def spoil(event):
        if not spoiled:
            event.memory.fill(event.groups[0].block_ids, b"POISONED")
        spoiled.append(event.groups[0].block_ids)

    world.seams.on("producer.kv_final", spoil)
    request = Request("b", list(prompt.token_ids), 1, {"do_remote_decode": True})
    world.p.add_request(request)
    world.p.schedule()
    if executed or arrived:
        world.p.execute()
    if arrived:
        # Preempted between the arrival of the record and that of the token: the record must not outlive it.
        world.p.scheduler._preempt(request)
        world.p.collect()
    else:
        world.p.scheduler._preempt(request)
    assert world.p.schedule()
    output = world.finish(world.p)["b"]
    assert len(spoiled) == 2
    assert arrived or spoiled[0] != spoiled[1]
    assert values(output.kv_transfer_params) == values(plain)
    assert output.kv_transfer_params["remote_block_ids"] == [list(spoiled[1])]
    assert tools.blocks_in_use(world.p) == 3


@pytest.mark.req("PRO-8")
def test_under_pressure_every_load_is_verified(tools, new_world):
    """A pool in which prefills take each other's blocks away, some in their final step."""
    preempted = []
    final = []
    for seed in range(12):
        world = new_world(
            seed=seed, producer={"num_blocks": 6, "block_size": 8, "steps_in_flight": 3}, consumer={"block_size": 8}
        )
        world.seams.on("request.preempted", lambda event: preempted.append(event.request_id))
        world.seams.on("producer.kv_final", lambda event, final=final: final.append(event.request_id))
        prompts = [tools.prompt(f"{seed}-{i}", 8 + 5 * (i % 5)) for i in range(6)]
        world.submit = lambda prompt, world=world: submit_longer(world, prompt)
        answers = world.run(prompts)
        assert {answer.verdict.status for answer in answers.values()} == {"verified"}
        assert all(answers[p.request_id].token_ids == tools.tokens_alone(p.token_ids, 4) for p in prompts)
    assert preempted
    assert len(final) > len(set(final)), "some prompt was finished twice"


def submit_longer(world, prompt):
    """P decodes a few tokens too, so that its requests grow and take each other's blocks."""
    params = {"do_remote_decode": True}
    world.p.add_request(Request(prompt.request_id, list(prompt.token_ids), 9, params))
    world.proxy._prompts[prompt.request_id] = prompt


def test_take_gives_a_payload_once():
    sends = ProducerChecksums(WorldShape(1, 1))
    sends.register("r", 3, BLOCKS)
    sends.add(3, "r", [record()])
    assert sends.take("r") is not None
    assert sends.take("r") is None
