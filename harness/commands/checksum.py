"""`kvchaos checksum`: the checksums of a dump, so that two engines' dumps can be compared by hand."""

from __future__ import annotations

import json
from pathlib import Path

import click
import numpy as np
import numpy.typing as npt

from harness.commands.output import printing
from harness.dump import Dump, load_dump
from kernels import definition


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--path",
    "computed_by",
    type=click.Choice(["definition", "torch"]),
    default="definition",
    show_default=True,
    help="How to compute them: the numpy definition, or torch from a paged cache filled with the dump.",
)
@click.option("--json", "as_json", is_flag=True, help='Print {"checksums": [...]}, one hexadecimal text a block.')
def checksum(file: Path, computed_by: str, as_json: bool) -> None:
    """Print the KV checksum of each block in FILE, a .npz dump.

    FILE holds the arrays kv (uint8 [layers, heads, tokens, bytes per token], whole blocks; a token's K bytes, then its
    V bytes), layer_numbers (one integer a layer), and the integers first_head, block_size, first_token (where the
    dump begins in its request) and num_tokens (tokens of the request that count, from its first).

    Each line is a block position in the request and the block's checksum. Both ways to compute give the same values.
    """
    dump = load_dump(file)
    values = [f"0x{value:016x}" for value in (_by_torch(dump) if computed_by == "torch" else _by_definition(dump))]
    with printing():
        if as_json:
            click.echo(json.dumps({"checksums": values}))
            return
        for position, value in enumerate(values, start=dump.first_block):
            click.echo(f"{position}  {value}")


def _by_definition(dump: Dump) -> npt.NDArray[np.uint64]:
    return definition.block_checksums(
        dump.kv, dump.layer_numbers, dump.first_head, dump.block_size, dump.first_token, dump.num_tokens
    )


def _by_torch(dump: Dump) -> npt.NDArray[np.uint64]:
    from kernels import torch_path  # torch takes seconds to import, and only this path needs it

    blocks = dump.kv.shape[2] // dump.block_size
    # Blocks in descending order, above an unused one: a path that ignored the block table would show.
    block_ids = range(blocks, 0, -1)
    layers = torch_path.paged_cache(dump.kv, dump.layer_numbers, dump.first_head, dump.block_size, block_ids)
    sums = torch_path.block_checksums(
        layers, block_ids, block_size=dump.block_size, start=dump.first_block, num_tokens=dump.num_tokens
    )
    return torch_path.as_uint64(sums)
