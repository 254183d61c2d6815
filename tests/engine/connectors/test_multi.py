"""Several connectors in one: who loads, who holds, and whose carrier counts (CAR-2)."""

import pytest

from engine.checksum.policy import ChecksumSettings
from engine.checksum.verdict import VerdictStatus
from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.connectors.base import Carrier
from engine.connectors.fabric import Fabric
from engine.connectors.multi import MultiConnector
from engine.connectors.offload import OFFLOAD
from engine.connectors.pull import PULL
from engine.connectors.push import PUSH, push_params
from engine.core import connected_engine
from engine.errors import StartupError
from engine.request import Request
from engine.seams import Seams

SENDS = {"do_remote_decode": True}


def request(params, name="r"):
    return Request(name, list(range(40)), 4, params)


def scheduler(*parts):
    return MultiConnector("m", "", parts).scheduler(EngineConfig("E"), VirtualClock())


def pull_params(multi):
    return multi.request_finished(request(SENDS, "sent"), {0: [1, 2, 3]})


@pytest.mark.req("CAR-2")
@pytest.mark.parametrize(
    ("parts", "carrier"), [((OFFLOAD, PULL), "kv_transfer_params"), ((OFFLOAD, PUSH), "connector")]
)
def test_a_producer_request_has_the_first_carrier_that_there_is(parts, carrier):
    multi = scheduler(*parts)
    assert multi.kv_checksum_carrier(request(SENDS), receiving=False) is Carrier(carrier)
    assert multi.kv_checksum_carrier(request(None), receiving=False) is None
    assert multi.has_carrier()


@pytest.mark.req("CAR-2")
def test_of_two_carriers_the_first_counts():
    assert scheduler(PUSH, PULL).kv_checksum_carrier(request(SENDS), receiving=False) is Carrier.CONNECTOR
    assert scheduler(PULL, PUSH).kv_checksum_carrier(request(SENDS), receiving=False) is Carrier.KV_TRANSFER_PARAMS


@pytest.mark.req("CAR-2")
def test_a_load_has_the_carrier_of_the_part_that_loads_it():
    multi = scheduler(OFFLOAD, PULL)
    load = request(pull_params(multi))
    assert multi.matched_tokens(load, 0) == 40
    assert multi.kv_checksum_carrier(load, receiving=True) is Carrier.KV_TRANSFER_PARAMS
    kept = request(None, "kept")
    kept.output_token_ids = [1]
    assert multi.request_finished(kept, {0: [4, 5, 6]}) == {}
    assert multi.matched_tokens(load, 0) == 32, "the host has two whole blocks of it"
    assert multi.kv_checksum_carrier(load, receiving=True) is None


@pytest.mark.req("CAR-2")
def test_who_is_asked_out_of_turn_chooses_first():
    multi = scheduler(OFFLOAD, PULL)
    load = request(pull_params(multi))
    assert multi.kv_checksum_carrier(load, receiving=True) is Carrier.KV_TRANSFER_PARAMS
    assert multi.kv_checksum_carrier(request(None, "local"), receiving=True) is None


def test_one_part_holds_a_request_and_is_told_what_becomes_of_it():
    multi = scheduler(OFFLOAD, PULL)
    pull_params(multi)
    assert (multi.num_leases, multi.holds_lease("sent")) == (1, True)
    multi.end_lease("sent")
    assert multi.expired() == ["sent"]
    assert (multi.num_leases, multi.sent("sent")) == (0, False)
    pull_params(multi)
    assert multi.sent("sent")
    assert not multi.sent("sent")


@pytest.mark.req("CAR-3")
def test_without_any_carrier_fail_closed_does_not_start():
    multi = MultiConnector("m", "", (OFFLOAD, OFFLOAD))
    config = EngineConfig("E", checksum=ChecksumSettings(kv_checksum_mode="enforce"))
    with pytest.raises(StartupError, match="MultiScheduler carries no checksums"):
        connected_engine(multi, config, Seams(), VirtualClock(), Fabric(Seams()))


@pytest.mark.req("CAR-2", "GAP-13")
def test_under_fail_closed_a_load_without_a_carrier_is_served_unchecked_and_others_are_checked(tools, new_world):
    world = new_world("enforce", transfer="offload_pull", prefix_caching=False)
    prompt = tools.prompt("a", 40)
    again = tools.prompt("b", 40, prefix=prompt.token_ids)
    world.run([prompt])
    world.seams.on("consumer.load_finished", lambda e: e.memory.fill(e.groups[0].block_ids, b"POISONED"))
    world.arrivals.append(again)
    world.act_until(lambda: "b" in world.answers)
    answers = world.answers
    assert world.p.connector.holds_lease("b"), "nobody reads it from P, whose lease ends by itself"
    world.p.connector.end_lease("b")
    assert answers["a"].verdict.status is VerdictStatus.VERIFIED
    assert (answers["b"].verdict.status, answers["b"].verdict.reason) == (VerdictStatus.NOT_CHECKED, "no_carrier")
    assert answers["b"].error is None
    other = tools.prompt("c", 40)
    assert world.run([other])["c"].verdict.status is VerdictStatus.MISMATCH


@pytest.mark.req("CAR-2", "EXT-3")
def test_a_part_with_its_own_carrier_is_given_the_checksums():
    multi = scheduler(OFFLOAD, PUSH)
    sends = request(SENDS, "r")
    assert multi.request_finished(sends, {0: [1, 2, 3]}) == push_params("E", "r")
    multi.carry_checksums(sends, "text")
    assert multi.has_message
    _, message = multi.step_message()
    assert message.sends[0].checksums == "text"
    assert not multi.has_message
