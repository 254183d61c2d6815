"""`kvchaos overhead`: what checksums cost a user, measured on a pair of engines."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from engine.config import PRESETS
from engine.errors import InputError, KVChaosError
from harness.commands.options import json_output, runs_dir_option
from harness.commands.output import printing
from harness.interrupts import signals_interrupt
from harness.overhead.design import DEFAULT_LENGTHS, Design, Kind, Load
from harness.overhead.routes import DEFAULT_SWITCH, check_url, for_kind, switched, two_servers

if TYPE_CHECKING:
    from harness.overhead.present import Told
    from harness.overhead.session import Setting

NAME = "overhead"


def _group(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Several options as one decorator, in this order in the help."""

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


_whom = _group(
    click.option("--url", metavar="URL", help="A running pair. Default: one that this command starts and ends."),
    click.option("--switch", default=DEFAULT_SWITCH, show_default=True, help="Key of a request that is false or true."),
    click.option("--url-off", metavar="URL", help="Instead of a switch: a pair without checksums..."),
    click.option("--url-on", metavar="URL", help="... and one with them, the same otherwise."),
    click.option("--producer-url", metavar="URL", help="With --url: the producer, for what its counters say of costs."),
    click.option("--consumer-url", metavar="URL", help="With --url: the consumer, likewise."),
    click.option("--served-model", default="kvchaos", show_default=True, help="The model that requests name."),
    click.option(
        "--timeout", type=click.IntRange(1), default=600, show_default=True, help="Seconds; then a request failed."
    ),
    click.option(
        "--model",
        type=click.Choice(sorted(PRESETS)),
        default="tiny",
        show_default=True,
        help="Of own engines.",
    ),
    click.option("--chunk", type=click.IntRange(1), default=512, show_default=True, help="Tokens a step, own engines."),
)
_what = _group(
    click.option("--aa", is_flag=True, help="No checksums in either arm: what the study sees where there is nothing."),
    click.option("--planted", metavar="5%|50ms", help="Delay arm B by that much more: would the study have seen it?"),
    click.option(
        "--length",
        "lengths",
        type=click.IntRange(1),
        multiple=True,
        default=DEFAULT_LENGTHS,
        show_default=True,
        help="Tokens of a prompt; may be given again.",
    ),
    click.option(
        "--load",
        "loads",
        type=click.Choice([str(load) for load in Load]),
        multiple=True,
        default=[str(load) for load in Load],
        show_default=True,
        help="low: one request in flight; high: arrivals near saturation. May be given again.",
    ),
    click.option("--output-tokens", type=click.IntRange(1), default=4, show_default=True, help="Of each request."),
    click.option(
        "--requests", type=click.IntRange(1, 64), default=4, show_default=True, help="In a slot at high load."
    ),
    click.option("--utilisation", type=float, default=80, show_default=True, help="High load, % of capacity."),
)
_how_long = _group(
    click.option("--margin", type=float, default=1, show_default=True, help="No difference: % of the median TTFT."),
    click.option("--time-limit", type=click.IntRange(1), default=2400, show_default=True, help="Seconds, all cells."),
    click.option(
        "--min-blocks", type=click.IntRange(2), default=8, show_default=True, help="Of each cell, without warm-up."
    ),
    click.option(
        "--max-blocks", type=click.IntRange(2), default=400, show_default=True, help="Of each cell, without warm-up."
    ),
    click.option(
        "--warmup-blocks", type=click.IntRange(0), default=1, show_default=True, help="Of each cell, dropped."
    ),
    click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Prompts, arrivals."),
)


@click.command()
@_what
@_how_long
@_whom
@click.option("--rows", type=click.Path(path_type=Path, dir_okay=False), help="Send nothing: judge these rows again.")
@runs_dir_option
@json_output
def overhead(rows: Path | None, runs_dir: Path, as_json: bool, **options: Any) -> int:
    """Measure what KV checksums cost in time to first token (TTFT), with its uncertainty.

    The same prompts are sent with checksums off and on, in blocks off-on-on-off, for every prompt length and load in
    turn, until each interval is narrower than half the margin or the time is up. TTFT counts from the moment that a
    request was to be sent, fixed beforehand by a seed. Its rows.csv and report are left in a folder below --runs-dir,
    also after Ctrl-C.

    \b
    Exit codes: 0 every cell is EQUIVALENT (--planted: every cell is OVERHEAD, as it must be); 1 a cell is OVERHEAD
    (--planted: a cell is EQUIVALENT, the delay went unseen); 2 a cell is INCONCLUSIVE or has too few rows;
    64 bad arguments; 70 the study could not go on; 130 interrupted, and judged as far as it went.
    """
    from harness.overhead.present import judged_again  # scipy takes its second, and --help must not wait for it
    from harness.rundir import make_folder

    now = datetime.now(UTC)
    if rows is not None:
        told = judged_again(rows, options["margin"] / 100)
        return _finish(make_folder(runs_dir, NAME, now), runs_dir, told, as_json=as_json)
    design = _design(options)
    _check_whom(options)
    run_dir = make_folder(runs_dir, NAME, now)
    told, failure = _run(run_dir, design, options, now)
    code = _finish(run_dir, runs_dir, told, as_json=as_json)
    if failure is not None:
        raise failure
    return code


def _run(run_dir: Path, design: Design, options: dict[str, Any], now: datetime) -> tuple[Told, KVChaosError | None]:
    """Run the study. Also returns what ended it early, if something did."""
    from harness.overhead.present import finished, keep_design
    from harness.overhead.session import run_study

    keep_design(run_dir, design, ["kvchaos", *sys.argv[1:]], now)
    with signals_interrupt(), ExitStack() as stack:
        setting = _setting(options, design, stack)
        outcome = run_study(design, setting, run_dir, lambda line: click.echo(line, err=True))
    return finished(run_dir, design, outcome), outcome.failure


def _finish(run_dir: Path, runs_dir: Path, told: Told, *, as_json: bool) -> int:
    """Write the report and print it."""
    from harness.overhead.present import print_study, study_json, write_report
    from harness.rundir import point_latest

    write_report(run_dir, told)
    point_latest(runs_dir / NAME, run_dir)
    with printing() as console:
        if as_json:
            click.echo(study_json(run_dir, told))
        else:
            print_study(run_dir, told, console)
    return told.exit_code


def _design(options: dict[str, Any]) -> Design:
    """The study that is asked for. Raises InputError for one that cannot be run."""
    if options["aa"] and options["planted"]:
        raise InputError("--aa and --planted: an A/A study has nothing in either arm: drop one")
    kind = Kind.AA if options["aa"] else Kind.PLANTED if options["planted"] else Kind.OVERHEAD
    return Design(
        kind=kind,
        lengths=tuple(options["lengths"]),
        loads=tuple(Load(load) for load in options["loads"]),
        seed=options["seed"],
        margin=options["margin"] / 100,
        output_tokens=options["output_tokens"],
        high_requests=options["requests"],
        utilisation=options["utilisation"] / 100,
        warmup_blocks=options["warmup_blocks"],
        min_blocks=options["min_blocks"],
        max_blocks=options["max_blocks"],
        time_limit_s=options["time_limit"],
        # Nobody knows what a pair that runs already keeps of earlier prompts; one's own pair keeps nothing.
        unique_starts=any(options[name] for name in ("url", "url_off", "url_on")),
    )


def _check_whom(options: dict[str, Any]) -> None:
    """Refuse options that cannot be, or contradict each other, before anything is started."""
    from harness.overhead.planted_delay import parse_delay

    off, on, one = options["url_off"], options["url_on"], options["url"]
    engines = options["producer_url"], options["consumer_url"]
    problems = (
        (one and (off or on), "--url with --url-off or --url-on: give the one pair, or the two"),
        (bool(off) != bool(on), "--url-off and --url-on: give both"),
        (any(engines) and not (all(engines) and one), "--producer-url and --consumer-url: give both, and --url"),
        (
            options["planted"] and (one or off),
            "--planted: only a pair that this command starts can be delayed; of another, start the producer with "
            "--plant-delay and leave --planted out",
        ),
    )
    for wrong, what in problems:
        if wrong:
            raise InputError(what)
    if options["planted"]:
        parse_delay(options["planted"])
    for name in ("url", "url_off", "url_on", "producer_url", "consumer_url"):
        if options[name]:
            check_url(f"--{name.replace('_', '-')}", options[name])


def _setting(options: dict[str, Any], design: Design, stack: ExitStack) -> Setting:
    """Whom to ask. A pair that is started here ends with `stack`."""
    from harness.overhead.pair import OwnPair, PairSettings
    from harness.overhead.session import Setting

    engines = None
    if options["url"] is not None:
        routes = switched(options["url"], options["switch"])
        if options["producer_url"]:
            engines = {"producer": options["producer_url"], "consumer": options["consumer_url"]}
    elif options["url_off"] is not None:
        routes = two_servers(options["url_off"], options["url_on"])
    else:
        settings = PairSettings.for_design(design, options["model"], options["chunk"], options["planted"])
        click.echo("starting a producer, a consumer and the proxy", err=True)
        pair = stack.enter_context(OwnPair(settings))
        routes, engines = switched(pair.url, DEFAULT_SWITCH), pair.engines
    return Setting(for_kind(design.kind, routes), engines, options["served_model"], options["timeout"])
