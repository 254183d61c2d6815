"""Where D's wrong rows come from: the token of this or another request that has the same row, in the same place of
its layers and heads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness.diagnosis.compare import Comparison, Ids, Ints, Mask, sample_of
from harness.diagnosis.finding import Finding
from harness.diagnosis.words import percent

RANKS = 3
MOST_ALIKE = 4  # a row that more tokens of a source share says nothing about where it came from
_MOST_ROWS = 2**18
_SAMPLE = 4096
_SHORT = 8  # bytes: rows below this are equal by chance


@dataclass(frozen=True, slots=True, eq=False)
class Sources:
    """What was found.

    Attributes:
        ranked: the likeliest source of each compared token first: int64 [T] each, an index in the table, or -1.
        displacements: (number of the source, its token's position less the token's), most frequent first.
    """

    ranked: tuple[Ints, ...]
    displacements: tuple[tuple[int, int], ...]


def find_sources(cmp: Comparison) -> Sources:
    """Look every wrong row up (or those of some planes, where there are very many) and let the rows of a token vote."""
    token, index = _matches(cmp)
    if not len(token):
        return Sources((), ())
    size = cmp.table.shape[3]
    codes, votes = np.unique(token * size + index, return_counts=True)
    token, index = codes // size, codes % size
    number, offset = cmp.source_of[index], cmp.token_of[index] - cmp.tokens[token]
    reach = 2 * int(max(cmp.token_of.max(), cmp.tokens[-1])) + 1
    displacements, which = np.unique(number * reach + offset + reach // 2, return_inverse=True)
    totals = np.bincount(which, weights=votes).astype(np.int64)
    order = np.lexsort((np.abs(offset), number, -totals[which], -votes, token))
    token, index = token[order], index[order]
    rank = np.arange(len(token)) - np.searchsorted(token, token)
    ranked = []
    for wanted in range(min(RANKS, int(rank.max()) + 1)):
        source = np.full(cmp.num_tokens, -1)
        source[token[rank == wanted]] = index[rank == wanted]
        ranked.append(source)
    most = displacements[np.argsort(-totals, kind="stable")].tolist()
    return Sources(tuple(ranked), tuple((code // reach, code % reach - reach // 2) for code in most))


def _matches(cmp: Comparison) -> tuple[Ints, Ints]:
    """(compared token, index in the table) of every wrong row and of every row like it in the same plane."""
    size = cmp.table.shape[3]
    wrong, ids, table = (array.reshape(-1, array.shape[3]) for array in (cmp.wrong, cmp.ids, cmp.table))
    planes = _chosen_planes(cmp)
    salt = np.random.default_rng(1).integers(0, 2**64, len(planes), dtype=np.uint64)[:, None]
    keys: Ids = (table[planes] ^ salt).reshape(-1)
    order = np.argsort(keys)
    keys = keys[order]
    plane, token = np.nonzero(wrong[planes])
    wanted = (ids[planes] ^ salt)[plane, token]
    low, high = np.searchsorted(keys, wanted, "left"), np.searchsorted(keys, wanted, "right")
    usable = (high > low) & (high - low <= MOST_ALIKE)
    low, token, alike = low[usable], token[usable], (high - low)[usable]
    token = np.repeat(token, alike)
    within = np.arange(len(token)) - np.repeat(np.cumsum(alike) - alike, alike)
    return token, order[np.repeat(low, alike) + within] % size


def _chosen_planes(cmp: Comparison) -> Ints:
    """Planes (layer, head, part) whose rows are looked up: all, or some of each set that differs in the same tokens."""
    wrong = cmp.wrong.reshape(-1, cmp.num_tokens)
    planes = np.flatnonzero(wrong.any(axis=1))
    most = max(1, _MOST_ROWS // cmp.table.shape[3])
    if len(planes) <= most:
        return planes
    _, groups = np.unique(np.packbits(wrong[planes], axis=1), axis=0, return_inverse=True)
    groups = groups.reshape(-1)
    order = np.argsort(groups, kind="stable")
    within = np.arange(len(order)) - np.searchsorted(groups[order], groups[order])
    return np.sort(planes[order[np.argsort(within, kind="stable")[:most]]])


def scattered(cmp: Comparison, rows: Mask) -> list[Finding]:
    """That most of these rows (judged by a sample) are a request's all the same, in no pattern. It predicts none."""
    if cmp.half < _SHORT:
        return []
    sample = sample_of(rows, _SAMPLE)
    ids, weights = cmp.ids[sample], cmp.wrong_bytes[sample]
    distinct, which = np.unique(ids, return_inverse=True)
    findings = []
    for number, name in enumerate(cmp.source_names):
        table = cmp.table[..., cmp.source_of == number].reshape(-1)
        nearest = np.minimum(np.searchsorted(distinct, table), len(distinct) - 1)
        found = np.zeros(len(distinct), bool)
        found[nearest[distinct[nearest] == table]] = True
        share = float(weights[found[which]].sum() / weights.sum())
        if share > 0.5:
            whose = f"request {name}'s KV" if name else "this request's own KV"
            what = "the rest" if cmp.bytes_of(rows) < cmp.total else "it"
            text = (
                f"{percent(round(1000 * share), 1000)} of {what} is {whose} from other places, in no pattern known here"
            )
            findings.append(Finding("scattered", text, 9, None))
    return findings
