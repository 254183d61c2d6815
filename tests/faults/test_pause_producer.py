from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from pydantic import ValidationError

from engine.checksum.records import GroupBlocks
from engine.seams import BlocksFreed, KVFinal, RequestEnded
from faults.levers import Levers
from faults.pause_producer import PauseProducer, PauseProducerParams

MID_READ = {"load": 2, "at": "mid_read"}
P_BLOCKS = GroupBlocks(0, 16, 0, (1, 2, 4), 45)


@dataclass
class FakeProducer:
    """Process and clock of P: what was asked of it, in order."""

    asked: list[str] = field(default_factory=list)

    def pause(self, side: str) -> None:
        self.asked.append(f"pause {side}")

    def resume(self, side: str) -> None:
        self.asked.append(f"resume {side}")

    def kill(self, side: str) -> bool:
        raise AssertionError("nobody asked for this")

    def end_lease(self, request_id: str) -> bool:
        self.asked.append(f"end_lease {request_id}")
        return True


@dataclass
class FakeCompetitors:
    writes: Any = lambda: None
    released: list[str] = field(default_factory=list)
    done: bool = False

    def release(self) -> str | None:
        if self.released:
            return None
        self.released.append("c1")
        return "c1"

    def has_finished(self, request_id: str) -> bool:
        return self.done


def pause(how: str | None = None) -> dict[str, Any]:
    return {"kind": "pause_producer", "when": MID_READ} | ({} if how is None else {"how": how})


def levers(producer: FakeProducer, competitors: FakeCompetitors | None = None) -> Levers:
    return Levers(clock=producer, competitors=competitors, process=producer)


@pytest.mark.parametrize("seed", range(3))
def test_p_stops_once_the_operations_before_have_landed_and_d_waits_for_its_blocks_to_be_freed(
    read_of, seed: int
) -> None:
    read = read_of(pause(), levers(producer := FakeProducer()), seed)
    index, hold = read.until_struck()
    assert producer.asked == []
    for _ in range(2):
        assert not hold.until()
    assert producer.asked == ["pause producer", "end_lease r2", "resume producer"]
    assert read.context.evidence == []
    read.seams.emit(BlocksFreed("producer", "r2", (1, 2, 4)))
    assert hold.until()
    (evidence,) = read.context.evidence
    assert f"P was stopped after {index} of 24 copy operations had landed" in evidence.what
    assert evidence.what.endswith("it gave back blocks [1, 2, 4]")
    assert (evidence.before, evidence.after) == ("3 blocks held", "none held")


def test_only_p_s_own_blocks_of_this_request_count_as_freed(read_of) -> None:
    read = read_of(pause(), levers(FakeProducer()))
    read.seams.emit(BlocksFreed("producer", "r2", (1, 2, 4)))  # before P was stopped
    _, hold = read.until_struck()
    assert not hold.until()
    read.seams.emit(BlocksFreed("producer", "r1", (7,)))
    read.seams.emit(BlocksFreed("consumer", "r2", (5, 3, 9)))
    assert not hold.until()
    assert read.context.evidence == []


def test_reuse_waits_for_the_competitor_and_shows_that_p_s_blocks_changed(read_of) -> None:
    competitors = FakeCompetitors()
    read = read_of(pause("blocks_reused"), levers(FakeProducer(), competitors))
    read.seams.emit(KVFinal("producer", "r2", {0: P_BLOCKS}, read.producer))
    _, hold = read.until_struck()
    assert not hold.until()
    read.seams.emit(BlocksFreed("producer", "r2", (1, 2, 4)))
    assert not hold.until()
    assert competitors.released == ["c1"]
    read.producer.fill((2,), b"otherKV!")
    competitors.done = True
    assert hold.until()
    _, reused = read.context.evidence
    assert reused.what == "c1 overwrote blocks of P"
    assert reused.before != reused.after


def test_a_competitor_that_took_other_blocks_is_no_evidence_of_reuse(read_of) -> None:
    competitors = FakeCompetitors(done=True)
    read = read_of(pause("blocks_reused"), levers(FakeProducer(), competitors))
    read.seams.emit(KVFinal("producer", "r2", {0: P_BLOCKS}, read.producer))
    _, hold = read.until_struck()
    assert not hold.until()
    read.seams.emit(BlocksFreed("producer", "r2", (1, 2, 4)))
    read.producer.fill((7,), b"otherKV!")
    assert hold.until()
    assert [evidence.seam for evidence in read.context.evidence] == ["blocks.freed"]


def test_past_the_load_timeout_p_stays_stopped_and_d_reads_on(read_of) -> None:
    read = read_of(pause("load_times_out"), levers(producer := FakeProducer()))
    index, hold = read.until_struck()
    assert hold.until()
    assert producer.asked == ["pause producer"]
    read.seams.emit(RequestEnded("producer", "r2", "length"))
    read.seams.emit(RequestEnded("consumer", "r1", "length"))
    assert read.context.evidence == []
    read.seams.emit(RequestEnded("consumer", "r2", "error"))
    (evidence,) = read.context.evidence
    assert f"after {index} of 24" in evidence.what
    assert "still was when the request ended on D (error)" in evidence.what


def test_a_read_that_is_never_reached_leaves_no_evidence(read_of) -> None:
    read = read_of(pause("load_times_out"), levers(producer := FakeProducer()))
    read.seams.emit(RequestEnded("consumer", "r2", "error"))
    assert (read.context.evidence, producer.asked) == ([], [])


@pytest.mark.parametrize("how", ["lease_ends", "blocks_reused", "load_times_out"])
def test_without_the_levers_nothing_is_held(read_of, how: str) -> None:
    read = read_of(pause(how))
    assert not any(read.post(op).holds for op in read.ops)


@pytest.mark.parametrize(
    ("how", "own"),
    [
        ("lease_ends", {"lever.clock", "blocks.freed"}),
        ("blocks_reused", {"lever.clock", "lever.competitors", "blocks.freed", "producer.kv_final"}),
        ("load_times_out", {"request.ended", "lever.load_timeout"}),
    ],
)
def test_needs(how: str, own: set[str]) -> None:
    needs = PauseProducer.needs(PauseProducerParams.model_validate(pause(how)))
    assert needs == own | {"consumer.load_scheduled", "transfer.op_posted", "transfer.op_landed", "lever.process"}


@pytest.mark.parametrize("wrong", [{"how": "for ever"}, {"when": {"load": 2, "at": "before_read"}}])
def test_parameters_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        PauseProducerParams.model_validate(pause() | wrong)
