"""pytest runs scenarios where it is asked to, says what was judged, and is as before everywhere else."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from harness import api, pytest_cells  # torch cannot be imported twice, which a pytest within this one would do
from harness.history import History
from harness.plan import Cell
from harness.targets.sim import SimTarget
from kvchaos_pytest import _looks_like_a_scenario

pytest_plugins = ["pytester"]

FLIP = """\
schema_version: 1
name: flip
summary: A bit of D's copy flips before the check.
workload: {requests: 2, prompt_tokens: 20, output_tokens: 2}
faults:
  - kind: bit_flip
    when: {load: 2, at: before_verify}
expect:
  off:                   {verdict: not_checked, outcome: served, truth: corrupted}
  fail_open:             {verdict: mismatch, outcome: served, truth: corrupted}
  fail_closed_fail:      {verdict: mismatch, outcome: failed, truth: corrupted}
  fail_closed_recompute: {verdict: mismatch, outcome: recomputed, truth: corrupted, tokens: right}
"""
GAP = """\
schema_version: 1
name: gap
summary: Bit 63 of two pieces flips.
workload: {requests: 1, prompt_tokens: 20, output_tokens: 2}
policies: [fail_closed_fail]
known_gap: GAP-8
faults:
  - kind: bit_flip
    when: {load: 1, at: before_verify}
    pattern: bit63_pair
expect:
  fail_closed_fail: {verdict: verified, outcome: served, truth: corrupted}
"""
LOST = """\
schema_version: 1
name: lost
summary: The checksums are lost.
workload: {requests: 1, prompt_tokens: 20, output_tokens: 2}
policies: [off]
faults:
  - kind: drop_checksums
    when: {load: 1}
expect:
  off: {verdict: not_checked}
"""
NOTHING = """\
schema_version: 1
name: nothing
summary: There is no slot past the end, so nothing can flip.
workload: {requests: 1, prompt_tokens: 16, output_tokens: 2}
policies: [off]
faults:
  - kind: bit_flip
    when: {load: 1, at: before_verify}
    where: past_end
expect:
  off: {verdict: not_checked}
"""
FOREIGN = """\
services:
  schema_version: 1
  expect: 2
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A project with a test, and scenarios in a folder that has the name of one of our packages."""
    pytester.makepyfile(test_theirs="def test_theirs(): pass")
    folder = pytester.mkdir("scenarios")
    for name, text in {"flip": FLIP, "gap": GAP, "lost": LOST, "nothing": NOTHING, "foreign": FOREIGN}.items():
        (folder / f"{name}.yaml").write_text(text)
    return pytester


def ini(project: pytest.Pytester, *lines: str) -> None:
    project.makeini("\n".join(["[pytest]", "addopts = --strict-markers --strict-config", *lines]))


def ids(result: pytest.RunResult) -> list[str]:
    """What --collect-only -q lists."""
    return [line for line in result.outlines if "::" in line]


def test_the_plugin_is_installed() -> None:
    (found,) = entry_points(group="pytest11", name="kvchaos")
    assert found.value == "kvchaos_pytest", "run `make setup`"


def test_scenarios_are_tests(project: pytest.Pytester) -> None:
    result = project.runpytest_inprocess("scenarios", "--collect-only", "-q")
    policies = ("off", "fail_open", "fail_closed_fail", "fail_closed_recompute")
    flips = [f"scenarios/flip.yaml::{policy}" for policy in policies]
    assert ids(result) == [
        *flips,
        "scenarios/gap.yaml::fail_closed_fail",
        "scenarios/lost.yaml::off",
        "scenarios/nothing.yaml::off",
    ]


def test_results_become_outcomes(project: pytest.Pytester) -> None:
    result = project.runpytest_inprocess("scenarios", "-v", "-rsf", "--junitxml=junit.xml")
    result.assert_outcomes(passed=5, skipped=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "scenarios/gap.yaml::fail_closed_fail PASSED*",
            "SKIPPED [1] scenarios/lost.yaml:1: not applicable: sim with policy off has no kv_checksums",
            "FAILED scenarios/nothing.yaml::off - unknown: no evidence*",
        ]
    )
    cases = ElementTree.parse(project.path / "junit.xml").getroot().iter("testcase")
    properties = {
        (case.get("classname"), case.get("name")): {p.get("name"): p.get("value") for p in case.iter("property")}
        for case in cases
    }
    gap = properties["scenarios.gap.yaml", "fail_closed_fail"]
    assert (gap["result"], gap["known_gap"], gap["id"]) == ("known_gap", "GAP-8", "gap--fail_closed_fail")
    assert "known_gap" not in properties["scenarios.flip.yaml", "off"]
    assert properties["scenarios.nothing.yaml", "off"]["result"] == "unknown"


def test_a_failure_shows_the_judgement(project: pytest.Pytester) -> None:
    (project.path / "scenarios" / "flip.yaml").write_text(FLIP.replace("outcome: failed", "outcome: served"))
    result = project.runpytest_inprocess("scenarios/flip.yaml", "--kvchaos-seed=3", "--kvchaos-policy=fail_closed_fail")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*_ flip: fail_closed_fail _*",
            "FAIL: flip, fail_closed_fail, *",
            "  A bit of D's copy flips before the check.",
            "why",
            "  r2 (load 2): outcome is failed (KV load failed: *), expected served",
            "expected",
            "  loads with a fault: verdict mismatch, outcome served, truth corrupted",
            "  other loads: verdict verified, outcome served, truth intact, tokens right",
            "found",
            "  r2 (load 2): verdict mismatch, outcome failed, truth corrupted, tokens none",
            "evidence",
            "  bit_flip at consumer.load_finished, r2: bit * (* -> *)",
            "rerun",
            "  kvchaos run scenarios/flip.yaml --policy fail_closed_fail --seed 3 --target sim",
            "FAILED scenarios/flip.yaml::fail_closed_fail - fail: r2 (load 2): outcome is *",
        ]
    )
    result.stdout.no_fnmatch_line("*Error*")
    result.stdout.no_fnmatch_line("*harness*")


def test_a_failure_shows_the_damage_and_its_diagnosis() -> None:
    cell = api.run_scenario(FLIP, policy="off")
    loads = (cell.loads[0], replace(cell.loads[1], damage="one bit", diagnosis=("a flipped bit", "\x1b[2Ja write")))
    shown = str(pytest_cells.judgement(pytest_cells.JudgedError([replace(cell, loads=loads)]), "flip.yaml"))
    assert "\ndamage\n  r2: one bit\n  r2: a flipped bit\n  r2: \\x1b[2Ja write\nevidence\n" in shown


def test_unknown_fails_in_its_own_words(project: pytest.Pytester) -> None:
    result = project.runpytest_inprocess("scenarios/nothing.yaml")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["unknown: nothing, off, *", "  unknown: nothing was shown here*", "  no evidence that bit_flip on r1 happened"]
    )


def test_a_twin_that_is_not_clean_fails_the_test(project: pytest.Pytester) -> None:
    """Its only load is faulted, so `others` is wrong about nothing but the twin."""
    text = GAP.replace("name: gap", "name: twin") + "others:\n  fail_closed_fail: {verdict: mismatch}\n"
    (project.path / "scenarios" / "twin.yaml").write_text(text)
    result = project.runpytest_inprocess("scenarios/twin.yaml")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "FAIL: the clean twin of it, which no fault touches: twin-*",
            "  r1 (load 1): verdict is verified, expected mismatch",
            "FAILED scenarios/twin.yaml::fail_closed_fail - fail: the clean twin: r1 *",
        ]
    )


def test_a_shared_twin_runs_once(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    class Counting(SimTarget):
        def run(self, cell: Cell, history: History) -> None:
            ran.append(cell.id)
            super().run(cell, history)

    monkeypatch.setitem(api.TARGETS, "sim", Counting())
    (project.path / "scenarios" / "other.yaml").write_text(FLIP.replace("name: flip", "name: other"))
    project.runpytest_inprocess("scenarios", "-k", "bit_flip and off and not nothing").assert_outcomes(
        passed=2, deselected=9
    )
    assert sorted(cell.partition("-")[0] for cell in ran) == ["flip", "other", "twin"]


@pytest.mark.parametrize(
    ("arguments", "selected"),
    [
        (("-k", "off"), ["flip.yaml::off", "lost.yaml::off", "nothing.yaml::off"]),
        (("-k", "drop_checksums or GAP-8"), ["gap.yaml::fail_closed_fail", "lost.yaml::off"]),
        (("-m", "not kvchaos"), []),
        (("-m", "kvchaos", "--kvchaos-policy=fail_open"), ["flip.yaml::fail_open"]),
        (("--kvchaos-policy=off", "--kvchaos-policy=fail_open", "-k", "fail_open or gap"), ["flip.yaml::fail_open"]),
    ],
)
def test_tests_are_selected(project: pytest.Pytester, arguments: tuple[str, ...], selected: list[str]) -> None:
    ini(project)
    result = project.runpytest_inprocess("scenarios", "--collect-only", "-q", *arguments)
    assert ids(result) == [f"scenarios/{name}" for name in selected]


def test_one_is_selected_by_its_id(project: pytest.Pytester) -> None:
    project.runpytest_inprocess("scenarios/flip.yaml::fail_open").assert_outcomes(passed=1)


def test_a_broken_scenario_is_one_line_a_problem(project: pytest.Pytester) -> None:
    text = FLIP.replace("at: before_verify", "at: never").replace("requests: 2", "requests: 0")
    (project.path / "scenarios" / "flip.yaml").write_text(text)
    result = project.runpytest_inprocess("scenarios")
    result.assert_outcomes(errors=1)
    lines = result.outlines
    start = next(number for number, line in enumerate(lines) if "ERROR collecting scenarios/flip.yaml" in line)
    assert lines[start + 1].startswith("scenarios/flip.yaml:4: workload.requests: requests is 0: use at least 1")
    assert lines[start + 2].startswith("scenarios/flip.yaml:7: faults[0].when.at: at is 'never': use one of")
    assert lines[start + 3].startswith("===")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--kvchaos-policy=of", "--kvchaos-policy: policy is 'of': use one of *; did you mean 'off'?"),
        ("--kvchaos-target=simm", "--kvchaos-target: target is 'simm': use *; did you mean 'sim'?"),
        ("--kvchaos-seed=-1", "--kvchaos-seed: seed is -1: use a whole number*"),
    ],
)
def test_an_option_that_cannot_be_used(project: pytest.Pytester, option: str, message: str) -> None:
    result = project.runpytest_inprocess("scenarios", option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{message}"])


def test_other_suites_are_left_alone(project: pytest.Pytester) -> None:
    """Not where pytest looks by itself, not below `testpaths`, and never a file that is no scenario."""
    project.runpytest_inprocess().assert_outcomes(passed=1)
    project.runpytest_inprocess("scenarios/foreign.yaml").assert_outcomes()
    ini(project, "testpaths = scenarios test_theirs.py")
    project.runpytest_inprocess().assert_outcomes(passed=1)
    project.makeini("[pytest]\naddopts = scenarios")  # whoever writes this means it
    assert len(ids(project.runpytest_inprocess("--collect-only", "-q"))) == 7


def test_other_suites_are_left_alone_in_processes(project: pytest.Pytester) -> None:
    """The workers of xdist get the paths of `testpaths` as if they had been given."""
    ini(project, "testpaths = scenarios test_theirs.py")
    project.runpytest_subprocess("-n", "1").assert_outcomes(passed=1)


def test_the_folders_of_the_ini_file(project: pytest.Pytester) -> None:
    """Everything below them is a scenario; elsewhere only a file that is named."""
    (project.path / "scenarios" / "foreign.yaml").unlink()
    (project.mkdir("elsewhere") / "other.yml").write_text(FLIP.replace("name: flip", "name: other"))
    ini(project, "kvchaos_scenarios = scenarios")
    assert len(ids(project.runpytest_inprocess("--collect-only", "-q"))) == 7 + 1
    assert ids(project.runpytest_inprocess("elsewhere", "--collect-only", "-q")) == []
    assert len(ids(project.runpytest_inprocess("elsewhere/other.yml", "--collect-only", "-q"))) == 4
    (project.path / "scenarios" / "typo.yaml").write_text(FLIP.replace("expect:", "expcet:"))
    project.runpytest_inprocess().assert_outcomes(errors=1)


def test_with_the_option_everything_is_a_scenario(project: pytest.Pytester) -> None:
    result = project.runpytest_inprocess("--kvchaos", "scenarios")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["scenarios/foreign.yaml:1: services: services is not known here*"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (FLIP, True),
        ("\ufeff" + FLIP, True),
        ("---\n" + FLIP, True),
        ("'schema_version' : 1\nexpect:\n  off: {}\n", True),
        (FOREIGN, False),
        ("schema_version: 1\n", False),
        ("schema_version: 1\n---\nexpect: {}\n", False),
        ("schema_version:1\nexpect:x\n", False),
        ("", False),
    ],
)
def test_what_looks_like_a_scenario(tmp_path: Path, text: str, expected: bool) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    assert _looks_like_a_scenario(path) is expected
    assert not _looks_like_a_scenario(tmp_path / "missing.yaml")


def test_nothing_of_ours_is_imported_without_a_scenario(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_it(kvchaos):
            ours = {"kernels", "engine", "faults", "scenarios", "reports", "harness"}
            assert not (ours | {"torch", "numpy", "pydantic", "yaml"}) & set(sys.modules)
        """
    )
    ini(pytester, "filterwarnings = error")
    pytester.makefile(".yaml", foreign=FOREIGN)
    pytester.runpytest_subprocess(".").assert_outcomes(passed=1)


def test_a_package_that_hides_ours_is_named(project: pytest.Pytester) -> None:
    """Our packages have short names, and `python -m pytest` puts the folder that it is run in first."""
    (project.mkpydir("reports") / "results.py").touch()
    result = project.runpytest_subprocess("scenarios/flip.yaml")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["kvchaos cannot be imported (cannot import name '*' from 'reports.results'*"])


def test_in_processes(project: pytest.Pytester) -> None:
    result = project.runpytest_subprocess("scenarios", "test_theirs.py", "-n", "2", "-W", "error")
    result.assert_outcomes(passed=6, skipped=1, failed=1)
    result.stdout.fnmatch_lines(["why", "FAILED scenarios/nothing.yaml::off - unknown: no evidence*"])


def test_the_fixture(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        from pathlib import Path

        import pytest

        def test_by_path(kvchaos, monkeypatch, tmp_path):
            monkeypatch.chdir(tmp_path)
            cell = kvchaos.run("scenarios/flip.yaml", policy="fail_open")
            assert (cell.result, cell.rerun.split()[-3]) == ("pass", "9")

        def test_by_text(kvchaos):
            text = Path("scenarios/gap.yaml").read_text()
            cell = kvchaos.run(text, policy="fail_closed_fail", seed=4)
            assert (cell.result, cell.known_gap) == ("known_gap", "GAP-8")
            twin = kvchaos.run(text, policy="fail_closed_fail", twin=True)
            assert (twin.role, twin.result) == ("twin", "pass")

        def test_what_is_wrong(kvchaos):
            with pytest.raises(Exception, match="policy is 'of'"):
                kvchaos.run("scenarios/flip.yaml", policy="of")
        """
    )
    project.runpytest_inprocess("test_the_fixture.py", "--kvchaos-seed=9").assert_outcomes(passed=3)


def test_a_crash_of_ours_keeps_its_traceback(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """A judgement is for the author of a scenario, a bug for us."""

    def broken(cell: object) -> None:
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(pytest_cells, "properties", broken)
    result = project.runpytest_inprocess("scenarios/gap.yaml")
    result.stdout.fnmatch_lines(["*RuntimeError: a bug of ours"])
