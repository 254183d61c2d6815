"""The pull connector over a NIXL that is played: every way that a read, a peer or a notice can go wrong."""

import dataclasses

import pytest

from engine.config import preset
from engine.connectors.nixl import NixlPatience
from engine.request import FinishReason
from engine.seams import Change, Drop, Hold

PATIENCE = NixlPatience()


@pytest.mark.parametrize(("p_layout", "d_layout"), [("HND", "HND"), ("HND", "NHD"), ("NHD", "HND"), ("NHD", "NHD")])
@pytest.mark.parametrize(("p_block", "d_block"), [(16, 16), (8, 16), (16, 8), (12, 16)])
def test_a_load_brings_the_right_kv(nixl_pair, p_layout, d_layout, p_block, d_block):
    pair = nixl_pair(
        mode="log",
        producer={"layout": p_layout, "block_size": p_block},
        consumer={"layout": d_layout, "block_size": d_block},
    )
    wanted = {}
    pair.seams.on("producer.kv_final", lambda e: wanted.update(p=e.memory.tokens(e.groups[0])))
    pair.seams.on("consumer.load_finished", lambda e: wanted.update(d=e.memory.tokens(e.groups[0])))
    request, tokens = pair.prefilled()
    output = pair.serve(request)["r"]
    assert output.token_ids == tokens
    assert (wanted["p"] == wanted["d"]).all()
    if p_block == d_block:
        assert output.verdict.status == "verified"
    assert pair.free


RANKS = [
    ({"tp_size": 2}, {}),
    ({}, {"tp_size": 2, "pp_size": 2}),
    ({"tp_size": 4, "pp_size": 2}, {}),
    ({"pp_size": 2}, {"tp_size": 4, "layout": "NHD"}),
    ({"kernel_block_splits": 2}, {}),
    ({"layout": "NHD"}, {"kernel_block_splits": 2, "tp_size": 2}),
    ({"kernel_block_splits": 2, "block_size": 32}, {"tp_size": 2, "block_size": 16}),
]


@pytest.mark.parametrize(("producer", "consumer"), RANKS)
def test_engines_of_several_ranks(nixl_pair, producer, consumer):
    pair = nixl_pair(producer=producer, consumer=consumer)
    request, tokens = pair.prefilled()
    output = pair.serve(request)["r"]
    assert (output.token_ids, output.verdict.status) == (tokens, "verified")
    assert len(pair.net.handles) == 2
    assert pair.free


@pytest.mark.parametrize("consumer", [{}, {"tp_size": 2, "pp_size": 2, "layout": "NHD"}])
@pytest.mark.parametrize("model", ["tiny-window", "tiny-mla", "tiny-indexed", "tiny-hybrid", "tiny-shared"])
def test_every_group_is_read(nixl_pair, model, consumer):
    pair = nixl_pair(model=preset(model), consumer=consumer, num_blocks=128)
    wanted = {}

    def keep(event):
        name = event.engine
        wanted[name] = [event.memory.tokens(blocks) for _, blocks in sorted(event.groups.items())]

    pair.seams.on("producer.kv_final", keep)
    pair.seams.on("consumer.load_finished", keep)
    request, tokens = pair.prefilled(length=60)
    output = pair.serve(request)["r"]
    assert (output.token_ids, output.verdict.status) == (tokens, "verified")
    for sent, received in zip(wanted["P"], wanted["D"], strict=True):
        assert received.size
        assert (sent == received).all()
    assert pair.free


def test_caches_are_registered_once_for_all_that_is_read_of_them(nixl_pair):
    pair = nixl_pair(model=preset("tiny-hybrid"), producer={"tp_size": 2}, num_blocks=128)
    before = list(pair.p_agent.api.regions)
    assert len(before) == 2 * 4
    pair.serve(*(pair.prefilled(name)[0] for name in "ab"))
    assert pair.p_agent.api.regions == before


def test_a_layer_is_one_handle(nixl_pair):
    pair = nixl_pair()
    pair.serve(pair.prefilled()[0])
    assert len(pair.net.handles) == 2
    assert all(handle.released for handle in pair.net.handles)


def test_a_peer_is_asked_once(nixl_pair):
    pair = nixl_pair()
    pair.serve(*(pair.prefilled(name)[0] for name in "abc"))
    pair.serve(pair.prefilled("d")[0])
    assert pair.asked == ["P"]


def test_the_producer_is_told(nixl_pair):
    pair = nixl_pair()
    request, _ = pair.prefilled()
    assert pair.p.connector.num_leases == 1
    pair.serve(request)
    assert pair.net.notes == [(pair.p_agent.name, b"r")]
    pair.step_until(lambda: pair.p.connector.num_leases == 0, pair.p)


# ---- reads that fail


def test_a_failed_read_is_reported_when_no_handle_moves(nixl_pair):
    """The blocks of the others are still being written until then."""
    pair = nixl_pair()
    request, _ = pair.prefilled()
    pair.post_reads(request)
    first, second = pair.net.handles
    first.fail()
    for _ in range(20):
        assert pair.d.step() == []
    assert pair.d_worker.num_moving == 1
    assert pair.d_agent.api.removed == []
    second.land()
    assert pair.finish(request)["r"].verdict.reason == "load_failed"
    assert pair.d_agent.api.removed == [pair.p_agent.name]
    assert pair.d_worker.num_moving == 0
    assert pair.free


@pytest.mark.parametrize("call", ["initialize_xfer", "transfer"])
def test_a_read_that_cannot_be_posted(nixl_pair, nixl_error, call):
    pair = nixl_pair()
    pair.d_agent.api.fails[call] = nixl_error("planted")
    assert pair.serve(pair.prefilled("a")[0])["a"].verdict.reason == "load_failed"
    assert len(pair.net.handles) == (call == "transfer")
    pair.d_agent.api.fails.clear()
    request, tokens = pair.prefilled("b")
    assert pair.serve(request)["b"].token_ids == tokens
    assert pair.free


def test_a_read_whose_state_cannot_be_asked(nixl_pair, nixl_error):
    pair = nixl_pair()
    request, _ = pair.prefilled()
    pair.post_reads(request)
    for handle in pair.net.handles:
        handle.fail(nixl_error("NIXL_ERR_REMOTE_DISCONNECT"))
    assert pair.finish(request)["r"].verdict.reason == "load_failed"
    assert pair.free


def test_a_handle_that_cannot_be_released(nixl_pair, nixl_error):
    pair = nixl_pair()
    pair.d_agent.api.fails["release_xfer_handle"] = nixl_error("planted")
    request, tokens = pair.prefilled()
    assert pair.serve(request)["r"].token_ids == tokens


def test_recompute_after_a_failed_read(nixl_pair):
    pair = nixl_pair(load_failure="recompute")
    request, tokens = pair.prefilled()
    pair.post_reads(request)
    for handle in pair.net.handles:
        handle.fail()
    output = pair.finish(request)["r"]
    assert (output.token_ids, output.recomputed) == (tokens, True)


def test_a_failure_of_one_read_leaves_the_others_alone(nixl_pair):
    """Also after the peer has been met anew: what reads from the old agent goes on, and it is kept until then."""
    pair = nixl_pair()
    slow, tokens = pair.prefilled("slow")
    pair.post_reads(slow)
    failing, _ = pair.prefilled("failing")
    pair.post_reads(failing)
    for handle in pair.net.handles[2:]:
        handle.fail()
    pair.finish(failing)
    third, third_tokens = pair.prefilled("third")
    pair.net.at_once = True
    assert pair.serve(third)["third"].token_ids == third_tokens
    assert pair.d_agent.api.removed == []
    for handle in pair.net.handles[:2]:
        handle.land()
    assert pair.finish(slow)["slow"].token_ids == tokens
    assert pair.d_agent.api.removed == []
    assert pair.free


def test_a_peer_that_answers_nothing_gets_no_further_load(nixl_pair):
    """Its unfinished reads keep their blocks; more would pin them all. When it goes on, so do its loads."""
    pair = nixl_pair()
    stuck, tokens = pair.prefilled("stuck")
    pair.post_reads(stuck)
    pair.seconds += PATIENCE.read_s + 1
    refused, _ = pair.prefilled("refused")
    assert pair.serve(refused)["refused"].verdict.reason == "load_failed"
    assert len(pair.net.handles) == 2
    for handle in pair.net.handles:
        handle.land()
    assert pair.finish(stuck)["stuck"].token_ids == tokens
    pair.net.at_once = True
    request, tokens = pair.prefilled("after")
    assert pair.serve(request)["after"].token_ids == tokens
    assert pair.free


def test_an_aborted_load_keeps_its_blocks_until_its_reads_end(nixl_pair, tools):
    pair = nixl_pair()
    request, _ = pair.prefilled()
    pair.post_reads(request)
    pair.d.abort("r")
    pair.finish(request)
    for _ in range(20):
        pair.d.step()
    assert tools.blocks_in_use(pair.d) == 3
    for handle in pair.net.handles:
        handle.land()
    assert pair.free


# ---- notices


@pytest.mark.parametrize(
    "note", [b"", b"\xff\xfe", b"\x00", b"nobody's", b"\x01", b"\x01nobody's", b"\x01\xff", b"r" * 10**6]
)
def test_notices_that_mean_nothing(nixl_pair, note):
    pair = nixl_pair()
    request, tokens = pair.prefilled()
    for name in ("P", "D"):
        agent = {"P": pair.p_agent, "D": pair.d_agent}[name]
        agent.api.inbox["stranger"] = [note, note]
    pair.p.step()
    assert pair.p.connector.num_leases == 1
    assert pair.serve(request)["r"].token_ids == tokens


def test_a_read_that_goes_on_renews_its_lease(nixl_pair):
    pair = nixl_pair(heartbeat_s=5, producer={"lease_ticks": 100})
    request, tokens = pair.prefilled()
    pair.post_reads(request)
    for _ in range(5):
        pair.clock.advance(60)
        pair.seconds += 6
        pair.step_until(lambda: pair.p_agent.api.inbox)
        pair.p.step()
        assert pair.p.connector.num_leases == 1
    for handle in pair.net.handles:
        handle.land()
    assert pair.finish(request)["r"].token_ids == tokens
    pair.step_until(lambda: pair.p.connector.num_leases == 0, pair.p)


def test_a_lease_that_has_ended_is_not_renewed(nixl_pair):
    pair = nixl_pair(heartbeat_s=5, producer={"lease_ticks": 100})
    request, _ = pair.prefilled()
    pair.post_reads(request)
    pair.seconds += 6
    pair.step_until(lambda: pair.p_agent.api.inbox)
    pair.p.connector.end_lease("r")
    pair.p_worker.poll()
    pair.p.step()
    assert pair.p.connector.num_leases == 0


def test_a_producer_that_cannot_be_told_has_its_lease(nixl_pair):
    pair = nixl_pair()
    request, tokens = pair.prefilled()
    pair.post_reads(request)
    for handle in pair.net.handles:
        handle.land()
    pair.net.dead.add(pair.p_agent.name)
    assert pair.finish(request)["r"].token_ids == tokens
    assert pair.p.connector.num_leases == 1


# ---- seams


def test_operations_can_be_dropped_held_and_changed(nixl_pair):
    """As on the simulated fabric: what is dropped counts as done, what is held holds what comes after it."""
    pair = nixl_pair()
    released, posted, landed = [], [], []

    def post(event):
        posted.append(event.op.index)
        if event.op.index == 0:
            return Drop()
        if event.op.index == 5:
            return Hold(lambda: bool(released), "a test")
        return Change(event)

    pair.seams.on("transfer.op_posted", post)
    pair.seams.on("transfer.op_landed", lambda event: landed.append(event.op.index))
    request, _ = pair.prefilled()
    pair.d.add_request(request)
    pair.step_until(lambda: len(landed) == 4)
    for _ in range(20):
        pair.d.step()
    assert posted == [0, 1, 2, 3, 4, 5]
    assert sorted(landed) == [1, 2, 3, 4]
    released.append(True)
    output = pair.finish(request)["r"]
    assert output.verdict.status == "mismatch"
    assert sorted(landed) == list(range(1, 24))


OUTSIDE = [{"source_block": 10**6}, {"head": 2}, {"layer": 2}, {"target_replica": 1}, {"group": 1}]


@pytest.mark.parametrize("place", OUTSIDE)
def test_an_operation_that_is_changed_to_a_place_outside(nixl_pair, place):
    pair = nixl_pair()

    def far(event):
        return Change(dataclasses.replace(event, op=dataclasses.replace(event.op, **place)))

    pair.seams.on("transfer.op_posted", far)
    assert pair.serve(pair.prefilled()[0])["r"].verdict.reason == "load_failed"
    assert pair.free


def test_a_producer_killed_while_an_operation_is_held(nixl_pair):
    """The shape of a kill in the middle of a read: some operations have landed, some were never posted."""
    pair = nixl_pair()
    released = []

    def post(event):
        return Hold(lambda: bool(released), "a test") if event.op.index == 7 else None

    pair.seams.on("transfer.op_posted", post)
    request, _ = pair.prefilled()
    pair.d.add_request(request)
    pair.step_until(lambda: pair.net.handles and not pair.d_worker.num_moving)
    pair.net.dead.add(pair.p_agent.name)
    released.append(True)
    output = pair.finish(request)["r"]
    assert (output.finish_reason, output.verdict.reason) == (FinishReason.ERROR, "load_failed")
    assert pair.free


@pytest.mark.parametrize("to_producer", [False, True])
def test_notices_can_be_dropped_and_held(nixl_pair, to_producer):
    pair = nixl_pair()
    events, released = [], []

    def notice(event):
        events.append(event.to_producer)
        if event.to_producer != to_producer:
            return None
        return Drop() if event.request_id == "dropped" else Hold(lambda: bool(released), "a test")

    pair.seams.on("transfer.completion", notice)
    held, tokens = pair.prefilled("held")
    if to_producer:
        assert pair.serve(held)["held"].token_ids == tokens
        assert pair.net.notes == []
        released.append(True)
        pair.d_worker.poll()
        assert [note for _, note in pair.net.notes] == [b"held"]
    else:
        pair.d.add_request(held)
        for _ in range(20):
            assert pair.d.step() == []
        pair.step_until(lambda: events)
        released.append(True)
        assert pair.finish(held)["held"].token_ids == tokens
    dropped, _ = pair.prefilled("dropped")
    pair.d.add_request(dropped)
    pair.step_until(lambda: len(events) == 4)
    for _ in range(20):
        pair.d.step()
    assert events == [False, True] * 2
    assert (pair.d.scheduler.num_loading == 1) is (not to_producer)
    assert (b"dropped" in [note for _, note in pair.net.notes]) is (not to_producer)
