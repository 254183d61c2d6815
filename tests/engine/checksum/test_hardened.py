"""Version 2 between two engines: what version 1 verifies or mistakes, version 2 does not (GAP-4, GAP-5, GAP-9)."""

from __future__ import annotations

import base64
import string

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.checksum.consumer import CHECKSUMS_PARAM, ConsumerChecksums
from engine.checksum.hardened import as_summed, bound, prompt_binding, to_sum, unbound
from engine.checksum.payload import Payload, PayloadGroup, PayloadInvalid, PayloadLimits, decode, encode
from engine.checksum.policy import ChecksumSettings, resolve
from engine.checksum.producer import ProducerChecksums
from engine.checksum.records import GroupBlocks, GroupSums, Merge, MergedGroup, WorldShape
from engine.checksum.verdict import VerdictStatus
from engine.checksum.worker import ChecksumWorker
from engine.config import EngineConfig
from engine.errors import StartupError
from engine.paged import PagedKVCache
from engine.request import Request
from engine.seams import Seams

ONE = WorldShape(1, 1)
LIMITS = PayloadLimits.for_engine(4096, (16,))
PROMPT = [7, 300, 2, 65_000] * 12
BOTH = pytest.mark.parametrize("version", [1, 2])


def engine() -> tuple[PagedKVCache, ChecksumWorker]:
    """Two layers, each [blocks, K or V, tokens, heads, width], of random contents."""
    generator = torch.Generator().manual_seed(1)
    cache = PagedKVCache(EngineConfig("e", num_blocks=8, layout="NHD"))
    for layer in cache.layers:
        layer.copy_(torch.randn(layer.shape, generator=generator))
    return cache, ChecksumWorker([cache])


def blocks(tokens: int, start: int = 0) -> dict[int, GroupBlocks]:
    return {0: GroupBlocks(0, 16, start, tuple(range(1 + start, 1 + -(-tokens // 16))), tokens)}


def sent(version: int, prompt: list[int], worker: ChecksumWorker) -> str:
    """What P answers for a prompt whose KV lies in blocks 1, 2 and so on of its cache."""
    producer = ProducerChecksums(ONE, version=version)
    groups = producer.register("r", 1, blocks(len(prompt)), prompt)
    producer.add(1, "r", [worker.checksum("r", groups).finalise()])
    text = producer.take("r")
    assert text is not None
    return text


def judged(text: str, prompt: list[int], worker: ChecksumWorker, start: int = 0):
    """What D concludes from a load into the same blocks of its own cache."""
    consumer = ConsumerChecksums("D", ONE, 1008, Seams())
    request = Request("r", list(prompt), 1, {"do_remote_prefill": True, CHECKSUMS_PARAM: text})
    groups = consumer.start(request, blocks(len(prompt), start), 1)
    consumer.add(1, "r", [worker.checksum("r", groups).finalise()])
    return consumer.judge("r")


@pytest.mark.req("HRD-5")
@BOTH
def test_the_same_kv_verifies_with_either_version(version):
    _, worker = engine()
    for tokens in (1, 16, 17, 48):
        verdict = judged(sent(version, PROMPT[:tokens], worker), PROMPT[:tokens], worker)
        assert verdict.status is VerdictStatus.VERIFIED
        assert verdict.groups[0].compared == tuple(range(-(-tokens // 16)))
    behind_a_prefix = judged(sent(version, PROMPT, worker), PROMPT, worker, start=2)
    assert behind_a_prefix.groups[0].compared == (2,)
    assert behind_a_prefix.status is VerdictStatus.VERIFIED


@pytest.mark.req("HRD-5")
def test_version_1_is_the_default_and_the_other_is_asked_for():
    _, worker = engine()
    assert ProducerChecksums(ONE).register("r", 1, blocks(20)) == blocks(20)
    assert decode(sent(1, PROMPT, worker), LIMITS).version == 1
    assert decode(sent(2, PROMPT, worker), LIMITS).version == 2
    assert resolve(ChecksumSettings(kv_checksum_mode="log")).version == 1
    assert resolve(ChecksumSettings(kv_checksum_mode="log", kv_checksum_version=2)).version == 2
    with pytest.raises(StartupError, match="kv_checksum_version is 3: use 1 or 2"):
        resolve(ChecksumSettings(kv_checksum_version=3))


@pytest.mark.req("GAP-8", "HRD-1")
@BOTH
def test_two_flips_of_bit_63_in_a_block(version):
    cache, worker = engine()
    text = sent(version, PROMPT, worker)
    pieces = cache.layers[0].view(torch.int64)
    pieces[1, 0, 3, 0, 0] ^= -(2**63)
    pieces[1, 1, 9, 1, 2] ^= -(2**63)
    verdict = judged(text, PROMPT, worker)
    assert verdict.status is (VerdictStatus.VERIFIED if version == 1 else VerdictStatus.MISMATCH)


@pytest.mark.req("GAP-5", "HRD-3")
@BOTH
def test_the_checksums_of_another_prompt(version):
    """D has loaded the other request's KV with the other request's checksums, so the bytes agree."""
    _, worker = engine()
    other = [1, *PROMPT[1:]]
    verdict = judged(sent(version, other, worker), PROMPT, worker)
    if version == 1:
        assert verdict.status is VerdictStatus.VERIFIED
    else:
        assert verdict.status is VerdictStatus.MISMATCH
        assert verdict.groups[0].differing == (0, 1, 2)


@pytest.mark.req("GAP-4", "HRD-4")
@BOTH
@pytest.mark.parametrize("flip", [False, True])
def test_a_last_block_of_which_the_producer_holds_less(version, flip):
    """P has 40 tokens of D's 45: of its third block, version 2 compares the eight that both have."""
    cache, worker = engine()
    text = sent(version, PROMPT[:40], worker)
    if flip:
        cache.layers[1].view(torch.int64)[3, 1, 7, 1, 0] ^= 1
    cache.layers[1].view(torch.int64)[3, 1, 8, 1, 0] ^= 1  # P has no such token
    verdict = judged(text, PROMPT[:45], worker)
    if version == 1:
        assert verdict.groups[0].not_compared == (2,)
        assert verdict.status is VerdictStatus.VERIFIED
    else:
        assert verdict.groups[0].compared == (0, 1, 2)
        assert verdict.groups[0].differing == ((2,) if flip else ())


def outcomes(text: str) -> dict[str, int]:
    """Every character replaced by 12 others: how D would read it."""
    clean = decode(text, LIMITS)
    counts = {"invalid": 0, "read as something else": 0}
    rng = np.random.default_rng(1)
    alphabet = string.ascii_letters + string.digits + "+/="
    for place in range(len(text)):
        for other in rng.choice([c for c in alphabet if c != text[place]], 12, replace=False):
            try:
                payload = decode(text[:place] + str(other) + text[place + 1 :], LIMITS)
            except PayloadInvalid:
                counts["invalid"] += 1
            else:
                assert payload != clean
                counts["read as something else"] += 1
    return counts


@pytest.mark.req("GAP-9", "HRD-2")
def test_a_changed_character_is_always_seen_by_version_2():
    _, worker = engine()
    first, second = (outcomes(sent(version, PROMPT, worker)) for version in (1, 2))
    assert first["read as something else"] > first["invalid"]
    assert second["read as something else"] == 0


@pytest.mark.req("HRD-2", "WIR-2")
def test_a_payload_of_version_2_needs_its_check():
    _, worker = engine()
    payload = decode(sent(2, PROMPT, worker), LIMITS)
    assert decode(encode(payload), LIMITS) == payload
    with pytest.raises(PayloadInvalid, match="4 fields"):
        decode(encode(Payload(payload.tp_size, payload.num_tokens, payload.groups)).replace("lAE", "lAI", 1), LIMITS)
    with pytest.raises(PayloadInvalid, match="this engine reads 1 and 2"):
        encode(Payload(1, 20, payload.groups, 3))


@pytest.mark.req("HRD-2", "WIR-2")
def test_no_field_is_packed_before_it_is_read(monkeypatch):
    """msgpack reads deeper nests than it can write: hashing what arrived as it is would raise its ValueError."""
    deep = base64.b64encode(b"\x95\x02\x01\x01" + b"\x91" * 1000 + b"\x90" + b"\xc4\x08" + bytes(8)).decode()
    with monkeypatch.context() as patched:
        patched.setattr("msgpack.packb", lambda fields: pytest.fail("packed"))
        with pytest.raises(PayloadInvalid, match="is not an array of group_id"):
            decode(deep, LIMITS)
    with pytest.raises(PayloadInvalid, match="tp_size is 18446744073709551616, outside"):
        encode(Payload(2**64, 20, (), 2))


@pytest.mark.req("HRD-3")
@settings(max_examples=50)
@given(
    prompt=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=30),
    values=st.lists(st.integers(0, 2**64 - 1), max_size=4),
    more=st.lists(st.integers(0, 2**32 - 1), max_size=5),
)
def test_what_is_bound_is_unbound_by_the_same_prompt_only(prompt, values, more):
    group = PayloadGroup(0, 9, 16, 0, np.array(values, dtype=np.uint64))
    payload = Payload(1, len(prompt), (group,), 2)
    text = encode(bound(payload, prompt_binding(prompt)))
    received = decode(text, PayloadLimits.for_engine(4096, (1,)))
    assert unbound(received, prompt + more) == payload
    if values:
        assert unbound(received, [prompt[0] ^ 1, *prompt[1:]]) != payload
        assert received != payload
    plain = Payload(1, len(prompt), (group,))
    assert unbound(plain, prompt) == plain


@pytest.mark.req("HRD-3")
def test_a_binding_is_of_the_salt_and_of_every_token_in_its_place():
    bindings = [
        prompt_binding([1, 2]),
        prompt_binding([2, 1]),
        prompt_binding([1, 2, 0]),
        prompt_binding([1]),
        prompt_binding([1, 2], "a"),
        prompt_binding([1, 2], "b"),
        prompt_binding([], "a"),
        prompt_binding([0x61], ""),
    ]
    assert len(set(bindings)) == len(bindings)
    assert prompt_binding((1, 2)) == prompt_binding([1, 2])


@pytest.mark.req("HRD-4")
def test_version_1_is_summed_as_before_and_version_2_up_to_what_both_hold():
    scheduled = blocks(45)
    assert to_sum(scheduled, 1, 40) is scheduled
    assert to_sum(scheduled, 2)[0].tokens_to_sum == 45
    assert to_sum(scheduled, 2, 40)[0].tokens_to_sum == 40
    assert to_sum(scheduled, 2, 99)[0].tokens_to_sum == 45
    merged = MergedGroup(to_sum(scheduled, 2, 40)[0], 9, np.zeros(3, dtype=np.uint64))
    merge = Merge({0: merged}, False, frozenset(), frozenset(), frozenset())
    assert as_summed(merge).groups[0].blocks.num_tokens == 40


def test_workers_that_sum_by_another_version_are_other_blocks():
    _, worker = engine()
    consumer = ConsumerChecksums("D", ONE, 1008, Seams())
    text = sent(2, PROMPT, worker)
    consumer.start(Request("r", list(PROMPT), 1, {"do_remote_prefill": True, CHECKSUMS_PARAM: text}), blocks(48), 1)
    record = worker.checksum("r", blocks(48)).finalise()
    assert isinstance(record.groups[0], GroupSums)
    consumer.add(1, "r", [record])
    assert consumer.judge("r").reason == "other_blocks"
