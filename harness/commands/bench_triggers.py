"""`kvchaos bench triggers`: what it costs a producer when it sums (EXT-8)."""

from __future__ import annotations

import json
import random
from dataclasses import asdict

import click
from rich.table import Table

from harness.bench.triggers import MODELS, ROUNDS, Measured, measure, multi_turn, single_turn
from harness.commands.output import printing


@click.command()
@click.option("--model", type=click.Choice(sorted(MODELS)), default="tiny", show_default=True)
@click.option("--tokens", type=click.IntRange(64, 8000), default=2048, show_default=True, help="Of the longest prompt.")
@click.option("--prompts", type=click.IntRange(1), default=4, show_default=True, help="That share nothing.")
@click.option("--turns", type=click.IntRange(1, 32), default=8, show_default=True, help="Of the conversation.")
@click.option("--rounds", type=click.IntRange(1), default=ROUNDS, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print all figures as JSON.")
def triggers(model: str, tokens: int, prompts: int, turns: int, rounds: int, seed: int, as_json: bool) -> None:
    """Compare when a producer sums: at a prompt's end, keeping sums of shared blocks, or as KV is written.

    Each on prompts that share nothing, and on a conversation whose prompts grow. Seconds are those of the engine's
    thread for sums, each request's the median of all rounds; the forwards between them are not in it.
    """
    rng = random.Random(seed)
    traffics = (single_turn(rng, prompts, tokens), multi_turn(rng, turns, tokens))
    found = measure(MODELS[model], traffics, rounds, lambda what: click.echo(what, err=True))
    with printing() as console:
        if as_json:
            click.echo(json.dumps([asdict(one) for one in found], indent=1))
        else:
            for traffic in dict.fromkeys(one.traffic for one in found):
                console.print(traffic)
                console.print(_table([one for one in found if one.traffic == traffic]))
                console.print()


def _table(found: list[Measured]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("trigger")
    for column in ("ms a request", "tokens read", "tokens kept", "MiB read"):
        table.add_column(column, justify="right")
    for one in found:
        table.add_row(
            one.trigger,
            f"{one.seconds * 1000:.3f}",
            f"{one.tokens_read:,.0f}",
            f"{one.tokens_kept:,.0f}",
            f"{one.bytes_read / 2**20:.2f}",
        )
    return table
