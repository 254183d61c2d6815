"""150,000 hostile payloads through the decoder and the verdict: nothing crashes, nothing wrong is verified (WIR-2)."""

import base64
import hashlib
import random
import tracemalloc
from dataclasses import replace

import msgpack
import numpy as np
import pytest

from engine.checksum.hardened import as_summed, to_sum
from engine.checksum.payload import PayloadInvalid, PayloadLimits, decode
from engine.checksum.records import GroupBlocks, Merge, MergedGroup
from engine.checksum.verdict import VerdictStatus, judge_load

LIMITS = PayloadLimits.for_engine(4096, (16, 16))
MIB = 2**20
LOADED = {0: GroupBlocks(0, 16, 0, tuple(range(9)), 140), 1: GroupBlocks(1, 16, 2, tuple(range(7)), 140)}


def to_text(fields):
    return base64.b64encode(msgpack.packb(fields)).decode()


def with_check(fields):
    """The fields of version 2 end with their check, which whoever alters them can compute anew."""
    if fields[0] != 2:
        return fields
    return [*fields, hashlib.sha256(msgpack.packb(fields)).digest()[:8]]


def own_side(rng):
    """What D's workers summed."""
    groups = {
        g: MergedGroup(blocks, 1000 + g, np.array([rng.getrandbits(64) for _ in blocks.block_ids], dtype=np.uint64))
        for g, blocks in LOADED.items()
    }
    return Merge(groups, False, frozenset(), frozenset(), frozenset())


def sent_fields(merge, version):
    groups = [
        [g, m.fingerprint, m.blocks.block_size, m.blocks.start, m.values.astype("<u8").tobytes()]
        for g, m in merge.groups.items()
    ]
    return [version, 2, 140, groups]


def random_fields(rng, depth=0):
    """Anything that msgpack can say."""
    choices = [
        lambda: rng.choice([True, False, None, rng.random(), -1, 2**63, 2**64 - 1, rng.getrandbits(16)]),
        lambda: rng.randbytes(rng.randrange(20)),
        lambda: "x" * rng.randrange(5),
        lambda: msgpack.ExtType(rng.randrange(128), rng.randbytes(4)),
        lambda: msgpack.Timestamp(rng.getrandbits(30)),
        lambda: [random_fields(rng, depth + 1) for _ in range(rng.randrange(6))] if depth < 5 else 0,
        lambda: {rng.randrange(9): random_fields(rng, depth + 1)} if depth < 5 else 0,
    ]
    return rng.choice(choices)()


def change_a_field(rng, fields):
    fields = [*fields[:3], [list(group) for group in fields[3]]]
    target = rng.choice([fields, *fields[3]])
    index = rng.randrange(len(target))
    if isinstance(target[index], bytes):
        cut = rng.randrange(len(target[index]))
        target[index] = rng.choice([target[index][:cut], target[index][cut:], target[index][: cut // 8 * 8]])
    elif isinstance(target[index], list):
        target[index] = rng.choice([target[index][::-1], target[index][:1], target[index] * 2, random_fields(rng)])
    else:
        target[index] = rng.choice([target[index] + 1, rng.randrange(200), random_fields(rng)])
    return to_text(with_check(fields))


def flip_bits(rng, raw):
    changed = bytearray(raw)
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        changed[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    return base64.b64encode(bytes(changed)).decode()


def change_characters(rng, text):
    at = rng.randrange(len(text))
    return text[:at] + chr(rng.choice([rng.randrange(128), rng.randrange(32, 127), 0xD800, 0x1F600])) + text[at + 1 :]


def hostile_texts(rng, fields, count):
    raw, good = msgpack.packb(with_check(fields)), to_text(with_check(fields))
    oversized = "A" * (LIMITS.max_base64 + 1)
    kinds = [
        lambda: good,
        lambda: good[: rng.randrange(len(good))],
        lambda: base64.b64encode(raw[: rng.randrange(len(raw))]).decode(),
        lambda: flip_bits(rng, raw),
        lambda: flip_bits(rng, raw),
        lambda: change_characters(rng, good),
        lambda: change_a_field(rng, fields),
        lambda: change_a_field(rng, fields),
        lambda: to_text(random_fields(rng)),
        lambda: base64.b64encode(rng.randbytes(rng.randrange(200))).decode(),
        lambda: base64.b64encode(rng.choice([b"\x95", b"\x94\x01", b"\xdd\x00\x00\xff\xff"]) * 900).decode(),
        lambda: oversized,
        lambda: rng.choice([None, 7, raw, [good], {}]),
    ]
    for index in range(count):
        yield kinds[index % len(kinds)]()


def common_values_agree(payload, merge):
    """Independently of the verdict: does every block that both sides hold alike have D's own value?"""
    for group in payload.groups:
        mine = merge.groups[group.group_id]
        held = dict(enumerate(map(int, mine.values), start=mine.blocks.start))
        for offset, value in enumerate(map(int, group.values)):
            position = group.start + offset
            first, end = position * mine.blocks.block_size, (position + 1) * mine.blocks.block_size
            theirs, ours = (len(range(first, min(end, n))) for n in (payload.num_tokens, mine.blocks.num_tokens))
            if position in held and theirs == ours > 0 and held[position] != value:
                return False
    return True


def judged(payload, merge):
    """The verdict, and D's side as it was summed: version 2 sums no token that P did not."""
    groups = to_sum(LOADED, payload.version, payload.num_tokens)
    summed = {g: replace(merged, blocks=groups[g]) for g, merged in merge.groups.items()}
    merge = as_summed(replace(merge, groups=summed))
    judge_load(payload, groups, merge, compare_block_sizes=True)  # whatever it says: it must not crash
    return judge_load(payload, groups, merge), merge


@pytest.mark.req("WIR-2", "VER-1", "VER-6", "GAP-9", "HRD-2", "HRD-4")
@pytest.mark.parametrize(("version", "count"), [(1, 100_000), (2, 50_000)])
def test_hostile_payloads(version, count):
    rng = random.Random(20260301)
    merge = own_side(rng)
    limits = LIMITS.for_request(140)
    seen = dict.fromkeys(VerdictStatus, 0)
    invalid = 0
    texts = hostile_texts(rng, sent_fields(merge, version), count)
    tracemalloc.start()
    try:
        for text in texts:
            try:
                payload = decode(text, limits)
            except PayloadInvalid:
                invalid += 1
                continue
            verdict, own = judged(payload, merge)
            seen[verdict.status] += 1
            if verdict.status is VerdictStatus.VERIFIED:
                assert {g.group_id for g in payload.groups} == set(own.groups)
                assert common_values_agree(payload, own)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * MIB
    assert invalid > count / 2
    assert seen[VerdictStatus.VERIFIED] > count / 20
    assert seen[VerdictStatus.UNVERIFIED] > count / 50
    # A bit that flips in a value of version 1 is a mismatch, a false one; version 2 has its check for that.
    assert seen[VerdictStatus.MISMATCH] > count / 20 if version == 1 else seen[VerdictStatus.MISMATCH] < count / 50
