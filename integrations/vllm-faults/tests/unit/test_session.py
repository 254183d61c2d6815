"""Who may arm a fault, what happens in which order at a moment, and that nothing happens until something is armed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kvchaos_vllm_faults.blocks import CHECKSUMMED, FIRST_USE, KV_FINAL, LOAD_FINISHED, READ_DONE, Blocks
from kvchaos_vllm_faults.faults import Order, OrderError
from kvchaos_vllm_faults.faults.base import Read
from kvchaos_vllm_faults.memory import EngineMemory
from kvchaos_vllm_faults.session import Session
from kvchaos_vllm_faults.token import VARIABLE, ArmError, why_not_armable

TOKEN = "0123456789abcdef"
FLIP = Order("bit_flip", "r2", "before_verify")


@pytest.fixture
def session(memory: EngineMemory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    monkeypatch.setenv(VARIABLE, TOKEN)
    made = Session()
    made.memory = memory
    return made


@pytest.mark.parametrize(("token", "why"), [("", "is not set"), ("short", "has 5 characters")])
def test_without_a_token_nothing_can_be_armed(
    session: Session, monkeypatch: pytest.MonkeyPatch, token: str, why: str
) -> None:
    monkeypatch.setenv(VARIABLE, token)
    with pytest.raises(ArmError, match=why):
        session.arm(FLIP, token)
    assert why in (why_not_armable() or "")
    assert session.idle


def test_another_token_arms_nothing(session: Session) -> None:
    with pytest.raises(ArmError, match="is not that of"):
        session.arm(FLIP, TOKEN + "0")
    assert session.idle


def test_an_order_that_nobody_can_follow_arms_nothing(session: Session) -> None:
    with pytest.raises(OrderError):
        session.arm(Order("bit_flip", "r2", "never"), TOKEN)
    assert session.idle


def test_nothing_happens_until_something_is_armed(session: Session, memory: EngineMemory, load: Blocks) -> None:
    before = memory.read(range(memory.num_blocks))
    session.kv(LOAD_FINISHED, "r2", load)
    read = Read((1,), (2,))
    assert session.reads("r2", read) == [read]
    assert (memory.read(range(memory.num_blocks)) == before).all()


def test_only_the_named_request_is_touched(session: Session, memory: EngineMemory, load: Blocks) -> None:
    session.name_of = lambda request_id: request_id.split("-")[0]
    session.arm(FLIP, TOKEN)
    session.kv(LOAD_FINISHED, "r1-77", load)
    assert not session.take_evidence()
    session.kv(LOAD_FINISHED, "r2-78", load)
    assert len(session.take_evidence()) == 1
    assert not session.take_evidence(), "told once"


@pytest.mark.parametrize(
    ("moment", "at", "sees_change"),
    [
        (KV_FINAL, "before_checksum", False),
        (CHECKSUMMED, "after_checksum", False),
        (LOAD_FINISHED, "before_verify", True),
    ],
)
def test_a_listener_sees_p_before_a_fault_and_d_after_it(
    session: Session, memory: EngineMemory, load: Blocks, moment: str, at: str, sees_change: bool
) -> None:
    before, seen = memory.read(load.block_ids), []
    session.listener = lambda *told: seen.append((told[0], told[3].read(load.block_ids)))
    session.arm(Order("bit_flip", "r2", at), TOKEN)
    session.kv(moment, "r2", load)
    ((told, kv),) = seen
    assert told == moment
    assert (kv != before).any() == sees_change
    assert (memory.read(load.block_ids) != before).any()


def test_a_load_that_is_held_after_its_read_waits_before_anybody_looks(session: Session, load: Blocks) -> None:
    order: list[str] = []
    session.wait = lambda request, why: order.append(f"wait {request}")
    session.listener = lambda moment, *rest: order.append(moment)
    session.arm(Order("early_reuse", "r2", "after_read"), TOKEN)
    session.kv(READ_DONE, "r2", load)
    session.kv(LOAD_FINISHED, "r2", load)
    assert order == ["wait r2", READ_DONE, LOAD_FINISHED]


def test_reuse_is_proved_by_what_the_blocks_hold_now(session: Session, memory: EngineMemory) -> None:
    blocks = Blocks(0, (1, 2), 8, 16)
    session.arm(Order("early_reuse", "r2", "before_read"), TOKEN)
    session.kv(KV_FINAL, "r2", blocks)
    before = session.digests(blocks)
    memory.fill([2], b"COMPETES")
    session.reused("r2", "c1", before)
    (proof,) = session.take_evidence()
    assert proof.before == before[1]
    assert proof.after == session.digests(blocks)[1]


def test_disarming_forgets_everything(session: Session, memory: EngineMemory, load: Blocks) -> None:
    session.arm(FLIP, TOKEN)
    session.kv(KV_FINAL, "r2", load)
    assert session.disarm() == [("bit_flip", "r2", 0)]
    assert session.idle
    assert session.final_blocks("r2") is None
    before = memory.read(load.block_ids)
    session.kv(FIRST_USE, "r2", load)
    assert (memory.read(load.block_ids) == before).all()
