"""A section shows the story of the requests that it is about, says what it leaves out, and draws what it tells."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from reports import story
from reports.results import TimelineEvent
from reports.story import story_of
from reports.strip import GUTTER, LANES, MAX_COLUMNS, NARROWEST, strip_of
from scenarios.words import Outcome, Policy, Result, Role, VerdictStatus


@pytest.fixture
def faulted(build):
    """A cell whose load 2 was faulted and caught."""
    load = build.corrupted_load(Policy.FAIL_OPEN, VerdictStatus.MISMATCH)
    loads = (build.load(1), load, build.load(3))
    return build.cell(policy=Policy.FAIL_OPEN, loads=loads, timeline=build.timeline(2, load, "bit_flip"))


def told(cell):
    return [event.what for event in story_of(cell).rows]


def test_a_cell_without_a_timeline_has_no_story(build):
    assert story_of(build.cell()) is None


def test_the_story_is_that_of_the_faulted_request(faulted):
    found = story_of(faulted)
    assert found.about == "req-2"
    assert len(found.rows) == 13
    assert {event.request_id for event in found.rows} == {"req-2"}
    assert found.left_out == "1 more event of req-1 not shown: see results.json."
    assert not found.opened


@pytest.mark.parametrize("result", [Result.FAIL, Result.UNKNOWN])
def test_a_cell_that_needs_a_person_is_open_and_whole(faulted, result):
    found = story_of(replace(faulted, result=result))
    assert found.opened
    assert found.rows == faulted.timeline
    assert found.left_out is None
    assert {event.request_id for event in found.aside} == {"req-1"}
    assert found.about == "req-1, req-2 and req-3"


def test_competitors_and_the_whole_run_belong_to_every_story(faulted):
    events = (
        TimelineEvent(40, "producer", "request.ended", "c1", "P ended the request (length)"),
        TimelineEvent(99, "run", "engine.crashed", None, "an engine crashed: x"),
    )
    assert {event.what for event in events} < set(told(replace(faulted, timeline=(*faulted.timeline, *events))))


def test_without_a_fault_a_bad_request_or_the_first_is_the_example(build):
    loads = tuple(build.load(n) for n in (1, 2, 3))
    timeline = tuple(TimelineEvent(n, "consumer", "answer", f"req-{n}", "D answered") for n in (1, 2, 3))
    clean = build.cell(faults=(), loads=loads, timeline=timeline)
    assert story_of(clean).about == "req-1"
    bad = replace(loads[2], outcome=Outcome.HUNG)
    assert story_of(replace(clean, loads=(*loads[:2], bad))).about == "req-3"


def test_a_long_story_keeps_its_beginning_and_its_end(faulted, monkeypatch):
    monkeypatch.setattr(story, "MAX_ROWS", 4)
    found = story_of(faulted)
    own = [event for event in faulted.timeline if event.request_id == "req-2"]
    assert list(found.rows) == [*own[:2], *own[-2:]]
    assert found.left_out == "10 more events of req-1 and req-2 not shown: see results.json."


def test_only_twins_that_passed_have_no_picture(faulted):
    assert story_of(faulted).strip
    assert story_of(replace(faulted, role=Role.TWIN)).strip is None
    assert story_of(replace(faulted, role=Role.TWIN, result=Result.FAIL)).strip


def strip(cell, events=None):
    return strip_of(cell, events or [e for e in cell.timeline if e.request_id == "req-2"], ("req-2",))


def points(path):
    return [(int(x), int(y)) for x, y in re.findall(r"M(\d+) (\d+)", path)]


def test_every_event_is_drawn_once_in_its_lane(faulted):
    found = strip(faulted)
    lanes = {label.text: label.y - 4 for label in found.lanes}
    assert tuple(lanes) == LANES
    drawn = sorted([*points(found.dots), *points(found.bad_dots)])
    wanted = [event.where for event in faulted.timeline if event.request_id == "req-2" and event.where != "fault"]
    assert [y for _, y in drawn] == [lanes[where] for where in wanted]
    assert len({x for x, _ in drawn}) == len(drawn)
    assert all(GUTTER < x < found.width for x, _ in drawn)


def test_the_fault_is_shaded_and_marked_where_it_acted(faulted):
    found = strip(faulted)
    (x, width) = found.window
    (place,) = points(found.diamonds)
    assert x < place[0] < x + width
    assert place[1] + 7 == {label.text: label.y - 4 for label in found.lanes}["consumer"]
    assert found.window_label == "bit_flip"
    assert not [dot for dot in points(found.dots + found.bad_dots) if x < dot[0] < x + width]
    assert "The fault acts at 85." in found.words


def test_labels_say_verdict_and_outcome_and_what_is_wrong(faulted):
    labels = [(label.text, label.bad) for label in strip(faulted).labels]
    assert labels == [
        ("KV final", False), ("summed", False), ("answers", False), ("forwards", False), ("load", False),
        ("first copy", False), ("last copy", False), ("done", False), ("finished", False), ("wrong KV", True),
        ("mismatch", True), ("served", False),
    ]  # fmt: skip


def test_moments_are_numbered_once(faulted):
    assert [label.text for label in strip(faulted).ticks] == ["12", "14", "15", "19", "22", "80", "85", "90", "99"]


def test_a_window_reaches_from_the_first_to_the_last_event_of_the_fault(faulted):
    late = TimelineEvent(95, "fault", "proxy.params_pass", "req-2", "drop_checksums: gone")
    events = [event for event in faulted.timeline if event.request_id == "req-2"]
    found = strip(faulted, [*events[:-1], late, events[-1]])
    assert found.window_label == "bit_flip + drop_checksums"
    assert "The fault acts from 85 to 95." in found.words
    assert len(points(found.diamonds)) == 2
    x, width = found.window
    assert all(x < place < x + width for place, _ in points(found.diamonds))


def test_a_fault_without_evidence_has_no_window_and_says_so(faulted):
    nothing = TimelineEvent(99, "fault", "fault.done", "req-2", "bit_flip: left no evidence that it happened")
    found = strip(faulted, [event for event in faulted.timeline if event.where != "fault"] + [nothing])
    assert found.window is None
    assert found.diamonds == ""
    assert ("no evidence", True) in [(label.text, label.bad) for label in found.labels]


def test_others_are_named_in_the_picture(faulted):
    events = [TimelineEvent(5, "producer", "request.ended", "c1", "x"), TimelineEvent(6, "run", "end", None, "y")]
    found = strip(faulted, events)
    assert [label.text for label in found.labels] == ["c1 ended", "deadline"]
    assert len(points(found.other_dots)) == 1
    assert found.threads == ("",)


def test_a_long_picture_is_cut_and_says_so(faulted):
    events = [TimelineEvent(n, "producer", "request.preempted", "req-2", "x") for n in range(MAX_COLUMNS + 3)]
    found = strip(faulted, events)
    assert len(found.ticks) == MAX_COLUMNS
    assert "3 later events not drawn" in found.words
    assert found.width < GUTTER + (MAX_COLUMNS + 1) * NARROWEST
