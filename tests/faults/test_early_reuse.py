from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from pydantic import ValidationError

from engine.cache import KVMemory
from engine.checksum.records import GroupBlocks
from engine.seams import Completion, CopyOp, KVFinal, OpPosted, Seams
from faults.base import digest
from faults.early_reuse import EarlyReuse, EarlyReuseParams
from faults.levers import Levers
from harness.history import History
from harness.plan import plan_cells
from harness.targets import TARGETS, sim_world
from scenarios.loader import parse_scenario
from scenarios.words import Policy, Result

WHAT = re.compile(r"(c\d) overwrote P's block (\d+) \(block position (\d+)\) after the lease ended")
BLOCKS = GroupBlocks(0, 16, 0, (5, 3, 9), 45)
MOMENTS = ("before_read", "mid_read", "after_read")


def reuse(at: str, load: int = 2) -> dict[str, Any]:
    return {"kind": "early_reuse", "when": {"load": load, "at": at}}


def named_blocks(ran) -> dict[int, int]:
    """Block position to P's block, as the evidence has it."""
    matches = [WHAT.fullmatch(item.what) for item in ran.evidence]
    assert all(match[1] == "c1" for match in matches)
    return {int(match[3]): int(match[2]) for match in matches}


def corrupted(load) -> set[int]:
    return set(load.load_finished.differing(load.kv_final))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", ["off", "fail_open", "fail_closed_fail", "fail_closed_recompute"])
def test_before_read_every_block_that_arrives_is_another_requests(sim, policy: str, seed: int) -> None:
    ran = sim(reuse("before_read"), policy=policy, seed=seed, competitors=1).fault
    load = ran.load()
    assert corrupted(load) == set(named_blocks(ran)) == set(load.kv_final.positions())
    assert corrupted(ran.load(1)) == set()


@pytest.mark.parametrize("seed", range(6))
def test_mid_read_the_first_half_is_right_and_the_rest_is_not(sim, seed: int) -> None:
    """Operations land in order of position: with an odd number of blocks the middle one is torn."""
    ran = sim(reuse("mid_read"), seed=seed, competitors=1).fault
    load = ran.load()
    blocks = len(load.kv_final.positions())
    assert corrupted(load) == set(range(blocks // 2, blocks))
    assert set(named_blocks(ran)) == set(range(blocks))
    assert corrupted(ran.load(1)) == set()


@pytest.mark.parametrize("policy", ["off", "fail_open", "fail_closed_fail", "fail_closed_recompute"])
def test_after_read_everything_arrived_although_the_blocks_are_overwritten(sim, policy: str) -> None:
    ran = sim(reuse("after_read"), policy=policy, competitors=1).fault
    load = ran.load()
    assert corrupted(load) == set()
    assert set(named_blocks(ran)) == set(load.kv_final.positions())
    assert load.tokens == load.wanted


@pytest.mark.parametrize("at", MOMENTS)
def test_the_evidence_names_the_blocks_that_the_producer_sent(sim, at: str) -> None:
    ran = sim(reuse(at), competitors=1).fault
    (final,) = ran.all("producer.kv_final")
    assert named_blocks(ran) == dict(enumerate(final["groups"][0]["blocks"]))
    assert all(item.before != item.after for item in ran.evidence)


@pytest.mark.parametrize("at", MOMENTS)
def test_the_digest_after_is_of_what_is_in_the_producers_memory(monkeypatch, at: str) -> None:
    """Looked up in the world itself when the run is over: the competitor was the last to write there."""
    worlds: list[sim_world.SimWorld] = []

    class Kept(sim_world.SimWorld):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            worlds.append(self)

    monkeypatch.setattr("harness.targets.sim.SimWorld", Kept)
    text = (
        "{schema_version: 1, name: x, summary: x, policies: ['off'], expect: {'off': {verdict: not_checked}},"
        f" workload: {{requests: 1, output_tokens: 2, competitors: 1}}, faults: [{reuse(at, load=1)}]}}"
    )
    target = TARGETS["sim"]
    cell = plan_cells([parse_scenario(text)], list(Policy), 3, target.provides)[0]
    history = History()
    target.run(cell, history)
    memory = worlds[0].producer.memory
    found = {line["what"]: line["after"] for line in history.lines if line["event"] == "evidence"}
    assert len(found) >= 3
    for what, after in found.items():
        assert digest(memory.slots((int(WHAT.fullmatch(what)[2]),))) == after


def test_a_competitor_that_nobody_declared_leaves_no_evidence(sim) -> None:
    ran = sim(reuse("before_read"), competitors=0).fault
    assert ran.evidence == ()
    assert corrupted(ran.load()) == set()
    assert ran.result.result is Result.UNKNOWN
    assert "no evidence that early_reuse on r2 happened" in ran.result.why


def test_two_loads_need_two_competitors(sim) -> None:
    both = sim(reuse("before_read", 1), reuse("before_read", 2), competitors=2).fault
    assert {item.request_id for item in both.evidence} == {"r1", "r2"}
    assert all(corrupted(both.load(n)) for n in (1, 2))
    one = sim(reuse("before_read", 1), reuse("before_read", 2), competitors=1).fault
    assert len({item.request_id for item in one.evidence}) == 1
    assert one.result.result is Result.UNKNOWN


ONE_AT_A_TIME = {
    "topology": {"consumer": {"max_num_seqs": 1}},
    "requests": 3,
    "prompt_tokens": [70, 90],
    "shared_prefix_tokens": 64,
    "competitors": 1,
}


def one_at_a_time(sim) -> Iterator[Any]:
    return (sim(reuse("before_read", 3), seed=seed, **ONE_AT_A_TIME).fault for seed in range(30))


def test_only_what_is_loaded_can_be_stale(sim) -> None:
    """The shared prefix comes from the consumer's own cache."""
    ran = next(ran for ran in one_at_a_time(sim) if ran.load(3).load_finished is not None)
    load = ran.load(3)
    assert load.load_finished.positions().start == 4
    assert corrupted(load) == set(load.load_finished.positions())
    assert set(named_blocks(ran)) == set(load.kv_final.positions())


def test_a_transfer_that_holds_up_what_the_competitor_waits_for_is_unknown(sim) -> None:
    """The competitor wants all blocks, others wait behind this load with theirs, and nobody can go on."""
    result = next(ran.result for ran in one_at_a_time(sim) if ran.load(3).load_finished is None)
    assert result.result is Result.UNKNOWN
    assert "no evidence that early_reuse on r3 happened" in result.why
    assert any("early_reuse: c1 has not finished its prefill" in line for line in result.why)


# ---- on its own, with levers that only these tests know


@dataclass
class FakeClock:
    leases: set[str] = field(default_factory=lambda: {"r2"})

    def end_lease(self, request_id: str) -> bool:
        held = request_id in self.leases
        self.leases.discard(request_id)
        return held


@dataclass
class FakeCompetitors:
    waiting: list[str] = field(default_factory=lambda: ["c1", "c2"])
    finished: set[str] = field(default_factory=set)

    def release(self) -> str | None:
        return self.waiting.pop(0) if self.waiting else None

    def has_finished(self, request_id: str) -> bool:
        return request_id in self.finished


def posted(memory: KVMemory, index: int = 0, request: str = "r2", num_ops: int = 24) -> OpPosted:
    op = CopyOp(index, 0, 0, 0, 0, 5, 0, 5, 0, 16)
    return OpPosted("consumer", request, op, num_ops, memory, memory)


@pytest.fixture
def ready(attach, memory_of: Callable[..., KVMemory]):
    """The fault, with P's KV of r2 final."""

    def make(at: str, clock: Any, competitors: Any) -> tuple[Seams, Any, KVMemory]:
        memory = memory_of()
        seams, context = attach(reuse(at), levers=Levers(clock, competitors))
        seams.emit(KVFinal("producer", "r2", {0: BLOCKS}, memory))
        return seams, context, memory

    return make


def test_the_transfer_waits_until_the_competitor_is_done_and_the_evidence_is_written_once(ready) -> None:
    clock, competitors = FakeClock(), FakeCompetitors()
    seams, context, memory = ready("before_read", clock, competitors)
    (hold,) = seams.emit(posted(memory)).holds
    assert (clock.leases, competitors.waiting) == (set(), ["c2"])
    assert not hold.until()
    assert "c1 has not finished" in hold.why
    memory.fill((5, 3), b"otherKV!")
    assert not hold.until()
    assert context.evidence == []
    competitors.finished.add("c1")
    assert hold.until()
    assert hold.until()
    assert [item.what for item in context.evidence] == [
        "c1 overwrote P's block 5 (block position 0) after the lease ended",
        "c1 overwrote P's block 3 (block position 1) after the lease ended",
    ]
    assert seams.emit(posted(memory)).holds == ()


@pytest.mark.parametrize(("at", "index"), [("before_read", 0), ("mid_read", 12)])
def test_it_strikes_at_one_operation_of_its_request(ready, at: str, index: int) -> None:
    for request, other in (("r1", index), *(("r2", i) for i in range(24) if i != index)):
        seams, _, memory = ready(at, clock := FakeClock(), FakeCompetitors())
        assert seams.emit(posted(memory, other, request)).holds == ()
        assert clock.leases == {"r2"}
    assert len(seams.emit(posted(memory, index)).holds) == 1


def test_after_read_holds_the_notice_to_the_consumer(ready) -> None:
    seams, _, _ = ready("after_read", clock := FakeClock(), FakeCompetitors())
    assert seams.emit(Completion("consumer", "r2", to_producer=True)).holds == ()
    assert clock.leases == {"r2"}
    assert len(seams.emit(Completion("consumer", "r2", to_producer=False)).holds) == 1


@pytest.mark.parametrize(
    ("clock", "competitors"),
    [
        (None, FakeCompetitors()),
        (FakeClock(), None),
        (FakeClock(set()), FakeCompetitors()),
        (FakeClock(), FakeCompetitors([])),
    ],
    ids=["no clock", "no competitors", "no lease", "no competitor left"],
)
def test_without_what_it_needs_it_leaves_no_evidence_and_holds_nothing(ready, clock, competitors) -> None:
    seams, context, memory = ready("before_read", clock, competitors)
    assert seams.emit(posted(memory)).holds == ()
    assert context.evidence == []


def test_a_competitor_that_took_other_blocks_is_no_evidence(ready) -> None:
    competitors = FakeCompetitors()
    seams, context, memory = ready("before_read", FakeClock(), competitors)
    (hold,) = seams.emit(posted(memory)).holds
    memory.fill((1, 2, 4), b"otherKV!")
    competitors.finished.add("c1")
    assert hold.until()
    assert context.evidence == []


@pytest.mark.parametrize("at", MOMENTS)
def test_needs(at: str) -> None:
    seam = "transfer.completion" if at == "after_read" else "transfer.op_posted"
    needs = EarlyReuse.needs(EarlyReuseParams.model_validate(reuse(at)))
    assert needs == {"producer.kv_final", seam, "lever.clock", "lever.competitors"}


@pytest.mark.parametrize("wrong", [{"when": {"load": 2}}, {"when": {"load": 2, "at": "in_flight"}}, {"blocks": 1}])
def test_parameters_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        EarlyReuseParams.model_validate(reuse("before_read") | wrong)
