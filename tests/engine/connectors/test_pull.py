"""The pull connector: parameters, carriers, leases, and which slot of P goes into which slot of D."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.checksum.records import GroupBlocks
from engine.checksum.verdict import VerdictStatus
from engine.clock import VirtualClock
from engine.config import PRESETS
from engine.connectors.base import Carrier
from engine.connectors.pull import PullScheduler, copy_segments
from engine.errors import RequestError
from engine.request import FinishReason, Request

PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "P",
    "remote_request_id": "r",
    "remote_block_ids": [[1, 2, 3]],
}


@pytest.fixture
def clock():
    return VirtualClock()


@pytest.fixture
def connector(clock):
    return PullScheduler("E", lease_ticks=10, clock=clock)


def request(params, name="r"):
    return Request(name, list(range(40)), 4, params)


# ---- parameters


@pytest.mark.req("CAR-4")
@pytest.mark.parametrize(
    ("params", "sending", "receiving"),
    [
        (None, None, None),
        ({}, None, None),
        ({"do_remote_decode": True}, Carrier.KV_TRANSFER_PARAMS, None),
        (PARAMS, None, Carrier.KV_TRANSFER_PARAMS),
        (PARAMS | {"do_remote_decode": True}, Carrier.KV_TRANSFER_PARAMS, None),
    ],
    ids=["none", "empty", "producer", "load", "bidirectional"],
)
def test_what_carries_checksums(connector, params, sending, receiving):
    assert connector.kv_checksum_carrier(request(params), receiving=False) is sending
    assert connector.kv_checksum_carrier(request(params), receiving=True) is receiving
    assert connector.has_carrier()


@pytest.mark.req("CAR-4")
def test_a_bidirectional_load_is_served_unchecked_and_not_counted(tools, new_world):
    """A relay: D loads the prompt, and a third engine will read it from D."""
    world = new_world("enforce")
    prompt = tools.prompt("a", 40)
    load = world.load(prompt, do_remote_decode=True)
    world.deliver()
    output = world.finish()["a"]
    assert (load.verdict.status, load.verdict.reason) == (VerdictStatus.NOT_CHECKED, "no_carrier")
    assert output.token_ids == tools.tokens_alone(prompt.token_ids, prompt.max_tokens)
    assert not world.d.scheduler.checks.counts
    assert output.kv_transfer_params["kv_checksums"], "as a producer it still sends checksums of the whole prompt"
    assert world.d.connector.num_leases == 1


def test_what_the_producer_answers(connector):
    answer = connector.request_finished(request({"do_remote_decode": True}), {0: [4, 7]})
    assert answer == PARAMS | {"remote_engine_id": "E", "remote_block_ids": [[4, 7]]}
    connector.check_params(request(answer))
    assert connector.request_finished(request(None), {0: [4]}) is None
    assert connector.request_finished(request(PARAMS), {0: [4]}) is None


def test_the_load_follows_the_parameters(connector):
    groups = {0: GroupBlocks(0, 16, 1, (8, 9), 40)}
    assert connector.matched_tokens(request(PARAMS), 16) == 24
    assert connector.matched_tokens(request({}), 16) == 0
    load = connector.plan_load(request(PARAMS), groups)
    assert (load.request_id, load.groups, load.remote_engine_id, load.remote_request_id) == ("r", groups, "P", "r")
    assert load.remote_block_ids == {0: (1, 2, 3)}


NOT_BOOLEANS = [1, 0, "true", "false", "", [], {}, 1.0]
NOT_STRINGS = [None, 3, b"P", ["P"], {"P": 1}, True]
NOT_LISTS_OF_IDS = [
    None, 5, "12", {}, {"0": [1]}, [1, 2, 3], [None], ["12"], [{}], [(1, 2)], ([1],), [[1.0]], [[True]], [["1"]],
    [[None]], [[[1]]], [[1], 2],
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("do_remote_prefill", value) for value in NOT_BOOLEANS),
        *(("do_remote_decode", value) for value in NOT_BOOLEANS),
        *(("remote_engine_id", value) for value in NOT_STRINGS),
        *(("remote_request_id", value) for value in NOT_STRINGS),
        *(("remote_block_ids", value) for value in NOT_LISTS_OF_IDS),
    ],
    ids=str,
)
def test_parameters_of_another_type_are_refused(connector, name, value):
    with pytest.raises(RequestError, match=rf"^request r: kv_transfer_params\.{name} "):
        connector.check_params(request(PARAMS | {name: value}))


@pytest.mark.parametrize("name", ["remote_engine_id", "remote_request_id", "remote_block_ids"])
def test_a_missing_parameter_is_refused(connector, name):
    params = {key: value for key, value in PARAMS.items() if key != name}
    with pytest.raises(RequestError, match=name):
        connector.check_params(request(params))


@pytest.mark.parametrize(
    "params", [{}, {"do_remote_prefill": False}, {"do_remote_prefill": None, "remote_block_ids": 3}]
)
def test_without_a_load_nothing_else_is_asked_of_them(connector, params):
    connector.check_params(request(params))


# ---- loads that cannot work

UNUSABLE = {
    "an unknown engine": {"remote_engine_id": "nobody"},
    "no engine": {"remote_engine_id": ""},
    "no group": {"remote_block_ids": []},
    "a group too many": {"remote_block_ids": [[1, 2, 3], [4]]},
    "too few blocks": {"remote_block_ids": [[1, 2]]},
    "no blocks": {"remote_block_ids": [[]]},
    "a negative id": {"remote_block_ids": [[1, -1, 2]]},
    "the null block": {"remote_block_ids": [[0, 1, 2]]},
    "an id past the end": {"remote_block_ids": [[1, 2, 64]]},
    "an id past the end that is not read": {"remote_block_ids": [[1, 2, 3, 10**9]]},
    "an enormous id": {"remote_block_ids": [[1, 2, 2**200]]},
}


@pytest.mark.req("CON-4", "VER-7")
@pytest.mark.parametrize("changed", UNUSABLE.values(), ids=UNUSABLE)
@pytest.mark.parametrize("load_failure", ["fail", "recompute"])
@pytest.mark.parametrize("mode", ["off", "enforce"])
def test_a_load_that_cannot_work_fails_and_is_not_judged(tools, new_world, mode, load_failure, changed):
    world = new_world(mode, load_failure)
    prompt = tools.prompt("a", 40)
    world.load(prompt, **changed)
    output = world.finish()["a"]
    assert (output.verdict.status, output.verdict.reason) == (VerdictStatus.NOT_CHECKED, "load_failed")
    if load_failure == "fail":
        assert (output.finish_reason, output.error) == (
            FinishReason.ERROR,
            "KV load failed: the connector reports a failed transfer",
        )
    else:
        assert output.recomputed
        assert output.token_ids == tools.tokens_alone(prompt.token_ids, prompt.max_tokens)
    assert (tools.blocks_in_use(world.d), world.d.scheduler.checks.num_pending) == (0, 0)
    assert not world.d.scheduler.checks.counts


@pytest.mark.parametrize("geometry", [{"model": PRESETS["small"]}], ids=["other layers and heads"])
def test_a_peer_of_another_geometry_fails_the_load(tools, new_world, geometry):
    world = new_world("off", consumer=geometry)
    world.load(tools.prompt("a", 40))
    assert world.finish()["a"].finish_reason is FinishReason.ERROR


def test_more_remote_blocks_than_needed_do_no_harm(tools, new_world):
    world = new_world("enforce")
    prompt = tools.prompt("a", 40)
    params = world.run_producer(prompt)
    params["remote_block_ids"][0] += [9] * 1000
    world.load(prompt, params)
    world.deliver()
    output = world.finish()["a"]
    assert output.verdict.status is VerdictStatus.VERIFIED
    assert output.token_ids == tools.tokens_alone(prompt.token_ids, prompt.max_tokens)


json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.req("WIR-2")
@given(name=st.sampled_from([*PARAMS, "kv_checksums"]), value=json, load_failure=st.sampled_from(["fail", "recompute"]))
def test_any_value_anywhere_is_refused_or_fails_or_serves_the_right_tokens(name, value, load_failure, tools, new_world):
    world = new_world("enforce", load_failure)
    prompt = tools.prompt("a", 20)
    try:
        world.load(prompt, **{name: value})
    except RequestError:
        assert not world.d.scheduler.has_work
        return
    world.deliver()
    output = world.finish()["a"]
    if output.finish_reason is not FinishReason.ERROR:
        assert output.token_ids == tools.tokens_alone(prompt.token_ids, prompt.max_tokens)
    assert (tools.blocks_in_use(world.d) > 0) == (world.d.connector.num_leases > 0)


# ---- leases


def test_a_lease_ends_once(connector, clock):
    connector.request_finished(request({"do_remote_decode": True}, "a"), {0: [1]})
    clock.advance(5)
    connector.request_finished(request({"do_remote_decode": True}, "b"), {0: [2]})
    clock.advance(4)
    assert connector.expired() == []
    clock.advance(1)
    assert (connector.expired(), connector.expired(), connector.num_leases) == (["a"], [], 1)
    assert not connector.sent("a"), "a notice that comes too late"
    assert connector.sent("b")
    assert not connector.sent("b"), "a notice that comes twice"
    assert connector.num_leases == 0


def test_a_lease_can_be_ended_early(connector):
    connector.request_finished(request({"do_remote_decode": True}, "a"), {0: [1]})
    assert connector.holds_lease("a")
    connector.end_lease("a")
    assert connector.expired() == ["a"]
    assert not connector.holds_lease("a")
    with pytest.raises(KeyError):
        connector.end_lease("a")


# ---- which slot goes where


def slots_of(segments, theirs, mine):
    """Token position of D -> (P block, P slot, D block, D slot), every slot of every segment."""
    found = {}
    for position, source, source_slot, target, target_slot, count in segments:
        for i in range(count):
            token = position * mine + target_slot + i
            assert token not in found, "a slot is written twice"
            found[token] = (source, source_slot + i, target, target_slot + i)
    return found


@given(
    mine=st.integers(1, 24),
    theirs=st.integers(1, 24),
    num_tokens=st.integers(1, 100),
    local=st.integers(0, 3),
    spare=st.integers(-2, 2),
)
def test_every_token_goes_from_its_slot_to_its_slot(mine, theirs, num_tokens, local, spare):
    start = min(local, (num_tokens - 1) // mine)
    block_ids = tuple(range(100 + start, 100 + -(-num_tokens // mine)))
    needed = -(-num_tokens // theirs)
    remote = tuple(range(500, 500 + max(0, needed + spare)))
    segments = copy_segments(GroupBlocks(0, mine, start, block_ids, num_tokens), remote, theirs)
    if len(remote) < needed:
        assert segments is None
        return
    found = slots_of(segments, theirs, mine)
    assert set(range(start * mine, num_tokens)) <= set(found)
    for token, (source, source_slot, target, target_slot) in found.items():
        assert (source, source_slot) == (500 + token // theirs, token % theirs)
        assert (target, target_slot) == (100 + token // mine, token % mine)
    if mine == theirs:
        assert len(segments) == len(block_ids), "whole blocks are one segment"


@pytest.mark.parametrize("sizes", [(8, 16), (16, 8), (8, 32), (32, 16), (16, 24), (24, 16), (5, 16)], ids=str)
@pytest.mark.parametrize("layouts", [("HND", "NHD"), ("NHD", "HND")], ids=str)
def test_the_bytes_arrive_at_their_positions(tools, new_world, sizes, layouts):
    """Between block sizes and layouts. Sizes of which none divides the other cannot be compared (VER-2, EXT-2)."""
    seen = {}
    world = new_world(
        "log",
        producer={"block_size": sizes[0], "layout": layouts[0]},
        consumer={"block_size": sizes[1], "layout": layouts[1]},
    )
    for seam in ("producer.kv_final", "consumer.load_finished"):
        world.seams.on(seam, lambda event, seam=seam: seen.__setitem__(seam, event.memory.tokens(event.groups[0])))
    prompt = tools.prompt("a", 53)
    answer = world.run([prompt])["a"]
    assert np.array_equal(seen["producer.kv_final"], seen["consumer.load_finished"])
    comparable = max(sizes) % min(sizes) == 0
    wanted = (VerdictStatus.VERIFIED, None) if comparable else (VerdictStatus.UNVERIFIED, "other_block_size")
    assert (answer.verdict.status, answer.verdict.reason) == wanted
    assert answer.token_ids == tools.tokens_alone(prompt.token_ids, prompt.max_tokens)
