"""P's side of a handover: what the consumer is told, and how long P holds the blocks (PRO-6, PRO-7)."""

import logging

import pytest

from engine.checksum.payload import PayloadLimits, decode
from engine.errors import RequestError
from engine.request import FinishReason, Request
from engine.seams import Change, Drop, ParamsLeave, RecordLeaves

LIMITS = PayloadLimits.for_engine(1008, [16])


@pytest.mark.req("PRO-6", "WIR-1")
@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 53])
def test_the_answer_names_the_blocks_and_carries_their_checksums(tools, new_world, length):
    world = new_world()
    seen = {}
    world.seams.on("producer.kv_final", lambda event: seen.update(event.groups))
    params = world.run_producer(tools.prompt("a", length))
    payload = decode(params["kv_checksums"], LIMITS)
    blocks = -(-length // 16)
    assert (payload.tp_size, payload.num_tokens) == (1, length)
    (group,) = payload.groups
    assert (group.group_id, group.block_size, group.start, len(group.values)) == (0, 16, 0, blocks)
    assert params["remote_block_ids"] == [list(seen[0].block_ids)]
    assert len(seen[0].block_ids) == blocks


@pytest.mark.req("PRO-6")
def test_without_checksums_the_answer_is_the_connector_s_alone(tools, new_world):
    params = new_world("off").run_producer(tools.prompt("a", 40))
    assert "kv_checksums" not in params
    assert params["do_remote_prefill"]


@pytest.mark.req("PRO-6")
def test_an_aborted_request_sends_nothing(tools, new_world):
    """Its prompt is summed already, and its output is in flight."""
    world = new_world()
    world.p.add_request(Request("a", list(tools.prompt("a", 20).token_ids), 4, {"do_remote_decode": True}))
    world.p.schedule()
    world.p.execute()
    world.p.abort("a")
    world.p.collect()
    (output,) = world.p.take_finished()
    assert (output.finish_reason, output.kv_transfer_params) == (FinishReason.ABORT, None)
    assert (world.p.connector.num_leases, tools.blocks_in_use(world.p), world.p.scheduler.sends.num_pending) == (
        0,
        0,
        0,
    )


@pytest.mark.req("PRO-7")
@pytest.mark.parametrize("lost", ["the record", "a group's blocks"])
def test_without_every_record_no_checksums_are_sent_and_a_warning_is_logged(tools, new_world, caplog, lost):
    world = new_world()

    def tamper(event):
        if lost == "the record":
            return Drop()
        sums = event.record.groups[0]
        blocks = type(sums.blocks)(0, 16, 0, sums.blocks.block_ids[::-1], sums.blocks.num_tokens)
        record = type(event.record)("a", 0, 0, {0: type(sums)(blocks, sums.fingerprint, sums.values)})
        return Change(RecordLeaves(event.engine, record))

    world.seams.on("worker.record_leaves", tamper)
    with caplog.at_level(logging.WARNING):
        params = world.run_producer(tools.prompt("a", 40))
    assert "kv_checksums" not in params
    assert params["do_remote_prefill"], "the KV can be read all the same"
    assert "request a: no checksums are sent" in caplog.text


def test_the_blocks_are_held_until_the_consumer_has_read_them(tools, new_world):
    world = new_world()
    world.load(tools.prompt("a", 40))
    assert tools.blocks_in_use(world.p) == 3
    with pytest.raises(RequestError, match="the id is in use"):
        world.p.add_request(Request("a", [1], 1))
    world.deliver()
    assert tools.blocks_in_use(world.p) == 3, "P has not been told yet"
    tools.one_step(world.p)
    assert (tools.blocks_in_use(world.p), world.p.connector.num_leases) == (0, 0)
    assert not world.p.scheduler.has_work
    world.p.add_request(Request("a", [1], 1))


def test_a_lease_ends_with_time_and_a_notice_after_that_is_ignored(tools, new_world):
    world = new_world("log", producer={"lease_ticks": 5})
    world.load(tools.prompt("a", 40))
    world.clock.advance(4)
    tools.one_step(world.p)
    assert tools.blocks_in_use(world.p) == 3
    world.clock.advance(1)
    assert not world.p.schedule(), "freeing needs no step"
    assert tools.blocks_in_use(world.p) == 0
    world.deliver()
    world.p.add_request(Request("b", list(range(60)), 4))
    tools.one_step(world.p)
    assert tools.blocks_in_use(world.p) == 4, "the late notice freed nothing"
    assert world.finish(world.p)["b"].finish_reason is FinishReason.LENGTH
    assert tools.blocks_in_use(world.p) == 0


def test_leased_blocks_wait_behind_the_fence_too(tools, new_world):
    """P has stopped at EOS with a step in flight, which still writes its last block when the lease ends."""
    world = new_world()
    world.p.add_request(Request("a", list(tools.eos_after_8), 20, {"do_remote_decode": True}))
    world.p.schedule()
    while world.p.connector.num_leases == 0:
        world.p.schedule()
        world.p.execute()
        world.p.collect()
    assert world.p.steps_in_flight == 1
    world.p.connector.end_lease("a")
    world.p.schedule()
    assert tools.blocks_in_use(world.p) == 2
    world.p.execute()
    assert tools.blocks_in_use(world.p) == 2
    world.p.collect()
    while world.p.steps_in_flight:
        world.p.execute()
        world.p.collect()
    assert tools.blocks_in_use(world.p) == 0


def test_what_leaves_can_be_changed(tools, new_world):
    world = new_world()
    world.seams.on("producer.params_leave", lambda e: Change(ParamsLeave(e.engine, e.request_id, {"else": 1})))
    assert world.run_producer(tools.prompt("a", 40)) == {"else": 1}
    assert world.p.connector.num_leases == 1
