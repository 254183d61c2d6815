"""The loads that D will judge: decoded when they start, completed by every worker's record, judged once."""

import logging

import numpy as np
import pytest

from engine.checksum import consumer
from engine.checksum.consumer import CHECKSUMS_PARAM, ConsumerChecksums
from engine.checksum.payload import Payload, PayloadGroup, encode
from engine.checksum.records import GroupBlocks, GroupSums, WorkerRecord, WorldShape
from engine.checksum.verdict import UnverifiedReason, VerdictStatus
from engine.request import Request
from engine.seams import Change, PayloadDecoded, Seams

BLOCKS = {0: GroupBlocks(0, 16, 0, (4, 2), 20)}
PAYLOAD = Payload(1, 20, (PayloadGroup(0, 9, 16, 0, np.array([11, 22], dtype=np.uint64)),))


def request(text, name="r"):
    return Request(name, [1] * 20, 1, {"do_remote_prefill": True, CHECKSUMS_PARAM: text})


def record(rank=0, values=(11, 22)):
    return WorkerRecord("r", rank, 0, {0: GroupSums(BLOCKS[0], 9, np.array(values, dtype=np.uint64))})


@pytest.fixture
def checks():
    return ConsumerChecksums("D", WorldShape(1, 1), 1008, Seams())


def outcome(checks, text, *records, step_id=1):
    checks.start(request(text), BLOCKS, step_id)
    checks.add(step_id, "r", list(records))
    verdict = checks.judge("r")
    assert checks.num_pending == 0
    return verdict.status, verdict.reason


@pytest.mark.req("VER-6", "VER-1")
def test_equal_sums_verify_and_others_do_not(checks):
    assert outcome(checks, encode(PAYLOAD), record()) == (VerdictStatus.VERIFIED, None)
    assert outcome(checks, encode(PAYLOAD), record(values=(11, 23))) == (VerdictStatus.MISMATCH, None)


@pytest.mark.req("CON-5", "CON-3", "VER-3")
def test_the_records_of_all_workers_are_kept_and_summed():
    checks = ConsumerChecksums("D", WorldShape(2, 1), 1008, Seams())
    checks.start(request(encode(PAYLOAD)), BLOCKS, 1)
    checks.add(2, "r", [record(1, (10, 2**64 - 1))])
    checks.add(5, "r", [record(0, (1, 23))])
    assert checks.judge("r").status is VerdictStatus.VERIFIED
    checks.start(request(encode(PAYLOAD)), BLOCKS, 7)
    checks.add(8, "r", [record(1)])
    assert checks.judge("r").reason == "workers_missing"


@pytest.mark.req("VER-3", "WIR-2")
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "no_checksums"),
        ("", "invalid"),
        ("x", "invalid"),
        (5, "invalid"),
        ([], "invalid"),
        ({}, "invalid"),
        (b"kQ==", "invalid"),
        (encode(PAYLOAD)[:-4], "invalid"),
        ("A" * 10**6, "invalid"),
        (encode(Payload(1, 21, PAYLOAD.groups)), "invalid"),
    ],
    ids=[
        "none",
        "empty",
        "short",
        "number",
        "list",
        "dict",
        "bytes",
        "cut",
        "oversized",
        "more tokens than the prompt",
    ],
)
def test_nothing_to_compare_with(checks, text, reason):
    assert outcome(checks, text, record()) == (VerdictStatus.UNVERIFIED, reason)


@pytest.mark.req("VER-2")
@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (PayloadGroup(0, 8, 16, 0, PAYLOAD.groups[0].values), "other_layers"),
        (PayloadGroup(0, 9, 24, 0, PAYLOAD.groups[0].values), "other_block_size"),
        (PayloadGroup(0, 9, 16, 2, PAYLOAD.groups[0].values), "no_common_position"),
        (PayloadGroup(1, 9, 16, 0, PAYLOAD.groups[0].values), "one_side_only"),
    ],
)
def test_another_sender_is_unverified(checks, sent, reason):
    assert outcome(checks, encode(Payload(1, 20, (sent,))), record()) == (VerdictStatus.UNVERIFIED, reason)


def test_records_of_an_earlier_step_are_of_another_request_with_the_id(checks):
    """Its prompt was summed for a consumer, it was aborted, and its record arrives while a new request loads."""
    checks.start(request(encode(PAYLOAD)), BLOCKS, step_id=4)
    checks.add(3, "r", [record(values=(5, 6))])
    checks.add(4, "r", [record()])
    assert checks.judge("r").status is VerdictStatus.VERIFIED


def test_records_of_nobody_are_dropped(checks):
    checks.add(1, "r", [record()])
    assert checks.num_pending == 0


@pytest.mark.req("CON-2", "CON-4")
def test_a_dropped_load_is_neither_judged_nor_counted(checks):
    checks.start(request(encode(PAYLOAD)), BLOCKS, 1)
    checks.drop("r")
    checks.drop("r")
    assert checks.num_pending == 0
    assert not checks.counts


@pytest.mark.req("CON-1")
def test_what_is_decoded_passes_the_seam():
    seams, seen = Seams(), []

    def replace(event):
        seen.append(event)
        return Change(PayloadDecoded(event.engine, event.request_id, UnverifiedReason.INVALID))

    seams.on("consumer.payload_decoded", replace)
    checks = ConsumerChecksums("D", WorldShape(1, 1), 1008, seams)
    assert outcome(checks, encode(PAYLOAD), record()) == (VerdictStatus.UNVERIFIED, "invalid")
    assert seen == [PayloadDecoded("D", "r", PAYLOAD)]


@pytest.mark.req("VER-4")
def test_a_reason_is_warned_of_once_a_process_and_detailed_at_debug_level(checks, caplog, monkeypatch):
    monkeypatch.setattr(consumer, "_warned", set())
    with caplog.at_level(logging.DEBUG):
        for text in (None, None, "x", None):
            outcome(checks, text, record())
    warnings = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert warnings == [
        f"KV loads cannot be verified: {why} (logged once per reason)" for why in ("no_checksums", "invalid")
    ]
    details = [r.message for r in caplog.records if r.message.startswith("request r: load unverified")]
    assert details == [
        f"request r: load unverified: {why}" for why in ("no_checksums",) * 2 + ("invalid", "no_checksums")
    ]
    assert checks.counts == {(VerdictStatus.UNVERIFIED, "no_checksums"): 3, (VerdictStatus.UNVERIFIED, "invalid"): 1}


@pytest.mark.req("VER-1")
def test_every_mismatch_is_an_error(checks, caplog):
    for _ in range(2):
        outcome(checks, encode(PAYLOAD), record(values=(0, 22)))
    errors = [r.message for r in caplog.records if r.levelno == logging.ERROR]
    assert errors == ["request r: KV checksum mismatch, block positions by group: {0: [0]}"] * 2


# ---- checksums that the connector brings (EXT-3)


def later(checks, *texts):
    checks.start(request("what is in the parameters does not count"), BLOCKS, 1, brought_later=True)
    checks.add(1, "r", [record()])
    for text in texts:
        checks.bring("r", text)
    verdict = checks.judge("r")
    return verdict.status, verdict.reason


@pytest.mark.req("EXT-3", "CAR-1")
def test_what_the_connector_brings_before_the_verdict_is_what_counts(checks):
    assert later(checks, encode(PAYLOAD)) == (VerdictStatus.VERIFIED, None)
    assert later(checks, encode(PAYLOAD), "the first counts") == (VerdictStatus.VERIFIED, None)
    assert later(checks, encode(PAYLOAD)[:-4]) == (VerdictStatus.UNVERIFIED, "invalid")


@pytest.mark.req("EXT-3", "VER-3")
def test_what_the_connector_never_brings_is_missing(checks):
    assert later(checks) == (VerdictStatus.UNVERIFIED, "no_checksums")


@pytest.mark.req("EXT-3", "WIR-2")
def test_what_is_brought_is_held_to_the_limits_of_its_request(checks):
    longer = Payload(1, 36, (PayloadGroup(0, 9, 16, 0, np.arange(3, dtype=np.uint64)),))
    assert later(checks, encode(longer)) == (VerdictStatus.UNVERIFIED, "invalid")


def test_what_is_brought_for_nobody_is_ignored(checks):
    checks.bring("r", encode(PAYLOAD))
    assert checks.num_pending == 0


def test_the_seam_is_reached_once_a_load_whenever_its_checksums_come():
    seams, seen = Seams(), []
    seams.on("consumer.payload_decoded", lambda event: seen.append(event.payload))
    checks = ConsumerChecksums("D", WorldShape(1, 1), 1008, seams)
    later(checks)
    later(checks, encode(PAYLOAD))
    outcome(checks, encode(PAYLOAD), record())
    assert [isinstance(payload, Payload) for payload in seen] == [False, True, True]
