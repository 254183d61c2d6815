"""`kvchaos selftest`: plant bugs, and prove that each of them is noticed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from harness.commands.options import json_output
from harness.commands.output import printing
from harness.mutants import MUTANTS
from harness.mutants.base import Mutant, probe_name
from harness.mutants.trial import State, Trial, unique_probes
from harness.selftest import SelftestResult, run_selftest
from reports.records import to_json
from reports.text import counted

WIDTH = 160
_WORDS = {
    State.KILLED: "killed",
    State.SURVIVED: "SURVIVED",
    State.CONTROL_NOTICED: "CONTROL NOTICED",
    State.NEVER_REACHED: "NEVER REACHED",
}


@click.command()
@click.option("--only", "names", multiple=True, metavar="NAME", help="Try only this mutant; may be given again.")
@click.option("--list", "only_list", is_flag=True, help="List the mutants and what must notice them; run nothing.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Drives every choice.")
@click.option("--jobs", type=click.IntRange(1, 256), default=1, show_default=True, help="Processes to try mutants in.")
@json_output
def selftest(names: tuple[str, ...], only_list: bool, seed: int, jobs: int, as_json: bool) -> int:
    """Plant bugs, one at a time, and prove that the harness notices each of them.

    A bug replaces one function of the engine, of a fault, of the judge or of a report. It must be reached, one of its
    killers must notice it, and its control, which it does not concern, must not.

    \b
    Exit codes: 0 every bug was noticed; 1 one survived, or disturbed its control; 70 one was never reached, or a
    killer or control fails without any bug.
    """
    mutants = _chosen(names)
    if only_list:
        with printing() as console:
            _print_list(mutants, as_json, _wide(console))
        return 0
    with _progress(len(mutants) + len(unique_probes(mutants))) as advance:
        result = run_selftest(mutants, seed, jobs, advance)
    with printing() as console:
        if as_json:
            click.echo(json.dumps({"exit_code": result.exit_code, **to_json(result)}))
        else:
            _print_result(result, _wide(console))
    return result.exit_code


def _chosen(names: Sequence[str]) -> list[Mutant]:
    known = {mutant.name for mutant in MUTANTS}
    for name in names:
        if name not in known:
            close = get_close_matches(name, known, 1)
            advice = f"did you mean {close[0]}?" if close else "`kvchaos selftest --list` names them all"
            raise click.BadParameter(f"there is no mutant {name!r}: {advice}", param_hint="--only")
    return [mutant for mutant in MUTANTS if not names or mutant.name in names]


def _print_list(mutants: Sequence[Mutant], as_json: bool, console: Console) -> None:
    if as_json:
        rows = [
            {
                "name": mutant.name,
                "area": mutant.area,
                "what": mutant.what,
                "killers": [probe_name(killer) for killer in mutant.killers],
                "control": probe_name(mutant.control),
            }
            for mutant in mutants
        ]
        click.echo(json.dumps(rows))
        return
    table = _table("name", "area", "what is broken", "must be noticed by", "must not be noticed by")
    for mutant in mutants:
        killers = "\n".join(map(probe_name, mutant.killers))
        table.add_row(mutant.name, mutant.area, mutant.what, killers, probe_name(mutant.control))
    console.print(table)


def _print_result(result: SelftestResult, console: Console) -> None:
    table = _table("mutant", "", "killed by", "control", "calls")
    for trial in result.trials:
        table.add_row(
            trial.mutant,
            Text(_WORDS[trial.state], "green" if trial.state is State.KILLED else "bold red"),
            "\n".join(noticed.killer for noticed in trial.killed_by) or "-",
            trial.control,
            str(trial.calls),
        )
    console.print(table)
    console.print()
    for trial in result.trials:
        if trial.state is not State.KILLED:
            console.print(Text(_complaint(trial), "bold red"))
    console.print(Text(_conclusion(result), "bold" if result.exit_code == 0 else "bold red"))


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        wraps = column == "what is broken"
        table.add_column(column, justify="right" if column == "calls" else "left", no_wrap=not wraps, overflow="fold")
    return table


def _complaint(trial: Trial) -> str:
    told = {
        State.SURVIVED: f"nobody noticed, neither {' nor '.join(trial.idle)}",
        State.CONTROL_NOTICED: f"the control {trial.control} noticed it too: {trial.control_noticed}",
        State.NEVER_REACHED: "its killers never called what it replaces: was that renamed or bound elsewhere?",
    }
    return f"{_WORDS[trial.state]}: {trial.mutant} ({trial.what}) {told.get(trial.state, '')}"


def _conclusion(result: SelftestResult) -> str:
    killed, tried = len(result.of(State.KILLED)), len(result.trials)
    seconds = sum(trial.seconds for trial in result.trials)
    bugs = counted(tried, "planted bug")
    if killed == tried:
        return f"{killed} of {bugs} noticed, no control disturbed ({seconds:.0f} s of work)."
    return f"{tried - killed} of {bugs} did not come out as they must: do not trust a green run."


def _wide(console: Console) -> Console:
    if not console.is_terminal:
        console.width = WIDTH
    return console


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar on a terminal's stderr, nothing elsewhere."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("planting bugs", total=total)
        yield lambda name: bar.update(task, advance=1, description=name)
