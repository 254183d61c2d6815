"""Flipped bits: a few anywhere, or the same bit of every element."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from harness.diagnosis.compare import Bytes, Comparison, sample_of
from harness.diagnosis.finding import Finding, place, row_text
from harness.diagnosis.words import count, joined

MOST_BITS = 64
MOST_NAMED = 4
_FEW = 4
_SAMPLE = 64


def flipped_bits(cmp: Comparison) -> list[Finding]:
    """A few bits, each named, if the bytes that differ do so in hardly more than one bit each."""
    if cmp.total > MOST_BITS:
        return []
    rows = np.argwhere(cmp.wrong)
    text = describe_bits(cmp, rows.tolist(), cmp.producer_rows(cmp.wrong), cmp.consumer_rows(cmp.wrong))
    return [Finding("bits", text, 0, cmp.wrong)] if text else []


def describe_bits(cmp: Comparison, rows: list[list[int]], before: Bytes, after: Bytes) -> str | None:
    """Which bits differ between uint8 [n, half] of n rows (layer, head, part, token); None: too many to be flips."""
    changed = before ^ after
    which, byte = np.nonzero(changed)
    masks = changed[which, byte]
    bits = np.unpackbits(masks[:, None], axis=1, bitorder="little")
    total = int(bits.sum())
    if not 0 < total <= MOST_BITS or (total > _FEW and 2 * total > 3 * len(masks)):
        return None
    flips = [
        (rows[which[i]], int(byte[i]), int(bit)) for i in range(len(masks)) for bit in np.flatnonzero(bits[i]).tolist()
    ]
    named = [f"bit {bit} of byte {at} of {_row(cmp, row)}" for row, at, bit in flips[:MOST_NAMED]]
    if total > MOST_NAMED:
        named.append(f"{total - MOST_NAMED} more")
    meanings = {_meaning(at, bit) for _, at, bit in flips} if cmp.holds_16_bits else set()
    note = f" ({'each ' if total > 1 else ''}{meanings.pop()})" if len(meanings) == 1 else ""
    return f"{count(total, 'bit')} {'is' if total == 1 else 'are'} flipped: {joined(named)}{note}"


def _row(cmp: Comparison, row: list[int]) -> str:
    layer, head, part, token = row
    return row_text(cmp, (layer, head, part, token))


def _meaning(byte: int, bit: int) -> str:
    """What a bit of a little-endian bf16 or fp16 means, as far as both agree."""
    place_in_element = byte % 2 * 8 + bit
    if place_in_element == 15:
        return "the sign of a 16-bit float"
    if place_in_element >= 10:
        return "an exponent bit of a 16-bit float"
    if place_in_element >= 7:
        return "an exponent bit of a bf16, a fraction bit of an fp16"
    return "a fraction bit of a 16-bit float"


def same_bit(cmp: Comparison) -> list[Finding]:
    """One bit of every 16-bit element of some rows is flipped, or stuck at 0 or 1."""
    if not cmp.holds_16_bits:
        return []
    sample = sample_of(cmp.wrong, _SAMPLE)
    before, after = _elements(cmp.producer_rows(sample)), _elements(cmp.consumer_rows(sample))
    mask = _one_bit(before, after)
    if mask is None:
        return []
    before, after = _elements(cmp.producer_rows(cmp.wrong)), _elements(cmp.consumer_rows(cmp.wrong))
    changes = {"flipped": before ^ mask, "set": before | mask, "cleared": before & ~mask}
    right = {verb: (predicted == after).all(axis=1) for verb, predicted in changes.items()}
    verb = max(right, key=lambda verb: np.count_nonzero(right[verb]))
    if not right[verb].any():
        return []
    explained = np.zeros_like(cmp.wrong)
    explained[cmp.wrong] = right[verb]
    where = place(cmp, explained)
    bit = int(mask).bit_length() - 1
    name = "the sign bit" if bit == 15 else f"bit {bit}"
    return [Finding("same_bit", f"{name} of every 16-bit element is {verb}{where.text()}", 1 + where.cost, explained)]


def _elements(rows: Bytes) -> npt.NDArray[np.uint16]:
    return np.ascontiguousarray(rows).view("<u2")


def _one_bit(before: npt.NDArray[np.uint16], after: npt.NDArray[np.uint16]) -> np.uint16 | None:
    """The bit in which most of the rows differ, if it is the only one there."""
    changed = np.bitwise_or.reduce(before ^ after, axis=1)
    values, counts = np.unique(changed, return_counts=True)
    mask: np.uint16 = values[counts.argmax()]
    return mask if int(mask).bit_count() == 1 and 2 * counts.max() >= len(changed) else None
