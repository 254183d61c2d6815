"""A history told as a story: the right words, in the right order, whether or not evidence carries its time."""

from __future__ import annotations

import random

import pytest

from reports.results import TimelineEvent, from_json, to_json
from reports.timeline import timeline

GROUPS = [{"group": 0, "start": 0, "blocks": [4, 5, 6], "block_size": 16, "tokens": 41}]
SUMS = "1122334455667788"


def kv(at, digests, *, request="r2", group=0, grid=16, start=0):
    return {
        "event": "oracle.kv", "at": at, "request": request, "group": group, "grid": grid, "start": start,
        "digests": list(digests), "sums": [],
    }  # fmt: skip


def seam(event, t, request="r2", **fields):
    engine = "producer" if event.startswith("producer") else "consumer"
    return {"event": event, "t": t, "request": request, "engine": engine, **fields}


def verdict(status, compared=(0, 1, 2), differing=(), reason=None, group=0):
    left = [p for p in range(3) if p not in compared]
    groups = [{
        "group": group, "status": status, "reason": reason, "loaded": [0, 1, 2], "compared": list(compared),
        "not_compared": left, "differing": list(differing),
    }]  # fmt: skip
    return {"status": status, "reason": reason, "groups": groups}


def evidence(seam_name, what="bit 3 of byte 7", request="r2", fault="bit_flip", **fields):
    return {
        "event": "evidence", "fault": fault, "seam": seam_name, "request": request, "what": what,
        "before": "aa", "after": "bb", **fields,
    }  # fmt: skip


def answer(t, request="r2", reason="length", tokens=(1, 2), **fields):
    return {
        "event": "answer", "t": t, "engine": "consumer", "request": request, "tokens": list(tokens),
        "finish_reason": reason, "error": None, "recomputed": False, "verdict": verdict("verified"), **fields,
    }  # fmt: skip


def history():
    """One load that comes out well, written in the order in which a target writes it."""
    return [
        {"event": "cell", "id": "x", "seed": 1},
        {"event": "request", "request": "r2", "load": 2, "tokens": 41},
        {"event": "oracle.tokens", "request": "r2", "tokens": [1, 2]},
        kv("kv_final", "abc"),
        kv("to_be_read", "abC"),
        seam("producer.kv_final", 10, groups=GROUPS),
        kv("checksummed", "abc"),
        seam("producer.checksummed", 10, groups=GROUPS),
        seam("producer.params_leave", 12, kv_checksums=SUMS, keys=[]),
        seam("request.ended", 12, reason="length") | {"engine": "producer"},
        seam("proxy.params_pass", 13, kv_checksums=SUMS, keys=[]),
        seam("consumer.load_scheduled", 20, groups=GROUPS),
        seam("transfer.op_landed", 25, index=0, of=24),
        seam("transfer.op_landed", 60, index=23, of=24),
        seam("transfer.completion", 60, to="consumer"),
        seam("transfer.completion", 60, to="producer"),
        seam("consumer.load_finished", 64, groups=GROUPS),
        kv("load_finished", "abc"),
        seam("consumer.verified", 70, verdict=verdict("verified")),
        seam("consumer.first_use", 75, groups=GROUPS),
        kv("first_use", "abC"),
        seam("request.ended", 90, reason="length"),
        answer(91),
        {"event": "oracle.pool", "engine": "producer", "free": 63, "total": 63, "ends": [["r2", 1]]},
        {"event": "end", "t": 91, "finished": True, "held": []},
    ]


def told(lines):
    return [f"{event.t} {event.where}: {event.what}" for event in timeline(lines)]


def with_line(line, before="oracle.pool"):
    """The history with one more line, where targets write evidence."""
    lines = history()
    place = next(n for n, x in enumerate(lines) if x["event"] == before)
    return [*lines[:place], line, *lines[place:]]


def test_a_load_that_comes_out_well():
    assert told(history()) == [
        "10 producer: P has computed the prompt, 41 tokens: its KV is final in 3 blocks",
        "10 producer: P checksummed 3 blocks",
        "12 producer: P answered the proxy, with kv_checksums",
        "13 proxy: the proxy forwarded the parameters, with kv_checksums as P sent them",
        "20 consumer: D scheduled the load of 3 blocks",
        "25 transfer: copy 1 of 24 landed",
        "60 transfer: copy 24 of 24 landed",
        "60 transfer: both sides were told that the transfer is done",
        "64 consumer: D's worker took the load as finished: 3 blocks",
        "70 consumer: verdict verified: 3 blocks compared",
        "75 consumer: D reads the loaded KV for the first time",
        "91 consumer: D answered: 2 tokens",
    ]


def test_events_keep_the_name_of_their_line_and_can_be_stored():
    events = timeline(history())
    assert [event.event for event in events][:2] == ["producer.kv_final", "producer.checksummed"]
    assert {event.request_id for event in events} == {"r2"}
    assert all(from_json(TimelineEvent, to_json(event)) == event for event in events)


@pytest.mark.parametrize("t", [None, 10, 13, 60, 64, 70])
@pytest.mark.parametrize(
    ("name", "at", "after", "before"),
    [
        ("producer.kv_final", 10, "its KV is final", "P checksummed"),
        ("producer.checksummed", 10, "P checksummed", "P answered"),
        ("proxy.params_pass", 13, "P answered", "the proxy forwarded"),
        ("transfer.completion", 60, "copy 24 of 24", "both sides were told"),
        ("consumer.load_finished", 64, "took the load as finished", "verdict"),
        ("consumer.verified", 70, "verdict", "D reads"),
    ],
)
def test_evidence_is_told_at_its_seam(name, at, after, before, t):
    """With the time of its seam or without one it comes to the same."""
    line = evidence(name) if t is None else evidence(name, t=t)
    events = timeline(with_line(line))
    (place,) = [n for n, event in enumerate(events) if event.where == "fault"]
    assert (events[place].what, events[place].event, events[place].request_id) == (
        "bit_flip: bit 3 of byte 7",
        name,
        "r2",
    )
    assert events[place].t == (t or at)
    if t in (None, at):
        assert after in events[place - 1].what
        assert before in events[place + 1].what


def test_evidence_of_an_operation_comes_first_in_its_moment():
    lines = told(with_line(evidence("transfer.op_posted", t=60)))
    place = lines.index("60 fault: bit_flip: bit 3 of byte 7")
    assert lines[place + 1] == "60 transfer: copy 24 of 24 landed"


def test_evidence_whose_time_nobody_knows_comes_last_and_says_so():
    assert told(with_line(evidence("transfer.op_posted")))[-1] == (
        "91 fault: bit_flip: bit 3 of byte 7 (its time was not recorded)"
    )


def test_evidence_written_live_is_told_where_evidence_written_late_is():
    late = with_line(evidence("consumer.load_finished", t=64))
    live = with_line(evidence("consumer.load_finished", t=64), before="consumer.load_finished")
    assert told(live) == told(late)


@pytest.mark.parametrize(("count", "lines"), [(1, 1), (3, 3), (4, 1), (13, 1)])
def test_many_changes_at_one_moment_are_one_event(count, lines):
    found = history()
    found[-2:-2] = [evidence("consumer.verified", f"block {n}", t=70) for n in range(count)]
    faults = [line for line in told(found) if "fault" in line]
    assert len(faults) == lines
    assert faults[0] == "70 fault: bit_flip: block 0" + (f", and {count - 1} more such changes" if count > 3 else "")


def test_a_fault_that_proved_nothing_is_told():
    line = {"event": "fault.done", "fault": "bit_flip", "request": "r2", "evidence": 0}
    assert told(with_line(line))[-1] == "91 fault: bit_flip: left no evidence that it happened"
    assert told(with_line(line | {"evidence": 2})) == told(history())


@pytest.mark.parametrize(
    ("sent", "passed", "said"),
    [
        (SUMS, SUMS, ", with kv_checksums as P sent them"),
        (SUMS, None, " without the kv_checksums that P sent"),
        (SUMS, "00", " with other kv_checksums than P sent"),
        (None, None, ", without kv_checksums"),
    ],
)
def test_what_the_proxy_passes_on(sent, passed, said):
    lines = history()
    for line in lines:
        if line["event"] == "producer.params_leave":
            line["kv_checksums"] = sent
        if line["event"] == "proxy.params_pass":
            line["kv_checksums"] = passed
    assert f"13 proxy: the proxy forwarded the parameters{said}" in told(lines)


def test_what_the_bytes_oracle_saw():
    lines = history()
    for line in lines:
        if line.get("at") == "checksummed":
            line["digests"] = ["a", "X", "c"]
        if line.get("at") == "load_finished":
            line["digests"] = ["a", "X", "Y"]
        if line.get("at") == "first_use":
            line["digests"] = ["a", "X", "Y"]
    seen = [line for line in told(lines) if "bytes oracle" in line]
    assert seen == [
        "10 producer: bytes oracle: P summed other bytes than it held when its KV was final, in block position 1",
        "64 consumer: bytes oracle: other bytes arrived than P held, in block positions 1-2",
        "75 consumer: bytes oracle: D reads other bytes than P held, in block positions 1-2",
    ]


def test_with_checksums_off_nothing_is_said_to_be_summed():
    """The seam is reached all the same, and a fault may act there."""
    lines = with_line(evidence("producer.checksummed", t=10))
    lines[0]["policy"] = "off"
    next(line for line in lines if line.get("at") == "checksummed")["digests"] = ["X", "b", "c"]
    text = told(lines)
    assert not [line for line in text if "summed" in line]
    assert text[1] == "10 fault: bit_flip: bit 3 of byte 7"


def test_the_oracle_looks_after_a_fault_of_its_moment():
    lines = with_line(evidence("consumer.load_finished", t=64))
    next(line for line in lines if line.get("at") == "load_finished")["digests"] = ["X", "b", "c"]
    what = [event.what.partition(":")[0] for event in timeline(lines) if event.t == 64]
    assert what == ["D's worker took the load as finished", "bit_flip", "bytes oracle"]


def test_blocks_that_did_not_arrive():
    """The line has no time: it is written when D is about to be told."""
    line = {"event": "transfer.landed", "request": "r2", "positions": [0]}
    text = told(with_line(line, before="transfer.completion"))
    place = text.index("60 transfer: copies arrived for block position 0 only, of 3 blocks")
    assert text[place + 1] == "60 transfer: both sides were told that the transfer is done"
    assert told(with_line(line | {"positions": [0, 1, 2]}, before="transfer.completion")) == told(history())


def test_the_first_foreign_read_is_told():
    reads = [{"event": "oracle.read", "request": "r2", "foreign": found} for found in ([], [40], [41])]
    lines = history()
    place = next(n for n, line in enumerate(lines) if line["event"] == "consumer.first_use") + 1
    text = told([*lines[:place], *reads, *lines[place:]])
    said = "75 consumer: provenance oracle: D reads slots that are not its own, or were changed, at token 40"
    assert [line for line in text if "provenance" in line] == [said]


def test_positions_are_those_of_the_blocks_of_the_side_that_is_looked_at():
    """The oracle counts in 16 tokens where D's blocks have 32; what D did not load begins at position 2 of 16."""
    lines = history()
    for line in lines:
        if line["event"].startswith("consumer.load_finished"):
            line["groups"] = [{**GROUPS[0], "block_size": 32, "start": 1}]
    lines = [line for line in lines if line.get("at") not in ("kv_final", "load_finished")]
    lines += [kv("kv_final", "abcdef"), kv("load_finished", "cdXY", start=2)]
    assert "64 consumer: bytes oracle: other bytes arrived than P held, in block position 2" in told(lines)


def test_every_group_is_told():
    lines = history()
    lines += [kv("kv_final", "qrs", group=1), kv("load_finished", "qrX", group=1)]
    for line in lines:
        if line["event"] in ("producer.checksummed", "consumer.load_finished"):
            line["groups"] = [GROUPS[0], {**GROUPS[0], "group": 1, "blocks": [9]}]
        if line["event"] == "consumer.verified":
            more = verdict("mismatch", compared=(2,), differing=(2,), group=1)["groups"]
            line["verdict"] = {"status": "mismatch", "reason": None, "groups": [*line["verdict"]["groups"], *more]}
    text = told(lines)
    assert "10 producer: P checksummed 3 blocks of group 0, 1 block of group 1" in text
    assert "64 consumer: bytes oracle: other bytes arrived than P held, in block position 2 of group 1" in text
    assert (
        "70 consumer: verdict mismatch: group 0: 3 blocks compared; "
        "group 1: block position 2 differs, 1 block compared, 2 not"
    ) in text


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (verdict("mismatch", differing=(0, 1)), "verdict mismatch: block positions 0-1 differ, 3 blocks compared"),
        (verdict("unverified", (), reason="no_checksums"), "verdict unverified (no_checksums): nothing compared"),
        ({"status": "not_checked", "reason": "off", "groups": []}, "verdict not_checked (off)"),
    ],
)
def test_verdicts(found, said):
    lines = [seam("consumer.verified", 70, verdict=found)]
    assert told(lines) == [f"70 consumer: {said}"]


def test_a_verdict_comes_before_what_follows_from_it():
    """The engine tells of it last, in the same moment."""
    lines = [
        seam("consumer.recompute_start", 70),
        seam("consumer.verified", 70, verdict=verdict("mismatch", differing=(0,))),
        evidence("consumer.verified", t=70),
    ]
    assert [event.where for event in timeline(lines)] == ["consumer", "fault", "consumer"]
    assert "verdict" in timeline(lines)[0].what
    assert "gave up the load" in timeline(lines)[2].what


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (answer(9, recomputed=True), "D answered: 2 tokens, all computed by itself"),
        (answer(9, reason="error", tokens=(), error="KV load failed"), "the request failed: KV load failed"),
        (answer(9, reason="abort", tokens=(1,)), "the request aborted after 1 token"),
        (seam("request.preempted", 9), "D preempted the request"),
        (
            {"event": "engine.crashed", "error": "DoubleFreeError: block 3"},
            "an engine crashed: DoubleFreeError: block 3",
        ),
        ({"event": "engine.refused", "error": "no carrier"}, "an engine refused to start: no carrier"),
        ({"event": "checker.crashed", "error": "KeyError"}, "a checker crashed: KeyError"),
        (
            {"event": "oracle.pool", "engine": "consumer", "free": 60, "total": 63, "ends": []},
            "bookkeeping oracle: 3 of 63 blocks of D never came back",
        ),
        (
            {"event": "end", "t": 9, "finished": False, "held": ["early_reuse: c1 has not finished"]},
            "the deadline passed with work left (early_reuse: c1 has not finished)",
        ),
    ],
)
def test_how_it_may_end(line, said):
    (event,) = timeline([line])
    assert event.what == said


def test_an_end_that_the_answer_does_not_tell_is_told():
    twice = with_line(seam("request.ended", 92, reason="length"))
    assert [line for line in told(twice) if "ended the request" in line] == [
        "90 consumer: D ended the request (length)",
        "92 consumer: D ended the request (length)",
    ]
    unanswered = [line for line in history() if line["event"] != "answer"]
    assert "90 consumer: D ended the request (length)" in told(unanswered)
    competitor = with_line(seam("request.ended", 30, request="c1", reason="length") | {"engine": "producer"})
    assert "30 producer: P ended the request (length)" in told(competitor)


def test_what_happens_over_and_over_is_told_once():
    lines = [seam("request.preempted", t, request="c1") | {"engine": "producer"} for t in range(5)]
    lines.insert(3, seam("request.preempted", 3))
    assert told(lines) == [
        "0 producer: P preempted the request, 5 times in a row",
        "3 consumer: D preempted the request",
    ]


def test_sides_that_are_told_at_different_times_are_told_apart():
    lines = [seam("transfer.completion", 60, to="consumer"), seam("transfer.completion", 99, to="producer")]
    assert told(lines) == [
        "60 transfer: D was told that the transfer is done",
        "99 transfer: P was told that the transfer is done",
    ]


def test_an_event_of_a_later_version_is_left_out():
    assert told([*history(), {"event": "worker.stalled", "t": 5, "request": "r2"}]) == told(history())
    assert timeline([]) == ()


def test_a_line_in_an_unknown_form_is_still_told():
    assert told([{"event": "transfer.op_landed", "t": 5, "request": "r2", "bytes": 4096}]) == [
        "5 run: transfer.op_landed, in a form that this version does not know"
    ]


def test_long_errors_are_cut():
    (event,) = timeline([{"event": "engine.crashed", "error": "x" * 5000}])
    assert len(event.what) < 400
    assert "more characters" in event.what


def test_time_never_runs_backwards():
    lines = history()
    lines[-2:-2] = [evidence(name, t=t) for name, t in (("transfer.op_posted", 25), ("proxy.params_pass", 13))]
    body = lines[1:]
    random.Random(3).shuffle(body)
    for found in (lines, [lines[0], *body]):
        times = [event.t for event in timeline(found)]
        assert times == sorted(times)
