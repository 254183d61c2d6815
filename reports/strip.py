"""A cell's timeline as a picture: a lane a side, a column an event, a thread a request, the fault's window shaded.

Columns are equally wide: virtual time counts actions, so the distance between two events says little. Everything that
the picture shows is also in the table beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from reports.results import CellResult, LoadResult, TimelineEvent
from reports.text import clip, counted, visible
from scenarios.words import Outcome, VerdictStatus

LANES = ("producer", "proxy", "transfer", "consumer")
GUTTER, TOP, LANE, AXIS = 74, 30, 40, 26
# A column is as wide as the page allows, within these.
PAGE_WIDTH, NARROWEST, WIDEST, PAD = 1130, 60, 72, 16
MAX_COLUMNS = 40
MAX_LABEL = 24

LABELS = {
    "producer.kv_final": "KV final",
    "producer.checksummed": "summed",
    "producer.params_leave": "answers",
    "proxy.params_pass": "forwards",
    "consumer.load_scheduled": "load",
    "transfer.op_landed": "copy",
    "transfer.completion": "done",
    "consumer.load_finished": "finished",
    "consumer.first_use": "first read",
    "consumer.recompute_start": "gives up",
    "oracle.kv": "wrong KV",
    "oracle.read": "foreign KV",
    "oracle.pool": "blocks lost",
    "transfer.landed": "not all",
    "request.preempted": "preempted",
    "request.ended": "ended",
    "engine.refused": "refused",
    "engine.crashed": "crash",
    "checker.crashed": "checker",
    "end": "deadline",
    "fault.done": "no evidence",
}
NO_EVIDENCE = "fault.done"
BAD_EVENTS = frozenset(
    {
        "transfer.landed", "oracle.kv", "oracle.read", "oracle.pool", "engine.refused", "engine.crashed",
        "checker.crashed", "end", NO_EVIDENCE,
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Label:
    x: int
    y: int
    text: str
    bad: bool


@dataclass(frozen=True, slots=True)
class Strip:
    """Lines to draw, in pixels. Paths are SVG path data; `window` is x and width."""

    width: int
    height: int
    lanes: tuple[Label, ...]
    rules: str
    threads: tuple[str, ...]
    dots: str
    bad_dots: str
    other_dots: str
    diamonds: str
    labels: tuple[Label, ...]
    ticks: tuple[Label, ...]
    moments: str
    window: tuple[int, int] | None
    window_label: str
    words: str


def strip_of(cell: CellResult, events: Sequence[TimelineEvent], focus: Sequence[str]) -> Strip | None:
    """The picture of these events; None if there are none. `focus` are the requests whose thread is drawn."""
    if not events:
        return None
    drawn = events[:MAX_COLUMNS]
    column = min(WIDEST, max(NARROWEST, (PAGE_WIDTH - GUTTER) // len(drawn)))
    drawing = _Drawing(drawn, tuple(focus), {load.request_id: load for load in cell.loads}, column)
    return drawing.strip(len(events) - len(drawn))


@dataclass(frozen=True, slots=True)
class _Drawing:
    events: Sequence[TimelineEvent]
    focus: tuple[str, ...]
    loads: Mapping[str, LoadResult]
    column: int

    def strip(self, left: int) -> Strip:
        events, right = self.events, self.x(len(self.events)) - self.column // 2
        struck = [n for n, event in enumerate(events) if _is_proof(event)]
        moments = self.moments()
        return Strip(
            width=right + PAD,
            height=_BOTTOM + AXIS,
            lanes=tuple(Label(0, _lane(name) + 4, name, False) for name in LANES),
            rules="".join(f"M{GUTTER} {_lane(name)}H{right}" for name in LANES),
            threads=tuple(self.thread(request) for request in self.focus),
            dots=self.dots(lambda event: self.is_own(event) and not self.is_bad(event)),
            bad_dots=self.dots(self.is_bad),
            other_dots=self.dots(lambda event: not self.is_own(event) and not self.is_bad(event)),
            diamonds="".join(f"M{x} {y - 7}l7 7-7 7-7-7z" for x, y in map(self.point, struck) if y),
            labels=tuple(self.labels()),
            ticks=tuple(Label((a + b) // 2, _BOTTOM + 20, str(t), False) for a, b, t in moments),
            moments="".join(f"M{a} {_BOTTOM + 6}H{b}" for a, b, _ in moments if a != b),
            window=(self.x(struck[0]) - self.column // 2, (struck[-1] - struck[0] + 1) * self.column)
            if struck
            else None,
            window_label=clip(" + ".join(dict.fromkeys(_kind(events[n]) for n in struck)), 60),
            words=self.words([events[n].t for n in struck], left),
        )

    def window(self, struck: Sequence[int]) -> tuple[int, int] | None:
        if not struck:
            return None
        return self.x(struck[0]) - self.column // 2, (struck[-1] - struck[0] + 1) * self.column

    def x(self, number: int) -> int:
        return GUTTER + self.column // 2 + number * self.column

    def point(self, number: int) -> tuple[int, int]:
        """Where an event is: in its lane; a fault in that of its seam. Height 0 where no lane is known."""
        event = self.events[number]
        where = event.event.partition(".")[0] if event.where == "fault" else event.where
        return self.x(number), _lane(where) if where in LANES else 0

    def is_own(self, event: TimelineEvent) -> bool:
        return event.request_id in self.focus

    def is_bad(self, event: TimelineEvent) -> bool:
        load = self.loads.get(event.request_id or "")
        if event.event in BAD_EVENTS or event.where == "run":
            return True
        if load is None:
            return False
        if event.event == "consumer.verified":
            return load.verdict in (VerdictStatus.MISMATCH, VerdictStatus.UNVERIFIED)
        return event.event == "answer" and load.outcome not in (Outcome.SERVED, Outcome.RECOMPUTED)

    def dots(self, wanted: Callable[[TimelineEvent], bool]) -> str:
        """Points of no length, which a round line cap makes dots."""
        chosen = (n for n, event in enumerate(self.events) if not _is_proof(event) and wanted(event))
        return "".join(f"M{x} {y}h0" for x, y in map(self.point, chosen) if y)

    def thread(self, request: str) -> str:
        """A line through the events of a request, from lane to lane."""
        numbers = (n for n, event in enumerate(self.events) if event.request_id == request and event.where in LANES)
        points = [self.point(n) for n in numbers]
        parts = [f"M{points[0][0]} {points[0][1]}"] if points else []
        for (x1, y1), (x2, y2) in pairwise(points):
            middle = (x1 + x2) // 2
            parts.append(f"H{x2}" if y1 == y2 else f"C{middle} {y1} {middle} {y2} {x2} {y2}")
        return "".join(parts)

    def labels(self) -> Iterator[Label]:
        copied: set[str | None] = set()
        for n, event in enumerate(self.events):
            if _is_proof(event):
                continue
            text = self.label(event, copied)
            if len(self.focus) > 1 or event.request_id not in (None, *self.focus):
                text = f"{event.request_id or ''} {text}".strip()
            x, y = self.point(n)
            yield Label(x, (y + 18) if y else TOP - 15, clip(visible(text), MAX_LABEL), self.is_bad(event))

    def label(self, event: TimelineEvent, copied: set[str | None]) -> str:
        load = self.loads.get(event.request_id or "")
        if load is not None and event.event in ("consumer.verified", "answer"):
            return str(load.verdict if event.event == "consumer.verified" else load.outcome)
        if event.event == "transfer.op_landed":
            word = "last copy" if event.request_id in copied else "first copy"
            copied.add(event.request_id)
            return word
        return LABELS.get(event.event, event.event.rpartition(".")[2].replace("_", " "))

    def moments(self) -> list[tuple[int, int, int]]:
        """Where each virtual time begins and ends, and the time."""
        grouped = [list(group) for _, group in groupby(enumerate(self.events), key=lambda item: item[1].t)]
        return [(self.x(group[0][0]), self.x(group[-1][0]), group[0][1].t) for group in grouped]

    def words(self, struck: Sequence[int], left: int) -> str:
        named = visible(", ".join(self.focus)) or "the cell"
        window = ""
        if struck:
            at = f"at {struck[0]}" if struck[0] == struck[-1] else f"from {struck[0]} to {struck[-1]}"
            window = f" The fault acts {at}."
        more = f" {counted(left, 'later event')} not drawn." if left else ""
        first, last = self.events[0].t, self.events[-1].t
        return f"Events of {named} by lane, from virtual time {first} to {last}.{window}{more} The table lists them."


_BOTTOM = TOP + len(LANES) * LANE


def _is_proof(event: TimelineEvent) -> bool:
    """Whether a fault shows here that it happened."""
    return event.where == "fault" and event.event != NO_EVIDENCE


def _lane(name: str) -> int:
    return TOP + LANES.index(name) * LANE + 14


def _kind(event: TimelineEvent) -> str:
    """The fault of an event: what stands before the colon."""
    return visible(event.what.partition(":")[0])
