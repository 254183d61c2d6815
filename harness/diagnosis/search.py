"""Tries every kind of hypothesis and ranks what came true.

A hypothesis predicts D's bytes from P's and other requests'. It counts only if it contradicts no byte that D has
right; it is the better the more of the differing bytes it predicts, and then the less it assumes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from harness.diagnosis.axes import misplaced_planes
from harness.diagnosis.bits import describe_bits, flipped_bits, same_bit
from harness.diagnosis.casts import converted
from harness.diagnosis.compare import Comparison, Mask, compare
from harness.diagnosis.fills import filled, find_fills
from harness.diagnosis.finding import Finding, axes_of, head_names, layer_names
from harness.diagnosis.layouts import reordered
from harness.diagnosis.model import Diagnosis, Hypothesis, KVBlocks
from harness.diagnosis.moves import moved_tokens
from harness.diagnosis.pieces import changed_pieces
from harness.diagnosis.sources import find_sources, scattered
from harness.diagnosis.torn import torn, unknown_content
from harness.diagnosis.words import count, numbered, percent, ranges, sentence

MOST_HYPOTHESES = 3
MOST_PARTS = 5
MIN_BYTES = 4  # that a move must explain: fewer are equal by chance
MIN_PART = 0.01  # of the damage, that a part of an explanation must add
_MOST_ROWS_OF_BITS = 64


def diagnose(producer: KVBlocks, consumer: KVBlocks, others: Mapping[str, KVBlocks] | None = None) -> Diagnosis:
    """Say what of D's KV differs from P's, and what would explain it.

    Args:
        producer: P's KV. Tokens that D does not hold are looked at only as where D's bytes may come from.
        consumer: D's, of the same layers and heads. Tokens that P does not hold are not looked at.
        others: KV of other requests, by name, of which D's bytes may be.

    Returns:
        With at most five hypotheses, best first: those that explain everything, or else the parts of an explanation.

    Raises:
        ValueError: the two have no token in common, or somebody has other layers, heads or bytes a token.
    """
    cmp = compare(producer, consumer, others or {})
    if not cmp.total:
        return Diagnosis(None)
    findings = _without_idle_excuses(cmp, _found(cmp))
    complete = sorted((f for f in findings if _accounted(cmp, f) == cmp.total), key=lambda f: _key(cmp, f))
    hypotheses = [_hypothesis(cmp, finding) for finding in complete] or _in_parts(cmp, findings)
    distinct = list({hypothesis.text: hypothesis for hypothesis in hypotheses}.values())
    return Diagnosis(_damage(cmp), tuple(distinct[: MOST_HYPOTHESES if complete else MOST_PARTS]))


def _found(cmp: Comparison) -> list[Finding]:
    bits = flipped_bits(cmp) + changed_pieces(cmp)
    fills = find_fills(cmp)
    sources = find_sources(cmp)
    others = [
        *same_bit(cmp),
        *filled(cmp, fills),
        *reordered(cmp),
        *misplaced_planes(cmp),
        *moved_tokens(cmp, sources),
        *converted(cmp),
        *torn(cmp, fills, sources),
    ]
    return bits + [f for f in others if f.explained is not None and cmp.bytes_of(f.explained) >= MIN_BYTES]


def _without_idle_excuses(cmp: Comparison, findings: list[Finding]) -> list[Finding]:
    """No row is excused as being in no dump while another finding does explain it."""
    explained = [finding.explained for finding in findings if finding.explained is not None]

    def judged(finding: Finding) -> Finding:
        excused = finding.excused
        if excused is None or any(2 * cmp.bytes_of(excused & rows) > cmp.bytes_of(excused) for rows in explained):
            return replace(finding, excused=None)
        return finding

    return [judged(finding) for finding in findings]


def _accounted(cmp: Comparison, finding: Finding) -> int:
    """Bytes that it predicts, or says to come from where no dump reaches."""
    return sum(cmp.bytes_of(rows) for rows in (finding.explained, finding.excused) if rows is not None)


def _key(cmp: Comparison, finding: Finding) -> tuple[int, int, float]:
    excused = 0 if finding.excused is None else cmp.bytes_of(finding.excused)
    return -_accounted(cmp, finding), excused, finding.cost


def _hypothesis(cmp: Comparison, finding: Finding) -> Hypothesis:
    explained = 0 if finding.explained is None else cmp.bytes_of(finding.explained)
    text = finding.text
    if finding.excused is not None and finding.excused.any():
        tokens = cmp.tokens[finding.excused.any(axis=(0, 1, 2))].tolist()
        text += f"; what {numbered('token', tokens)} then {'holds' if len(tokens) == 1 else 'hold'} is in no dump"
    elif finding.explained is not None and explained < cmp.total:
        text += f" (explains {percent(explained, cmp.total)} of it)"
    return Hypothesis(finding.kind, sentence(text), explained / cmp.total)


def _in_parts(cmp: Comparison, findings: list[Finding]) -> list[Hypothesis]:
    """Findings that together explain as much as possible: each time the one that adds most."""
    rest = cmp.wrong.copy()
    chosen: list[Finding] = []
    while findings and len(chosen) < MOST_PARTS - 1:
        added = [(cmp.bytes_of(rest & f.explained) if f.explained is not None else 0) for f in findings]
        best = min(range(len(findings)), key=lambda i: (-added[i], *_key(cmp, findings[i])))
        if added[best] < max(MIN_BYTES, MIN_PART * cmp.total):
            break
        chosen.append(findings[best])
        for rows in (chosen[-1].explained, chosen[-1].excused):
            if rows is not None:
                rest &= ~rows
    chosen += _bits_besides(cmp, chosen, rest)
    if rest.any():
        chosen += [*([] if chosen else unknown_content(cmp)), *scattered(cmp, rest)]
    return [_hypothesis(cmp, finding) for finding in chosen]


def _bits_besides(cmp: Comparison, chosen: list[Finding], rest: Mask) -> list[Finding]:
    """A few flipped bits in rows that the chosen findings leave, compared with what these say should be there."""
    if not chosen or not 0 < np.count_nonzero(rest) <= _MOST_ROWS_OF_BITS:
        return []
    rows = np.argwhere(rest).tolist()
    before = cmp.producer_rows(rest)
    for number, row in enumerate(rows):
        sources = [f.source((row[0], row[1], row[2], row[3])) for f in chosen if f.source is not None]
        found = next((source for source in sources if source is not None), None)
        if found is not None:
            before[number] = cmp.source_row(*found)
    text = describe_bits(cmp, rows, before, cmp.consumer_rows(rest))
    return [Finding("bits", f"besides, {text}", 0, rest.copy())] if text else []


def _damage(cmp: Comparison) -> str:
    layers, heads, parts = axes_of(np.any(cmp.wrong, axis=3))
    tokens = cmp.tokens[cmp.wrong.any(axis=(0, 1, 2))]
    blocks = np.unique(tokens // cmp.consumer.block_size).tolist()
    all_layers, all_heads = layer_names(cmp), head_names(cmp)
    items = [
        f"{numbered('layer', [all_layers[i] for i in layers])} of {len(all_layers)}",
        f"{numbered('head', [all_heads[i] for i in heads])} of {len(all_heads)}",
        *([f"{'KV'[parts[0]]} only"] if len(parts) == 1 else []),
        f"{numbered('token', tokens.tolist())} (block position{'' if len(blocks) == 1 else 's'} {ranges(blocks)})",
        f"{cmp.total:,} of {count(cmp.wrong.size * cmp.half, 'byte')}",
    ]
    return ", ".join(items)
