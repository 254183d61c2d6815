"""Each fault does what it says to the bytes, the parameters or the read, and proves it."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest
from kvchaos_vllm_faults.blocks import CHECKSUMMED, KV_FINAL, LOAD_FINISHED, LOAD_SCHEDULED, READ_DONE, VERIFIED, Blocks
from kvchaos_vllm_faults.evidence import Evidence, digest
from kvchaos_vllm_faults.faults import FAULTS, Fault, OrderError
from kvchaos_vllm_faults.faults.base import Read
from kvchaos_vllm_faults.memory import EngineMemory

Arm = Callable[..., Fault]
READ = Read((7, 3, 9), (20, 21, 22), preceding=19)
MOMENTS = {
    "before_checksum": KV_FINAL, "after_checksum": CHECKSUMMED, "before_verify": LOAD_FINISHED, "after_verify": VERIFIED
}  # fmt: skip


def everything(memory: EngineMemory) -> np.ndarray:
    return memory.read(range(memory.num_blocks))


def bits_changed(before: np.ndarray, after: np.ndarray) -> int:
    return int(np.unpackbits(before ^ after).sum())


@pytest.mark.parametrize("at", MOMENTS)
@pytest.mark.parametrize("seed", range(5))
def test_one_bit_of_a_token_that_counts_flips(
    arm: Arm, memory: EngineMemory, load: Blocks, evidence: list[Evidence], at: str, seed: int
) -> None:
    fault = arm("bit_flip", at, seed=seed)
    before = everything(memory)
    valid = memory.tokens(load)
    for moment in MOMENTS.values():
        fault.on_kv(moment, load, memory)
    assert bits_changed(before, everything(memory)) == 1
    assert bits_changed(valid, memory.tokens(load)) == 1
    (proof,) = evidence
    assert (proof.moment, proof.request) == (MOMENTS[at], "r2")
    assert proof.before != proof.after


def test_a_flip_after_verification_spares_the_token_that_is_computed_again(
    arm: Arm, memory: EngineMemory, load: Blocks
) -> None:
    for seed in range(40):
        arm("bit_flip", "after_verify", seed=seed).on_kv(VERIFIED, load, memory)
    last = memory.tokens(load)[:, :, -1]
    fresh = memory.read([9])[:, :, 0, 4]
    assert (last == fresh).all()
    # The last token lies in slot 4 of block 9: none of the flips has hit it.
    arm("bit_flip", "after_verify", token=28).on_kv(VERIFIED, load, memory)
    assert (memory.tokens(load)[:, :, -1] == last).all()


def test_a_flip_behind_the_last_token(arm: Arm, memory: EngineMemory, load: Blocks, evidence: list[Evidence]) -> None:
    before, valid = everything(memory), memory.tokens(load)
    arm("bit_flip", "before_verify", where="past_end").on_kv(LOAD_FINISHED, load, memory)
    assert bits_changed(before, everything(memory)) == 1
    assert (memory.tokens(load) == valid).all()
    assert len(evidence) == 1


def test_a_flip_at_a_place_that_is_named(arm: Arm, memory: EngineMemory, load: Blocks) -> None:
    before = memory.read([3])
    place = {"layer": 2, "head": 1, "token": 19, "byte": 5, "bit": 6}
    arm("bit_flip", "before_verify", **place).on_kv(LOAD_FINISHED, load, memory)
    assert memory.read([3])[2, 1, 0, 3, 5] == before[2, 1, 0, 3, 5] ^ 0b0100_0000


@pytest.mark.parametrize("place", [{"token": 3}, {"token": 29}, {"layer": 3}, {"head": 2}, {"byte": 32}])
def test_a_place_that_the_load_does_not_have(
    arm: Arm, memory: EngineMemory, load: Blocks, evidence: list[Evidence], place: dict[str, int]
) -> None:
    before = everything(memory)
    arm("bit_flip", "before_verify", **place).on_kv(LOAD_FINISHED, load, memory)
    assert (everything(memory) == before).all()
    assert not evidence


def test_bit_63_of_two_pieces_of_one_block(arm: Arm, memory: EngineMemory, load: Blocks) -> None:
    before = memory.read(load.block_ids)
    arm("bit_flip", "before_verify", pattern="bit63_pair").on_kv(LOAD_FINISHED, load, memory)
    changed = np.argwhere(before != memory.read(load.block_ids))
    assert len(changed) == 2
    assert len({block for _, _, block, _, _ in changed.tolist()}) == 1
    assert all(byte % 8 == 7 for *_, byte in changed.tolist())


@pytest.mark.parametrize("how", ["swap_tokens", "swap_heads", "swap_layers", "swap_kv"])
def test_parts_that_are_exchanged_are_the_same_bytes_elsewhere(
    arm: Arm, memory: EngineMemory, load: Blocks, evidence: list[Evidence], how: str
) -> None:
    before, rest = memory.read(load.block_ids), memory.read([1, 2])
    arm("misplace", "in_flight", how=how).on_kv(LOAD_FINISHED, load, memory)
    after = memory.read(load.block_ids)
    assert sorted(before.tobytes()) == sorted(after.tobytes())
    assert (before != after).any()
    assert (memory.read([1, 2]) == rest).all()
    for proof in evidence:
        assert proof.before != proof.after


def test_k_and_v_exchanged_twice_are_what_they_were(arm: Arm, memory: EngineMemory, load: Blocks) -> None:
    before = memory.read(load.block_ids)
    for _ in range(2):
        arm("misplace", "in_flight", how="swap_kv").on_kv(LOAD_FINISHED, load, memory)
    assert (memory.read(load.block_ids) == before).all()


def test_hnd_read_as_nhd_takes_heads_for_slots(arm: Arm, memory: EngineMemory, load: Blocks) -> None:
    lying = memory.read([7])[0, :, 0].copy()  # [heads, slots, bytes], K and V in one row
    arm("layout_mismatch", "in_flight", how="hnd_as_nhd").on_kv(LOAD_FINISHED, load, memory)
    heads, slots, width = lying.shape
    rows = lying.reshape(heads * slots, width)
    read = memory.read([7])[0, :, 0]
    for head in range(heads):
        for slot in range(slots):
            assert (read[head, slot] == rows[slot * heads + head]).all()


@pytest.mark.parametrize(
    ("how", "wanted"),
    [("reverse", (22, 21, 20)), ("shift", (19, 20, 21))],
)
def test_blocks_are_read_from_wrong_addresses(arm: Arm, how: str, wanted: tuple[int, ...]) -> None:
    (read,) = arm("misplace", "in_flight", how=how).on_read(READ)
    assert (read.local, read.remote, read.tells) == ((7, 3, 9), wanted, True)


def test_the_first_block_of_a_request_has_none_before_it(arm: Arm) -> None:
    (read,) = arm("misplace", "in_flight", how="shift").on_read(Read((7, 3), (20, 21)))
    assert read.remote == (20, 20)


@pytest.mark.parametrize("seed", range(5))
def test_two_blocks_swapped_and_one_duplicated(arm: Arm, seed: int) -> None:
    (swapped,) = arm("misplace", "in_flight", how="swap_blocks", seed=seed).on_read(READ)
    assert sorted(swapped.remote) == [20, 21, 22]
    assert sum(new != old for new, old in zip(swapped.remote, READ.remote, strict=True)) == 2
    (doubled,) = arm("misplace", "in_flight", how="duplicate", seed=seed).on_read(READ)
    assert len(set(doubled.remote)) == 2


def test_the_blocks_of_another_request(arm: Arm) -> None:
    other = {"remote_block_ids": [[30, 31, 32, 33]]}
    (read,) = arm("misplace", "in_flight", how="other_request", other=other).on_read(READ)
    assert read.remote == (31, 32, 33)
    (short,) = arm("misplace", "in_flight", how="other_request", other={"remote_block_ids": [[40]]}).on_read(READ)
    assert short.remote == (40, 21, 22)
    with pytest.raises(OrderError, match="other_request needs the other load"):
        arm("misplace", "in_flight", how="other_request")


def test_a_block_id_that_p_does_not_have(arm: Arm, evidence: list[Evidence]) -> None:
    params = {"remote_block_ids": [[3, 4, 5]], "x": 1}
    spoiled = arm("misplace", "params_pass", how="out_of_range").on_params(params, 128)
    (ids,) = spoiled["remote_block_ids"]
    assert sum(old != new for old, new in zip((3, 4, 5), ids, strict=True)) == 1
    assert 128 <= max(ids) < 256
    assert (spoiled["x"], params["remote_block_ids"]) == (1, [[3, 4, 5]])
    assert len(evidence) == 1


def test_misplaced_blocks_are_proved_by_what_p_held(
    arm: Arm, memory: EngineMemory, load: Blocks, evidence: list[Evidence]
) -> None:
    kv = memory.read(load.block_ids)
    arrived = {p: digest(kv[:, :, n, : load.tokens_at(p)]) for n, p in enumerate(load.positions)}
    right = arm("misplace", "in_flight", how="reverse", held=arrived)
    right.on_read(READ)
    right.on_kv(LOAD_FINISHED, load, memory)
    assert not evidence, "what arrived is what P held: nothing was misplaced"
    wrong = arm("misplace", "in_flight", how="reverse", held=dict.fromkeys(arrived, "other"))
    wrong.on_read(READ)
    wrong.on_kv(LOAD_FINISHED, load, memory)
    # The middle block is read from where it is.
    assert [proof.after for proof in evidence] == [arrived[1], arrived[3]]


@pytest.mark.parametrize("moved", [0, 1, 2])
def test_a_short_transfer_leaves_poison(
    arm: Arm, memory: EngineMemory, load: Blocks, evidence: list[Evidence], moved: int
) -> None:
    fault = arm("short_transfer", "in_flight", moved_blocks=moved)
    fault.on_kv(LOAD_SCHEDULED, load, memory)
    (read,) = fault.on_read(READ)
    assert (read.local, read.remote) == ((7, 3, 9)[:moved], (20, 21, 22)[:moved])
    fault.on_kv(LOAD_FINISHED, load, memory)
    assert len(evidence) == 3 - moved
    assert memory.read([9]).tobytes() == b"POISONED" * (memory.read([9]).size // 8)


def test_a_transfer_that_was_whole_after_all_proves_nothing(
    arm: Arm, memory: EngineMemory, load: Blocks, evidence: list[Evidence]
) -> None:
    fault = arm("short_transfer", "in_flight", moved_blocks=1)
    fault.on_kv(LOAD_SCHEDULED, load, memory)
    kv = memory.read(load.block_ids)
    memory.write(load.block_ids, kv ^ 1)
    fault.on_kv(LOAD_FINISHED, load, memory)
    assert not evidence


def payload(num_tokens: int = 29, blocks: int = 4) -> str:
    group = [0, 77, 8, 0, bytes(range(8 * blocks))]
    return base64.b64encode(msgpack.packb([1, 1, num_tokens, [group]])).decode()


def read(text: str) -> list[Any]:
    return msgpack.unpackb(base64.b64decode(text))


@pytest.mark.parametrize(
    ("how", "check"),
    [
        ("lose", lambda text: text is None),
        ("cut", lambda text: text == payload()[: len(payload()) // 2]),
        ("alter_version", lambda text: read(text)[0] != 1 and read(text)[1:] == read(payload())[1:]),
        ("alter_num_tokens", lambda text: read(text)[2] == 28),
        ("alter_tp_size", lambda text: read(text)[1] == 2),
        ("shorten", lambda text: read(text)[2] == 24 and len(read(text)[3][0][4]) == 24),
    ],
)
def test_checksums_are_spoiled(arm: Arm, evidence: list[Evidence], how: str, check: Callable[[Any], bool]) -> None:
    params = arm("drop_checksums", "params_pass", how=how).on_params({"kv_checksums": payload(), "x": 1}, 128)
    assert check(params.get("kv_checksums"))
    assert params["x"] == 1
    assert len(evidence) == 1


def test_one_bit_of_one_value_is_altered(arm: Arm) -> None:
    params = arm("drop_checksums", "params_pass", how="alter_value").on_params({"kv_checksums": payload()}, 128)
    old, new = read(payload())[3][0][4], read(params["kv_checksums"])[3][0][4]
    assert sum((a ^ b).bit_count() for a, b in zip(old, new, strict=True)) == 1


def test_without_checksums_there_is_nothing_to_spoil(arm: Arm, evidence: list[Evidence]) -> None:
    assert arm("drop_checksums", "params_pass", how="lose").on_params({"x": 1}, 128) == {"x": 1}
    assert not evidence


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        ("whole", {"remote_block_ids": [[8]], "kv_checksums": "theirs"}),
        ("ids_only", {"remote_block_ids": [[8]], "kv_checksums": "ours", "own": 1}),
        ("checksums_only", {"remote_block_ids": [[7]], "kv_checksums": "theirs", "own": 1}),
    ],
)
def test_params_are_swapped(arm: Arm, evidence: list[Evidence], how: str, wanted: dict[str, Any]) -> None:
    other = {"remote_block_ids": [[8]], "kv_checksums": "theirs"}
    fault = arm("swap_params", "params_pass", how=how, other=other)
    assert fault.on_params({"remote_block_ids": [[7]], "kv_checksums": "ours", "own": 1}, 128) == wanted
    assert len(evidence) == 1


def test_early_reuse_holds_the_read_or_its_second_half(arm: Arm) -> None:
    (whole,) = arm("early_reuse", "before_read").on_read(READ)
    assert (whole.hold, whole.tells, whole.local) == (True, True, READ.local)
    first, second = arm("early_reuse", "mid_read").on_read(READ)
    assert (first.hold, first.tells, first.local) == (False, False, (7,))
    assert (second.hold, second.tells, second.local) == (True, True, (3, 9))
    assert arm("early_reuse", "after_read").on_read(READ) == (READ,)


def test_reused_blocks_are_proved_one_by_one(arm: Arm, evidence: list[Evidence]) -> None:
    blocks = Blocks(0, (4, 5), 8, 16)
    arm("early_reuse", "before_read").on_reuse("c1", {0: "a", 1: "b"}, {0: "a", 1: "c"}, blocks)
    assert [(proof.before, proof.after) for proof in evidence] == [("b", "c")]
    assert "block 5" in evidence[0].what


@pytest.mark.parametrize("at", ["before_checksum", "params_pass", "mid_read", "after_read", "after_verify"])
def test_a_noop_proves_that_its_moment_was_reached_and_does_nothing(
    arm: Arm, memory: EngineMemory, load: Blocks, evidence: list[Evidence], at: str
) -> None:
    fault = arm("noop", at)
    before = everything(memory)
    for moment in (*MOMENTS.values(), LOAD_SCHEDULED, READ_DONE):
        fault.on_kv(moment, load, memory)
    assert fault.on_params({"x": 1}, 128) == {"x": 1}
    assert fault.on_read(READ) == (READ,)
    assert (everything(memory) == before).all()
    assert len(evidence) == 1


@pytest.mark.parametrize("kind", FAULTS)
def test_a_moment_that_a_kind_does_not_have(arm: Arm, kind: str) -> None:
    how = {"misplace": "shift", "layout_mismatch": "hnd_as_nhd"}.get(kind)
    with pytest.raises(OrderError, match="not at 'now'"):
        arm(kind, "now", how=how)


@pytest.mark.parametrize("kind", ["misplace", "layout_mismatch", "drop_checksums", "swap_params"])
def test_a_how_that_a_kind_does_not_have(arm: Arm, kind: str) -> None:
    at = "in_flight" if kind in ("misplace", "layout_mismatch") else "params_pass"
    with pytest.raises(OrderError, match="sideways"):
        arm(kind, at, how="sideways", other={})


def test_a_kind_that_does_not_exist(arm: Arm) -> None:
    with pytest.raises(OrderError, match="no fault 'gremlin'"):
        arm("gremlin", "in_flight")
