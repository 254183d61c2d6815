"""A copy that stopped part-way. The reference walks the regions one by one, as the connector moves them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

POISON = np.frombuffer(b"POISONED", np.uint8)
LAYERS, HEADS, SIZE = 2, 3, 16


def regions(tokens, block_size, first=0):
    """(where, token, bytes) of each row in copy order."""
    half = SIZE // 2
    for start in range(first - first % block_size, tokens, block_size):
        for layer in range(LAYERS):
            for part in range(2):
                for head in range(HEADS):
                    for token in range(max(first, start), min(start + block_size, tokens)):
                        yield (layer, part, head, token), np.s_[layer, head, token, part * half : part * half + half]


def stop_after(num_bytes, p, old, block_size, first=0):
    """D over `old`: the first bytes of P copied. Also what the first byte not copied is part of."""
    d, stopped = old.copy(), None
    for place, where in regions(p.shape[2], block_size, first):
        count = min(SIZE // 2, num_bytes)
        d[where][:count] = p[where][:count]
        num_bytes -= count
        if stopped is None and count < SIZE // 2:
            stopped = place, count
    return d, stopped


def words(stopped):
    (layer, part, head, token), byte = stopped
    at = f"byte {byte} of " if byte else ""
    return f"all is right up to {at}{'KV'[part]} of token {token} (layer {layer}, head {head}); from there on it holds"


TOTAL = LAYERS * HEADS * 48 * SIZE


@given(st.integers(1, TOTAL - 200), st.sampled_from([8, 16]), st.sampled_from(["zeros", "POISONED", "B"]))
def test_any_byte_any_content(random_kv, run, num_bytes, block_size, content):
    p = random_kv(1, LAYERS, HEADS, 48, SIZE)
    other = random_kv(2, LAYERS, HEADS, 60, SIZE)
    old = {"zeros": np.zeros_like(p), "POISONED": np.broadcast_to(np.tile(POISON, 2), p.shape), "B": other[:, :, :48]}
    d, stopped = stop_after(num_bytes, p, old[content], block_size)
    (layer, part, head, token), byte = stopped
    at = part * SIZE // 2 + byte
    alike = (p == old[content])[layer, head, token]
    if alike[at] or (byte and alike[at - 1]):
        return  # where it stopped cannot be seen
    found = next(h for h in run(p, d, block_size, B=other).hypotheses if h.kind == "torn")
    assert found.explained == 1.0
    says = {"zeros": "zeros", "POISONED": 'the 8-byte pattern "POISONED"', "B": "request B's tokens "}[content]
    if num_bytes % (LAYERS * HEADS * SIZE * block_size):
        assert (
            f"stopped after {num_bytes:,} of {TOTAL:,} bytes: in the order block, layer, K or V, head, " in found.text
        )
        assert f"{words(stopped)} {says}" in found.text
    else:
        blocks = num_bytes // (LAYERS * HEADS * SIZE * block_size)
        says = f"of {48 // block_size} arrived (tokens 0 to {blocks * block_size - 1}); the rest holds {says}"
        assert says in found.text


@given(st.integers(8 * 16, TOTAL - 200))
def test_in_the_middle_of_a_block_it_is_the_best(random_kv, best, num_bytes):
    p = random_kv(1, LAYERS, HEADS, 48, SIZE)
    block = LAYERS * HEADS * SIZE * 16
    num_bytes += 40 if num_bytes % block < 40 else 0
    d, _ = stop_after(num_bytes, p, np.broadcast_to(np.tile(POISON, 2), p.shape), 16)
    assert best(p, d)[0] == "torn"


def test_whole_blocks(random_kv, best):
    p = random_kv(layers=LAYERS, heads=HEADS, tokens=40, size=SIZE)
    d = p.copy()
    d[:, :, 16:] = np.tile(POISON, 2)
    pattern = 'the 8-byte pattern "POISONED" (50 4f 49 53 4f 4e 45 44) over and over'
    assert best(p, d) == (
        "torn",
        f"Only the first block of 3 arrived (tokens 0 to 15); the rest holds {pattern}.",
    )
    d = p.copy()
    d[:, :, 32:] = 0
    assert best(p, d)[1] == "Only the first 2 blocks of 3 arrived (tokens 0 to 31); the rest holds zeros."


def test_a_consumer_that_holds_a_tail(random_kv, best):
    p = random_kv(layers=LAYERS, heads=HEADS, tokens=80, size=SIZE)
    d, stopped = stop_after(1700, p, np.zeros_like(p), 16, first=32)
    assert stopped == ((0, 0, 1, 50), 4) or stopped[0][3] >= 48
    kind, text = best(p, d[:, :, 32:].copy(), first_token=32)
    assert kind == "torn"
    assert f"stopped after 1,700 of {48 * LAYERS * HEADS * SIZE:,} bytes" in text
    assert words(stopped) in text


@pytest.mark.parametrize(("p_size", "d_size"), [(32, 16), (16, 32)])
def test_regions_are_of_the_smaller_blocks(random_kv, best, p_size, d_size):
    p = random_kv(layers=LAYERS, heads=HEADS, tokens=96, size=SIZE)
    d, stopped = stop_after(2001, p, np.zeros_like(p), 16)
    kind, text = best(p, d, d_size, producer_block_size=p_size)
    assert kind == "torn"
    assert words(stopped) in text


def test_the_row_of_the_stop_has_to_fit_as_well(random_kv, run):
    p = random_kv(layers=LAYERS, heads=HEADS, tokens=48, size=SIZE)
    d, ((layer, part, head, token), _) = stop_after(1700, p, np.zeros_like(p), 16)
    d[layer, head, token, part * 8 : part * 8 + 8] ^= 0x5A
    assert all(found.kind != "torn" for found in run(p, d).hypotheses)


def test_over_unknown_bytes(random_kv, run):
    p = random_kv(1, LAYERS, HEADS, 48, 64)
    d = random_kv(2, LAYERS, HEADS, 48, 64)
    d[:, :, :16] = p[:, :, :16]
    d[0, :, 16:32] = p[0, :, 16:32]
    (found,) = run(p, d).hypotheses
    assert (found.kind, found.explained) == ("torn", 0.0)
    assert "all is right up to K of token 16 (layer 1, head 0); from there on it holds bytes that" in found.text


def test_what_is_right_by_chance_after_the_stop(random_kv, run, best):
    """A stop is said to be at the start of a block or row if that may as well be."""
    p, b = random_kv(layers=LAYERS, heads=HEADS, tokens=48, size=SIZE), random_kv(1, LAYERS, HEADS, 48, SIZE)
    p[0, 0, 0, 0] = 0
    assert best(p, np.zeros_like(p)) == ("zeros", "Every token holds zeros.")
    p[0, 0, 16, :3] = 0
    d = p.copy()
    d[:, :, 16:] = 0
    assert best(p, d)[1] == "Only the first block of 3 arrived (tokens 0 to 15); the rest holds zeros."
    b[0, :, 16:18] = p[0, :, 16:18]
    d[:, :, 16:] = b[:, :, 16:]
    other, stopped = run(p, d, B=b).hypotheses
    assert (other.kind, other.explained) == ("other_request", 1.0)
    assert stopped.text == (
        "Only the first block of 3 arrived (tokens 0 to 15); the rest holds request B's tokens 16 to 47."
    )
