"""What holds for every variant of the kinds that act on a transfer: it proves itself, its twin changes nothing."""

from __future__ import annotations

from typing import Any

import pytest

from engine.seams import SEAMS
from faults.levers import CHECKSUMS, CLOCK, COMPETITORS
from faults.registry import FAULTS
from harness.gaps import PREDICATES
from harness.history import History
from harness.plan import missing_names
from harness.targets import TARGETS
from scenarios.loader import parse_scenario
from scenarios.words import Policy, Result

# Kind -> its choices of `how` (None: it has none), and its moments.
VARIANTS: dict[str, tuple[tuple[str | None, ...], tuple[str, ...]]] = {
    "misplace": (
        ("swap_blocks", "shift", "duplicate", "reverse", "other_request", "swap_tokens", "swap_heads", "swap_layers",
         "swap_kv"),
        ("in_flight",),
    ),
    "layout_mismatch": (
        ("hnd_as_nhd", "packed_as_separate", "other_block_size", "other_dtype", "kernel_block_order",
         "offset_overflow"),
        ("in_flight",),
    ),
    "consumer_reuse": ((None,), ("before_verify", "after_verify")),
    "false_success": (("failed", "cancelled", "timed_out"), ("in_flight",)),
    "double_read": (("before_reuse", "after_reuse", "another_prompt"), ("params_pass",)),
    "swap_params": (("whole", "ids_only", "checksums_only"), ("params_pass",)),
    "cancelling": (("equal_factors", "linear"), ("before_verify",)),
    "local_prefix": (("flip", "poison"), ("params_pass",)),
}  # fmt: skip
OUT_OF_RANGE = ("misplace", "out_of_range", "params_pass")
ALL = [(kind, how, at) for kind, (hows, moments) in VARIANTS.items() for how in hows for at in moments] + [OUT_OF_RANGE]
HARMLESS = {
    OUT_OF_RANGE,
    ("double_read", "before_reuse", "params_pass"),
    ("swap_params", "checksums_only", "params_pass"),
}
UNSEEN = {
    ("consumer_reuse", None, "after_verify"): "GAP-2",
    ("double_read", "another_prompt", "params_pass"): "GAP-5",
    ("swap_params", "whole", "params_pass"): "GAP-5",
    ("cancelling", "equal_factors", "before_verify"): "GAP-10",
    ("cancelling", "linear", "before_verify"): "GAP-11",
    ("local_prefix", "flip", "params_pass"): "GAP-4",
    ("local_prefix", "poison", "params_pass"): "GAP-4",
}
BETWEEN_TWO = ("consumer_reuse", "double_read", "swap_params", "local_prefix")
UNCACHED = {"producer": {"prefix_caching": False, "num_blocks": 24}, "consumer": {"prefix_caching": False}}
SPECIAL: dict[tuple[str, str | None], dict[str, Any]] = {
    ("double_read", "before_reuse"): {"identical_prompts": True, "topology": UNCACHED},
    ("double_read", "after_reuse"): {"identical_prompts": True, "topology": UNCACHED, "competitors": 1},
    ("local_prefix", "flip"): {"shared_prefix_tokens": 20},
    ("local_prefix", "poison"): {"shared_prefix_tokens": 20},
}
POLICIES = ("off", "fail_open", "fail_closed_fail", "fail_closed_recompute")
Variant = tuple[str, str | None, str]


def fault(variant: Variant) -> dict[str, Any]:
    kind, how, at = variant
    params: dict[str, Any] = {"kind": kind, "when": {"load": 2, "at": at}}
    if how is not None:
        params["how"] = how
    if kind in BETWEEN_TWO or how == "other_request":
        params["other_load"] = 1
    return params


def run(sim, variant: Variant, policy: str, seed: int = 3):
    return sim(fault(variant), policy=policy, seed=seed, **{"prompt_tokens": 55} | SPECIAL.get(variant[:2], {}))


def named(variant: Variant) -> str:
    return "-".join(filter(None, variant))


CELLS = [
    pytest.param(variant, policy, id=f"{named(variant)}-{policy}")
    for variant in ALL
    for policy in POLICIES
    if policy != "off" or variant[1] != "checksums_only"
]


def test_the_table_has_every_choice_of_every_kind() -> None:
    for kind, (hows, moments) in VARIANTS.items():
        schema = FAULTS[kind].params_model.model_json_schema()
        choices = set(schema["properties"].get("how", {}).get("enum", (None,)))
        when = next(part for name, part in schema["$defs"].items() if name.endswith("When"))["properties"]["at"]
        extra = {OUT_OF_RANGE} if kind == "misplace" else set()
        assert choices == {*hows, *(how for _, how, _ in extra)}, kind
        assert set(when.get("enum") or [when["const"]]) == {*moments, *(at for _, _, at in extra)}, kind


@pytest.mark.parametrize(("variant", "policy"), CELLS)
def test_it_proves_itself_and_nothing_is_corrupted_outside_the_known_gaps(sim, variant: Variant, policy: str) -> None:
    ran = run(sim, variant, policy).fault
    assert ran.seen.undone == ran.seen.problems == ()
    # These scenarios name no known gap, so one that holds is said, by its name.
    if variant in UNSEEN and policy != "off":
        (violation,) = ran.result.violations
        assert violation.startswith("unexplained_verified: r2 ")
        assert UNSEEN[variant] in violation
    else:
        assert ran.result.violations == ()
    assert {item.request_id for item in ran.evidence} == {"r2"}
    assert {item.fault for item in ran.evidence} == {variant[0]}
    assert all(item.seam in SEAMS and item.before != item.after for item in ran.evidence)
    faulted, other = ran.result.loads[1], ran.result.loads[0]
    assert (faulted.truth == "corrupted") == (variant not in HARMLESS)
    assert (other.truth, other.tokens) == ("intact", "right")
    if policy != "off" and variant != OUT_OF_RANGE:
        unseen = variant in UNSEEN or variant[1] == "before_reuse"
        assert faulted.verdict == ("verified" if unseen else "mismatch")


@pytest.mark.parametrize(("variant", "policy"), CELLS)
def test_the_clean_twin_changes_nothing(sim, variant: Variant, policy: str) -> None:
    pair = run(sim, variant, policy)
    assert pair.twin.result.result is Result.PASS
    assert {item.fault for item in pair.twin.evidence} == {"noop"}
    for number in (1, 2):
        clean, faulted = pair.twin.load(number), pair.fault.load(number)
        assert clean.foreign == ()
        assert clean.load_finished.differing(clean.kv_final) == ()
        assert clean.tokens == clean.wanted == faulted.wanted
        assert clean.kv_final == faulted.kv_final


@pytest.mark.parametrize("variant", UNSEEN, ids=named)
def test_what_the_check_does_not_see_is_the_known_gap_that_the_spec_names(sim, variant: Variant) -> None:
    ran = run(sim, variant, "fail_closed_fail").fault
    assert PREDICATES[UNSEEN[variant]](ran.load(), [ran.load(1)])


@pytest.mark.parametrize("variant", ALL, ids=named)
def test_the_seed_decides_everything(sim, variant: Variant) -> None:
    ran = run(sim, variant, "fail_open").fault
    again = History()
    TARGETS["sim"].run(ran.cell, again)
    assert again.lines == ran.lines
    assert run(sim, variant, "fail_open", seed=4).fault.lines != ran.lines


@pytest.mark.parametrize("variant", ALL, ids=named)
def test_what_it_needs_are_names_that_a_target_can_provide(variant: Variant) -> None:
    cls = FAULTS[variant[0]]
    needs = cls.needs(cls.params_model.model_validate(fault(variant)))
    assert needs
    assert needs <= set(SEAMS) | {CLOCK, COMPETITORS, CHECKSUMS}


def test_without_checksums_swapping_them_does_not_apply() -> None:
    text = (
        "{schema_version: 1, name: x, summary: x, policies: ['off'], expect: {'off': {verdict: not_checked}},"
        f" faults: [{fault(('swap_params', 'checksums_only', 'params_pass'))}]}}"
    )
    assert missing_names(parse_scenario(text), Policy.OFF, TARGETS["sim"].provides) == (CHECKSUMS,)
