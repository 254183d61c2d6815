"""A cell's history as observations: what the engine said, what the oracles saw, what the faults proved.

Only reads; `harness.judge` concludes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace
from typing import Any

from engine.checksum.verdict import VerdictStatus
from engine.errors import KVChaosError
from engine.groups import kv_groups
from engine.presets import preset
from engine.request import FinishReason
from faults.base import Evidence
from harness.errors import HistoryError
from harness.history import Line, error_text, find_all
from harness.oracles.bookkeeping import KILLED
from harness.oracles.diagnosis import EVENT as DIAGNOSIS
from harness.oracles.kv_bytes import CHECKSUMMED, EVENT, FIRST_USE, KV_FINAL, LOAD_FINISHED, TO_BE_READ
from harness.oracles.provenance import EVENT_ON, EVENT_READ
from reports.records import from_json, to_json
from reports.results import GroupCoverage
from scenarios.schema import Scenario
from scenarios.words import Outcome, Policy, Role, Violation

_NUM_ENGINES = 2


@dataclass(frozen=True, slots=True)
class KVView:
    """What the bytes oracle saw of a request at one moment: per grid position a digest and a sum.

    `start` is the first grid position; `grid` is its size in tokens.
    """

    grid: int
    start: int
    digests: tuple[str, ...]
    sums: tuple[str, ...]

    def positions(self) -> range:
        return range(self.start, self.start + len(self.digests))

    def digest(self, position: int) -> str | None:
        return self.digests[position - self.start] if position in self.positions() else None

    def sum(self, position: int) -> str | None:
        return self.sums[position - self.start] if position in self.positions() else None

    def differing(self, other: KVView) -> tuple[int, ...]:
        """This view's positions whose bytes are not the other's (or that the other does not have)."""
        return tuple(p for p in self.positions() if self.digest(p) != other.digest(p))


@dataclass(frozen=True, slots=True)
class GroupObservation:
    """What `RequestObservation` says of the first KV cache group, for another one."""

    group_id: int
    block_size: int
    kv_final: KVView | None
    checksummed: KVView | None
    load_finished: KVView | None
    to_be_read: KVView | None
    first_use: KVView | None
    foreign: tuple[int, ...] | None
    landed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RequestObservation:
    """One request of the workload. `block_size` is D's: verdicts count positions in it.

    Views, block size, `foreign` and `landed` are those of the first KV cache group; `more` has those of the others.

    The views are the bytes oracle's (`harness.oracles.kv_bytes`): P's `kv_final` and `checksummed`, D's
    `load_finished`; of D's `first_use` the reference is `to_be_read`. `foreign` are positions that the provenance
    oracle saw it read though they were not its own (None: nothing read, or nobody watched); `landed` are D's block
    positions for which a copy operation landed.
    """

    load: int
    request_id: str
    block_size: int
    num_prompt_tokens: int
    outcome: Outcome
    error: str | None
    verdict: VerdictStatus
    reason: str | None
    groups: tuple[GroupCoverage, ...]
    tokens: tuple[int, ...]
    wanted: tuple[int, ...]
    kv_final: KVView | None
    checksummed: KVView | None
    load_finished: KVView | None
    to_be_read: KVView | None
    first_use: KVView | None
    foreign: tuple[int, ...] | None
    landed: tuple[int, ...]
    checksums_altered: bool
    damage: str | None
    hypotheses: tuple[str, ...]
    more: tuple[GroupObservation, ...] = ()

    @property
    def per_group(self) -> tuple[RequestObservation, ...]:
        """The request as seen in each of its groups alone."""
        if not self.more:
            return (self,)
        return self.of_group(0), *(self.of_group(group.group_id) for group in self.more)

    def of_group(self, group_id: int) -> RequestObservation:
        """The request as seen in one group alone. Raises KeyError if it has none of that number."""
        coverage = tuple(group for group in self.groups if group.group_id == group_id)
        if group_id == 0:
            return replace(self, groups=coverage, more=())
        seen = {group.group_id: group for group in self.more}[group_id]
        views = {field.name: getattr(seen, field.name) for field in fields(seen) if field.name != "group_id"}
        return replace(self, groups=coverage, more=(), **views)


@dataclass(frozen=True, slots=True)
class CellObservation:
    """Everything that a cell's history says. `undone` names faults without evidence."""

    id: str
    target: str
    scenario: Scenario
    policy: Policy
    role: Role
    seed: int
    twin: str | None
    missing: tuple[str, ...]
    repeats: str | None
    requests: tuple[RequestObservation, ...]
    evidence: tuple[Evidence, ...]
    undone: tuple[str, ...]
    provenance: bool
    violations: tuple[str, ...]
    problems: tuple[str, ...]


def observe(lines: list[Line]) -> CellObservation:
    """Read one cell's history.

    Raises:
        HistoryError: a line lacks what it must have: the file is damaged or of another version.
    """
    try:
        # Through plain values, which checks the type of every field.
        return from_json(CellObservation, to_json(_observe(lines)))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, KVChaosError) as error:
        where = lines[0].get("id", "?") if lines else "?"
        raise HistoryError(
            f"history of cell {where}: {error_text(error)}: the file is damaged or of another version"
        ) from error


def _observe(lines: list[Line]) -> CellObservation:
    head = lines[0]
    ends = find_all(lines, "end")
    end = ends[0] if ends else None
    problems = [f"a checker crashed: {line['error']}" for line in find_all(lines, "checker.crashed")]
    if end is None and not problems and not head["missing"] and not find_all(lines, "engine.refused"):
        problems.append("the history has no end: the run was interrupted")
    scenario = Scenario.from_plain(head["scenario"])
    if end is not None and not problems and not find_all(lines, "engine.crashed"):
        problems += _not_watched(scenario, bool(head["provenance"]), lines)
    return CellObservation(
        id=head["id"],
        target=head["target"],
        scenario=scenario,
        policy=Policy(head["policy"]),
        role=Role(head["role"]),
        seed=head["seed"],
        twin=head["twin"],
        missing=tuple(head["missing"]),
        repeats=head["repeats"],
        requests=tuple(_request(line, lines, scenario) for line in find_all(lines, "request")),
        evidence=tuple(
            Evidence(x["fault"], x["seam"], x["request"], x["what"], x["before"], x["after"])
            for x in find_all(lines, "evidence")
        ),
        undone=() if problems or head["missing"] else _undone(scenario, lines),
        provenance=bool(find_all(lines, EVENT_ON)),
        violations=_violations(lines, end),
        problems=tuple(problems),
    )


def _not_watched(scenario: Scenario, provenance: bool, lines: list[Line]) -> list[str]:
    """What a history that came to its end must hold, and does not: nothing could be concluded from its absence."""
    found = []
    loads = [line["load"] for line in find_all(lines, "request")]
    if loads != list(range(1, scenario.workload.requests + 1)):
        found.append(f"the history holds the requests {loads}, not the {scenario.workload.requests} of the workload")
    known = {line["request"] for line in find_all(lines, "oracle.tokens") if line["tokens"]}
    unknown = [line["request"] for line in find_all(lines, "request") if line["request"] not in known]
    if unknown:
        found.append(f"no oracle said which tokens are right for {', '.join(unknown)}")
    if len([*find_all(lines, "oracle.pool"), *find_all(lines, KILLED)]) != _NUM_ENGINES:
        found.append("no oracle said of both engines whether their blocks came back")
    if provenance and not find_all(lines, EVENT_ON):
        found.append("no oracle watched the attention reads, though the run asked for it")
    return found


def _request(line: Line, lines: list[Line], scenario: Scenario) -> RequestObservation:
    request_id = line["request"]
    answers = [x for x in find_all(lines, "answer") if x["request"] == request_id]
    wanted = [x for x in find_all(lines, "oracle.tokens") if x["request"] == request_id]
    first, *more = [
        _group(request_id, group.group_id, group.block_size(scenario.topology.consumer.block_size), lines)
        for group in kv_groups(preset(scenario.topology.model))
    ]
    answer = answers[0] if answers else None
    verdict = answer["verdict"] if answer else _last_verdict(request_id, lines)
    outcome, error = _outcome(answer, lines)
    diagnosed = [x for x in find_all(lines, DIAGNOSIS) if x["request"] == request_id]
    return RequestObservation(
        load=line["load"],
        request_id=request_id,
        block_size=first.block_size,
        num_prompt_tokens=line["tokens"],
        outcome=outcome,
        error=error,
        verdict=VerdictStatus(verdict["status"]),
        reason=verdict["reason"],
        groups=tuple(_coverage(group) for group in verdict["groups"]),
        tokens=tuple(answer["tokens"]) if answer else (),
        wanted=tuple(wanted[0]["tokens"]) if wanted else (),
        kv_final=first.kv_final,
        checksummed=first.checksummed,
        load_finished=first.load_finished,
        to_be_read=first.to_be_read,
        first_use=first.first_use,
        foreign=first.foreign,
        landed=first.landed,
        checksums_altered=_checksums_altered(request_id, lines),
        damage=diagnosed[-1]["damage"] if diagnosed else None,
        hypotheses=tuple(diagnosed[-1]["hypotheses"]) if diagnosed else (),
        more=tuple(more),
    )


def _group(request_id: str, group_id: int, block_size: int, lines: list[Line]) -> GroupObservation:
    """What the oracles saw of a request in one group. Lines that name none are of the first."""
    seen = [x for x in lines if x["event"] in (EVENT, EVENT_READ, "transfer.landed") and x["request"] == request_id]
    own = [x for x in seen if x.get("group", 0) == group_id]
    views = {x["at"]: _view(x, block_size) for x in own if x["event"] == EVENT}
    landed = [x["positions"] for x in own if x["event"] == "transfer.landed"]
    return GroupObservation(
        group_id=group_id,
        block_size=block_size,
        kv_final=views.get(KV_FINAL),
        checksummed=views.get(CHECKSUMMED),
        load_finished=views.get(LOAD_FINISHED),
        to_be_read=views.get(TO_BE_READ),
        first_use=views.get(FIRST_USE),
        foreign=_foreign(own),
        landed=tuple(landed[-1]) if landed else (),
    )


def _checksums_altered(request_id: str, lines: list[Line]) -> bool:
    """Whether D got other checksums than P sent (both as digests)."""
    for way in (("producer.params_leave", "proxy.params_pass"), ("transfer.carrier_sent", "transfer.carrier_arrives")):
        sent, got = ([x["kv_checksums"] for x in find_all(lines, at) if x["request"] == request_id] for at in way)
        if sent and got and sent[-1] != got[-1]:
            return True
    return False


def _foreign(own: list[Line]) -> tuple[int, ...] | None:
    """Positions that a request read foreign or changed; None if nobody watched its reads or it read nothing."""
    reads = [x for x in own if x["event"] == EVENT_READ]
    return tuple(sorted({p for x in reads for p in x["foreign"]})) if reads else None


def _undone(scenario: Scenario, lines: list[Line]) -> tuple[str, ...]:
    """The faults that the scenario lists and that left no evidence, also those that were never attached."""
    done = [(line["fault"], line["request"], line["evidence"]) for line in find_all(lines, "fault.done")]
    found = [(kind, request) for kind, request, evidence in done if not evidence]
    found += [(fault.kind, f"load {fault.when.load}") for fault in scenario.faults[len(done) :]]
    return tuple(f"{kind} on {request}" for kind, request in found)


def _view(line: Line, block_size: int) -> KVView:
    grid, digests, sums = line["grid"], tuple(line["digests"]), tuple(line["sums"])
    if not 1 <= grid <= block_size or block_size % grid or len(digests) != len(sums):
        raise ValueError(
            f"no view of blocks of {block_size}: a grid of {grid}, {len(digests)} digests, {len(sums)} sums"
        )
    return KVView(grid, line["start"], digests, sums)


def _coverage(group: dict[str, Any]) -> GroupCoverage:
    return GroupCoverage(
        group_id=group["group"],
        status=VerdictStatus(group["status"]),
        reason=group["reason"],
        loaded=tuple(group["loaded"]),
        compared=tuple(group["compared"]),
        not_compared=tuple(group["not_compared"]),
        differing=tuple(group["differing"]),
    )


def _last_verdict(request_id: str, lines: list[Line]) -> dict[str, Any]:
    """The verdict of a request that never answered, as far as it came."""
    judged = [x for x in find_all(lines, "consumer.verified") if x["request"] == request_id]
    verdict: dict[str, Any] = judged[-1]["verdict"] if judged else {"status": "no_load", "reason": None, "groups": []}
    return verdict


def _outcome(answer: Line | None, lines: list[Line]) -> tuple[Outcome, str | None]:
    if answer is None:
        for event, outcome in (("engine.refused", Outcome.REFUSED), ("engine.crashed", Outcome.CRASHED)):
            found = find_all(lines, event)
            if found:
                return outcome, found[0]["error"]
        return Outcome.HUNG, "no answer by the deadline"
    reason, error, recomputed = FinishReason(answer["finish_reason"]), answer["error"], answer["recomputed"]
    if reason is FinishReason.ABORT:
        return Outcome.ABORTED, error
    if reason is FinishReason.ERROR:
        return Outcome.FAILED, error
    return Outcome.RECOMPUTED if recomputed else Outcome.SERVED, error


def _violations(lines: list[Line], end: Line | None) -> tuple[str, ...]:
    found: list[str] = []
    for pool in find_all(lines, "oracle.pool"):
        free, total, engine = pool["free"], pool["total"], pool["engine"]
        # A run that did not finish still holds blocks: no_progress or the crash says so, and nothing leaked.
        if free != total and end is not None and end["finished"] is True:
            found.append(f"{Violation.LEAK}: {total - free} of {total} blocks of the {engine} never came back")
    for line in (*find_all(lines, "oracle.pool"), *find_all(lines, KILLED)):
        twice = [request for request, count in line["ends"] if count > 1]
        found += [f"{Violation.TWO_TERMINAL_STATES}: {request} on the {line['engine']}" for request in twice]
    answered = Counter(line["request"] for line in find_all(lines, "answer"))
    found += [f"{Violation.TWO_TERMINAL_STATES}: {r} was answered {n} times" for r, n in answered.items() if n > 1]
    crashes = [line["error"] for line in find_all(lines, "engine.crashed")]
    found += [f"{Violation.DOUBLE_FREE}: {error}" for error in crashes if error.startswith("DoubleFreeError")]
    if end is not None and end["finished"] is False:
        held = "; ".join(end["held"]) or "nothing was held"
        found.append(f"{Violation.NO_PROGRESS}: the deadline passed with work left ({held})")
    return tuple(found)
