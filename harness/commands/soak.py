"""`kvchaos soak`: many requests over a local pair, some of them faulted."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from harness.commands.options import json_output
from harness.commands.output import printing
from harness.interrupts import signals_interrupt


@click.command()
@click.option("--requests", type=click.IntRange(1, 100_000), default=1000, show_default=True)
@click.option("--concurrency", type=click.IntRange(1, 256), default=16, show_default=True)
@click.option(
    "--fault-rate", type=click.IntRange(0, 100), default=5, show_default=True, help="Percent of the requests."
)
@click.option("--warm", type=click.IntRange(1), default=300, show_default=True, help="RSS is compared from here on.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Drives every choice.")
@click.option("--deadline", type=click.IntRange(1), default=600, show_default=True, help="Seconds for all requests.")
@json_output
def soak(requests: int, concurrency: int, fault_rate: int, warm: int, seed: int, deadline: int, as_json: bool) -> int:
    """Send many requests through a producer, a consumer and the proxy on this machine, KV over NIXL.

    In some loads a bit flips before the check. Each must be a mismatch and recomputed; every answer must be right, all
    blocks must come back, and no process may grow by more than 32 MiB once it is warm. Exits with 1 if not.
    """
    from harness.soak import SoakPlan  # torch takes its second, and --help must not wait for it
    from harness.soak import soak as run

    with signals_interrupt():
        result = run(SoakPlan(requests, concurrency, fault_rate, warm, seed, deadline))
    with printing():
        if as_json:
            click.echo(json.dumps(asdict(result)))
        else:
            click.echo(f"{result.requests} requests, {result.flipped} faulted, in {result.seconds:.1f} s")
            for name, count in result.outcomes.items():
                click.echo(f"  {count:>6}  {name}")
            for name, (first, last) in result.rss_kib.items():
                click.echo(f"  {name}: RSS {first} KiB after {min(warm, requests)} requests, {last} KiB in the end")
            for problem in result.problems[:20]:
                click.echo(f"WRONG: {problem}")
            click.echo("FAILED" if result.problems else "PASSED")
    return 1 if result.problems else 0
