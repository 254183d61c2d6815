"""Broken consequences: what the engine does with a load whose check failed."""

from __future__ import annotations

from dataclasses import replace

from engine.checksum.policy import ChecksumPolicy
from engine.checksum.verdict import Verdict, VerdictStatus
from engine.request import FinishReason, Request
from engine.scheduler import Scheduler
from engine.seams import RecomputeStart
from harness.mutants.base import Function, Mutant

FAIL_LOAD = "engine.scheduler.Scheduler._fail_load"


def _open(original: Function) -> Function:
    def resolve(settings: object) -> ChecksumPolicy:
        policy: ChecksumPolicy = original(settings)
        return replace(policy, fail_closed=False)

    return resolve


def _only_mismatches(original: Function) -> Function:
    def acceptable(verdict: Verdict) -> bool:
        return verdict.status is not VerdictStatus.MISMATCH

    return acceptable


def _use_anyway(scheduler: Scheduler, request: Request) -> None:
    """As `Scheduler._use` of a load that was accepted."""
    request.num_computed_tokens = request.num_prompt_tokens - 1
    scheduler._run(request)


def _answered(original: Function) -> Function:
    """The error of the policy `fail` is lost, and the request runs on what it has."""

    def fail_load(scheduler: Scheduler, request: Request, why: str) -> None:
        if scheduler._policy.load_failure == "fail":
            _use_anyway(scheduler, request)
        else:
            original(scheduler, request, why)

    return fail_load


def _half_answered(original: Function) -> Function:
    """The request ends as if it had been answered, without a token."""

    def fail_load(scheduler: Scheduler, request: Request, why: str) -> None:
        if scheduler._policy.load_failure == "fail":
            scheduler._finish(request, FinishReason.STOP)
        else:
            original(scheduler, request, why)

    return fail_load


def _old_blocks(original: Function) -> Function:
    """The request is said to be recomputed, and runs on the KV that was loaded."""

    def fail_load(scheduler: Scheduler, request: Request, why: str) -> None:
        if scheduler._policy.load_failure == "fail":
            original(scheduler, request, why)
            return
        scheduler._seams.emit(RecomputeStart(scheduler._config.engine_id, request.request_id))
        request.recomputed = True
        _use_anyway(scheduler, request)

    return fail_load


def _cached(original: Function) -> Function:
    def fail_load(scheduler: Scheduler, request: Request, why: str) -> None:
        scheduler.kv.cache(request, request.num_prompt_tokens)
        original(scheduler, request, why)

    return fail_load


def _leaked(original: Function) -> Function:
    def fail_load(scheduler: Scheduler, request: Request, why: str) -> None:
        request.tables = []
        original(scheduler, request, why)

    return fail_load


def _freed_twice(original: Function) -> Function:
    def fail_load(scheduler: Scheduler, request: Request, why: str) -> None:
        scheduler.kv.free(request.request_id, list(request.block_ids), scheduler._last_step)
        original(scheduler, request, why)

    return fail_load


def _forgotten(original: Function) -> Function:
    """The request neither fails nor runs."""

    def fail_load(scheduler: Scheduler, request: Request, why: str) -> None: ...

    return fail_load


MUTANTS = (
    Mutant(
        name="fail-closed-is-open",
        area="policy",
        what="Fail-closed does what fail-open does.",
        target="engine.checksum.policy.resolve",
        replace=_open,
        killers=(
            "flip-before-verify--fail_closed_fail",
            "flip-before-verify--fail_closed_recompute",
            "checksums-lost--fail_closed_fail",
        ),
        control="flip-before-verify--fail_open",
    ),
    Mutant(
        name="unverified-is-accepted",
        area="policy",
        what="Fail-closed accepts loads that could not be verified.",
        target="engine.checksum.verdict.Verdict.acceptable",
        replace=_only_mismatches,
        killers=(
            "checksums-lost--fail_closed_fail",
            "checksums-cut--fail_closed_recompute",
            "clean-other-block-size--fail_closed_fail",
        ),
        control="flip-before-verify--fail_closed_fail",
    ),
    Mutant(
        name="fail-answers",
        area="policy",
        what="A load that must fail its request is used, and the request answered.",
        target=FAIL_LOAD,
        replace=_answered,
        killers=("flip-before-verify--fail_closed_fail", "checksums-lost--fail_closed_fail"),
        control="flip-before-verify--fail_closed_recompute",
    ),
    Mutant(
        name="fail-is-no-error",
        area="policy",
        what="A request that must fail ends normally, with no token.",
        target=FAIL_LOAD,
        replace=_half_answered,
        killers=("flip-before-verify--fail_closed_fail", "checksums-lost--fail_closed_fail"),
        control="flip-before-verify--fail_closed_recompute",
    ),
    Mutant(
        name="recompute-keeps-blocks",
        area="policy",
        what="A recompute keeps the blocks of the load and computes nothing.",
        target=FAIL_LOAD,
        replace=_old_blocks,
        killers=("empty-transfer--fail_closed_recompute", "stale-read-after-reuse--fail_closed_recompute"),
        control="flip-before-verify--fail_closed_fail",
    ),
    Mutant(
        name="failed-load-is-cached",
        area="policy",
        what="The blocks of a failed load go into the prefix cache.",
        target=FAIL_LOAD,
        replace=_cached,
        killers=("empty-transfer-shared-prefix",),
        control="empty-transfer--fail_closed_fail",
    ),
    Mutant(
        name="failed-load-leaks",
        area="policy",
        what="The blocks of a failed load never go back to the pool.",
        target=FAIL_LOAD,
        replace=_leaked,
        killers=("flip-before-verify--fail_closed_fail", "flip-before-verify--fail_closed_recompute"),
        control="clean-transfer--fail_closed_fail",
    ),
    Mutant(
        name="failed-load-is-freed-twice",
        area="policy",
        what="The blocks of a failed load go back to the pool twice.",
        target=FAIL_LOAD,
        replace=_freed_twice,
        killers=("flip-before-verify--fail_closed_fail", "flip-before-verify--fail_closed_recompute"),
        control="clean-transfer--fail_closed_fail",
    ),
    Mutant(
        name="failed-load-hangs",
        area="policy",
        what="The request of a failed load is forgotten.",
        target=FAIL_LOAD,
        replace=_forgotten,
        killers=("flip-before-verify--fail_closed_fail", "flip-before-verify--fail_closed_recompute"),
        control="clean-transfer--fail_closed_fail",
    ),
)
