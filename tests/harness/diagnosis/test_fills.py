"""Zeros and patterns where nothing arrived."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

POISON = 'the 8-byte pattern "POISONED" (50 4f 49 53 4f 4e 45 44) over and over'
PATTERNS = [
    (b"\0", "zeros"),
    (b"\xff", "the byte 0xff over and over"),
    (b"\xc0\x7f", "the 2-byte pattern (c0 7f) over and over"),
    (b"\xde\xad\xbe\xef", "the 4-byte pattern (de ad be ef) over and over"),
    (b"POISONED", POISON),
    (b"\1\0\0\0\0\0\0\0", "the 8-byte pattern (01 00 00 00 00 00 00 00) over and over"),
]


def tile(pattern, like):
    """The pattern over each token's bytes."""
    return np.broadcast_to(np.resize(np.frombuffer(pattern, np.uint8), like.shape[-1]), like.shape)


@pytest.mark.parametrize(("pattern", "text"), PATTERNS)
@pytest.mark.parametrize("size", [8, 24, 64])
def test_a_block_of_a_pattern(random_kv, best, pattern, text, size):
    p = random_kv(size=size)
    d = p.copy()
    d[:, :, 16:32] = tile(pattern, d[:, :, 16:32])
    assert best(p, d) == ("zeros" if pattern == b"\0" else "pattern", f"Tokens 16 to 31 hold {text}.")


@given(st.integers(0, 198), st.integers(1, 50), st.sampled_from([8, 16, 32]), st.sampled_from(PATTERNS))
def test_any_run_of_tokens_but_the_last(random_kv, best, first, length, block_size, pattern):
    p = random_kv(5)
    d = p.copy()
    last = min(first + length, 199)
    d[:, :, first:last] = tile(pattern[0], d[:, :, first:last])
    tokens = f"Token {first} holds" if last - first == 1 else f"Tokens {first} to {last - 1} hold"
    if last - first == 2:
        tokens = f"Tokens {first} and {first + 1} hold"
    assert best(p, d, block_size)[1] == f"{tokens} {pattern[1]}."


def test_where_it_stands(random_kv, best):
    p = random_kv(layers=3, heads=4)
    d = p.copy()
    d[1:, 2, 16:32, 32:] = 0
    assert best(p, d)[1] == "Tokens 16 to 31 hold zeros in layers 1 and 2, head 2, V."
    d = p.copy()
    d[0, 2, 16:32] = 0
    d[1, 1, 5:8] = 0
    assert best(p, d) == ("zeros", "Parts of tokens 5 to 7 and 16 to 31 hold zeros in layers 0 and 1, heads 1 and 2.")
    assert best(p, tile(b"\0", p).copy()) == ("zeros", "Every token holds zeros.")


@pytest.mark.parametrize(
    ("where", "says"),
    [
        (np.s_[1], "Layer 1 was not copied and holds"),
        (np.s_[1:], "Layers 1 and 2 were not copied and hold"),
        (np.s_[:, 0], "Head 0 was not copied and holds"),
        (np.s_[:, [0, 2, 3]], "Heads 0, 2 and 3 were not copied and hold"),
        (np.s_[..., :32], "K was not copied and holds"),
        (np.s_[..., 32:], "V was not copied and holds"),
    ],
)
@pytest.mark.parametrize(("pattern", "text"), [PATTERNS[0], PATTERNS[4]])
def test_a_layer_head_or_part_that_was_not_copied(random_kv, best, where, says, pattern, text):
    p = random_kv(layers=3, heads=4)
    d = p.copy()
    d[where] = tile(pattern, p)[where]
    assert best(p, d) == ("not_copied", f"{says} {text}.")


@pytest.mark.parametrize(("where", "says"), [(np.s_[1], "Layer 1"), (np.s_[:, 1], "Head 1"), (np.s_[..., 32:], "V")])
def test_not_copied_over_unknown_bytes(random_kv, run, where, says):
    p = random_kv()
    d = p.copy()
    d[where] = random_kv(9)[where]
    (found,) = run(p, d).hypotheses
    assert (found.kind, found.explained) == ("not_copied", 0.0)
    assert found.text == f"{says} was not copied and holds bytes that nothing here explains."


def test_zeros_that_p_has_too_are_part_of_it(random_kv, best):
    p = random_kv()
    p[0, :, 20:24] = 0
    d = p.copy()
    d[:, :, 16:32] = 0
    assert best(p, d)[1] == "Tokens 16 to 31 hold zeros."


def test_a_pattern_of_a_token_is_found_where_a_row_is_shorter(random_kv, best):
    p = random_kv(size=8)
    d = p.copy()
    d[:, :, 40:50] = np.frombuffer(b"POISONED", np.uint8)
    assert best(p, d)[1] == f"Tokens 40 to 49 hold {POISON}."
