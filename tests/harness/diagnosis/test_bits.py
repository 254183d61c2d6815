"""A few flipped bits are named; the same bit of every element is one hypothesis, not thousands."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.diagnosis import KVBlocks, diagnose

PLACE = re.compile(r"bit (\d) of byte (\d+) of ([KV]) of token (\d+) \(layer (\d+), head (\d+)\)")


@given(st.data())
def test_up_to_four_bits_are_found_and_named(random_kv, best, data):
    p = random_kv(tokens=40)
    d = p.copy()
    index = st.tuples(*(st.integers(0, size - 1) for size in (2, 2, 40, 64, 8)))
    flips = data.draw(st.sets(index, min_size=1, max_size=4))
    for layer, head, token, byte, bit in flips:
        d[layer, head, token, byte] ^= 1 << bit
    kind, text = best(p, d)
    assert kind == "bits"
    assert text.startswith("1 bit is flipped: " if len(flips) == 1 else f"{len(flips)} bits are flipped: ")
    found = {
        (int(layer), int(head), int(token), int(byte) + 32 * (part == "V"), int(bit))
        for bit, byte, part, token, layer, head in PLACE.findall(text)
    }
    assert found == flips


@pytest.mark.parametrize(
    ("byte", "bit", "says"),
    [
        (33, 7, "(the sign of a 16-bit float)."),
        (3, 2, "(an exponent bit of a 16-bit float)."),
        (2, 7, "(an exponent bit of a bf16, a fraction bit of an fp16)."),
        (3, 1, "(an exponent bit of a bf16, a fraction bit of an fp16)."),
        (2, 6, "(a fraction bit of a 16-bit float)."),
    ],
)
def test_what_a_bit_means(random_kv, best, byte, bit, says):
    p = random_kv()
    d = p.copy()
    d[1, 0, 20, byte] ^= 1 << bit
    assert best(p, d)[1].endswith(says)


def test_bits_of_one_meaning_say_each(random_kv, best):
    p = random_kv()
    d = p.copy()
    for token in range(10, 19):
        d[0, 1, token, 5] ^= 0x80
    kind, text = best(p, d)
    assert kind == "bits"
    assert text.startswith("9 bits are flipped: bit 7 of byte 5 of K of token 10 (layer 0, head 1), ")
    assert text.endswith(" and 5 more (each the sign of a 16-bit float).")


def test_of_elements_of_other_sizes_no_meaning_is_told(random_kv) -> None:
    p = random_kv()
    d = p.copy()
    d[1, 0, 20, 3] ^= 1 << 2
    found = diagnose(KVBlocks(p, 16, element_bytes=4), KVBlocks(d, 16, element_bytes=4), {})
    assert found.texts[0].endswith("bit 2 of byte 3 of K of token 20 (layer 1, head 0).")
    d = p.copy()
    d[..., 1::2] ^= 0x80
    found = diagnose(KVBlocks(p, 16, element_bytes=4), KVBlocks(d, 16, element_bytes=4), {})
    assert not any("16-bit" in text for text in found.texts)


def test_other_bytes_are_no_flipped_bits(random_kv, run):
    p = random_kv()
    d = p.copy()
    d[0, 0, 7, :6] ^= np.array([0x5A, 0xA5, 0x77, 0x3C, 0xFF, 0x1E], np.uint8)
    assert run(p, d).hypotheses == ()


@pytest.mark.parametrize(("bit", "name"), [(15, "The sign bit"), (14, "Bit 14"), (0, "Bit 0"), (7, "Bit 7")])
@pytest.mark.parametrize("change", ["flipped", "set", "cleared"])
def test_the_same_bit_of_every_element(random_kv, best, bit, name, change):
    p = random_kv(3)
    d = p.copy()
    elements, mask = d.view(np.uint16)[:, :, 16:32], np.uint16(1 << bit)
    if change == "flipped":
        elements ^= mask
    elif change == "set":
        elements |= mask
    else:
        elements &= ~mask
    assert best(p, d) == ("same_bit", f"{name} of every 16-bit element is {change} in tokens 16 to 31.")


def test_every_sign_everywhere_and_of_v_in_one_layer(random_kv, best):
    p = random_kv()
    d = p.copy()
    d[..., 1::2] ^= 0x80
    assert best(p, d)[1] == "The sign bit of every 16-bit element is flipped."
    d = p.copy()
    d[1, :, :, 33::2] ^= 0x80
    assert best(p, d)[1] == "The sign bit of every 16-bit element is flipped in layer 1, V."


def test_a_bit_that_some_rows_have_never_set_is_stuck_all_the_same(random_kv, best):
    """In such a row, a flipped bit and one stuck at 1 look alike."""
    p = random_kv()
    p.view(np.uint16)[:, :, 16:20] &= np.uint16(0xBFFF)
    d = p.copy()
    d.view(np.uint16)[:, :, 16:32] |= np.uint16(0x4000)
    assert best(p, d)[1] == "Bit 14 of every 16-bit element is set in tokens 16 to 31."
