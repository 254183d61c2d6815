"""The wording of a map "place i holds what belongs to place j": exchanged, shifted, reversed, copied, rotated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.diagnosis.words import count, joined, numbered, ranges, spans


@dataclass(frozen=True, slots=True)
class Pattern:
    """`verb` ends a kind (`blocks_exchanged`), `text` is a clause, `cost` how many parameters it has."""

    verb: str
    text: str
    cost: float


def describe(moves: Mapping[int, int], noun: str, names: Sequence[int] | None = None) -> Pattern:
    """Word a map of places.

    Args:
        moves: from the place to that whose content it holds; not empty, no place to itself.
        noun: what a place is called: token, block position, head.
        names: what to call place i; None: i.
    """
    return _Namer(noun, names).describe(dict(sorted(moves.items())))


@dataclass(frozen=True, slots=True)
class _Namer:
    noun: str
    names: Sequence[int] | None

    def name(self, place: int) -> int:
        return place if self.names is None else self.names[place]

    def listed(self, places: Sequence[int]) -> str:
        return ranges(self.name(place) for place in places)

    def numbered(self, places: Sequence[int]) -> str:
        return numbered(self.noun, [self.name(place) for place in places])

    def describe(self, moves: dict[int, int]) -> Pattern:
        places, sources = list(moves), list(moves.values())
        offsets = {source - place for place, source in moves.items()}
        if all(moves.get(source) == place for place, source in moves.items()):
            return self._exchanged(moves)
        if len(set(sources)) == 1:
            verb = "holds" if len(places) == 1 else "all hold"
            return Pattern("copied", f"{self.numbered(places)} {verb} a copy of {self.numbered(sources[:1])}", 2)
        if len(offsets) == 1:
            return self._shifted(places, sources, offsets.pop())
        if len({place + source for place, source in moves.items()}) == 1:
            text = f"{self.numbered(places)} hold what belongs to {self.listed(sources)}, in reverse order"
            return Pattern("reversed", text, 2.5)
        if _is_range(places):
            turned = {(source - place) % len(places) for place, source in moves.items()}
            if len(turned) == 1 and set(sources) == set(places):
                return self._rotated(places, sources)
        return self._listed(places, sources)

    def _exchanged(self, moves: dict[int, int]) -> Pattern:
        pairs = [(place, source) for place, source in moves.items() if place < source]
        low, high = min(moves), max(moves)
        in_range = len(moves) >= high - low  # all of them, but for one in the middle
        if len(pairs) > 1 and in_range and all(place + source == low + high for place, source in pairs):
            return self._reversed(low, high)
        firsts, offsets = [place for place, _ in pairs], {source - place for place, source in pairs}
        if len(pairs) == 1:
            return Pattern("exchanged", f"{self.numbered([*pairs[0]])} are exchanged", 2)
        if len(offsets) == 1 and _is_range(firsts):
            seconds = [source for _, source in pairs]
            return Pattern("exchanged", f"{self.numbered(firsts)} are exchanged with {self.listed(seconds)}", 2)
        listed = joined([f"{self.name(place)} with {self.name(source)}" for place, source in pairs], 4)
        return Pattern("exchanged", f"{self.noun}s are exchanged in pairs: {listed}", 2 + len(pairs))

    def _reversed(self, low: int, high: int) -> Pattern:
        return Pattern("reversed", f"{self.numbered(range(low, high + 1))} are in reverse order", 2)

    def _shifted(self, places: list[int], sources: list[int], offset: int) -> Pattern:
        if _is_range(places) and set(places).isdisjoint(sources):
            text = f"{self.numbered(places)} hold a copy of {self.listed(sources)}"
            return Pattern("copied", text, 2)
        where = f"{count(abs(offset), self.noun)} {'earlier' if offset < 0 else 'later'}"
        return Pattern("shifted", f"{self.numbered(places)} hold what belongs {where}", 2 + 0.5 * len(spans(places)))

    def _rotated(self, places: list[int], sources: list[int]) -> Pattern:
        text = f"{self.numbered(places)} are rotated: {self._examples(places, sources)}"
        return Pattern("rotated", text, 2.75)

    def _listed(self, places: list[int], sources: list[int]) -> Pattern:
        """By runs of one offset, as far as that is short."""
        runs: list[tuple[int, int, int]] = []
        for place, source in zip(places, sources, strict=True):
            if runs and (place, source) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
                runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
            else:
                runs.append((place, source, 1))
        verb = "permuted" if set(places) == set(sources) else "moved"
        if len(runs) > 4:
            how = "are permuted" if verb == "permuted" else "hold others' content"
            return Pattern(
                verb, f"{self.numbered(places)} {how}: {self._examples(places, sources)}", 3 + min(len(runs), 20)
            )
        texts = [
            f"{self.numbered(range(place, place + length)) if not i else self.listed(range(place, place + length))} "
            f"{'holds' if length == 1 else 'hold'} what belongs to {self.listed(range(source, source + length))}"
            for i, (place, source, length) in enumerate(runs)
        ]
        return Pattern(verb, joined(texts), 2 + len(runs))

    def _examples(self, places: list[int], sources: list[int]) -> str:
        pairs = list(zip(places, sources, strict=True))
        shown = ", ".join(f"{self.name(place)} holds {self.name(source)}" for place, source in pairs[:3])
        return f"{shown}, and so on" if len(pairs) > 3 else shown


def _is_range(places: Sequence[int]) -> bool:
    return len(places) == places[-1] - places[0] + 1
