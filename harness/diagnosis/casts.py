"""Values taken for another dtype of the same width and converted, or bytes in the other order."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from harness.diagnosis.compare import Bytes, Comparison, Mask, sample_of
from harness.diagnosis.finding import Finding, place

_SAMPLE = 32


def bf16_to_fp16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16]:
    """The fp16 bits of the values that these bf16 bits have, rounded to nearest even."""
    with np.errstate(all="ignore"):
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float16).view(np.uint16)


def fp16_to_bf16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16]:
    """The bf16 bits of the values that these fp16 bits have, rounded to nearest even."""
    with np.errstate(all="ignore"):
        wide = bits.view(np.float16).astype(np.float32)
    words = wide.view(np.uint32)
    rounded = ((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(wide), np.uint16(0x7FC0), rounded)


def _is_fp16_nan(bits: npt.NDArray[np.uint16]) -> Mask:
    return (bits & 0x7FFF) > 0x7C00


def _is_bf16_nan(bits: npt.NDArray[np.uint16]) -> Mask:
    return (bits & 0x7FFF) > 0x7F80


def _cast(
    convert: Callable[[npt.NDArray[np.uint16]], npt.NDArray[np.uint16]],
    is_nan: Callable[[npt.NDArray[np.uint16]], Mask],
) -> Callable[[Bytes, Bytes], Mask]:
    """Which rows are converted: NaN may become any NaN, as libraries differ there."""

    def holds(before: Bytes, after: Bytes) -> Mask:
        wanted, got = convert(before.view("<u2")), after.view("<u2")
        matches: Mask = ((wanted == got) | (is_nan(wanted) & is_nan(got))).all(axis=1)
        return matches

    return holds


def _swapped(width: int) -> Callable[[Bytes, Bytes], Mask]:
    def holds(before: Bytes, after: Bytes) -> Mask:
        matches: Mask = (before.view(f"<u{width}") == after.view(f">u{width}")).all(axis=1)
        return matches

    return holds


def converted(cmp: Comparison) -> list[Finding]:
    """A finding for each conversion of which at least half the rows of a sample, and then some rows, are the result."""
    conversions = {
        ("bf16_as_fp16", "the values were bf16 and were converted to fp16", 2): _cast(bf16_to_fp16, _is_fp16_nan),
        ("fp16_as_bf16", "the values were fp16 and were converted to bf16", 2): _cast(fp16_to_bf16, _is_bf16_nan),
    }
    for width in (2, 4, 8):
        text = f"the bytes of every {8 * width}-bit word are in reverse order"
        conversions["byte_order", text, width] = _swapped(width)
    sample = sample_of(cmp.wrong, _SAMPLE)
    some = cmp.producer_rows(sample), cmp.consumer_rows(sample)
    findings = []
    for (kind, text, width), holds in conversions.items():
        if cmp.half % width or not holds(*some).any():
            continue
        before, after = cmp.producer_rows(cmp.wrong), cmp.consumer_rows(cmp.wrong)
        right = holds(before, after)
        if 2 * np.count_nonzero(_varied(before[right]) & _varied(after[right])) < np.count_nonzero(right):
            continue  # tiny values become zeros, which then need no conversion to explain them
        explained = np.zeros_like(cmp.wrong)
        explained[cmp.wrong] = right
        where = place(cmp, explained)
        if not where.is_box:  # a row that is the same after the conversion does not differ
            same = np.zeros_like(cmp.wrong)
            same[~cmp.wrong] = holds(cmp.producer_rows(~cmp.wrong), cmp.consumer_rows(~cmp.wrong))
            where = place(cmp, explained, around=same)
        findings.append(Finding(kind, text + where.text(), 1 + where.cost, explained))
    return findings


def _varied(rows: Bytes) -> Mask:
    """Which rows are not the same element over and over."""
    elements = np.ascontiguousarray(rows).view("<u2")
    varied: Mask = (elements != elements[:, :1]).any(axis=1)
    return varied
