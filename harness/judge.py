"""The judge: observations in, a result out. Pure, so that a stored history can be judged again.

`pass` needs proof that every fault happened, every expectation met, and no violation. What cannot be decided is
`unknown`, never `pass`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from harness.gaps import PREDICATES, corrupted_positions, holding_gaps
from harness.history import Line
from harness.observe import CellObservation, KVView, RequestObservation
from reports.results import CellResult, Expected, LoadResult
from scenarios.clean import clean_expectation
from scenarios.schema import Expectation
from scenarios.words import Outcome, Policy, Result, Tokens, Truth, VerdictStatus, Violation


def judge(cell: CellObservation, rerun: str) -> CellResult:
    """Judge one cell. `rerun` is the command that runs it again."""
    scenario, policy = cell.scenario, cell.policy
    expected = scenario.expect[policy]
    others = (scenario.others or {}).get(policy) or clean_expectation(policy)
    faulted = {fault.when.load for fault in scenario.faults}
    gap = None if policy is Policy.OFF else scenario.known_gap.get(policy)
    pairs = [(request, _load_result(request, request.load in faulted, cell.provenance)) for request in cell.requests]
    violations = [*cell.violations, *_unexplained(pairs, gap)]
    why: list[str] = []
    for request, load in pairs:
        wanted = expected if load.faulted or not faulted else others
        why += [f"{request.request_id} (load {load.load}): {line}" for line in _deviations(load, wanted)]
        if gap is not None and (load.faulted or not faulted):
            why += _gap_deviations(gap, request, cell.requests)
    why += violations
    result, reasons = _result(cell, why, gap)
    return replace(
        not_judged(cell, rerun),
        expected=_plain(expected),
        others=_plain(others) if faulted else None,
        known_gap=gap,
        result=result,
        why=reasons,
        loads=tuple(load for _, load in pairs),
        violations=tuple(violations),
    )


def not_judged(cell: CellObservation, rerun: str, *why: str) -> CellResult:
    """A cell of which nothing is said but what it is."""
    scenario = cell.scenario
    return CellResult(
        id=cell.id,
        scenario=scenario.name,
        summary=scenario.summary,
        faults=tuple(fault.kind for fault in scenario.faults),
        incidents=scenario.incidents,
        policy=cell.policy,
        topology=scenario.topology_id,
        seed=cell.seed,
        role=cell.role,
        twin=cell.twin,
        expected=None,
        others=None,
        known_gap=None,
        result=Result.UNKNOWN,
        why=why,
        loads=(),
        violations=(),
        evidence=cell.evidence,
        rerun=rerun,
    )


def judge_repeat(repeat: CellResult, first: list[Line] | None, again: list[Line]) -> CellResult:
    """A repeated cell must also have the history of the first time. `first` None: that is not at hand."""
    if first is None:
        return replace(repeat, result=Result.UNKNOWN, why=("the cell that it repeats is not in this history",))
    if first[1:] == again[1:]:
        return repeat
    pairs = enumerate(zip(first[1:], again[1:], strict=False), start=2)
    line = next((n for n, (a, b) in pairs if a != b), min(len(first), len(again)) + 1)
    why = f"not reproducible: line {line} of its history is not that of the first time"
    return replace(repeat, result=Result.FAIL, why=(why, *repeat.why))


def _result(cell: CellObservation, why: list[str], gap: str | None) -> tuple[Result, tuple[str, ...]]:
    if cell.missing:
        return Result.NOT_APPLICABLE, (f"{cell.target} with policy {cell.policy} has no {', '.join(cell.missing)}",)
    doubts = [*cell.problems, *(f"no evidence that {fault} happened" for fault in cell.undone)]
    if not cell.requests and not doubts:
        doubts = ["no request was observed"]
    if doubts:
        return Result.UNKNOWN, (*doubts, *why)
    if why:
        return Result.FAIL, tuple(why)
    return (Result.PASS if gap is None else Result.KNOWN_GAP), ()


def _load_result(request: RequestObservation, faulted: bool, provenance: bool) -> LoadResult:
    delivered = _worst(_truth(group.load_finished, group.kv_final) for group in request.per_group)
    if provenance:
        read = _worst(_read(group.foreign) for group in request.per_group)
    else:
        read = _worst(_truth(group.first_use, group.to_be_read) for group in request.per_group)
    return LoadResult(
        load=request.load,
        request_id=request.request_id,
        faulted=faulted,
        verdict=request.verdict,
        reason=request.reason,
        groups=request.groups,
        outcome=request.outcome,
        error=request.error,
        delivered=delivered,
        read=read,
        tokens=_tokens(request),
        corrupted_positions=corrupted_positions(request),
        num_prompt_tokens=request.num_prompt_tokens,
        tokens_got=request.tokens,
        tokens_wanted=request.wanted,
        damage=request.damage,
        diagnosis=request.hypotheses,
    )


def _worst(truths: Iterable[Truth]) -> Truth:
    """Of all KV cache groups: corrupted if one is, else intact if one was seen."""
    found = set(truths)
    return next((truth for truth in (Truth.CORRUPTED, Truth.INTACT) if truth in found), Truth.NONE)


def _read(foreign: tuple[int, ...] | None) -> Truth:
    return Truth.NONE if foreign is None else Truth.CORRUPTED if foreign else Truth.INTACT


def _truth(seen: KVView | None, wanted: KVView | None) -> Truth:
    """Whether what was seen on D is what P held when its KV was final."""
    if seen is None or wanted is None:
        return Truth.NONE
    return Truth.CORRUPTED if seen.differing(wanted) else Truth.INTACT


def _tokens(request: RequestObservation) -> Tokens:
    if request.outcome not in (Outcome.SERVED, Outcome.RECOMPUTED):
        return Tokens.NONE
    return Tokens.RIGHT if request.tokens == request.wanted else Tokens.WRONG


def _deviations(load: LoadResult, wanted: Expectation) -> Iterator[str]:
    for name in ("verdict", "reason", "outcome", "truth", "tokens"):
        expected = getattr(wanted, name)
        found = getattr(load, name)
        if expected is not None and found != expected:
            detail = f" ({load.error})" if name == "outcome" and load.error else ""
            yield f"{name} is {found}{detail}, expected {expected}"


def _gap_deviations(gap: str, request: RequestObservation, others: Sequence[RequestObservation]) -> Iterator[str]:
    predicate = PREDICATES.get(gap)
    if predicate is None:
        yield f"{gap} is named as the known gap, but this version cannot recognise it"
    elif not predicate(request, others):
        yield f"{request.request_id} (load {request.load}): {gap} is named as the known gap, but does not explain this"


def _unexplained(pairs: list[tuple[RequestObservation, LoadResult]], gap: str | None) -> Iterator[str]:
    """What must not happen whatever a scenario expects; `gap` is the known gap that it names."""
    others = [other for other, _ in pairs]
    for request, load in pairs:
        if load.verdict is VerdictStatus.VERIFIED and load.truth is Truth.CORRUPTED:
            holding = holding_gaps(request, others)
            if gap not in holding:
                like = f"; it looks like {', '.join(holding)}, which the scenario does not name" if holding else ""
                yield f"{Violation.UNEXPLAINED_VERIFIED}: {load.request_id} is verified and corrupted{like}"
        if load.outcome is Outcome.RECOMPUTED and load.read is Truth.CORRUPTED:
            yield f"{Violation.STALE_RECOMPUTE}: {load.request_id} was recomputed and read corrupted KV all the same"
        if load.tokens is Tokens.WRONG and load.read is not Truth.CORRUPTED:
            yield f"{Violation.UNEXPLAINED_TOKENS}: {load.request_id} has wrong tokens, but read nothing corrupted"


def _plain(expectation: Expectation) -> Expected:
    reason = expectation.reason
    return Expected(
        expectation.verdict,
        None if reason is None else str(reason),
        expectation.outcome,
        expectation.truth,
        expectation.tokens,
    )
