from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from engine.checksum.consumer import CHECKSUMS_PARAM
from engine.checksum.payload import CHECK_BYTES, Payload, PayloadGroup, PayloadInvalid, PayloadLimits, decode, encode
from engine.seams import ParamsPass
from faults.drop_checksums import DropChecksums, DropChecksumsParams

HOWS = ("lose", "cut", "alter_version", "alter_value", "alter_num_tokens", "alter_tp_size", "shorten")
VALUES = (1, 2**63 + 5, 2**64 - 1)
SENT = Payload(1, 45, (PayloadGroup(0, 0xABCDEF, 16, 0, np.array(VALUES, np.uint64)),))
LIMITS = PayloadLimits.for_engine(4096, (16,))


def drop(how: str = "lose") -> dict[str, Any]:
    return {"kind": "drop_checksums", "when": {"load": 2, "at": "params_pass"}, "how": how}


def params(text: object = None) -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "unknown": [1, {"x": 2}],
        CHECKSUMS_PARAM: encode(SENT) if text is None else text,
    }


def passed(attach, how: str, seed: int = 0) -> Mapping[str, Any]:
    seams, _ = attach(drop(how), seed)
    return seams.emit(ParamsPass("r2", params())).event.params


@pytest.mark.parametrize("how", HOWS)
def test_only_the_checksums_change(attach, how: str) -> None:
    after = passed(attach, how)
    rest = {key: value for key, value in params().items() if key != CHECKSUMS_PARAM}
    assert {key: value for key, value in after.items() if key != CHECKSUMS_PARAM} == rest
    assert after.get(CHECKSUMS_PARAM) != params()[CHECKSUMS_PARAM]


def test_lose_takes_the_key_away(attach) -> None:
    assert CHECKSUMS_PARAM not in passed(attach, "lose")


def test_cut_leaves_the_first_half(attach) -> None:
    text = encode(SENT)
    assert passed(attach, "cut")[CHECKSUMS_PARAM] == text[: len(text) // 2]


@pytest.mark.parametrize("seed", range(30))
def test_alter_version_changes_one_character_and_only_the_version(attach, seed: int) -> None:
    text = passed(attach, "alter_version", seed)[CHECKSUMS_PARAM]
    assert sum(a != b for a, b in zip(encode(SENT), text, strict=True)) == 1
    with pytest.raises(PayloadInvalid, match="version"):
        decode(text, LIMITS)


@pytest.mark.req("GAP-9")
@pytest.mark.parametrize("seed", range(30))
def test_alter_value_changes_one_character_and_one_bit_of_a_checksum(attach, seed: int) -> None:
    """What arrives is a payload that a producer could have sent."""
    text = passed(attach, "alter_value", seed)[CHECKSUMS_PARAM]
    assert sum(a != b for a, b in zip(encode(SENT), text, strict=True)) == 1
    arrived = decode(text, LIMITS)
    *same, last = arrived.groups[0].values.tolist()
    assert tuple(same) == VALUES[:-1]
    assert (last ^ VALUES[-1]).bit_count() == 1
    assert (arrived.tp_size, arrived.num_tokens) == (SENT.tp_size, SENT.num_tokens)


@pytest.mark.req("GAP-9", "HRD-2")
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("how", [how for how in HOWS if how not in ("lose", "shorten")])
def test_what_changes_on_the_way_keeps_the_check_of_version_2(attach, how: str, seed: int) -> None:
    sent = encode(replace(SENT, version=2))
    text = attach(drop(how), seed)[0].emit(ParamsPass("r2", params(sent))).event.params[CHECKSUMS_PARAM]
    with pytest.raises(PayloadInvalid, match="version" if how == "alter_version" else "payload"):
        decode(text, LIMITS)
    if how != "cut":
        assert base64.b64decode(text)[-CHECK_BYTES:] == base64.b64decode(sent)[-CHECK_BYTES:]
        assert base64.b64decode(text)[:-CHECK_BYTES] != base64.b64decode(sent)[:-CHECK_BYTES]


def test_shorten_stands_for_the_producer_and_makes_the_check_anew(attach) -> None:
    seams, _ = attach(drop("shorten"))
    text = seams.emit(ParamsPass("r2", params(encode(replace(SENT, version=2))))).event.params[CHECKSUMS_PARAM]
    assert decode(text, LIMITS).num_tokens == 32


@pytest.mark.parametrize("how", ["alter_version", "alter_value"])
def test_the_seed_decides_what_is_altered(attach, how: str) -> None:
    found = [passed(attach, how, seed)[CHECKSUMS_PARAM] for seed in range(10)]
    assert found == [passed(attach, how, seed)[CHECKSUMS_PARAM] for seed in range(10)]
    assert len(set(found)) > 1


@pytest.mark.parametrize("how", HOWS)
def test_the_evidence_holds_digests_of_what_was_sent_and_what_went_on(attach, how: str) -> None:
    seams, context = attach(drop(how))
    text = seams.emit(ParamsPass("r2", params())).event.params.get(CHECKSUMS_PARAM)
    (item,) = context.evidence
    assert item.before == hashlib.blake2b(encode(SENT).encode(), digest_size=8).hexdigest()
    assert item.after == (text and hashlib.blake2b(text.encode(), digest_size=8).hexdigest())
    assert item.before != item.after
    if how in ("alter_version", "alter_value"):
        where = [i for i, (a, b) in enumerate(zip(encode(SENT), text, strict=True)) if a != b]
        assert item.what == f"kv_checksums is altered at character {where[0]} of {len(text)}"


@pytest.mark.parametrize(
    ("request_id", "sent"),
    [("r1", params()), ("r2", {"do_remote_prefill": True}), ("r2", params(17)), ("r2", {})],
)
def test_what_it_cannot_touch_passes_and_leaves_no_evidence(attach, request_id: str, sent: dict[str, Any]) -> None:
    seams, context = attach(drop())
    event = ParamsPass(request_id, sent)
    assert seams.emit(event).event is event
    assert context.evidence == []


def test_it_needs_checksums_on_their_way(attach) -> None:
    needs = DropChecksums.needs(DropChecksumsParams.model_validate(drop()))
    assert needs == {"proxy.params_pass", "kv_checksums"}


@pytest.mark.parametrize(
    "wrong", [{"how": "shred"}, {"when": {"load": 2, "at": "in_flight"}}, {"when": {"load": -1}}, {"bits": 2}]
)
def test_parameters_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        DropChecksumsParams.model_validate(drop() | wrong)


def test_the_moment_may_be_left_out() -> None:
    given = {"kind": "drop_checksums", "when": {"load": 2}}
    assert DropChecksumsParams.model_validate(given) == DropChecksumsParams.model_validate(drop())


@pytest.mark.req("WIR-2")
@pytest.mark.parametrize(
    ("how", "verdict", "reason"),
    [
        ("lose", "unverified", "no_checksums"),
        ("cut", "unverified", "invalid"),
        ("alter_version", "unverified", "invalid"),
        ("alter_value", "mismatch", None),
        ("alter_num_tokens", "verified", None),
        ("alter_tp_size", "verified", None),
        ("shorten", "verified", None),
    ],
)
@pytest.mark.parametrize("policy", ["fail_open", "fail_closed_fail", "fail_closed_recompute"])
def test_in_a_run_the_kv_arrives_intact_and_the_evidence_agrees_with_the_record(
    sim, changed, how: str, verdict: str, reason: str | None, policy: str
) -> None:
    ran = sim(drop(how), policy=policy).fault
    load, other = ran.load(2), ran.load(1)
    assert (load.verdict, load.reason, other.verdict) == (verdict, reason, "verified")
    assert changed(load.kv_final, load.load_finished) == set()
    (item,) = ran.evidence
    (left,), (went_on,) = ran.all("producer.params_leave"), ran.all("proxy.params_pass")
    assert (item.before, item.after) == (left["kv_checksums"], went_on["kv_checksums"])
    assert [line["kv_checksums"] for line in ran.all("producer.params_leave", "r1")] == [
        line["kv_checksums"] for line in ran.all("proxy.params_pass", "r1")
    ]
