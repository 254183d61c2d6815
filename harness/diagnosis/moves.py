"""Tokens and blocks that hold what belongs to other tokens of this request, or to another request."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from harness.diagnosis.compare import Comparison, Ints, Mask, Row
from harness.diagnosis.finding import Finding, RowSource, fit_region, planes_texts
from harness.diagnosis.patterns import describe
from harness.diagnosis.sources import Sources
from harness.diagnosis.words import joined, numbered, ranges

MOST_GROUPS = 6
MOST_RUNS = 4
_IN_A_ROW = 4
_Group = tuple[Mask, Ints, Ints]  # planes [L, H, 2], compared tokens, and the index in the table of what each holds
Map = dict[int, int]  # position of a token, or a block position -> that whose content it holds


def moved_tokens(cmp: Comparison, sources: Sources) -> list[Finding]:
    """A finding for each set of tokens that were moved in the same layers, heads and parts."""
    groups: list[_Group] = []
    for ranked in sources.ranked:
        for number in range(len(cmp.sources)):
            of_source = (ranked >= 0) & (cmp.source_of[ranked] == number)
            groups += _by_token(cmp, np.flatnonzero(of_source), ranked)
    if len(groups) > 1:
        groups += _by_plane(cmp, sources)
    findings: list[Finding] = []
    for planes, tokens, index in groups:
        foreign = cmp.source_of[index[0]] > 0
        findings += _foreign(cmp, planes, tokens, index) if foreign else _own(cmp, planes, tokens, index)
    return findings


def _by_token(cmp: Comparison, tokens: Ints, source: Ints) -> Iterator[_Group]:
    """Group tokens by the planes in which they hold their source: all planes or the union if nothing contradicts."""
    shape = cmp.wrong.shape[:3]
    wrong = cmp.wrong.reshape(-1, cmp.num_tokens)
    ids, table = (array.reshape(-1, array.shape[3]) for array in (cmp.ids, cmp.table))
    right = ids[:, tokens] == table[:, source[tokens]]
    hits, misses = right & wrong[:, tokens], ~right & ~wrong[:, tokens]
    useful = _credible(hits, wrong[:, tokens], tokens, source[tokens])
    tokens, hits, misses = tokens[useful], hits[:, useful], misses[:, useful]
    if not len(tokens):
        return
    for planes in (np.ones(len(wrong), bool), hits.any(axis=1)):
        if not misses[planes].any():
            yield planes.reshape(shape), tokens, source[tokens]
            return
    patterns, group, sizes = np.unique(hits, axis=1, return_inverse=True, return_counts=True)
    for chosen in np.argsort(-sizes, kind="stable")[:MOST_GROUPS]:
        members = tokens[group.reshape(-1) == chosen]
        yield patterns[:, chosen].reshape(shape), members, source[members]


def _by_plane(cmp: Comparison, sources: Sources) -> Iterator[_Group]:
    """Group planes that hold the same sources in the same tokens, so that each may have its own damage."""
    shape = cmp.wrong.shape[:3]
    wrong = cmp.wrong.reshape(-1, cmp.num_tokens)
    ids, table = (array.reshape(-1, array.shape[3]) for array in (cmp.ids, cmp.table))
    held = np.full(wrong.shape, -1)
    for ranked in sources.ranked:
        held = np.where((held < 0) & wrong & (ranked >= 0) & (ids == table[:, ranked]), ranked, held)
    maps, group, sizes = np.unique(held, axis=0, return_inverse=True, return_counts=True)
    weights = sizes * (maps >= 0).sum(axis=1)
    for chosen in np.argsort(-weights, kind="stable")[:MOST_GROUPS]:
        for number in range(len(cmp.sources)):
            planes = group.reshape(-1) == chosen
            tokens = np.flatnonzero((maps[chosen] >= 0) & (cmp.source_of[maps[chosen]] == number))
            hits = np.repeat(planes[:, None], len(tokens), axis=1)
            tokens = tokens[_credible(hits, wrong[:, tokens], tokens, maps[chosen][tokens])]
            if len(tokens):
                yield planes.reshape(shape), tokens, maps[chosen][tokens]


def _credible(hits: Mask, wrong: Mask, tokens: Ints, source: Ints) -> Mask:
    """Which tokens do hold their source, given bool [planes, tokens]: where it has more than half of what is wrong.

    Or both K and V somewhere, over some tokens in a row. Less is chance: in the first layer, V is the same wherever
    the same word stands, and nearly every token has some twin there.
    """
    credible: Mask = 2 * hits.sum(axis=0) > wrong.sum(axis=0)
    both = np.flatnonzero((hits[0::2] & hits[1::2]).any(axis=0))
    if len(both):
        breaks = (np.diff(tokens[both]) != 1) | (np.diff(source[both] - tokens[both]) != 0)
        starts = np.append(0, np.flatnonzero(breaks) + 1)
        lengths = np.diff(np.append(starts, len(both)))
        credible[both[np.repeat(lengths, lengths) >= _IN_A_ROW]] = True
    return credible


def _own(cmp: Comparison, planes: Mask, tokens: Ints, index: Ints) -> list[Finding]:
    """As blocks, of D's size or P's, if every block moves as one; as tokens otherwise."""
    moves = dict(zip(cmp.tokens[tokens].tolist(), cmp.token_of[index].tolist(), strict=True))
    for grid in cmp.grids:
        blocks = _as_blocks(moves, grid)
        if blocks:
            found = _finding(cmp, planes, blocks, grid)
            if found:
                return found
    return _finding(cmp, planes, _bridged(cmp, planes, moves), 1)


def _as_blocks(moves: Map, grid: int) -> Map | None:
    blocks: Map = {}
    for token, source in moves.items():
        if (source - token) % grid or blocks.setdefault(token // grid, source // grid) != source // grid:
            return None
    return blocks


def _finding(cmp: Comparison, planes: Mask, moves: Map, unit: int) -> list[Finding]:
    if not moves:
        return []
    extended = moves | _from_outside(cmp, planes, moves, unit)
    target = _targets(cmp, extended, unit)
    fit = fit_region(cmp, planes, *target)
    if fit is None:
        extended, target = moves, _targets(cmp, moves, unit)
        fit = fit_region(cmp, planes, *target)
    if fit is None:
        return []
    noun = "token"
    if unit > 1:
        noun = "block position" if unit == cmp.grids[0] else "P's block position"
    pattern = describe(moves, noun)
    text = pattern.text
    if unit == 1 and pattern.verb == "copied":
        places, sources = sorted(moves), sorted(set(moves.values()))
        holds = "holds" if len(places) == 1 else "hold"
        text = f"{numbered('token', places)} {holds} this request's own {numbered('token', sources)}"
    scope = planes_texts(cmp, planes)
    text += f" in {', '.join(scope)}" if scope else ""
    cost = pattern.cost + (0.5 if scope else 0) + (0.25 if unit == 1 else 0)
    kind = f"{'tokens' if unit == 1 else 'blocks'}_{pattern.verb}"
    return [Finding(kind, text, cost, fit.explained, fit.excused, _source(planes, target))]


def _targets(cmp: Comparison, moves: Map, unit: int) -> tuple[Ints, Ints]:
    """The compared tokens in these blocks (or tokens), and the index in the table of what each would hold, or -1."""
    numbers = cmp.tokens // unit
    chosen = np.flatnonzero(np.isin(numbers, list(moves)))
    sources = np.array([moves[number] for number in numbers[chosen].tolist()], np.int64)
    return chosen, cmp.own_index(cmp.tokens[chosen] + (sources - numbers[chosen]) * unit)


def _from_outside(cmp: Comparison, planes: Mask, moves: Map, unit: int) -> Map:
    """In a shift, the wrong blocks (or tokens) whose content would come from outside of what P holds."""
    offsets = {source - place for place, source in moves.items()}
    if len(offsets) > 1:
        return {}
    offset = offsets.pop()
    first, end = cmp.producer.first_token, cmp.producer.end
    wrong = cmp.tokens[cmp.wrong[planes].any(axis=0)] // unit
    places = [int(place) for place in np.unique(wrong) if int(place) not in moves]
    return {
        place: place + offset
        for place in places
        if (place + offset + 1) * unit <= first or (place + offset) * unit >= end
    }


def _bridged(cmp: Comparison, planes: Mask, moves: Map) -> Map:
    """With the tokens between two of one displacement that hold what it says, though they are not wrong."""
    joined_up = dict(moves)
    places = sorted(moves)
    for before, after in pairwise(places):
        offset = moves[before] - before
        if moves[after] - after != offset or after == before + 1:
            continue
        gap = np.arange(before + 1, after)
        index = cmp.own_index(gap + offset)
        at = gap - cmp.first
        if (index >= 0).all() and (cmp.ids[planes][:, at] == cmp.table[planes][:, index]).all():
            joined_up |= {int(token): int(token) + offset for token in gap}
    return joined_up


def _foreign(cmp: Comparison, planes: Mask, tokens: Ints, index: Ints) -> list[Finding]:
    fit = fit_region(cmp, planes, tokens, index)
    if fit is None:
        return []
    number = int(cmp.source_of[index[0]])
    name = cmp.source_names[number]
    runs: list[tuple[int, int, int]] = []  # first token, first token there, length
    for token, there in zip(cmp.tokens[tokens].tolist(), cmp.token_of[index].tolist(), strict=True):
        if runs and runs[-1][1] - runs[-1][0] == there - token and _between(cmp, planes, runs[-1], token, number):
            runs[-1] = (*runs[-1][:2], token - runs[-1][0] + 1)
        else:
            runs.append((token, there, 1))
    scope = planes_texts(cmp, planes)
    where = f" in {', '.join(scope)}" if scope else ""
    whole = len(runs) == 1 and runs[0][0] == runs[0][1] and _is_everything(cmp, planes, runs[0], number)
    if whole:
        text = f"every token{where} holds what request {name} has at its position"
    else:
        text = _runs_text(cmp, runs, name) + where
    cost = (1.5 if whole else 1 + len(runs)) + (0.5 if scope else 0)
    return [Finding("other_request", text, cost, fit.explained, fit.excused, _source(planes, (tokens, index)))]


def _between(cmp: Comparison, planes: Mask, run: tuple[int, int, int], token: int, number: int) -> bool:
    """Whether the tokens from the run to this one hold the same displacement, so that it is one run."""
    gap = np.arange(run[0] + run[2], token)
    there = gap + run[1] - run[0]
    source = cmp.sources[number]
    if not len(gap):
        return True
    if there[0] < source.first_token or there[-1] >= source.end:
        return False
    index = there - source.first_token + int(np.argmax(cmp.source_of == number))
    at = gap - cmp.first
    return bool((cmp.ids[planes][:, at] == cmp.table[planes][:, index]).all())


def _is_everything(cmp: Comparison, planes: Mask, run: tuple[int, int, int], number: int) -> bool:
    """Whether what is before and after the run also is as in the other request."""
    last = int(cmp.tokens[-1])
    before = run[0] == cmp.first or _between(cmp, planes, (cmp.first, cmp.first, 0), run[0], number)
    return before and (run[0] + run[2] > last or _between(cmp, planes, run, last + 1, number))


def _runs_text(cmp: Comparison, runs: list[tuple[int, int, int]], name: str) -> str:
    texts: list[str] = []
    for token, there, length in runs:
        places = range(token, token + length)
        mine = ranges(places) if texts else numbered("token", places)
        theirs = range(there, there + length)
        of = ranges(theirs) if texts else f"request {name}'s {numbered('token', theirs)}"
        texts.append(f"{mine} {'holds' if length == 1 else 'hold'} {of}")
    return joined(texts, MOST_RUNS)


def _source(planes: Mask, target: tuple[Ints, Ints]) -> RowSource:
    index = dict(zip(*(array.tolist() for array in target), strict=True))

    def source(row: Row) -> tuple[int, int, int, int] | None:
        found = index.get(row[3], -1)
        return (*row[:3], found) if found >= 0 and planes[row[:3]] else None

    return source
