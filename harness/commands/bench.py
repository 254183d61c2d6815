"""`kvchaos bench`: what things cost on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator

import click
from rich.console import Console
from rich.table import Table

from engine.errors import InputError
from harness.bench import checksum as bench_checksum
from harness.bench.checksum import FLAT, ChecksumBench
from harness.commands.bench_triggers import triggers
from harness.commands.output import printing

EXIT_BELOW_BAR = 1


@click.group()
def bench() -> None:
    """Measure what things cost on this machine."""


bench.add_command(triggers)


@bench.command()
@click.option("--json", "as_json", is_flag=True, help="Print all figures as JSON.")
@click.option("--rounds", type=click.IntRange(min=1), default=bench_checksum.ROUNDS, show_default=True)
@click.option(
    "--size",
    "sizes",
    type=int,
    multiple=True,
    help="Bytes of a buffer, a multiple of 65536; may be given several times.  [default: 64 KiB, 1 MiB and 64 MiB]",
)
@click.option("--check", is_flag=True, help="Exit with 1 if a bar is missed or was not measured.")
def checksum(as_json: bool, rounds: int, sizes: tuple[int, ...], check: bool) -> None:
    """Compare KV checksums with what memory allows and with other hashes, in one thread.

    All contenders are measured in turn, over and over, in this thread's CPU time; figures are medians. Absolute speeds
    depend on the machine and its other work, ratios much less. A minute and a half or so.
    """
    try:
        found = bench_checksum.run_bench(sizes or bench_checksum.SIZES, rounds, lambda what: click.echo(what, err=True))
    except ValueError as error:
        raise InputError(f"--size: {error}") from None
    with printing() as console:
        if as_json:
            click.echo(json.dumps(found.as_json(), indent=1))
        else:
            for title, table in tables(found):
                console.print(title)
                console.print(table)
                console.print()
            _print_notes(console, found)
    if check and not all(bar.met for bar in found.bars):
        raise click.exceptions.Exit(EXIT_BELOW_BAR)


def tables(found: ChecksumBench) -> Iterator[tuple[str, Table]]:
    """What a person reads: each table and what stands above it."""
    machine = ", ".join(f"{name} {value}" for name, value in found.machine.items())
    for size in dict.fromkeys(row.size for row in found.rows):
        yield f"{size:,} bytes, GB/s", _speeds(found, size)
    payload = _table("", "us")
    for name, seconds in found.payload_s.items():
        payload.add_row(name, f"{seconds * 1e6:.0f}")
    yield f"The payload of {bench_checksum.PAYLOAD_TOKENS:,} tokens", payload
    growth = _table("tokens", "layers", "MiB", "ms", "GB/s")
    for row in found.growth:
        ms, speed = row.seconds * 1e3, row.size / row.seconds / 1e9
        growth.add_row(f"{row.tokens:,}", str(row.layers), f"{row.size / 2**20:g}", f"{ms:.3f}", f"{speed:.1f}")
    yield "One request, as an engine sums it", growth
    bars = _table("", "wanted", "measured", "")
    for bar in found.bars:
        word = {True: "met", False: "MISSED", None: "not measured"}[bar.met]
        bars.add_row(bar.what, bar.wanted, "-" if bar.measured is None else f"{bar.measured:.2f}", word)
    yield f"Bars, medians of {found.rounds} rounds on {machine}", bars


def _speeds(found: ChecksumBench, size: int) -> Table:
    rows = [row for row in found.rows if row.size == size]
    shapes = list(dict.fromkeys(row.shape for row in rows))
    speeds = {(row.shape, row.name): row.gb_per_s for row in rows}
    label = {shape: shape if shape == FLAT else f"paged {shape}" for shape in shapes}
    table = _table("", *label.values())
    for name in dict.fromkeys(row.name for row in rows):
        cells = [speeds.get((shape, name)) for shape in shapes]
        table.add_row(name, *("-" if cell is None else f"{cell:.1f}" for cell in cells))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in ("", "wanted") else "right")
    return table


def _print_notes(console: Console, found: ChecksumBench) -> None:
    for name, missing in dict.fromkeys((row.name, row.missing) for row in found.rows if row.missing):
        console.print(f"{name} is not here: {missing}")
    console.print("Paged: 8 heads of 128 in bf16, blocks of 16 tokens in random order; hashes after gathering them.")
    console.print("The Triton kernel needs a GPU: `make gpu-check` measures it.")
