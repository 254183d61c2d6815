"""What holds for these kinds of fault in every variant: it proves itself, and its clean twin changes nothing."""

from __future__ import annotations

from typing import Any

import pytest

from engine.seams import SEAMS
from faults import registry
from faults.base import Fault
from faults.levers import CHECKSUMS, CLOCK, COMPETITORS
from faults.registry import FAULTS
from harness.history import History
from harness.plan import missing_names
from harness.targets import TARGETS
from scenarios.loader import parse_scenario
from scenarios.words import Policy, Result

OFF, OPEN, FAIL, RECOMPUTE = POLICIES = ("off", "fail_open", "fail_closed_fail", "fail_closed_recompute")
CHECKED = (OPEN, FAIL, RECOMPUTE)


def fault(kind: str, at: str, **params: Any) -> dict[str, Any]:
    return {"kind": kind, "when": {"load": 2, "at": at}, **params}


VARIANTS = {
    "noop": fault("noop", "before_read"),
    "flip before checksum": fault("bit_flip", "before_checksum"),
    "flip after checksum": fault("bit_flip", "after_checksum"),
    "flip before verify": fault("bit_flip", "before_verify", flips=3),
    "flip after verify": fault("bit_flip", "after_verify"),
    "bit 63 twice": fault("bit_flip", "before_verify", pattern="bit63_pair"),
    "flip past the end": fault("bit_flip", "before_verify", where="past_end"),
    "flip of one bit": fault("bit_flip", "after_checksum", layer=1, head=0, token=7, byte=20, bit=3),
    "lost": fault("drop_checksums", "params_pass", how="lose"),
    "cut": fault("drop_checksums", "params_pass", how="cut"),
    "other version": fault("drop_checksums", "params_pass", how="alter_version"),
    "other value": fault("drop_checksums", "params_pass", how="alter_value"),
    "one token less": fault("drop_checksums", "params_pass", how="alter_num_tokens"),
    "other tp size": fault("drop_checksums", "params_pass", how="alter_tp_size"),
    "without last block": fault("drop_checksums", "params_pass", how="shorten"),
    "lost by the connector": fault("drop_checksums", "carrier_pass", how="lose"),
    "reuse before": fault("early_reuse", "before_read"),
    "reuse during": fault("early_reuse", "mid_read"),
    "reuse after": fault("early_reuse", "after_read"),
    "nothing arrives": fault("short_transfer", "in_flight", moved_blocks=0),
    "one block arrives": fault("short_transfer", "in_flight"),
}
KINDS = ("noop", "bit_flip", "drop_checksums", "early_reuse", "short_transfer")
# What D must not have received, or read, as P held it; the rest must arrive and be read intact.
CORRUPTING = {
    "flip before checksum", "flip after checksum", "flip before verify", "flip after verify", "bit 63 twice",
    "flip of one bit", "reuse before", "reuse during", "nothing arrives", "one block arrives",
}  # fmt: skip
WORKLOAD = {"prompt_tokens": [50, 60]}
CELLS = [
    pytest.param(name, policy, id=f"{name}-{policy}")
    for name in VARIANTS
    for policy in POLICIES
    if policy != OFF or VARIANTS[name]["kind"] != "drop_checksums"
]


def run(sim, name: str, policy: str, seed: int = 3):
    competitors = int(VARIANTS[name]["kind"] == "early_reuse")
    topology = {"transfer": "push"} if VARIANTS[name]["when"]["at"] == "carrier_pass" else None
    return sim(VARIANTS[name], policy=policy, seed=seed, competitors=competitors, topology=topology, **WORKLOAD)


def test_the_table_has_every_choice_of_these_kinds() -> None:
    seen = {kind: {"at": set(), "how": set(), "pattern": {"random"}, "where": {"valid"}} for kind in KINDS}
    for params in VARIANTS.values():
        seen[params["kind"]]["at"].add(params["when"]["at"])
        for name in ("how", "pattern", "where"):
            seen[params["kind"]][name].add(params.get(name, next(iter(seen[params["kind"]][name]), None)))
    for kind in KINDS:
        schema = FAULTS[kind].params_model.model_json_schema()
        for name in ("how", "pattern", "where"):
            choices = set(schema["properties"].get(name, {}).get("enum", ()))
            assert choices <= seen[kind][name], f"{kind}: {name}"
        moments = next(part for name, part in schema["$defs"].items() if name.endswith("When"))["properties"]["at"]
        if kind != "noop":  # test_noop.py goes through all of them
            assert set(moments.get("enum") or [moments["const"]]) == seen[kind]["at"], kind


@pytest.mark.parametrize(("name", "policy"), CELLS)
def test_it_leaves_evidence_of_what_it_touched(sim, name: str, policy: str) -> None:
    ran = run(sim, name, policy).fault
    assert ran.seen.undone == ()
    assert ran.seen.problems == ()
    assert {item.request_id for item in ran.evidence} == {"r2"}
    assert {item.fault for item in ran.evidence} == {VARIANTS[name]["kind"]}
    assert all(item.seam in SEAMS for item in ran.evidence)
    if name not in ("noop", "nothing arrives", "one block arrives"):  # poison that is still there is the proof of those
        assert all(item.before != item.after for item in ran.evidence)


@pytest.mark.parametrize(("name", "policy"), CELLS)
def test_it_corrupts_its_load_or_nothing_and_never_another(sim, changed, name: str, policy: str) -> None:
    ran = run(sim, name, policy).fault
    faulted, other = ran.load(2), ran.load(1)
    delivered = changed(faulted.kv_final, faulted.load_finished)
    read = changed(faulted.to_be_read, faulted.first_use) if faulted.first_use is not None else set()
    assert bool(delivered | read) == (name in CORRUPTING)
    assert changed(other.kv_final, other.load_finished) == changed(other.to_be_read, other.first_use) == set()
    assert other.tokens == other.wanted


@pytest.mark.parametrize(("name", "policy"), CELLS)
def test_the_clean_twin_changes_nothing(sim, changed, name: str, policy: str) -> None:
    """The same requests, and the same tokens wanted, as in the cell; the KV that P held is the same too."""
    pair = run(sim, name, policy)
    assert pair.twin.result.result is Result.PASS
    assert {item.fault for item in pair.twin.evidence} == {"noop"}
    for number in (1, 2):
        clean, faulted = pair.twin.load(number), pair.fault.load(number)
        assert changed(clean.kv_final, clean.load_finished) == changed(clean.to_be_read, clean.first_use) == set()
        assert clean.tokens == clean.wanted == faulted.wanted
        assert clean.kv_final == faulted.kv_final


@pytest.mark.parametrize("name", VARIANTS)
def test_the_seed_decides_everything(sim, name: str) -> None:
    ran = run(sim, name, OPEN).fault
    again = History()
    TARGETS["sim"].run(ran.cell, again)
    assert again.lines == ran.lines
    assert run(sim, name, OPEN, seed=4).fault.lines != ran.lines


@pytest.mark.parametrize("how", ["lose", "alter_value", "shorten"])
def test_without_checksums_dropping_them_does_not_apply(how: str) -> None:
    text = (
        "{schema_version: 1, name: x, summary: x, policies: ['off'], expect: {'off': {verdict: not_checked}},"
        f" faults: [{fault('drop_checksums', 'params_pass', how=how)}]}}"
    )
    assert missing_names(parse_scenario(text), Policy.OFF, TARGETS["sim"].provides) == (CHECKSUMS,)


@pytest.mark.parametrize("name", VARIANTS)
def test_what_it_needs_are_names_that_a_target_can_provide(name: str) -> None:
    cls = FAULTS[VARIANTS[name]["kind"]]
    needs = cls.needs(cls.params_model.model_validate(VARIANTS[name]))
    assert needs
    assert needs <= set(SEAMS) | {CLOCK, COMPETITORS, CHECKSUMS}


def test_the_registry_knows_each_kind_by_its_own_name() -> None:
    assert set(FAULTS) >= set(KINDS)
    for kind, cls in FAULTS.items():
        assert issubclass(cls, Fault)
        assert cls.kind == kind
        assert registry.params_model(kind) is cls.params_model
        assert cls.params_model.model_fields["kind"].annotation.__args__ == (kind,)
    assert registry.params_model("meteor") is None
