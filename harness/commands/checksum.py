"""`kvchaos checksum`: the checksums of a dump, so that two engines' dumps can be compared by hand."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import click
import numpy as np
import numpy.typing as npt

from engine.errors import InputError
from harness.commands.output import printing
from harness.dump import Dump, load_dump
from kernels import definition, definition_v2

MAX_INTERPRETED_PROGRAMS = 512
_PATIENCE_S = 600.0


class PathUnavailable(InputError):  # noqa: N818 - it says of a path, not of a mistake, that it cannot be taken
    """A way to compute that this machine, or this dump, does not have."""


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--path",
    "computed_by",
    type=click.Choice(["definition", "torch", "cpu", "triton"]),
    default="definition",
    show_default=True,
    help="How to compute them: the numpy definition; or, from a paged cache filled with the dump, torch, the compiled "
    "CPU path, or the Triton kernel (without a GPU in Triton's interpreter, which only small dumps can wait for).",
)
@click.option(
    "--version",
    type=click.IntRange(1, 2),
    default=1,
    show_default=True,
    help="Which checksum: that of the proposal, or the hardened one (not with --path triton).",
)
@click.option("--json", "as_json", is_flag=True, help='Print {"checksums": [...]}, one hexadecimal text a block.')
def checksum(file: Path, computed_by: str, version: int, as_json: bool) -> None:
    """Print the KV checksum of each block in FILE, a .npz dump.

    FILE holds the arrays kv (uint8 [layers, heads, tokens, bytes per token], whole blocks; a token's K bytes, then its
    V bytes), layer_numbers (one integer a layer), and the integers first_head, block_size, first_token (where the
    dump begins in its request) and num_tokens (tokens of the request that count, from its first).

    Each line is a block position in the request and the block's checksum. All ways to compute give the same values.
    Those of version 2 are what a producer has before it binds them to the prompt.
    """
    dump = load_dump(file)
    values = [f"0x{value:016x}" for value in _PATHS[computed_by](dump, file, version)]
    with printing():
        if as_json:
            click.echo(json.dumps({"checksums": values}))
            return
        for position, value in enumerate(values, start=dump.first_block):
            click.echo(f"{position}  {value}")


def _by_definition(dump: Dump, file: Path, version: int) -> npt.NDArray[np.uint64]:
    block_checksums = definition.block_checksums if version == 1 else definition_v2.block_checksums
    return block_checksums(
        dump.kv, dump.layer_numbers, dump.first_head, dump.block_size, dump.first_token, dump.num_tokens
    )


def _by_torch(dump: Dump, file: Path, version: int) -> npt.NDArray[np.uint64]:
    from kernels import torch_path  # torch takes seconds to import, and only paged paths need it

    return _paged(torch_path, dump, version=version)


def _by_cpu(dump: Dump, file: Path, version: int) -> npt.NDArray[np.uint64]:
    from kernels import paths

    if reason := paths.why_not_compiled(version):
        raise PathUnavailable(f"the compiled path cannot be imported ({reason}): pip install numba, or --path torch")
    from kernels import cpu_path

    return _paged(cpu_path, dump, version=version)


def _by_triton(dump: Dump, file: Path, version: int) -> npt.NDArray[np.uint64]:
    if version != 1:
        raise PathUnavailable("the Triton kernel has version 1 only: use another --path for version 2")
    if importlib.util.find_spec("triton") is None:
        raise PathUnavailable("triton is not installed: pip install triton (Linux only), or another --path")
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return _interpreted(dump, file)
    from kernels import triton_path

    return _paged(triton_path, dump, device=device)


def _interpreted(dump: Dump, file: Path) -> npt.NDArray[np.uint64]:
    """Run this command again in a process with TRITON_INTERPRET, which must be set before a kernel is made."""
    programs = dump.kv.shape[2] // dump.block_size * dump.kv.shape[0]
    if programs > MAX_INTERPRETED_PROGRAMS:
        raise PathUnavailable(
            f"{file}: {programs} blocks of one layer each are more than the {MAX_INTERPRETED_PROGRAMS} that Triton's "
            "interpreter can be waited for, and torch sees no GPU: use another --path"
        )
    done = subprocess.run(
        [sys.executable, "-m", "harness.cli", "checksum", str(file.resolve()), "--path", "triton", "--json"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=_PATIENCE_S,
        check=False,
    )
    if done.returncode != 0:
        raise PathUnavailable(f"{file}: Triton's interpreter failed: {done.stderr.strip()[-2000:]}")
    return np.array([int(value, 16) for value in json.loads(done.stdout)["checksums"]], dtype=np.uint64)


def _paged(path: ModuleType, dump: Dump, device: str = "cpu", **how: int) -> npt.NDArray[np.uint64]:
    from kernels import torch_path

    blocks = dump.kv.shape[2] // dump.block_size
    # Blocks in descending order, above an unused one: a path that ignored the block table would show.
    block_ids = range(blocks, 0, -1)
    layers = torch_path.paged_cache(
        dump.kv, dump.layer_numbers, dump.first_head, dump.block_size, block_ids, device=device
    )
    sums = path.block_checksums(
        layers, block_ids, block_size=dump.block_size, start=dump.first_block, num_tokens=dump.num_tokens, **how
    )
    return torch_path.as_uint64(sums)


_PATHS: dict[str, Callable[[Dump, Path, int], npt.NDArray[np.uint64]]] = {
    "definition": _by_definition,
    "torch": _by_torch,
    "cpu": _by_cpu,
    "triton": _by_triton,
}
