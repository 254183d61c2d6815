"""Names of layers: the number in one, which is in a checksum's factor, and the fingerprint of a group of them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable


def fingerprint(layers: Iterable[tuple[str, str, str]]) -> int:
    """Identify a group by its layers' (name, spec type, dtype), in any order, modulo 2**64.

    A layer counts the first 8 bytes, little-endian, of SHA-256 of `name NUL spec type NUL dtype`.
    """
    digests = (hashlib.sha256("\0".join(layer).encode()).digest() for layer in layers)
    return sum(int.from_bytes(digest[:8], "little") for digest in digests) % 2**64


def layer_number(name: str) -> int | None:
    """Find the number of a layer: the one integer component of its dotted name; None without exactly one."""
    numbers = [part for part in name.split(".") if re.fullmatch("[0-9]+", part)]
    # More digits than any model has layers: not a number to give to int(), whose cost grows with them.
    if len(numbers) != 1 or len(numbers[0]) > 9:
        return None
    return int(numbers[0])
