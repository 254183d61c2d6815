"""pytest runs scenarios: a YAML file is a test file, each of its policies a test, and `kvchaos` a fixture.

    pytest scenarios/                              # scenarios/smoke/double-bit-63.yaml::fail_closed_fail ...
    pytest scenarios/ -k early_reuse -n 2          # by name, policy, fault or gap; in processes
    pytest scenarios/ --kvchaos-seed 7 --kvchaos-policy off --junitxml report.xml

    def test_a_stale_read_is_caught(kvchaos):
        cell = kvchaos.run("scenarios/stale-read.yaml", policy="fail_closed_fail")
        assert cell.result == "pass", cell.why

Every pytest of an environment in which kvchaos is installed loads this module. So it takes no file that is not a
scenario (which it takes is in `_is_ours`), imports nothing of ours until there is one, and lies beside our packages:
an import of `harness` would hide a package of that name which another project's tests are about.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from harness.api import Runs
    from reports.results import CellResult
    from scenarios.schema import Scenario
    from scenarios.words import Policy

FOLDERS = "kvchaos_scenarios"
MARK = "kvchaos"
SUFFIXES = (".yaml", ".yml")
# Both at the left margin of the first document: enough to know a scenario by, and rare together anywhere else.
_KEYS = {"schema_version", "expect"}
_KEY = re.compile(r"""(["']?)(\w+)\1[ \t]*:(?:\s|$)""")
_MAX_BYTES = 1 << 16
_GIVEN: pytest.StashKey[tuple[Path, ...]] = pytest.StashKey()
_RUNS: pytest.StashKey[Runs] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kvchaos", "scenarios of KV-cache transfer (kvchaos)")
    group.addoption(
        "--kvchaos",
        action="store_true",
        help="Take every YAML file below the given paths for a scenario, so that one that is none is an error.",
    )
    group.addoption("--kvchaos-seed", type=int, default=0, metavar="N", help="Drives every choice (default: 0).")
    group.addoption("--kvchaos-target", default="sim", metavar="NAME", help="Where scenarios run (default: sim).")
    group.addoption(
        "--kvchaos-policy",
        action="append",
        default=[],
        metavar="NAME",
        help="Run only this policy; may be given again. Default: every policy that a scenario names.",
    )
    parser.addini(
        FOLDERS,
        "Folders of scenarios: every YAML file below them is one. Without it, files that look like scenarios are taken "
        "where they, or a folder that they are in, are named on the command line.",
        type="paths",
        default=[],
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{MARK}: a scenario that kvchaos runs, under one policy.")
    config.stash[_GIVEN] = _given(config)
    options = config.option
    if options.kvchaos_seed != 0 or options.kvchaos_target != "sim" or options.kvchaos_policy:
        _check_options(config)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """pytest-xdist: its workers are started with paths that nobody may have given."""
    node.workerinput["kvchaos_given"] = [str(path) for path in node.config.stash[_GIVEN]]


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> ScenarioFile | None:
    if file_path.suffix not in SUFFIXES or not _is_ours(file_path, parent.config):
        return None
    return ScenarioFile.from_parent(parent, path=file_path)


@pytest.fixture(scope="session")
def kvchaos(pytestconfig: pytest.Config) -> Scenarios:
    """Runs scenarios: `kvchaos.run(scenario, policy=..., seed=...)` gives the judged cell."""
    return Scenarios(pytestconfig)


class Scenarios:
    """The fixture `kvchaos`."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def run(
        self, scenario: Scenario | str | Path, *, policy: Policy | str, seed: int | None = None, twin: bool = False
    ) -> CellResult:
        """Run one scenario under one policy, and judge it: `harness.api.run_scenario`.

        Args:
            scenario: a scenario, YAML text, or a path: relative to the root that pytest names in its header.
            seed: default: that of `--kvchaos-seed`.
            twin: run its clean twin instead.

        Raises:
            ScenarioError: the scenario or an argument cannot be used; a line for each problem.
        """
        from harness.api import run_scenario

        if isinstance(scenario, Path) or (isinstance(scenario, str) and "\n" not in scenario):
            scenario = self._config.rootpath / scenario
        options = self._config.option
        chosen = options.kvchaos_seed if seed is None else seed
        return run_scenario(scenario, policy=policy, seed=chosen, target=options.kvchaos_target, twin=twin)


class ScenarioFile(pytest.File):
    """A scenario file; its tests are the policies that it runs under."""

    def collect(self) -> Iterable[ScenarioItem]:
        try:
            from harness.pytest_cells import Unusable, read_scenario, shown_path
        except ImportError as error:
            raise self.CollectError(
                f"kvchaos cannot be imported ({error}): does a folder or package named kernels, engine, faults, "
                "scenarios, reports or harness hide its own? Run `pytest`, not `python -m pytest`; best, give kvchaos "
                "an environment of its own"
            ) from None
        file = shown_path(self.path, self.config)
        try:
            scenario = read_scenario(self.path, file)
        except Unusable as error:
            raise self.CollectError(str(error)) from None
        wanted = self.config.option.kvchaos_policy
        for policy in scenario.policies:
            if not wanted or policy in wanted:
                yield ScenarioItem.from_parent(self, name=str(policy), scenario=scenario, policy=policy, file=file)


class ScenarioItem(pytest.Item):
    """A scenario under one policy, with its clean twin: passes when both come out as the scenario says."""

    def __init__(self, *, scenario: Scenario, policy: Policy, file: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.scenario, self.policy, self.file = scenario, policy, file
        gap = scenario.known_gap.get(policy)
        self.extra_keyword_matches.update(fault.kind for fault in scenario.faults)
        self.extra_keyword_matches.update([gap] if gap is not None else [])
        self.add_marker(MARK)

    def runtest(self) -> None:
        from harness.pytest_cells import properties, require_good, runs_of

        stash = self.config.stash
        if _RUNS not in stash:  # kept, so that scenarios that share a clean twin run it once
            stash[_RUNS] = runs_of(self.config.option)
        results = stash[_RUNS].judge(self.scenario, self.policy, self.file)
        self.user_properties += properties(results[0])
        require_good(results)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The judgement, where there is one: a traceback through our code would say nothing about the scenario."""
        from harness.pytest_cells import judgement

        return judgement(excinfo.value, self.file) or super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, f"{self.scenario.name}: {self.policy}"


def _check_options(config: pytest.Config) -> None:
    from harness.pytest_cells import Unusable, check_policies, runs_of

    try:
        runs_of(config.option)
        check_policies(config.option.kvchaos_policy)
    except Unusable as error:
        raise pytest.UsageError(str(error)) from None


def _given(config: pytest.Config) -> tuple[Path, ...]:
    """What was named on the command line, without the ids of tests; nothing where pytest chose where to look."""
    if hasattr(config, "workerinput"):
        return tuple(Path(path) for path in config.workerinput.get("kvchaos_given", ()))
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        return ()
    names = (str(argument).partition("::")[0] for argument in config.args)
    return tuple(Path(config.invocation_params.dir, name).resolve() for name in names)


def _is_ours(path: Path, config: pytest.Config) -> bool:
    """Whether a YAML file is a scenario to run, and not a file of somebody else's.

    Everything below the folders of the ini option, and with --kvchaos everything. Else it must look like a scenario
    and be asked for: by name, or, where no folders are configured, by naming a folder above it.
    """
    real = path.resolve()
    folders = [folder.resolve() for folder in config.getini(FOLDERS)]
    if config.option.kvchaos or any(real.is_relative_to(folder) for folder in folders):
        return True
    given = config.stash[_GIVEN]
    asked = real in given or (not folders and any(real.is_relative_to(folder) for folder in given))
    return asked and _looks_like_a_scenario(path)


def _looks_like_a_scenario(path: Path) -> bool:
    """By its text: a YAML parser would cost more, and cannot read a scenario that is not finished."""
    try:
        with path.open("rb") as stream:
            text = stream.read(_MAX_BYTES).decode("utf-8-sig", "replace")
    except OSError:
        return False
    seen: set[str] = set()
    for line in text.splitlines():
        if line.startswith(("---", "...")) and seen:
            break
        if match := _KEY.match(line):
            seen.add(match.group(2))
    return seen >= _KEYS
