"""Plain English: ranges, plurals, shares."""

import pytest

from harness.diagnosis.patterns import describe
from harness.diagnosis.words import count, joined, numbered, percent, ranges, sentence


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([5], "5"),
        ([6, 5], "5 and 6"),
        ([5, 6, 7], "5 to 7"),
        ([1, 5, 6, 7, 9, 10], "1, 5 to 7, 9 and 10"),
        (range(0, 20, 2), "0, 2, 4, 6, 8 and 5 more"),
        (range(0, 12, 2), "0, 2, 4, 6, 8 and 10"),
        ([0, 2, 4, 6, 8, *range(10, 20)], "0, 2, 4, 6, 8 and 10 to 19"),
        ([0, 2, 4, 6, 8, *range(10, 20), 30], "0, 2, 4, 6, 8 and 11 more"),
    ],
)
def test_ranges(numbers, text):
    assert ranges(numbers) == text


def test_plurals():
    assert numbered("token", [3]) == "token 3"
    assert numbered("block position", range(3)) == "block positions 0 to 2"
    assert count(1, "byte") == "1 byte"
    assert count(9216, "byte") == "9,216 bytes"
    assert count(0, "token") == "0 tokens"
    assert joined(["a"]) == "a"
    assert sentence("k and V are exchanged") == "K and V are exchanged."


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [(3, 5, "60%"), (1, 1000, "less than 1%"), (999, 1000, "more than 99%"), (5, 5, "100%"), (0, 5, "0%")],
)
def test_percent(part, whole, text):
    assert percent(part, whole) == text


def test_long_maps_stay_short():
    scattered = {place: place * 7 % 101 for place in range(1, 101)}
    found = describe(scattered, "token")
    assert found.verb == "permuted"
    assert found.text == "tokens 1 to 100 are permuted: 1 holds 7, 2 holds 14, 3 holds 21, and so on"
    backwards = describe({7: 3, 8: 2, 9: 1}, "block position")
    assert backwards.text == "block positions 7 to 9 hold what belongs to 1 to 3, in reverse order"
    assert describe({5: 1, 6: 2, 9: 5}, "head").text == "heads 5, 6 and 9 hold what belongs 4 heads earlier"
