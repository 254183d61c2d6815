"""Runs built by hand, small and realistic: what a judge would have said of a dozen scenarios under four policies."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from reports.results import CellResult, Evidence, Expected, GroupCoverage, LoadResult, RunResult, TimelineEvent
from scenarios.words import NotCheckedReason, Outcome, Policy, Result, Role, Tokens, Truth, VerdictStatus

WANTED = (104, 101, 108, 108, 111, 32, 119, 111, 114, 108, 100, 33, 32, 58, 41, 10)
BLOCKS = tuple(range(13))
SERVED_AS = {
    Policy.OFF: Outcome.SERVED,
    Policy.FAIL_OPEN: Outcome.SERVED,
    Policy.FAIL_CLOSED_FAIL: Outcome.FAILED,
    Policy.FAIL_CLOSED_RECOMPUTE: Outcome.RECOMPUTED,
}


def load(
    number: int = 1,
    verdict: VerdictStatus = VerdictStatus.VERIFIED,
    outcome: Outcome = Outcome.SERVED,
    *,
    reason: str | None = None,
    faulted: bool = False,
    corrupted: bool = False,
    wrong_tokens: bool = False,
) -> LoadResult:
    differing = (3,) if verdict is VerdictStatus.MISMATCH else ()
    compared = BLOCKS if verdict in (VerdictStatus.VERIFIED, VerdictStatus.MISMATCH) else ()
    not_compared = tuple(p for p in BLOCKS if p not in compared)
    group = GroupCoverage(0, verdict, reason, BLOCKS, compared, not_compared, differing)
    answered = outcome in (Outcome.SERVED, Outcome.RECOMPUTED)
    got = ((*WANTED[:5], 0, 7, *WANTED[7:]) if wrong_tokens else WANTED) if answered else ()
    return LoadResult(
        load=number,
        request_id=f"req-{number}",
        faulted=faulted,
        verdict=verdict,
        reason=reason,
        groups=() if verdict is VerdictStatus.NOT_CHECKED else (group,),
        outcome=outcome,
        error="KV load failed: checksum mismatch" if outcome is Outcome.FAILED else None,
        delivered=Truth.CORRUPTED if corrupted else Truth.INTACT,
        read=(Truth.CORRUPTED if corrupted else Truth.INTACT) if outcome is Outcome.SERVED else Truth.NONE,
        tokens=(Tokens.WRONG if wrong_tokens else Tokens.RIGHT) if answered else Tokens.NONE,
        corrupted_positions=(3,) if corrupted else (),
        num_prompt_tokens=200,
        tokens_got=got,
        tokens_wanted=WANTED,
    )


def expected(verdict: VerdictStatus, outcome: Outcome, truth: Truth, reason: str | None = None) -> Expected:
    return Expected(verdict=verdict, outcome=outcome, truth=truth, reason=reason)


def cell(
    scenario: str = "bit-flip-before-verify",
    policy: Policy = Policy.OFF,
    result: Result = Result.PASS,
    *,
    role: Role = Role.FAULT,
    faults: tuple[str, ...] = ("bit_flip",),
    loads: tuple[LoadResult, ...] = (),
    why: tuple[str, ...] = (),
    known_gap: str | None = None,
    topology: str = "tp2-hnd to tp1-nhd",
    seed: int = 7,
    evidence: tuple[Evidence, ...] | None = None,
    expect: Expected | None = None,
    others: Expected | None = None,
    summary: str = "One bit of block 3 flips after the transfer and before the verification.",
    timeline: tuple[TimelineEvent, ...] = (),
) -> CellResult:
    touched = Evidence(
        faults[0] if faults else "noop", "load_finished", "req-2", "block 3, layer 0, head 1", "9f2c11", "8b44e0"
    )
    return CellResult(
        id=f"{scenario}/{policy}/{topology}/{seed}/{role}",
        scenario=scenario,
        summary=summary,
        faults=faults,
        incidents=("vllm-project/vllm#52234",) if faults else (),
        policy=policy,
        topology=topology,
        seed=seed,
        role=role,
        twin=f"{scenario}/{policy}/{topology}/{seed}/{Role.TWIN}" if role is Role.FAULT else None,
        expected=expect,
        others=others,
        known_gap=known_gap,
        result=result,
        why=why,
        loads=loads,
        violations=(),
        evidence=(touched,) * bool(faults) if evidence is None else evidence,
        rerun=f"kvchaos run scenarios/{scenario}.yaml --policy {policy} --seed {seed}",
        timeline=timeline,
    )


def run(*cells: CellResult, interrupted: bool = False) -> RunResult:
    return RunResult("smoke", "sim", 7, interrupted, cells)


def timeline(number: int, faulted: LoadResult, fault: str) -> tuple[TimelineEvent, ...]:
    """The story of one faulted load among others, with what the fault did to it on the consumer."""
    request = f"req-{number}"
    events = [
        (12, "producer", "producer.kv_final", "P has computed the prompt"),
        (12, "producer", "producer.checksummed", "P checksummed 13 blocks"),
        (14, "producer", "producer.params_leave", "P answered the proxy, with kv_checksums"),
        (15, "proxy", "proxy.params_pass", "the proxy forwarded the parameters"),
        (19, "consumer", "consumer.load_scheduled", "D scheduled the load of 13 blocks"),
        (22, "transfer", "transfer.op_landed", "copy 1 of 104 landed"),
        (80, "transfer", "transfer.op_landed", "copy 104 of 104 landed"),
        (80, "transfer", "transfer.completion", "both sides were told that the transfer is done"),
        (85, "consumer", "consumer.load_finished", "D's worker took the load as finished: 13 blocks"),
        (85, "fault", "consumer.load_finished", f"{fault}: block 3, layer 0, head 1"),
        (85, "consumer", "oracle.kv", "bytes oracle: other bytes arrived than P held, in block position 3"),
        (90, "consumer", "consumer.verified", f"verdict {faulted.verdict}"),
        (99, "consumer", "answer", f"D answered: {len(faulted.tokens_got)} tokens"),
    ]
    told = [TimelineEvent(t, where, event, request, what) for t, where, event, what in events]
    told.insert(4, TimelineEvent(16, "producer", "producer.kv_final", "req-1", "P has computed the prompt"))
    return tuple(told)


def clean_loads(policy: Policy) -> tuple[LoadResult, ...]:
    if policy is Policy.OFF:
        return tuple(load(n, VerdictStatus.NOT_CHECKED, reason=NotCheckedReason.OFF) for n in (1, 2, 3, 4))
    return tuple(load(n) for n in (1, 2, 3, 4))


def fault_loads(policy: Policy, faulted: LoadResult) -> tuple[LoadResult, ...]:
    return tuple(faulted if ld.load == faulted.load else ld for ld in clean_loads(policy))


def corrupted_load(policy: Policy, verdict: VerdictStatus, reason: str | None = None) -> LoadResult:
    """The faulted load as it comes out where the checksums work, or as in a gap if the verdict is verified."""
    if policy is Policy.OFF:
        verdict, reason = VerdictStatus.NOT_CHECKED, NotCheckedReason.OFF
    outcome = Outcome.SERVED if verdict is VerdictStatus.VERIFIED else SERVED_AS[policy]
    served = outcome is Outcome.SERVED
    found = load(2, verdict, outcome, reason=reason, faulted=True, corrupted=True, wrong_tokens=served)
    return replace(
        found, damage="layer 0, head 1, tokens 48 to 63", diagnosis=("a write hit one block", "bits flipped")
    )


def smoke_run() -> RunResult:
    """Fault cells and clean twins of a dozen scenarios; every cell is as expected."""
    caught, lost = VerdictStatus.MISMATCH, VerdictStatus.UNVERIFIED
    scenarios = [
        ("bit-flip-before-verify", "bit_flip", caught, None, None),
        ("double-sign-flip", "bit_flip", caught, None, None),
        ("stale-read-after-reuse", "early_reuse", caught, None, None),
        ("wrong-block-order", "block_permutation", caught, None, None),
        ("short-transfer", "short_transfer", caught, None, None),
        ("late-write-after-notify", "early_notify", caught, None, None),
        ("checksums-lost", "drop_params", lost, "no_checksums", None),
        ("checksums-cut", "cut_payload", lost, "invalid", None),
        ("flip-before-checksum", "flip_at_producer", VerdictStatus.VERIFIED, None, "GAP-1"),
        ("double-bit-63", "bit_flip", VerdictStatus.VERIFIED, None, "GAP-8"),
    ]
    cells = [cell("clean", p, faults=(), loads=clean_loads(p), summary="Four requests and no fault.") for p in Policy]
    for name, fault, verdict, reason, gap in scenarios:
        for policy in Policy:
            bad = corrupted_load(policy, verdict, reason)
            if fault in ("drop_params", "cut_payload"):
                bad = replace(bad, delivered=Truth.INTACT, corrupted_positions=(), tokens=Tokens.RIGHT)
                bad = replace(bad, read=Truth.NONE if bad.read is Truth.NONE else Truth.INTACT)
                bad = replace(bad, tokens_got=WANTED if bad.outcome is not Outcome.FAILED else ())
            result = Result.KNOWN_GAP if gap and policy is not Policy.OFF else Result.PASS
            want = expected(bad.verdict, bad.outcome, bad.truth, bad.reason)
            cells.append(
                cell(
                    name,
                    policy,
                    result,
                    faults=(fault,),
                    loads=fault_loads(policy, bad),
                    known_gap=gap,
                    expect=want,
                    summary=f"What {fault} does to load 2 of four.",
                    timeline=timeline(2, bad, fault),
                )
            )
    twins = [cell(c.scenario, c.policy, role=Role.TWIN, faults=(), loads=clean_loads(c.policy)) for c in cells]
    return run(*cells, *twins)


def troubled_run() -> RunResult:
    """As `smoke_run`, with a failed, an unknown and a not applicable cell, and one that was never run."""
    cells = list(smoke_run().cells)
    failed, unknown, skipped = 7, 12, 18
    escaped = load(2, outcome=Outcome.SERVED, faulted=True, corrupted=True, wrong_tokens=True)
    cells[failed] = replace(
        cells[failed],
        result=Result.FAIL,
        loads=fault_loads(cells[failed].policy, escaped),
        why=("load 2: verdict is verified, expected mismatch", "load 2: outcome is served, expected recomputed"),
        violations=("unexplained_verified",),
    )
    cells[unknown] = replace(
        cells[unknown], result=Result.UNKNOWN, evidence=(), why=("early_reuse left no evidence: it may never have run",)
    )
    cells[skipped] = replace(
        cells[skipped], result=Result.NOT_APPLICABLE, loads=(), evidence=(), why=("target sim has no lever Network",)
    )
    del cells[23]
    return run(*cells)


@pytest.fixture
def build() -> SimpleNamespace:
    """The builders above, for tests that need a run of their own."""
    return SimpleNamespace(
        load=load, cell=cell, run=run, clean_loads=clean_loads, corrupted_load=corrupted_load, timeline=timeline
    )


@pytest.fixture
def smoke() -> RunResult:
    return smoke_run()


@pytest.fixture
def troubled() -> RunResult:
    return troubled_run()
