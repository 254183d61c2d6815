"""Numbers and places in plain English, so that every hypothesis words them alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MOST_ITEMS = 6


def count(number: int, noun: str) -> str:
    """1 byte; 9,216 bytes."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def joined(items: Sequence[str], most: int = MOST_ITEMS) -> str:
    """a; a and b; a, b and c; a, b and 7 more."""
    if len(items) > most:
        items = [*items[: most - 1], f"{len(items) - most + 1} more"]
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def spans(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Runs of consecutive numbers, (first, last), in order."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


def ranges(numbers: Iterable[int]) -> str:
    """0 to 3, 5 and 7 to 9. Two neighbours stay two: 0 and 1."""
    items: list[tuple[str, int]] = []  # each with how many numbers it stands for
    for first, last in spans(numbers):
        if last - first < 2:
            items += [(str(number), 1) for number in range(first, last + 1)]
        else:
            items.append((f"{first} to {last}", last - first + 1))
    texts = [text for text, _ in items]
    if len(items) > MOST_ITEMS:
        texts = [*texts[: MOST_ITEMS - 1], f"{sum(size for _, size in items[MOST_ITEMS - 1 :]):,} more"]
    return joined(texts)


def numbered(noun: str, numbers: Iterable[int]) -> str:
    """token 5; tokens 16 to 31 and 40."""
    listed = list(numbers)
    return f"{noun}{'' if len(listed) == 1 else 's'} {ranges(listed)}"


def sentence(text: str) -> str:
    """With a capital and a full stop."""
    return f"{text[:1].upper()}{text[1:]}."


def percent(part: int, whole: int) -> str:
    """60%. Never 0% or 100% of what is neither nothing nor everything."""
    if part == 0 or part == whole:
        return "100%" if part else "0%"
    value = 100 * part / whole
    if value < 1:
        return "less than 1%"
    return "more than 99%" if value > 99 else f"{value:.0f}%"
