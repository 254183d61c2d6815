"""Bytes in, bytes out."""

from hypothesis import given
from hypothesis import strategies as st

from engine.tokenizer import BOS, EOS, VOCAB_SIZE, decode, encode


@given(st.text())
def test_text_survives(text):
    tokens = encode(text)
    assert tokens[0] == BOS
    assert all(0 <= token < VOCAB_SIZE for token in tokens)
    assert decode(tokens) == text


@given(st.lists(st.integers(0, VOCAB_SIZE - 1)))
def test_any_tokens_are_some_text(tokens):
    assert isinstance(decode(tokens), str)


def test_specials_are_left_out():
    assert decode([BOS, ord("a"), EOS, ord("b")]) == "ab"
