"""A cell's history as a story: what each side did, in order, in words.

A history is one JSON object a line, in the order of writing; most lines carry `t`, virtual time. This reads plain
dicts and needs no package that wrote them, so that a stored history can be told again. It never judges: lines that it
does not know are left out, and nothing is told that no line says.

What the bytes oracle saw carries no `t`: it is told with the seam where it looked. Evidence is told at its own `t`; one
without is told at the seam that it names, where the history has that seam for its request, and else at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reports.results import TimelineEvent
from reports.telling import AT_SEAM, Told, positions, tell
from reports.text import counted, ranges

Line = Mapping[str, Any]
# A place in the story: time, line number, and what comes before (below 0) or after (above 0) that line.
Place = tuple[int, int, int]
Placed = tuple[Place, TimelineEvent]

# At these seams a fault changes, drops or holds what then goes on: its evidence comes before the line. At all others
# it acts on what the line says has happened.
ON_THE_WAY = frozenset({"producer.params_leave", "proxy.params_pass", "transfer.completion"})
# No line is written when an operation is posted; what happens there comes before anything else of its moment.
POSTED = "transfer.op_posted"
SUMMED = "producer.checksummed"
# Written in the moment of a verdict, before it, although they follow from it.
FROM_VERDICT = frozenset({"consumer.recompute_start", "request.ended"})
NORMAL_ENDS = frozenset({"stop", "length"})
UNTIMED = " (its time was not recorded)"
# More changes of one fault at one moment than these are told as one event.
MAX_CHANGES = 3
# What one fault or one engine says again and again is told once.
BOTH_TOLD = "both sides were told that the transfer is done"
REPEATING = frozenset({"request.preempted"})
BEFORE, VERDICT_FIRST = -1, -10
# P sums before a fault of that moment, D's bytes are looked at after it.
ORACLE_FIRST, FAULT, ORACLE_LAST = 1, 2, 3


def timeline(lines: Sequence[Line]) -> tuple[TimelineEvent, ...]:
    """The moments of one cell, in order. `lines` are its history, with or without the `cell` line."""
    history = _History(lines)
    placed = [
        *_of_lines(history),
        *_of_landed(history),
        *_of_bytes(history),
        *_of_reads(history),
        *_of_evidence(history),
    ]
    return _folded([event for _, event in sorted(placed, key=lambda item: item[0])])


@dataclass(frozen=True, slots=True)
class _History:
    """The lines, and the place of each in the story."""

    lines: Sequence[Line]

    @property
    def unsummed(self) -> bool:
        """Whether checksums are off: then P reaches the moment at which it would sum, and does not."""
        return any(line["event"] == "cell" and line.get("policy") == "off" for line in self.lines)

    @property
    def end(self) -> int:
        return max((line["t"] for line in self.lines if isinstance(line.get("t"), int)), default=0)

    def numbered(self, event: str, request: Any) -> list[int]:
        """The numbers of an event's lines of a request."""
        return [n for n, x in enumerate(self.lines) if x["event"] == event and x.get("request") == request]

    def place(self, number: int) -> Place:
        line = self.lines[number]
        t = line.get("t")
        if not isinstance(t, int):
            return self.end, len(self.lines) + number, 0
        if line["event"] == "consumer.verified":
            follows = (n for event in FROM_VERDICT for n in self.numbered(event, line["request"]))
            first = min((n for n in follows if self.lines[n].get("t") == t), default=number)
            if first < number:
                return t, first, VERDICT_FIRST
        return t, number, 0


def _beside(place: Place, step: int) -> Place:
    return place[0], place[1], place[2] + step


def _event(place: Place, told: Told, event: str, request: Any) -> Placed:
    return place, TimelineEvent(place[0], told.where, event, request if isinstance(request, str) else None, told.what)


def _of_lines(history: _History) -> Iterator[Placed]:
    """The lines that say by themselves what happened."""
    sent: dict[str, str | None] = {}
    left_out = {SUMMED} if history.unsummed else set()
    for number, line in enumerate(history.lines):
        if line["event"] == "producer.params_leave":
            sent[line["request"]] = line.get("kv_checksums")
        if line["event"] in left_out or (line["event"] == "request.ended" and _is_told_by_its_answer(line, history)):
            continue
        told = tell(line, sent)
        if told is not None:
            yield _event(history.place(number), told, line["event"], line.get("request"))


def _is_told_by_its_answer(line: Line, history: _History) -> bool:
    """An end that says no more than P's or D's answer: the only one of its request there, for the same reason."""
    request, reason, engine = line.get("request"), line.get("reason"), line.get("engine")
    ends = [n for n in history.numbered("request.ended", request) if history.lines[n].get("engine") == engine]
    answers = [history.lines[n].get("finish_reason") for n in history.numbered("answer", request)]
    left = engine == "producer" and bool(history.numbered("producer.params_leave", request))
    return len(ends) == 1 and (reason in answers or (left and reason in NORMAL_ENDS))


def _of_bytes(history: _History) -> Iterator[Placed]:
    """Where the bytes oracle saw other bytes than P held at KV final: its last look at each moment, as it is judged."""
    views = {(x["at"], x["request"], x.get("group", 0)): x for x in history.lines if x["event"] == "oracle.kv"}
    for (at, request, group), view in views.items():
        if at not in AT_SEAM or (history.unsummed and AT_SEAM[at][0] == SUMMED):
            continue
        seam, reference, said = AT_SEAM[at]
        wanted = views.get((reference, request, group))
        looked = history.numbered(seam, request)
        if wanted is None or not looked:
            continue
        blocks = history.lines[looked[-1]].get("groups", ())
        size = next((g["block_size"] for g in blocks if g["group"] == group), view["grid"])
        differing = _differing(view, wanted, size)
        if differing:
            of_group = f" of group {group}" if group else ""
            told = Told(seam.partition(".")[0], f"bytes oracle: {said}, in {positions(differing)}{of_group}")
            step = ORACLE_FIRST if at == "checksummed" else ORACLE_LAST
            yield _event(_beside(history.place(looked[-1]), step), told, "oracle.kv", request)


def _of_landed(history: _History) -> Iterator[Placed]:
    """Where fewer blocks arrived than D scheduled; the line has no time, and comes before D is told."""
    for number, line in enumerate(history.lines):
        if line["event"] != "transfer.landed":
            continue
        request = line["request"]
        scheduled = history.numbered("consumer.load_scheduled", request)
        after = next((n for n in history.numbered("transfer.completion", request) if n > number), None)
        if after is None or not scheduled:
            continue
        wanted = sum(len(group["blocks"]) for group in history.lines[scheduled[-1]].get("groups", ()))
        if len(line["positions"]) < wanted:
            arrived = positions(line["positions"]) if line["positions"] else "no block"
            found = Told("transfer", f"copies arrived for {arrived} only, of {counted(wanted, 'block')}")
            yield _event(_beside(history.place(after), BEFORE), found, line["event"], request)


def _of_reads(history: _History) -> Iterator[Placed]:
    """The first read of foreign or changed slots of each request; without a time, it is told after what came before."""
    told: set[str] = set()
    last = None
    for number, line in enumerate(history.lines):
        if isinstance(line.get("t"), int):
            last = number
        if line["event"] != "oracle.read" or not line["foreign"] or line["request"] in told or last is None:
            continue
        told.add(line["request"])
        tokens = f"token{'' if len(line['foreign']) == 1 else 's'} {ranges(line['foreign'])}"
        what = f"provenance oracle: D reads slots that are not its own, or were changed, at {tokens}"
        yield _event(_beside(history.place(last), ORACLE_LAST), Told("consumer", what), line["event"], line["request"])


def _differing(view: Line, wanted: Line, block_size: int) -> list[int]:
    """Positions in blocks of `block_size` tokens where two views differ; both count in blocks of `grid` tokens."""
    reference = dict(enumerate(wanted["digests"], start=wanted["start"]))
    wrong = [p for p, digest in enumerate(view["digests"], start=view["start"]) if reference.get(p) != digest]
    return sorted({p // max(1, block_size // view["grid"]) for p in wrong})


def _of_evidence(history: _History) -> Iterator[Placed]:
    """What the faults proved. Many changes of one fault at one moment are one event."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for line in history.lines:
        if line["event"] == "evidence":
            key = (line["fault"], line["seam"], line.get("request"), line.get("t"))
            groups.setdefault(key, []).append(line["what"])
    for (fault, seam, request, t), changes in groups.items():
        place, known = _place_of_evidence(history, seam, request, t)
        untimed = "" if known else UNTIMED
        if len(changes) > MAX_CHANGES:
            changes = [f"{changes[0]}, and {len(changes) - 1} more such changes"]
        for what in changes:
            yield _event(place, Told("fault", f"{fault}: {what}{untimed}"), seam, request)


def _place_of_evidence(history: _History, seam: str, request: Any, t: int | None) -> tuple[Place, bool]:
    """Where to tell it, and whether that is known."""
    for number in history.numbered(seam, request):
        line = history.lines[number]
        if "t" in line and t in (None, line["t"]) and line.get("to") != "producer":
            return _beside(history.place(number), BEFORE if seam in ON_THE_WAY else FAULT), True
    if t is None:
        return (history.end, 2 * len(history.lines), 0), False
    return (t, -1 if seam == POSTED else len(history.lines), 0), True


def _folded(events: Sequence[TimelineEvent]) -> tuple[TimelineEvent, ...]:
    """Without what says the same again: both sides told of one completion, one request preempted over and over."""
    folded: list[TimelineEvent] = []
    times: Counter[int] = Counter()
    last: dict[str | None, int] = {}
    for event in events:
        place = last.get(event.request_id)
        if place is not None and _is_other_side(folded[place], event):
            folded[place] = replace(folded[place], what=BOTH_TOLD)
        elif place is not None and event.event in REPEATING and replace(event, t=folded[place].t) == folded[place]:
            times[place] += 1
        else:
            last[event.request_id] = len(folded)
            folded.append(event)
    for place, more in times.items():
        folded[place] = replace(folded[place], what=f"{folded[place].what}, {more + 1} times in a row")
    return tuple(folded)


def _is_other_side(previous: TimelineEvent, event: TimelineEvent) -> bool:
    """The same completion, told to the other side in the same moment."""
    both = (previous.t, previous.where, previous.event) == (event.t, event.where, "transfer.completion")
    return both and event.where == "transfer" and previous.what != event.what
