"""Target `vllm` on played engines: what it tells them, what it writes down, and what the judge makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from harness.history import find_all
from harness.targets.vllm.target import VLLMTarget
from scenarios.words import Outcome, Policy, Result, Tokens, Truth, VerdictStatus

Run = Callable[..., Any]
Make = Callable[..., Any]

FLIPPED = {
    "off": {"verdict": "not_checked", "outcome": "served", "truth": "corrupted", "tokens": "wrong"},
    "fail_open": {"verdict": "mismatch", "outcome": "served", "truth": "corrupted", "tokens": "wrong"},
    "fail_closed_fail": {"verdict": "mismatch", "outcome": "failed", "truth": "corrupted"},
    "fail_closed_recompute": {"verdict": "mismatch", "outcome": "recomputed", "truth": "corrupted", "tokens": "right"},
}
ALL = [str(policy) for policy in Policy]
REUSE = {"kind": "early_reuse", "when": {"load": 2, "at": "before_read"}}


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("at", ["before_verify", "after_checksum"])
def test_a_flip_is_judged_under_every_policy(run: Run, scenario_of: Make, policy: Policy, at: str) -> None:
    fault = {"kind": "bit_flip", "when": {"load": 2, "at": at}}
    ran = run(scenario_of(policies=ALL, faults=[fault], expect=FLIPPED), policy)
    assert ran.result.result is Result.PASS, ran.result.why
    clean, faulted = ran.result.loads
    assert (clean.truth, clean.tokens) == (Truth.INTACT, Tokens.RIGHT)
    assert faulted.corrupted_positions == (0,)
    assert [evidence.request_id for evidence in ran.result.evidence] == ["r2"]


@pytest.mark.parametrize("policy", list(Policy))
def test_its_twin_is_clean(run: Run, scenario_of: Make, policy: Policy) -> None:
    ran = run(scenario_of(policies=ALL, expect=FLIPPED), policy, twin=True)
    assert ran.result.result is Result.PASS, ran.result.why
    assert {load.tokens for load in ran.result.loads} == {Tokens.RIGHT}


def test_early_reuse_lets_d_wait_and_p_give_its_blocks_away(run: Run, scenario_of: Make, world: Any) -> None:
    workload = {"requests": 2, "prompt_tokens": [20, 40], "output_tokens": 3, "competitors": 1}
    ran = run(scenario_of(policies=ALL, faults=[REUSE], workload=workload, expect=FLIPPED), Policy.FAIL_CLOSED_FAIL)
    assert ran.result.result is Result.PASS, ran.result.why
    names = [(role, name) for role, name, _ in world.commands]
    # Within D's generate, and before a competitor could run by itself at the end.
    assert names.index(("consumer", "generate"), 1) < names.index(("producer", "reuse"))
    assert ("producer", "compete") not in names
    assert "c1 (in blocks that r2 had on P)" in "".join(ran.result.loads[1].diagnosis)


def test_a_read_after_verification_is_known_from_its_first_use(run: Run, scenario_of: Make) -> None:
    """GAP-2 without provenance: the bytes that arrived were right, those that are read are not."""
    fault = {"kind": "bit_flip", "when": {"load": 2, "at": "after_verify"}}
    expect = {"fail_open": {"verdict": "verified", "outcome": "served", "truth": "corrupted"}}
    ran = run(scenario_of(policies=["fail_open"], faults=[fault], expect=expect, known_gap="GAP-2"))
    assert ran.result.result is Result.KNOWN_GAP, ran.result.why
    load = ran.result.loads[1]
    assert (load.delivered, load.read) == (Truth.INTACT, Truth.CORRUPTED)


def test_the_history_says_that_nobody_watches_reads(run: Run, scenario_of: Make) -> None:
    ran = run(scenario_of())
    assert ran.lines[0]["provenance"] is False
    assert not find_all(ran.lines, "oracle.provenance")


def test_wrong_tokens_of_right_reads_are_a_violation(run: Run, scenario_of: Make, world: Any) -> None:
    """What goes wrong after the first read shows in the tokens alone, and must not pass."""
    world.tokens_go_wrong = True
    clean = {"verdict": "verified", "outcome": "served", "truth": "intact"}
    ran = run(scenario_of(faults=None, expect={"fail_open": clean}, policies=["fail_open"]))
    assert any("unexplained_tokens" in violation for violation in ran.result.violations)


def test_a_fault_without_evidence_leaves_the_cell_unknown(run: Run, scenario_of: Make, world: Any) -> None:
    world.lose_events = frozenset({"evidence"})
    ran = run(scenario_of())
    assert ran.result.result is Result.UNKNOWN
    assert "no evidence that bit_flip on r2 happened" in ran.result.why


def test_a_load_without_a_verdict_is_no_pass(run: Run, scenario_of: Make, world: Any) -> None:
    """Where checksums are on and the protection says nothing, nothing may be taken for verified."""
    world.lose_events = frozenset({"consumer.verified"})
    ran = run(scenario_of())
    assert ran.result.result is Result.FAIL
    assert {load.verdict for load in ran.result.loads} == {VerdictStatus.NO_LOAD}


def test_a_request_without_an_answer_hangs(run: Run, scenario_of: Make, world: Any) -> None:
    world.never_answers = "r2"
    ran = run(scenario_of())
    assert ran.result.loads[1].outcome is Outcome.HUNG
    assert any("no_progress" in violation for violation in ran.result.violations)


def test_a_command_that_is_refused_leaves_the_cell_unknown(run: Run, scenario_of: Make, world: Any) -> None:
    world.refuses = "arm"
    ran = run(scenario_of())
    assert ran.result.result is Result.UNKNOWN
    assert "it will not" in ran.result.why[0]


def test_engines_that_do_not_come_up_leave_the_cell_unknown(run: Run, scenario_of: Make, world: Any) -> None:
    world.starts = False
    ran = run(scenario_of())
    assert ran.result.result is Result.UNKNOWN
    assert "no memory" in ran.result.why[0]
    assert not world.running, "what was started is ended"


def test_the_policy_is_told_to_both_engines(run: Run, scenario_of: Make, world: Any) -> None:
    run(scenario_of(policies=ALL, expect=FLIPPED), Policy.FAIL_CLOSED_RECOMPUTE)
    told = [(role, arguments) for role, name, arguments in world.commands if name == "policy"]
    wanted = {"mode": "enforce", "load_failure": "recompute"}
    assert told == [("producer", wanted), ("consumer", wanted)]


def test_golden_tokens_are_asked_for_once(run: Run, scenario_of: Make, world: Any) -> None:
    for policy in (Policy.OFF, Policy.FAIL_OPEN):
        run(scenario_of(), policy)
    plain = [
        request
        for _, name, arguments in world.commands
        if name == "generate"
        for request in arguments["requests"]
        if request["params"] is None
    ]
    assert len(plain) == 2  # two prompts, whichever policy


def test_cells_share_one_pair_and_closing_ends_it(target: VLLMTarget, run: Run, scenario_of: Make, world: Any) -> None:
    run(scenario_of())
    run(scenario_of(), Policy.OFF)
    assert world.running == 2
    target.close()
    assert world.running == 0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"topology": {"producer": {"block_size": 32}}}, "topology.block_size that differs between the sides"),
        ({"topology": {"consumer": {"tp": 2}}}, "topology.consumer.tp 2"),
        ({"topology": {"model": "tiny-window"}}, "topology.model tiny-window (the engine has its own"),
        ({"checksum": {"version": 2}}, "checksum.version 2"),
        ({"topology": {"transfer": "push"}}, "transfer.push"),
    ],
)
def test_what_vllm_cannot_say_does_not_apply(
    run: Run, scenario_of: Make, world: Any, changes: dict[str, Any], named: str
) -> None:
    ran = run(scenario_of(**changes))
    assert ran.result.result is Result.NOT_APPLICABLE
    assert named in ran.result.why[0]
    assert not world.running, "nothing is started for it"


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ({"kind": "kill_producer", "when": {"load": 1, "at": "mid_read"}}, "lever.process"),
        (
            {"kind": "layout_mismatch", "when": {"load": 1}, "how": "other_dtype"},
            "layout_mismatch with how: other_dtype",
        ),
        ({"kind": "bit_flip", "when": {"load": 1, "at": "before_verify"}, "layer": 7}, "layer 7 (there are 2)"),
    ],
)
def test_a_fault_that_vllm_does_not_have_does_not_apply(
    run: Run, scenario_of: Make, fault: dict[str, Any], named: str
) -> None:
    ran = run(scenario_of(faults=[fault]))
    assert ran.result.result is Result.NOT_APPLICABLE, ran.result.why
    assert named in ran.result.why[0]
