"""The conformance kit: the pull connector passes it, and every kind of broken connector fails it in the right words."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from engine.checksum.consumer import CHECKSUMS_PARAM
from engine.checksum.records import GroupBlocks
from engine.connectors.base import LoadSpec, SchedulerConnector, TransferResults
from engine.connectors.multi import MultiConnector
from engine.connectors.offload import OFFLOAD
from engine.connectors.pull import PullScheduler, PullWorker, copy_operations
from engine.connectors.push import PUSH
from engine.seams import CopyOp
from harness.conformance.cells import run_scenario
from harness.conformance.hostile import hostile_params
from harness.conformance.situations import SITUATIONS, clean_scenario
from harness.history import find_all
from harness.kit import ConnectorConformance
from scenarios.words import Policy

KIT = ConnectorConformance()


class TestPull(ConnectorConformance):
    connector = "pull"


class TestPush(ConnectorConformance):
    connector = "push"


class TestMulti(ConnectorConformance):
    connector = MultiConnector("offload_push", "what is in host memory, or else a push", (OFFLOAD, PUSH))


class Built:
    """The pull connector with one side replaced."""

    API_VERSION = 1
    name = "broken"
    summary = "a connector with a bug"

    def __init__(self, worker: type[PullWorker] = PullWorker, scheduler: type[PullScheduler] = PullScheduler) -> None:
        self._worker, self._scheduler = worker, scheduler

    def scheduler(self, config, clock):
        return self._scheduler(config.engine_id, config.lease_ticks, clock)

    def worker(self, config, memory, fabric):
        return self._worker(config.engine_id, memory, fabric)


def altered(change: Callable[[LoadSpec], LoadSpec]) -> Built:
    """A worker that loads something else than it was told."""

    class Worker(PullWorker):
        def start_loads(self, loads: Sequence[LoadSpec]) -> None:
            super().start_loads([change(load) for load in loads])

    return Built(Worker)


def failure(test: Callable[..., None], *arguments: Any, **named: Any) -> str:
    """What a test of the kit says when it fails."""
    with pytest.raises(pytest.fail.Exception) as failed:
        test(*arguments, **named)
    return str(failed.value)


# ---- the wrong blocks (BLK-5)


def shifted(load: LoadSpec) -> LoadSpec:
    ids = load.remote_block_ids[0]
    return replace(load, remote_block_ids={0: (*ids[1:], ids[-1])})


def resized(load: LoadSpec, by: int) -> LoadSpec:
    """`by` 1: the block after D's last as well. -1: all but the last."""
    blocks, remote = load.groups[0], load.remote_block_ids[0]
    whole = blocks.start + len(blocks.block_ids) + by
    ids = (*blocks.block_ids, blocks.block_ids[-1] + 1)[: len(blocks.block_ids) + by]
    groups = {0: GroupBlocks(0, blocks.block_size, blocks.start, ids, whole * blocks.block_size)}
    return replace(load, groups=groups, remote_block_ids={0: (*remote, remote[-1] + 1)[: len(remote) + by]})


@pytest.mark.req("BLK-5")
@pytest.mark.parametrize("prefix_hit", [False, True])
def test_blocks_shifted_by_one_are_told_as_that(prefix_hit: bool) -> None:
    broken = altered(shifted)
    told = failure(KIT.test_it_loads_exactly_its_blocks, broken, prefix_hit)
    assert "D was given other KV than P holds" in told
    assert "1 block position later" in told
    topology = failure(KIT.test_clean_loads_verify, broken, "HND", "NHD", 16)
    assert "verdict is mismatch, expected verified" in topology
    assert "1 block position later" in topology


@pytest.mark.req("BLK-5")
@pytest.mark.parametrize("prefix_hit", [False, True])
def test_a_block_more_fails(prefix_hit: bool) -> None:
    told = failure(KIT.test_it_loads_exactly_its_blocks, altered(lambda load: resized(load, 1)), prefix_hit)
    assert "but it changed D's block" in told


@pytest.mark.req("BLK-5")
@pytest.mark.parametrize("prefix_hit", [False, True])
def test_a_block_fewer_fails(prefix_hit: bool) -> None:
    told = failure(KIT.test_it_loads_exactly_its_blocks, altered(lambda load: resized(load, -1)), prefix_hit)
    assert f"tokens {32 * prefix_hit + 48} to {32 * prefix_hit + 56}" in told


class ReadsPrefixAgain(PullScheduler):
    def plan_load(self, request, groups):
        load = super().plan_load(request, groups)
        blocks = groups[0]
        if blocks.start == 0:
            return load
        ids = (request.block_ids[blocks.start - 1], *blocks.block_ids)
        return replace(load, groups={0: replace(blocks, start=blocks.start - 1, block_ids=ids)})


@pytest.mark.req("BLK-5")
def test_reading_a_cached_prefix_again_fails() -> None:
    broken = Built(scheduler=ReadsPrefixAgain)
    assert "plan_load must keep its groups" in failure(KIT.test_it_loads_exactly_its_blocks, broken, True)
    assert "other_blocks" in failure(KIT.test_clean_loads_verify_with, broken, "prefix hits")


def test_a_load_that_is_reported_too_early_fails() -> None:
    class Hasty(PullWorker):
        def start_loads(self, loads):
            super().start_loads(loads)
            self._begun = {load.request_id for load in loads}

        def poll(self) -> TransferResults:
            begun, self._begun = getattr(self, "_begun", set()), set()
            return replace(super().poll(), finished_receiving=frozenset(begun))

    told = failure(KIT.test_it_loads_exactly_its_blocks, Built(Hasty), False)
    assert "NO-BYTES" in told or "arrived" in told
    assert "expected verified" in failure(KIT.test_clean_loads_verify, Built(Hasty), "HND", "HND", 16)


def test_a_connector_that_asks_chance_fails() -> None:
    class Shuffling(PullWorker):
        def start_loads(self, loads):
            for load in random.SystemRandom().sample(loads, len(loads)):
                ops = copy_operations(load, self._memory, self._fabric.peer(load.remote_engine_id))
                random.SystemRandom().shuffle(ops)
                self._fabric.post("consumer", "producer", load.request_id, load.remote_request_id, ops)

    assert "Two runs of one cell" in failure(KIT.test_the_seed_decides_everything, Built(Shuffling))


# ---- carriers and leases


class WithoutCarrier(PullScheduler):
    kv_checksum_carrier = SchedulerConnector.kv_checksum_carrier


class CarriesEverything(PullScheduler):
    def kv_checksum_carrier(self, request, receiving):
        return "kv_transfer_params"


class Computes(PullScheduler):
    def request_finished(self, request, block_ids):
        params = super().request_finished(request, block_ids)
        return None if params is None else {**params, CHECKSUMS_PARAM: "lAEBKJA="}


@pytest.mark.req("CAR-1", "CAR-3")
@pytest.mark.parametrize(
    ("scheduler", "words"),
    [
        (WithoutCarrier, "does not override kv_checksum_carrier"),
        (CarriesEverything, "must name none for a request without transfer, on D"),
        (Computes, "generic code adds it"),
    ],
)
def test_a_wrong_carrier_fails(scheduler: type[PullScheduler], words: str) -> None:
    assert words in failure(KIT.test_it_carries_checksums, Built(scheduler=scheduler))


@pytest.mark.req("CAR-3")
def test_fail_closed_does_not_start_without_a_carrier() -> None:
    broken = Built(scheduler=WithoutCarrier)
    told = failure(KIT.test_clean_loads_are_served_under, broken, Policy.FAIL_CLOSED_FAIL)
    assert "WithoutCarrier carries no checksums" in told
    assert "verdict is not_checked" in failure(KIT.test_clean_loads_verify, broken, "HND", "HND", 8)


class Forever(PullScheduler):
    def expired(self) -> list[str]:
        return []


class Unending(PullScheduler):
    holds_lease = SchedulerConnector.holds_lease
    end_lease = SchedulerConnector.end_lease


class Credulous(PullScheduler):
    def sent(self, request_id: str) -> bool:
        super().sent(request_id)
        return True


@pytest.mark.parametrize(
    ("scheduler", "words"),
    [
        (Forever, "has ended by time still holds 4 of P's blocks"),
        (Unending, "and say so (num_leases, holds_lease)"),
        (Credulous, "free the blocks a second time"),
    ],
)
def test_a_wrong_lease_fails(scheduler: type[PullScheduler], words: str) -> None:
    assert words in failure(KIT.test_it_holds_blocks_for_the_consumer, Built(scheduler=scheduler))


def test_a_fault_without_evidence_comes_with_a_hint() -> None:
    name = "P's blocks are reused before the read"
    told = failure(KIT.test_what_goes_wrong_is_noticed, Built(scheduler=Unending), name, Policy.FAIL_OPEN)
    assert "no evidence that early_reuse" in told
    assert "holds_lease and end_lease?" in told


def test_a_consumer_that_never_says_that_it_has_read_fails() -> None:
    class Silent(PullWorker):
        def poll(self) -> TransferResults:
            return replace(super().poll(), finished_sending=frozenset())

    assert "D has read the request" in failure(KIT.test_it_holds_blocks_for_the_consumer, Built(Silent))


# ---- loads that cannot work


class Swallows(PullWorker):
    def poll(self) -> TransferResults:
        return replace(super().poll(), failed_receiving=frozenset())


class CallsItDone(PullWorker):
    def poll(self) -> TransferResults:
        results = super().poll()
        return replace(
            results,
            failed_receiving=frozenset(),
            finished_receiving=results.finished_receiving | results.failed_receiving,
        )


class Unchecked(PullWorker):
    """Believes that the other side is like itself."""

    def start_loads(self, loads):
        for load in loads:
            ops: list[CopyOp] = []
            for position, block_id in zip(load.groups[0].positions, load.groups[0].block_ids, strict=True):
                source = load.remote_block_ids[0][position] % 32
                for layer, part, head in product(range(2), repeat=3):
                    ops.append(CopyOp(len(ops), position, layer, part, head, source, 0, block_id, 0, 16))
            self._fabric.post("consumer", load.remote_engine_id, load.request_id, load.remote_request_id, ops)


@pytest.mark.parametrize(
    ("worker", "words"),
    [
        (Swallows, "failed_receiving must name"),
        (CallsItDone, "reported as finished"),
        (Unchecked, "The engine stopped with KeyError"),
    ],
)
@pytest.mark.parametrize("load_failure", ["fail", "recompute"])
def test_a_failure_that_is_not_told_fails(worker: type[PullWorker], words: str, load_failure: str) -> None:
    assert words in failure(KIT.test_an_unknown_producer_is_a_failed_load, Built(worker), load_failure)


def test_another_shape_that_is_loaded_all_the_same_fails() -> None:
    test = KIT.test_a_producer_of_another_shape_is_a_failed_load
    assert "reported as finished" in failure(test, Built(Unchecked), "fail")


class Trusting(PullScheduler):
    def check_params(self, request) -> None:
        pass


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (Built(scheduler=Trusting), "kv_transfer_params.remote_block_ids is None: the engine stopped with TypeError"),
        (Built(Swallows), "kv_transfer_params.remote_block_ids[0][0] is -1: D never answered"),
        (Built(Unchecked), "kv_transfer_params.remote_block_ids[0][0] is -1: the load was reported as finished"),
    ],
)
def test_swallowing_what_no_producer_sends_fails(broken: Built, words: str) -> None:
    assert words in failure(KIT.test_parameters_that_no_producer_sends_do_no_harm, broken)


# ---- the kit itself


def test_hostile_parameters_change_one_thing_each() -> None:
    params = {"flag": True, "ids": [[4, 5, 6]], "of": {"engine": "p", "port": 80}}
    found = dict(hostile_params(params))
    assert len(found) == len(list(hostile_params(params)))
    assert all(repr(changed) != repr(params) for changed in found.values())
    assert found["ids[0][2] is -1"] == {**params, "ids": [[4, 5, -1]]}
    assert found["of.engine is 'nobody'"] == {**params, "of": {"engine": "nobody", "port": 80}}
    assert found["flag is missing"] == {"ids": params["ids"], "of": params["of"]}
    assert found["ids[0] lacks its last item"]["ids"] == [[4, 5]]


def situation(name: str) -> list[Mapping[str, Any]]:
    differs = SITUATIONS[name]
    scenario = clean_scenario(Policy.FAIL_OPEN, differs.get("topology", {}), differs.get("workload"))
    return run_scenario(Built(), scenario, Policy.FAIL_OPEN, ConnectorConformance.seed).lines


def test_in_small_pools_requests_are_preempted_on_the_consumer() -> None:
    assert any(line["engine"] == "consumer" for line in find_all(situation("small pools"), "request.preempted"))


def test_with_prefix_hits_loads_begin_later() -> None:
    loads = find_all(situation("prefix hits"), "consumer.load_scheduled")
    assert [line["groups"][0]["start"] for line in loads].count(0) == 1


def test_a_connector_that_is_not_installed_is_named() -> None:
    class Missing(ConnectorConformance):
        connector = "teleport"

    told = failure(Missing().under_test)
    assert "no connector 'teleport'" in told
    assert "pull" in told
