"""The wire format: the shared examples, every refusal, limits, fingerprints (WIR-1, WIR-2, FPR-1)."""

import base64
import dataclasses
import hashlib
import json
import tracemalloc
from pathlib import Path

import msgpack
import numpy as np
import pytest

from engine.checksum.payload import (
    Payload,
    PayloadGroup,
    PayloadInvalid,
    PayloadLimits,
    decode,
    encode,
    fingerprint,
    layer_number,
)
from engine.errors import EXIT_USAGE, KVChaosError

SHARED = json.loads((Path(__file__).parents[2] / "vectors" / "payloads.json").read_text())
LIMITS = PayloadLimits.for_engine(4096, (16, 16))
MIB = 2**20


def u64(*values):
    return np.array(values, dtype=np.uint64)


def to_text(fields):
    return base64.b64encode(msgpack.packb(fields)).decode()


def one_group(group_id=0, layers=5, block_size=16, start=0, values=bytes(16)):
    return [group_id, layers, block_size, start, values]


PAYLOAD = Payload(2, 40, (PayloadGroup(0, 5, 16, 0, u64(1, 2**64 - 1, 3)), PayloadGroup(3, 2**64 - 1, 32, 1, u64(7))))


@pytest.mark.req("WIR-1")
@pytest.mark.parametrize("case", SHARED["valid"], ids=range(len(SHARED["valid"])))
def test_shared_valid_payloads(case):
    payload = decode(case["wire"], LIMITS)
    assert (payload.tp_size, payload.num_tokens) == (case["tp_size"], case["num_tokens"])
    got = [
        {
            "group_id": g.group_id,
            "fingerprint": f"{g.fingerprint:#018x}",
            "block_size": g.block_size,
            "start": g.start,
            "values": [f"{int(v):#018x}" for v in g.values],
        }
        for g in payload.groups
    ]
    assert got == case["groups"]
    assert encode(payload) == case["wire"]


@pytest.mark.req("WIR-2")
@pytest.mark.parametrize("case", SHARED["invalid"], ids=lambda case: case["why"])
def test_shared_invalid_payloads(case):
    with pytest.raises(PayloadInvalid, match=r"^payload: "):
        decode(case["wire"], LIMITS)


@pytest.mark.req("FPR-1")
@pytest.mark.parametrize("case", SHARED["fingerprints"], ids=lambda case: case["fingerprint"])
def test_shared_fingerprints(case):
    layers = [tuple(layer) for layer in case["layers"]]
    assert fingerprint(layers) == fingerprint(reversed(layers)) == int(case["fingerprint"], 16)


@pytest.mark.req("FPR-1")
def test_fingerprint_sums_over_stages_and_separates_fields():
    first, second = ("layers.0", "full_attention", "bfloat16"), ("layers.1", "mla", "float16")
    digest = hashlib.sha256(b"layers.0\0full_attention\0bfloat16").digest()
    assert fingerprint([first]) == int.from_bytes(digest[:8], "little")
    assert (fingerprint([first]) + fingerprint([second])) % 2**64 == fingerprint([first, second])
    assert fingerprint([("a", "b", "c")]) != fingerprint([("a", "bc", "")])
    assert fingerprint([]) == 0


@pytest.mark.req("DEF-4")
@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("model.layers.12.self_attn.attn", 12),
        ("0", 0),
        ("layers.007.attn", 7),
        ("model.layers.attn", None),
        ("model.layers.3.experts.4.attn", None),
        ("layers.3.3", None),
        ("layers.-3", None),
        ("layers.+3", None),
        ("layers.1_0", None),
        ("layers.3a", None),
        ("layers.\u0663", None),
        ("layers.3\n", None),
        ("", None),
        ("layers." + "9" * 5000, None),
    ],
)
def test_layer_number(name, number):
    assert layer_number(name) == number


@pytest.mark.req("WIR-1")
def test_the_wire_is_what_the_format_says():
    expected = [
        1,
        2,
        40,
        [
            [0, 5, 16, 0, bytes([1, *[0] * 7]) + b"\xff" * 8 + bytes([3, *[0] * 7])],
            [3, 2**64 - 1, 32, 1, bytes([7, *[0] * 7])],
        ],
    ]
    assert encode(PAYLOAD) == to_text(expected)
    assert decode(encode(PAYLOAD), LIMITS) == PAYLOAD


@pytest.mark.req("WIR-1")
def test_size_of_a_long_request():
    values = np.arange(131_072 // 16, dtype=np.uint64)
    text = encode(Payload(1, 131_072, (PayloadGroup(0, 2**64 - 1, 16, 0, values),)))
    assert len(text) == 87_420
    assert decode(text, PayloadLimits.for_engine(131_072, (16,))).groups[0].values.tolist() == values.tolist()


def test_groups_compare_by_value_and_cannot_change():
    group, same = PayloadGroup(0, 5, 16, 0, u64(1, 2)), PayloadGroup(0, 5, 16, 0, u64(1, 2))
    assert group == same
    assert hash(group) == hash(same)
    assert group != PayloadGroup(0, 5, 16, 0, u64(1, 3))
    assert group != "a group"
    with pytest.raises(ValueError, match="read-only"):
        group.values[0] = 9
    source = u64(1, 2)
    group = PayloadGroup(0, 5, 16, 0, source)
    source[0] = 9
    assert group.values.tolist() == [1, 2]
    for wrong in ([1, 2], np.array([1, 2]), np.zeros((1, 1), np.uint64)):
        with pytest.raises(ValueError, match="uint64"):
            PayloadGroup(0, 5, 16, 0, wrong)


@pytest.mark.req("WIR-2")
@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "it is a NoneType"),
        (b"lAEB", "it is a bytes"),
        (["lAEB"], "it is a list"),
        (7, "it is a int"),
        ("lAE\u00e9", "not ASCII"),
        ("\ud800lAE", "not ASCII"),
        ("lAEB\n", "not standard padded base64"),
        (" lAEB", "not standard padded base64"),
        ("lA-_", "not standard padded base64"),
        ("lAE=lAEB", "not standard padded base64"),
        ("=", "not standard padded base64"),
        ("lAF=", "not canonical"),
        (base64.b64encode(b"\xc1").decode(), "not the msgpack"),
        (base64.b64encode(b"\x94" * 3000).decode(), "not the msgpack"),
        (base64.b64encode(b"\xd4\x01\x00").decode(), "not the msgpack"),
        (base64.b64encode(b"\xd6\xff\x00\x00\x00\x00").decode(), "not the msgpack"),
        (base64.b64encode(b"\xc7\x0c\xff" + b"\xff" * 12).decode(), "not the msgpack"),
        (base64.b64encode(b"\x94\x01\x01\x28\xdd\xff\xff\xff\xff").decode(), "not the msgpack"),
        (base64.b64encode(b"\x94\x01\x01\x28\x91\x95\x00\x05\x10\x00\xc6\xff\xff\xff\xff").decode(), "not the msgpack"),
        (base64.b64encode(b"\x94\xcc\x01\x01\x28\x90").decode(), "not the shortest form"),
        (base64.b64encode(b"\xdc\x00\x04\x01\x01\x28\x90").decode(), "not the shortest form"),
        (base64.b64encode(b"\x94\x01\x01\x28\x91\x95\x00\x05\x10\x00\xc5\x00\x00").decode(), "not the shortest form"),
        (to_text([]), "it holds a list"),
        (to_text(7), "it holds a int"),
        (to_text(None), "it holds a NoneType"),
        (to_text([1.0, 1, 40, []]), "version is a float"),
        (to_text([True, 1, 40, []]), "version is a bool"),
        (to_text([0, 1, 40, []]), "version is 0"),
        (to_text([2, 1, 40, [], "more"]), "payload: "),
        (to_text([1, 1, 40, [], 0]), "5 fields"),
        (to_text([1, 0, 40, []]), "tp_size is 0"),
        (to_text([1, -1, 40, []]), "tp_size is -1"),
        (to_text([1, 1, True, []]), "num_tokens is a bool"),
        (to_text([1, 1, 0, []]), "num_tokens is 0, outside 1 to 4096"),
        (to_text([1, 1, 4097, []]), "num_tokens is 4097, outside 1 to 4096"),
        (to_text([1, 1, 2**64 - 1, []]), "num_tokens is 18446744073709551615"),
        (to_text([1, 1, 40, None]), "groups is not an array"),
        (to_text([1, 1, 40, [one_group(i) for i in range(5)]]), "groups is not an array of at most 4"),
        (to_text([1, 1, 40, [7]]), r"groups\[0\] is not an array of group_id"),
        (to_text([1, 1, 40, [one_group()[:4]]]), r"groups\[0\] is not an array of group_id"),
        (to_text([1, 1, 40, [one_group(), one_group(1, layers=-1)]]), r"groups\[1\].fingerprint is -1"),
        (to_text([1, 1, 40, [one_group(group_id=-1)]]), r"groups\[0\].group_id is -1"),
        (to_text([1, 1, 40, [one_group(start=[0])]]), r"groups\[0\].start is a list"),
        (to_text([1, 1, 40, [one_group(block_size=0)]]), r"groups\[0\].block_size is 0"),
        (to_text([1, 1, 40, [one_group(values=None)]]), r"groups\[0\].values is not a bin"),
        (to_text([1, 1, 40, [one_group(values=bytes(9))]]), r"groups\[0\].values is not a bin"),
        (to_text([1, 1, 40, [one_group(1), one_group(0)]]), "group 0 comes after group 1"),
    ],
)
def test_refusals_say_why_and_where(text, says):
    with pytest.raises(PayloadInvalid, match=says) as caught:
        decode(text, LIMITS)
    assert isinstance(caught.value, KVChaosError)
    assert caught.value.exit_code == EXIT_USAGE
    assert len(str(caught.value)) < 200


@pytest.mark.req("WIR-2")
def test_no_groups_and_no_values_are_payloads():
    assert decode(to_text([1, 1, 40, []]), LIMITS).groups == ()
    assert decode(to_text([1, 1, 40, [one_group(values=b"")]]), LIMITS).groups[0].values.tolist() == []


@pytest.mark.req("WIR-2")
def test_limits_of_an_engine_and_of_a_request():
    longest = Payload(
        2**64 - 1,
        4096,
        tuple(PayloadGroup(2**64 - 2 + i, 2**64 - 1, 2**64 - 1, 2**64 - 1, u64(*[0] * 256)) for i in range(2)),
    )
    text = encode(longest)
    assert decode(text, LIMITS) == longest
    # Every integer of that payload has its longest form: within a few headers' bytes of what can be needed.
    assert 2 * len(text) + 1024 <= LIMITS.max_base64 <= 2 * len(text) + 1024 + 128
    assert LIMITS.for_request(40).max_num_tokens == 40
    with pytest.raises(PayloadInvalid, match="outside 1 to 40"):
        decode(text, LIMITS.for_request(40))
    for arguments in ((0, (16,)), (16, ()), (16, (0,))):
        with pytest.raises(ValueError, match="at least 1"):
            PayloadLimits.for_engine(*arguments)


@pytest.mark.req("WIR-2")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tp_size": 0}, "tp_size"),
        ({"num_tokens": 0}, "num_tokens"),
        ({"num_tokens": 2**64}, "num_tokens"),
        ({"groups": (PAYLOAD.groups[1], PAYLOAD.groups[0])}, "not ascending"),
        ({"groups": (PAYLOAD.groups[0], PAYLOAD.groups[0])}, "not ascending"),
        ({"groups": (PayloadGroup(0, -1, 16, 0, u64()),)}, "fingerprint is -1"),
    ],
)
def test_encode_refuses_what_nobody_would_decode(change, says):
    with pytest.raises(PayloadInvalid, match=says):
        encode(dataclasses.replace(PAYLOAD, **change))


@pytest.mark.req("WIR-2")
@pytest.mark.parametrize(
    "raw",
    [
        b"\xdd\x00\x00\xff\xff" * 3000,
        b"\xdc\xff\xff" * 5000,
        b"\xdc\x3a\x00" * 5000,  # nested, each for just fewer elements than there are bytes
        b"\x9f" * 15000,
        b"\x95" * 15000,
        b"\x94" * 1000,
        b"\xc6\xff\xff\xff\xff" + bytes(15000),
        b"\xdf\xff\xff\xff\xff" * 3000,
        b"\xc9\xff\xff\xff\xff\x00" * 2500,
        bytes(15000),
    ],
    ids=lambda raw: raw[:3].hex(),
)
def test_hostile_headers_stay_small(raw):
    limits = PayloadLimits.for_engine(131_072, (16,) * 8)
    assert peak_of(base64.b64encode(raw).decode(), limits) < MIB


@pytest.mark.req("WIR-2")
def test_an_oversized_text_is_refused_before_it_is_decoded():
    assert peak_of("A" * 64 * MIB, LIMITS) < MIB / 16
    assert peak_of("\u00e9" * 16 * MIB, LIMITS) < MIB / 16
    good = to_text([1, 1, 40, [one_group(values=bytes(8 * (4096 // 16)))]])
    assert decode(good, LIMITS)
    longest = dataclasses.replace(LIMITS, max_base64=len(good))
    assert decode(good, longest)
    with pytest.raises(PayloadInvalid, match="characters are more than"):
        decode(good, dataclasses.replace(LIMITS, max_base64=len(good) - 1))


def peak_of(text, limits):
    """Peak bytes that refusing text takes."""
    tracemalloc.start()
    try:
        with pytest.raises(PayloadInvalid):
            decode(text, limits)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
