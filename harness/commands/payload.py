"""`kvchaos payload`: what the checksums in a request's `kv_transfer_params` say, or why an engine would refuse them."""

from __future__ import annotations

import json
import sys

import click

from engine.checksum.payload import HARDENED, Payload, PayloadLimits, decode
from harness.commands.output import printing

# Room for a hybrid model: what 16 groups of this block size need (twice that is accepted, as by an engine).
_BLOCK_SIZES = (16,) * 16
_BOUND = " (values are bound to the prompt)"


@click.group()
def payload() -> None:
    """Inspect the checksums that a producer sends (kv_checksums in kv_transfer_params)."""


@payload.command("decode")
@click.argument("text")
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    default=2**20,
    show_default=True,
    help="The longest request to accept, in tokens: a payload for more, or longer than one can need, is refused.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def decode_command(text: str, max_tokens: int, as_json: bool) -> None:
    """Print the fields of the payload TEXT (base64), or of standard input if TEXT is -.

    Exits 64 and says why if it is not exactly a payload that a producer can have sent. Values are printed with the
    block position in the request that each belongs to.
    """
    limits = PayloadLimits.for_engine(max_tokens, _BLOCK_SIZES)
    decoded = decode(_read_input(limits) if text == "-" else text, limits)
    with printing():
        click.echo(json.dumps(_as_dict(decoded)) if as_json else _as_text(decoded))


def _read_input(limits: PayloadLimits) -> str:
    """Read no more than shows that the text is too long; every byte a character, so that none gets lost."""
    data = sys.stdin.buffer.read(limits.max_base64 + 2)
    return data.decode("latin-1").removesuffix("\n")


def _as_dict(decoded: Payload) -> dict[str, object]:
    groups = [
        {
            "group_id": group.group_id,
            "fingerprint": f"0x{group.fingerprint:016x}",
            "block_size": group.block_size,
            "start": group.start,
            "values": [f"0x{value:016x}" for value in group.values],
        }
        for group in decoded.groups
    ]
    return {"version": decoded.version, "tp_size": decoded.tp_size, "num_tokens": decoded.num_tokens, "groups": groups}


def _as_text(decoded: Payload) -> str:
    lines = [
        f"version {decoded.version}{_BOUND if decoded.version == HARDENED else ''}",
        f"tp_size {decoded.tp_size}",
        f"num_tokens {decoded.num_tokens}",
    ]
    for group in decoded.groups:
        lines.append(
            f"group {group.group_id}: fingerprint 0x{group.fingerprint:016x}, block_size {group.block_size}, "
            f"start {group.start}, values {len(group.values)}"
        )
        lines.extend(f"  {group.start + offset}  0x{value:016x}" for offset, value in enumerate(group.values))
    return "\n".join(lines)
