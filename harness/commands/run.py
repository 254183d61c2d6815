"""`kvchaos run`: run scenarios, judge them, write the reports."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from harness.commands.options import json_output, scenario_paths
from harness.errors import PlanError
from harness.plan import Cell, plan_cells
from harness.rundir import Options, create, point_latest
from harness.runner import judge_run, run_cells
from harness.targets import TARGETS
from reports.results import to_json
from reports.terminal import print_run
from reports.write import write_reports
from scenarios.loader import load_scenarios
from scenarios.schema import Scenario
from scenarios.words import Policy


@click.command()
@scenario_paths
@click.option("--target", type=click.Choice(sorted(TARGETS)), default="sim", show_default=True, help="Where to run.")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    type=click.Choice([str(policy) for policy in Policy]),
    help="Run only this policy; may be given again. Default: every policy that a scenario names.",
)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Drives every choice.")
@click.option("--jobs", type=click.IntRange(1, 256), default=1, show_default=True, help="Processes to run cells in.")
@click.option(
    "--runs-dir",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("runs"),
    show_default=True,
    help="Where runs are kept, each in a folder of its own.",
)
@click.option(
    "--provenance/--no-provenance",
    default=True,
    show_default=True,
    help="Check every attention read against a shadow of who wrote what. Without it `read` is judged by bytes alone.",
)
@json_output
def run(
    paths: tuple[Path, ...],
    target: str,
    policies: tuple[str, ...],
    seed: int,
    jobs: int,
    runs_dir: Path,
    provenance: bool,
    as_json: bool,
) -> int:
    """Run the scenarios in PATHS (files or folders) and judge every request against the truth.

    Each scenario runs under each policy, with a clean twin in which the fault does nothing. Histories, results.json,
    junit.xml, summary.md and report.html are left in a folder below --runs-dir.
    """
    scenarios = load_scenarios(paths)
    wanted = tuple(Policy(policy) for policy in policies) or tuple(Policy)
    cells = plan_cells(scenarios, wanted, seed, TARGETS[target].provides, provenance)
    if not cells:
        raise PlanError(f"none of the {len(scenarios)} scenarios runs under --policy {', '.join(wanted)}")
    options = Options(_name(paths), target, seed, wanted, _sources(paths, scenarios), provenance)
    run_dir = create(runs_dir, options, ["kvchaos", *sys.argv[1:]], datetime.now(UTC))
    with _progress(len(cells)) as advance:
        _, interrupted = run_cells(cells, target, run_dir, jobs, advance)
    result = judge_run(run_dir, options, interrupted)
    write_reports(run_dir, result)
    point_latest(runs_dir, run_dir)
    if as_json:
        click.echo(json.dumps({"run_dir": str(run_dir), "exit_code": result.exit_code, **to_json(result)}))
    else:
        print_run(result, run_dir)
    return result.exit_code


def _name(paths: tuple[Path, ...]) -> str:
    """The run's name: that of the first path."""
    path = paths[0].resolve()
    return path.stem if path.is_file() else path.name or "run"


def _sources(paths: tuple[Path, ...], scenarios: list[Scenario]) -> dict[str, str]:
    """The file of each scenario as it was reached from `paths`, for rerun commands."""
    names = {scenario.name for scenario in scenarios}
    found: dict[str, str] = {}
    for path in paths:
        files = [path] if path.is_file() else sorted([*path.rglob("*.yaml"), *path.rglob("*.yml")])
        for file in files:
            if file.stem in names:
                found.setdefault(file.stem, str(file))
    return found


@contextmanager
def _progress(total: int) -> Iterator[Callable[[Cell], None]]:
    """A progress bar on a terminal's stderr, nothing elsewhere."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("running cells", total=total)

        def advance(cell: Cell) -> None:
            bar.update(task, advance=1, description=cell.id)

        yield advance
