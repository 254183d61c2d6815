"""Faults, targets and connectors of other distributions, from the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.connectors.registry import CONNECTORS
from engine.extensions import OWN, ExtensionError
from faults import registry
from faults.registry import FAULTS, params_model
from harness.plan import plan_cells
from harness.plugins import REGISTRIES, refuse, usable
from harness.rundir import read_options
from harness.targets import TARGETS, takes_connector
from scenarios.words import Policy

Install = Callable[..., None]
Run = Callable[..., Any]
Write = Callable[..., Path]

HISS = """
    from typing import Literal

    from faults.base import Fault, FaultParams, When
    from faults.moments import MOMENTS

    class HissWhen(When):
        at: Literal["before_verify"]

    class HissParams(FaultParams):
        kind: Literal["hiss"]
        when: HissWhen
        loud: bool = False

    class Hiss(Fault[HissParams]):
        '''Hisses at a load, and changes nothing.'''

        API_VERSION = 1
        kind = "hiss"
        params_model = HissParams

        @classmethod
        def needs(cls, params):
            return frozenset({MOMENTS[params.when.at]})

        def attach(self, seams):
            seams.on(MOMENTS[self.params.when.at], self._hiss)

        def _hiss(self, event):
            if event.request_id == self.context.request_id:
                self.record(MOMENTS[self.params.when.at], "hiss")
"""
POND = """
    from harness.targets.sim import SimTarget

    class Pond:
        API_VERSION = 1
        name = "pond"
        summary = "the simulator, under water"
        provides = frozenset({"consumer.load_finished"})

        def run(self, cell, history):
            SimTarget().run(cell, history)

    POND = Pond()
"""
HOSE = """
    from engine.connectors.pull import PullConnector

    class Hose(PullConnector):
        name = "hose"
        summary = "water through a hose"

    HOSE = Hose()
"""
FAULT = {"kind": "hiss", "when": {"load": 2, "at": "before_verify"}}
SERVED = {"off": {"verdict": "not_checked"}, "fail_open": {"verdict": "verified", "truth": "intact"}}


@pytest.fixture
def hiss(install: Install) -> None:
    install("acme-hiss", registry.GROUP, {"hiss": "acme_hiss:Hiss"}, {"acme_hiss": HISS}, version="3.1")


@pytest.fixture
def pond(install: Install) -> None:
    install("acme-pond", "kvchaos.targets", {"pond": "acme_pond:POND"}, {"acme_pond": POND})


@pytest.fixture
def hose(install: Install) -> None:
    install("acme-hose", "kvchaos.connectors", {"hose": "acme_hose:HOSE"}, {"acme_hose": HOSE})


def broken(install: Install, group: str, name: str) -> None:
    install(f"rusty-{name}", group, {name: f"rusty_{name}:THING"}, {f"rusty_{name}": "raise OSError('rust')"})


# ---- listing


def test_each_list_shows_what_is_installed_and_where_it_is_from(
    kvchaos: Run, hiss: None, pond: None, hose: None
) -> None:
    faults = {row["kind"]: row for row in kvchaos("list", "faults", "--json").json}
    assert faults["hiss"] == {
        "kind": "hiss",
        "at": "before_verify",
        "parameters": "loud",
        "summary": "Hisses at a load, and changes nothing.",
        "from": "acme-hiss 3.1",
    }
    assert faults["noop"]["from"] == OWN
    pond_row = {"target": "pond", "summary": "the simulator, under water", "from": "acme-pond 1.0"}
    assert pond_row in kvchaos("list", "targets", "--json").json
    assert {"hose", "pull"} <= {row["connector"] for row in kvchaos("list", "connectors", "--json").json}
    text = kvchaos("list", "connectors").out
    assert "acme-hose 1.0" in text
    assert "water through a hose" in text


@pytest.mark.parametrize(("what", "group"), [("faults", registry.GROUP), ("targets", "kvchaos.targets"),
                                             ("connectors", "kvchaos.connectors")])  # fmt: skip
def test_a_list_shows_the_rest_and_then_what_is_broken(kvchaos: Run, install: Install, what: str, group: str) -> None:
    before = kvchaos("list", what, "--json").json
    broken(install, group, "wreck")
    done = kvchaos("list", what, "--json")
    assert done.code == 64
    assert done.json == before
    assert done.err.startswith(f"kvchaos: {REGISTRIES[group].noun} wreck of rusty-wreck 1.0 (entry point wreck = ")
    assert done.err.count("\n") == 1
    assert "Traceback" not in done.err
    others = {"faults", "targets", "connectors"} - {what}
    assert [kvchaos("list", other).code for other in sorted(others)] == [0, 0]


def test_usable_sorts_and_says_what_cannot_be_used(install: Install, hose: None) -> None:
    broken(install, "kvchaos.connectors", "a-wreck")
    found, problems = usable(CONNECTORS)
    assert [item.name for item in found] == sorted(item.name for item in found)
    assert {("hose", "acme-hose 1.0"), ("pull", OWN)} <= {(item.name, item.distribution) for item in found}
    assert len(problems) == 1
    refuse([])
    with pytest.raises(ExtensionError, match="a-wreck of rusty-a-wreck"):
        refuse(problems)


# ---- faults


def test_a_scenario_may_name_an_installed_kind(kvchaos: Run, write_scenario: Write, hiss: None) -> None:
    path = write_scenario(faults=[FAULT], expect=SERVED)
    assert kvchaos("validate", path).code == 0
    assert kvchaos("list", "scenarios", path, "--json").json[0]["faults"] == "hiss"
    done = kvchaos("run", path, "--json")
    assert (done.code, done.err) == (0, "")
    faulted = [cell for cell in done.json["cells"] if cell["role"] == "fault"]
    assert [cell["evidence"][0]["what"] for cell in faulted] == ["hiss", "hiss"]
    manifest = json.loads((Path(done.json["run_dir"]) / "manifest.json").read_text())
    assert manifest["versions"]["acme-hiss"] == "3.1"
    assert kvchaos("analyze", done.json["run_dir"]).code == 0


def test_the_parameters_of_an_installed_kind_are_checked(kvchaos: Run, write_scenario: Write, hiss: None) -> None:
    done = kvchaos("validate", write_scenario(faults=[{**FAULT, "loud": "very"}], expect=SERVED))
    assert done.code == 64
    assert "faults[0].loud" in done.err


def test_several_processes_know_what_is_installed(
    kvchaos: Run, write_scenario: Write, hiss: None, pond: None, hose: None
) -> None:
    path = write_scenario(faults=[FAULT], expect=SERVED)
    assert kvchaos("run", path, "--jobs", "2", "--target", "pond").code == 0
    assert kvchaos("run", path, "--jobs", "2", "--connector", "hose").code == 0


def test_an_unknown_kind_is_told_with_all_kinds_and_imports_none(
    kvchaos: Run, write_scenario: Write, install: Install
) -> None:
    broken(install, registry.GROUP, "wreck")
    done = kvchaos("validate", write_scenario(faults=[{**FAULT, "kind": "wrack"}]))
    assert done.code == 64
    assert "wreck" in done.err
    assert "did you mean 'wreck'?" in done.err
    assert "rust" not in done.err.replace("rusty", "")


def test_a_broken_kind_is_a_problem_of_the_scenario_that_names_it(
    kvchaos: Run, write_scenario: Write, install: Install
) -> None:
    broken(install, registry.GROUP, "wreck")
    path = write_scenario(faults=[{**FAULT, "kind": "wreck"}])
    done = kvchaos("validate", path)
    assert done.code == 64
    (line,) = done.err.splitlines()
    assert f"{path}:1: faults[0].kind: fault wreck of rusty-wreck 1.0 (entry point" in line
    assert "OSError: rust" in line
    assert kvchaos("validate", write_scenario("sound")).code == 0
    assert kvchaos("run", write_scenario("sound")).code == 0


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("API_VERSION = 1", "API_VERSION = 3", "declares API_VERSION 3"),
        ("        API_VERSION = 1", "", "declares no API_VERSION"),
        ('kind = "hiss"', 'kind = "boo"', 'whose kind is not Literal["boo"]'),
        ("Fault[HissParams]", "object", "is no subclass of faults.base.Fault"),
        ("def attach(", "def attached(", "does not define attach"),
        ("params_model = HissParams", "params_model = HissWhen", "has no params_model"),
        ('Literal["before_verify"]', 'Literal["whenever"]', "no Literal of moments (before_checksum"),
        ('Literal["before_verify"]', "str", "no Literal of moments"),
        ("'''Hisses at a load, and changes nothing.'''", "", "has no docstring"),
    ],
)
def test_a_kind_that_does_not_keep_the_protocol_is_refused(install: Install, old: str, new: str, words: str) -> None:
    assert old in HISS
    install("acme-hiss", registry.GROUP, {"hiss": "acme_hiss:Hiss"}, {"acme_hiss": HISS.replace(old, new)})
    with pytest.raises(ExtensionError) as caught:
        params_model("hiss")
    assert words in str(caught.value)
    assert "fault hiss of acme-hiss 1.0 (entry point hiss = acme_hiss:Hiss in kvchaos.faults)" in str(caught.value)


def test_a_kind_of_kvchaos_own_cannot_be_replaced(kvchaos: Run, write_scenario: Write, install: Install) -> None:
    module = HISS.replace('"hiss"', '"bit_flip"')
    install("acme-hiss", registry.GROUP, {"bit_flip": "acme_hiss:Hiss"}, {"acme_hiss": module})
    done = kvchaos("validate", write_scenario())
    assert done.code == 64
    assert "fault bit_flip: kvchaos and acme-hiss 1.0 have one each" in done.err
    assert FAULTS["bit_flip"].__module__ == "faults.bit_flip"


# ---- targets


def test_cells_run_on_an_installed_target(kvchaos: Run, write_scenario: Write, pond: None) -> None:
    done = kvchaos("run", write_scenario(), "--target", "pond", "--json")
    assert done.code == 0
    assert all("--target pond" in cell["rerun"] for cell in done.json["cells"])


def test_what_a_target_does_not_provide_is_not_applicable(kvchaos: Run, write_scenario: Write, pond: None) -> None:
    early = {"kind": "early_reuse", "when": {"load": 2, "at": "before_read"}}
    done = kvchaos("run", write_scenario(faults=[early]), "--target", "pond", "--policy", "off", "--json")
    (cell,) = done.json["cells"]
    assert cell["result"] == "not_applicable"
    assert "lever.clock" in cell["why"][0]


@pytest.mark.parametrize(("option", "typo", "meant"), [("target", "ponds", "pond"), ("connector", "hoses", "hose")])
def test_an_unknown_name_is_told_with_all_names(
    kvchaos: Run, write_scenario: Write, pond: None, hose: None, option: str, typo: str, meant: str
) -> None:
    done = kvchaos("run", write_scenario(), f"--{option}", typo)
    assert done.code == 64
    names = ", ".join(REGISTRIES[f"kvchaos.{option}s"].names)
    assert meant in names
    wanted = f"Invalid value for '--{option}': {typo!r} is not one of {names}; did you mean {meant!r}?"
    assert wanted in done.err


@pytest.mark.parametrize("option", ["target", "connector"])
def test_a_broken_one_that_is_named_is_one_line(
    kvchaos: Run, write_scenario: Write, install: Install, option: str
) -> None:
    broken(install, f"kvchaos.{option}s", "wreck")
    done = kvchaos("run", write_scenario(), f"--{option}", "wreck")
    assert done.code == 64
    assert done.err.startswith(f"kvchaos: {option} wreck of rusty-wreck 1.0 (entry point wreck = rusty_wreck:THING in ")
    assert done.err.count("\n") == 1
    assert kvchaos("run", write_scenario()).code == 0
    assert kvchaos("run", "--help").code == 0


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("API_VERSION = 1", "API_VERSION = 2", "declares API_VERSION 2"),
        ("def run(", "def walk(", "lacks the method run"),
        ("frozenset({", "set({", "has no provides, a frozenset"),
        ('frozenset({"consumer.load_finished"})', "frozenset({1})", "has no provides, a frozenset"),
    ],
)
def test_a_target_that_does_not_keep_the_protocol_is_refused(install: Install, old: str, new: str, words: str) -> None:
    install("acme-pond", "kvchaos.targets", {"pond": "acme_pond:POND"}, {"acme_pond": POND.replace(old, new)})
    with pytest.raises(ExtensionError, match=words):
        TARGETS.choose("pond")


# ---- connectors


def test_the_connector_is_recorded_and_rerun(kvchaos: Run, write_scenario: Write, hose: None) -> None:
    done = kvchaos("run", write_scenario(), "--connector", "hose", "--json")
    assert done.code == 0
    run_dir = Path(done.json["run_dir"])
    assert read_options(run_dir).connector == "hose"
    heads = [
        json.loads(line) for line in (run_dir / "history.jsonl").read_text().splitlines() if '"event":"cell"' in line
    ]
    assert {head["connector"] for head in heads} == {"hose"}
    assert all("--connector hose" in cell["rerun"] for cell in done.json["cells"])
    assert json.loads((run_dir / "manifest.json").read_text())["options"]["connector"] == "hose"


def test_the_default_connector_is_recorded_and_not_repeated(kvchaos: Run, write_scenario: Write) -> None:
    done = kvchaos("run", write_scenario(), "--json")
    assert read_options(Path(done.json["run_dir"])).connector == "pull"
    assert not any("--connector" in cell["rerun"] for cell in done.json["cells"])


def test_a_run_from_before_one_could_choose_had_the_pull_connector(kvchaos: Run, write_scenario: Write) -> None:
    run_dir = Path(kvchaos("run", write_scenario(), "--json").json["run_dir"])
    manifest = json.loads((run_dir / "manifest.json").read_text())
    del manifest["options"]["connector"]
    (run_dir / "manifest.json").write_text(json.dumps(manifest))
    assert read_options(run_dir).connector == "pull"
    assert kvchaos("analyze", run_dir).code == 0


def test_seeds_do_not_depend_on_the_connector(scenario_of: Callable[..., Any]) -> None:
    plans = [
        plan_cells([scenario_of()], tuple(Policy), 5, TARGETS["sim"].provides, connector=name)
        for name in ("pull", "pull_offload")
    ]
    for pull, other in zip(*plans, strict=True):
        assert (pull.id, pull.seed, pull.world_seed, pull.data_seed) == (
            other.id,
            other.seed,
            other.world_seed,
            other.data_seed,
        )
        assert (pull.connector, other.connector) == ("pull", "pull_offload")


def test_a_target_with_transport_of_its_own_takes_no_connector(
    kvchaos: Run, write_scenario: Write, pond: None, hose: None
) -> None:
    done = kvchaos("run", write_scenario(), "--target", "pond", "--connector", "hose")
    assert done.code == 64
    assert done.err == "kvchaos: target pond has its own way to move KV: leave out --connector hose\n"
    assert takes_connector(TARGETS["sim"])
    assert not takes_connector(TARGETS["pond"])


def test_a_run_is_not_merged_with_one_of_another_connector(kvchaos: Run, write_scenario: Write, hose: None) -> None:
    runs = [
        kvchaos("run", write_scenario(), "--shard", f"{n}/2", "--connector", name, "--json").json["run_dir"]
        for n, name in ((1, "pull"), (2, "hose"))
    ]
    done = kvchaos("merge", *runs)
    assert done.code == 64
    assert "options differ" in done.err
