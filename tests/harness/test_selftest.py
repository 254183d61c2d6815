"""The selftest itself: how mutants are put in and taken out, what is concluded of them, and that each is killed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import click
import pytest

import engine.checksum.worker
import harness.gaps
import harness.plan
import harness.seeds
import kernels.paths
from engine.checksum.payload import PayloadLimits
from engine.checksum.verdict import Verdict, VerdictStatus
from engine.connectors.fabric import Fabric
from engine.seams import Seams
from harness.commands.selftest import selftest
from harness.mutants import MUTANTS
from harness.mutants.base import Mutant, applied, probe_name, resolve
from harness.mutants.bench import SCENARIOS, Bench, MutantError
from harness.mutants.checksum import MUTANTS as CHECKSUM_MUTANTS
from harness.mutants.trial import State, notice, try_mutant, unique_probes
from harness.oracles.tokens import oracle_tokens
from harness.selftest import SelftestError, run_selftest
from scenarios.loader import load_scenarios

DOC = Path("docs") / "selftest.md"
CRASHES = {"failed-load-is-freed-twice"}  # the engine itself refuses this


def never(bench: Bench) -> str | None:
    return None


def always(bench: Bench) -> str | None:
    return "something is wrong"


def short_hash_is_of_eight_digits(bench: Bench) -> str | None:
    found = harness.plan.short_hash("x")
    return None if len(found) == 8 else f"it has {len(found)}"


def mutant(**changes: Any) -> Mutant:
    """One that makes every short hash empty, which its killer sees."""
    fields = {
        "name": "empty-hash",
        "area": "judge",
        "what": "Every short hash is empty.",
        "target": "harness.seeds.short_hash",
        "replace": lambda original: lambda *parts: "",
        "killers": (short_hash_is_of_eight_digits,),
        "control": never,
    }
    return Mutant(**(fields | changes))


def harmless(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **named: original(*args, **named)


# ---- putting in and taking out


def test_a_function_is_replaced_wherever_it_is_bound_and_put_back() -> None:
    original = kernels.paths.block_checksums
    with applied(CHECKSUM_MUTANTS[0]):
        assert kernels.paths.block_checksums is not original
        assert engine.checksum.worker.block_checksums is kernels.paths.block_checksums
    assert kernels.paths.block_checksums is original
    assert engine.checksum.worker.block_checksums is original


def test_a_function_is_replaced_in_tables() -> None:
    original = harness.gaps.sums_collide
    with applied(mutant(target="harness.gaps.sums_collide")):
        assert harness.gaps.PREDICATES["GAP-8"] is harness.gaps.PREDICATES["GAP-11"] is harness.gaps.sums_collide
        assert harness.gaps.sums_collide is not original
        assert harness.gaps.PREDICATES["GAP-2"] is harness.gaps.changed_after_verification
    assert harness.gaps.PREDICATES["GAP-8"] is harness.gaps.PREDICATES["GAP-11"] is original


def test_a_property_stays_one() -> None:
    verdict = Verdict(VerdictStatus.MISMATCH)
    before = Verdict.__dict__["acceptable"]
    with applied(mutant(target="engine.checksum.verdict.Verdict.acceptable", replace=lambda _: lambda self: True)):
        assert verdict.acceptable is True
    assert Verdict.__dict__["acceptable"] is before
    assert verdict.acceptable is False


@pytest.mark.parametrize(
    ("cls", "name", "kind"),
    [(Seams, "emit", FunctionType), (PayloadLimits, "for_engine", classmethod), (Fabric, "_take", staticmethod)],
)
def test_a_method_stays_what_it_is(cls: type, name: str, kind: type) -> None:
    before = vars(cls)[name]
    with applied(mutant(target=f"{cls.__module__}.{cls.__name__}.{name}", replace=harmless)) as calls:
        assert type(vars(cls)[name]) is type(before) is kind
        assert vars(cls)[name] is not before
        if cls is PayloadLimits:
            assert PayloadLimits.for_engine(64, [16]).max_num_tokens == 64
            assert calls.count == 1
    assert vars(cls)[name] is before


def test_everything_is_put_back_after_an_exception() -> None:
    original = harness.seeds.short_hash
    with pytest.raises(ZeroDivisionError), applied(mutant(replace=lambda _: lambda *parts: 1 / 0)):
        harness.plan.short_hash("x")
    assert harness.plan.short_hash is harness.seeds.short_hash is original
    assert len(harness.plan.short_hash("x")) == 8


@pytest.fixture
def late_module() -> Iterator[Callable[[], ModuleType]]:
    """A module of ours that is first imported while a mutant is in."""
    name = "harness._imported_late"

    def make() -> ModuleType:
        module = ModuleType(name)
        module.short_hash = harness.seeds.short_hash
        sys.modules[name] = module
        return module

    yield make
    sys.modules.pop(name, None)


def test_a_module_that_was_imported_in_the_meantime_gets_the_original(late_module: Callable[[], ModuleType]) -> None:
    with applied(mutant()):
        late = late_module()
        assert late.short_hash("x") == ""
    assert late.short_hash is harness.seeds.short_hash


def test_what_was_computed_by_sound_code_does_not_help_a_mutant() -> None:
    Bench().history("clean-transfer--off")
    assert oracle_tokens.cache_info().currsize > 0
    with applied(mutant()):
        assert oracle_tokens.cache_info().currsize == 0
        Bench().history("clean-transfer--off")
    assert oracle_tokens.cache_info().currsize == 0


def test_calls_are_counted() -> None:
    with applied(mutant()) as calls:
        assert calls.count == 0
        harness.plan.short_hash("x")
        harness.seeds.short_hash("y")
    harness.seeds.short_hash("z")
    assert calls.count == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target": "harness.seeds.no_such_thing"}, "mutant empty-hash: harness.seeds.no_such_thing: there is no such"),
        ({"target": "harness.no_such_module.f"}, "there is no such function"),
        ({"target": "no_such_package.f"}, "there is no such function"),
        ({"target": "harness.gaps.PREDICATES"}, "is a dict, not a callable"),
        ({"replace": lambda original: original}, "its replacement is the original"),
    ],
)
def test_a_mutant_that_cannot_be_put_in_says_why(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(MutantError, match=said), applied(mutant(**changes)):
        pass


# ---- what is concluded


@pytest.mark.parametrize(
    ("changes", "state", "exit_code"),
    [
        ({}, State.KILLED, 0),
        ({"replace": harmless}, State.SURVIVED, 1),
        ({"control": short_hash_is_of_eight_digits}, State.CONTROL_NOTICED, 1),
        ({"killers": (never,)}, State.NEVER_REACHED, 70),
        ({"replace": lambda original: lambda *parts: 1 / 0}, State.KILLED, 0),
    ],
)
def test_states_and_exit_codes(changes: dict[str, Any], state: State, exit_code: int) -> None:
    result = run_selftest([mutant(**changes)])
    (trial,) = result.trials
    assert trial.state is state
    assert result.exit_code == exit_code
    assert (trial.killed_by == ()) == (state in (State.SURVIVED, State.NEVER_REACHED))
    assert (trial.calls == 0) == (state is State.NEVER_REACHED)


def test_a_survivor_wins_over_one_that_was_never_reached() -> None:
    survivor, unreached = mutant(name="a", replace=harmless), mutant(name="b", killers=(never,))
    result = run_selftest([unreached, survivor, mutant(name="c")])
    assert [trial.state for trial in result.trials] == [State.NEVER_REACHED, State.SURVIVED, State.KILLED]
    assert result.exit_code == 1
    assert run_selftest([unreached, mutant(name="c")]).exit_code == 70
    assert run_selftest([]).exit_code == 70


def test_one_killer_is_enough_and_those_that_noticed_nothing_are_named() -> None:
    (trial,) = run_selftest([mutant(killers=(never, short_hash_is_of_eight_digits))]).trials
    assert trial.state is State.KILLED
    assert trial.idle == ("never",)


def test_what_is_red_without_any_mutant_proves_nothing() -> None:
    with pytest.raises(SelftestError, match=r"without any mutant.*\nalways: something is wrong"):
        run_selftest([mutant(killers=(always,))])


def test_a_harmless_mutant_of_the_engine_survives() -> None:
    survivor = replace(CHECKSUM_MUTANTS[0], replace=harmless)
    trial = try_mutant(survivor)
    assert trial.state is State.SURVIVED
    assert trial.idle == ("flip-before-verify", "short-transfer--fail_open")
    assert trial.calls > 0


def test_a_lost_cell_is_noticed_and_a_full_disk_is_not_taken_for_that() -> None:
    (lost,) = [m for m in MUTANTS if m.name == "cells-get-lost"]
    with applied(lost):
        assert "interrupted" in (notice(Bench(), "clean-transfer--off") or "")

    def full(bench: Bench) -> str | None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        notice(Bench(), full)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no-such-scenario", "no scenario no-such-scenario"),
        ("empty-transfer-shared-prefix--off", "does not run under off"),
        ("checksums-lost--off", "does not apply to target sim"),
    ],
)
def test_a_killer_that_cannot_notice_anything_is_an_error(name: str, said: str) -> None:
    with pytest.raises(MutantError, match=said):
        try_mutant(mutant(killers=(name,)))


def test_other_processes_come_to_the_same() -> None:
    chosen = [m for m in MUTANTS if m.name in ("zero-is-nothing", "checksums-kept")]
    here, elsewhere = (run_selftest(chosen, seed=3, jobs=jobs) for jobs in (1, 2))
    assert [replace(t, seconds=0) for t in here.trials] == [replace(t, seconds=0) for t in elsewhere.trials]
    with pytest.raises(SelftestError, match="empty-hash: not of harness/mutants"):
        run_selftest([mutant()], jobs=2)


# ---- the mutants


@pytest.mark.parametrize("probe", unique_probes(MUTANTS).values(), ids=unique_probes(MUTANTS))
def test_without_a_mutant_nothing_is_noticed(probe: Any) -> None:
    assert notice(Bench(), probe) is None


@pytest.mark.parametrize("planted", MUTANTS, ids=lambda m: m.name)
def test_every_killer_notices_its_mutant_and_the_control_does_not(planted: Mutant) -> None:
    trial = try_mutant(planted)
    assert trial.state is State.KILLED, trial
    assert trial.idle == ()
    for noticed in trial.killed_by:
        # A replacement that cannot be called would be noticed for the wrong reason.
        assert "raised" not in noticed.how
        assert planted.name in CRASHES or "crashed" not in noticed.how


def test_mutants_are_well_declared() -> None:
    names = [m.name for m in MUTANTS]
    assert len(set(names)) == len(names)
    for planted in MUTANTS:
        assert planted.what.endswith(".")
        assert planted.killers
        assert planted.control not in planted.killers
        owner, name = resolve(planted.target)
        assert getattr(owner, "__module__", getattr(owner, "__name__", "")).partition(".")[0] != "tests"
        assert name in vars(owner)
    assert {m.area for m in MUTANTS} == {"engine", "checksum", "verifier", "policy", "injector", "judge", "reporter"}


@pytest.mark.parametrize("seed", [1, 2])
def test_the_scenarios_of_the_selftest_hold_for_every_seed(seed: int) -> None:
    scenarios = load_scenarios([SCENARIOS / "selftest"])
    run = Bench(seed).run(*(scenario.name for scenario in scenarios), twins=True)
    assert run.exit_code == 0
    assert len(run.cells) > len(scenarios)


def test_the_document_lists_the_mutants(root: Path) -> None:
    """The table between the marks is this one: paste it if it is not."""
    rows = [
        f"| `{m.name}` | {m.what} | {', '.join(map(probe_name, m.killers))} | {probe_name(m.control)} |"
        for m in MUTANTS
    ]
    table = "\n".join(
        ["| mutant | what is broken | must be noticed by | must not be noticed by |", "|---|---|---|---|", *rows]
    )
    assert table in (root / DOC).read_text(encoding="utf-8"), f"\n{table}"


# ---- the command


def run_command(*arguments: str) -> Any:
    return selftest.main(args=list(arguments), prog_name="kvchaos selftest", standalone_mode=False)


def test_the_command_tells_what_was_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("--only", "zero-is-nothing", "--only", "empty-run-passes") == 0
    out = capsys.readouterr().out
    assert "zero-is-nothing   killed  checksums of zero are compared" in out
    assert "2 of 2 planted bugs noticed" in out
    assert "constant-sum" not in out


def test_the_command_is_loud_about_survivors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planted = (mutant(name="tame", replace=harmless), mutant(name="far", killers=(never,)), mutant())
    monkeypatch.setattr("harness.commands.selftest.MUTANTS", planted)
    assert run_command() == 1
    out = capsys.readouterr().out
    assert "SURVIVED: tame (Every short hash is empty.) nobody noticed" in out
    assert "NEVER REACHED: far" in out
    assert "2 of 3 planted bugs did not come out as they must: do not trust a green run." in out
    assert run_command("--json", "--only", "far") == 70
    told = json.loads(capsys.readouterr().out)
    assert told["exit_code"] == 70
    assert told["trials"][0]["state"] == "never_reached"


def test_the_command_lists_mutants(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("--list") == 0
    out = capsys.readouterr().out
    assert all(m.name in out for m in MUTANTS)
    assert run_command("--list", "--json", "--only", "constant-sum") == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["killers"] == ["flip-before-verify", "short-transfer--fail_open"]


def test_the_command_refuses_what_it_does_not_know() -> None:
    with pytest.raises(click.BadParameter, match="there is no mutant 'constant-sums': did you mean constant-sum"):
        run_command("--only", "constant-sums")
    with pytest.raises(click.BadParameter, match="`kvchaos selftest --list` names them all"):
        run_command("--only", "xyzzy")
