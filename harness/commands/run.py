"""`kvchaos run`: run scenarios, judge them, write the reports."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from engine.connectors import DEFAULT_CONNECTOR
from harness.commands.choices import connector_option, target_option
from harness.commands.finish import finish
from harness.commands.options import json_output, runs_dir_option, scenario_paths
from harness.commands.output import printing
from harness.errors import PlanError
from harness.interrupts import signals_interrupt
from harness.plan import Cell, plan_cells
from harness.rundir import Options, create
from harness.runner import run_cells
from harness.shards import Shard, with_repeats
from harness.targets import TARGETS, takes_connector
from harness.targets.processes import PairTarget
from harness.targets.vllm import settings as vllm_settings
from harness.targets.vllm.target import VLLMTarget
from reports.text import counted
from scenarios.loader import load_scenarios
from scenarios.schema import Scenario
from scenarios.words import Policy


@click.command()
@scenario_paths
@target_option
@connector_option
@click.option(
    "--policy",
    "policies",
    multiple=True,
    type=click.Choice([str(policy) for policy in Policy]),
    help="Run only this policy; may be given again. Default: every policy that a scenario names.",
)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Drives every choice.")
@click.option("--jobs", type=click.IntRange(1, 256), default=1, show_default=True, help="Processes to run cells in.")
@runs_dir_option
@click.option("--shard", help="Run only part i of n of the plan, as i/n; `kvchaos merge` puts the parts together.")
@click.option(
    "--repeat",
    type=click.IntRange(0, 100),
    default=0,
    show_default=True,
    help="Run about this percentage of the cells twice: their histories must come out the same.",
)
@click.option(
    "--provenance/--no-provenance",
    default=True,
    show_default=True,
    help="Check every attention read against a shadow of who wrote what. Without it `read` is judged by bytes alone.",
)
@click.option(
    "--vllm-python",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Target vllm: the interpreter that has vLLM. Default: .venv-vllm/bin/python, which `make vllm-env` makes.",
)
@click.option(
    "--model",
    type=click.Path(path_type=Path, file_okay=False),
    help="Target vllm: the folder of a model, instead of the small one that is made on the spot.",
)
@json_output
def run(
    paths: tuple[Path, ...],
    target: str,
    connector: str,
    policies: tuple[str, ...],
    seed: int,
    jobs: int,
    runs_dir: Path,
    shard: str | None,
    repeat: int,
    provenance: bool,
    vllm_python: Path | None,
    model: Path | None,
    as_json: bool,
) -> int:
    """Run the scenarios in PATHS (files or folders) and judge every request against the truth.

    Each scenario runs under each policy, with a clean twin in which the fault does nothing. Histories, results.json,
    junit.xml, summary.md and report.html are left in a folder below --runs-dir.
    """
    if connector != DEFAULT_CONNECTOR and not takes_connector(TARGETS[target]):
        raise PlanError(f"target {target} has its own way to move KV: leave out --connector {connector}")
    if target != "vllm" and (vllm_python is not None or model is not None):
        raise PlanError(f"--vllm-python and --model are of target vllm: leave them out with --target {target}")
    vllm_settings.say(vllm_python, model)
    scenarios = load_scenarios(paths)
    wanted = tuple(Policy(policy) for policy in policies) or tuple(Policy)
    part = Shard.parse(shard) if shard is not None else None
    planned = plan_cells(scenarios, wanted, seed, TARGETS[target].provides, provenance, connector)
    planned = with_repeats(planned, repeat, seed)
    cells = planned if part is None else [cell for cell in planned if part.holds(cell)]
    if not planned:
        raise PlanError(f"none of the {len(scenarios)} scenarios runs under --policy {', '.join(wanted)}")
    if not cells:
        raise PlanError(f"--shard {shard} holds none of the {len(planned)} cells: use fewer shards")
    runs_on = TARGETS[target]
    if isinstance(runs_on, PairTarget | VLLMTarget):
        runs_on.check()
    options = Options(_name(paths), target, seed, wanted, _sources(paths, scenarios), provenance, connector)
    if vllm_python is not None or model is not None:
        options = replace(options, vllm_python=_text(vllm_python), model=_text(model))
    run_dir = create(
        runs_dir, options, [cell.id for cell in planned], shard, ["kvchaos", *sys.argv[1:]], datetime.now(UTC)
    )
    started = time.perf_counter()
    with signals_interrupt(), _progress(len(cells)) as advance:
        finished, _ = run_cells(cells, target, run_dir, jobs, advance)
    took = time.perf_counter() - started
    if not as_json:
        with printing():
            click.echo(f"{counted(len(finished), 'cell')} in {took:.1f} s ({len(finished) / took:.0f} a second)")
    return finish(run_dir, runs_dir, options, as_json=as_json)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


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
