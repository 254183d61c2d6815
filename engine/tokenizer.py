"""A byte-level tokenizer: token i is byte i, and two specials. Nothing to download."""

from __future__ import annotations

BOS = 256
EOS = 257
VOCAB_SIZE = 258


def encode(text: str) -> list[int]:
    """UTF-8 bytes of the text after a BOS token."""
    return [BOS, *text.encode("utf-8")]


def decode(token_ids: list[int]) -> str:
    """The text of the byte tokens; specials are left out and broken UTF-8 is replaced."""
    return bytes(t for t in token_ids if t < BOS).decode("utf-8", errors="replace")
