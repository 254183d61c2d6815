"""`kvchaos diff`: what of a consumer's KV differs from its producer's, and what would explain it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from harness.diagnosis import Diagnosis, KVBlocks, diagnose
from harness.diagnosis.words import count, numbered
from harness.dump import Dump, DumpError, load_dump

EXIT_DIFFERENT = 1


@click.command()
@click.argument("producer", metavar="P", type=click.Path(path_type=Path))
@click.argument("consumer", metavar="D", type=click.Path(path_type=Path))
@click.option(
    "--other",
    "others",
    multiple=True,
    metavar="NAME=FILE",
    help="A dump of another request, whose KV D may hold by mistake. May be given several times.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print identical, compared, damage, hypotheses and notes as JSON."
)
@click.pass_context
def diff(ctx: click.Context, producer: Path, consumer: Path, others: tuple[str, ...], as_json: bool) -> None:
    """Say what of D's KV differs from P's and what would explain it, best explanation first.

    P and D are .npz dumps of one request, of the same layers and heads: P's KV when its prefill was done, D's when its
    load had finished. D may begin later (a prefix was in its cache), and the block sizes may differ. A dump holds
    integer arrays, written by numpy.savez:

    \b
      kv             uint8 [layers, heads, tokens, bytes per token], whole blocks;
                     a token's K bytes, then its V bytes
      layer_numbers  one a layer
      first_head     number of the first head, over the unsharded model
      block_size     tokens a block
      first_token    where the dump begins in its request, at the start of a block
      num_tokens     tokens of the request that count, from its first

    Of a layer's paged cache [blocks, 2, block_size, heads, head_size], in whatever layout, kv has

    \b
      cache[block_ids].view(torch.uint8).permute(3, 0, 2, 1, 4).reshape(heads, tokens, -1)

    The order in which a transfer that stopped part-way is assumed to have copied is block, layer, K or V, head.

    Exit codes: 0 identical, 1 different, 64 a file or an argument cannot be used.
    """
    p = _load(producer)
    d, *loaded = (_load(path, like=(producer, p)) for path in (consumer, *_named(others).values()))
    other_dumps = dict(zip(_named(others), loaded, strict=True))
    first, end = max(p.first_token, d.first_token), min(p.num_tokens, d.num_tokens)
    if first >= end:
        raise DumpError(
            f"{consumer}: its tokens {d.first_token} to {d.num_tokens - 1} are not in {producer}, which holds "
            f"{p.first_token} to {p.num_tokens - 1}: dump the same request on both sides"
        )
    diagnosis = diagnose(
        _blocks(p), _blocks(d, end), {name: _blocks(o, o.num_tokens) for name, o in other_dumps.items()}
    )
    notes = _notes(p, d, first, end)
    click.echo(_as_json(diagnosis, first, end, notes) if as_json else _as_text(diagnosis, first, end, notes))
    ctx.exit(EXIT_DIFFERENT if diagnosis.damage else 0)


def _named(others: tuple[str, ...]) -> dict[str, Path]:
    named: dict[str, Path] = {}
    for other in others:
        name, equals, path = other.partition("=")
        if not (name and equals and path) or name in named:
            why = f"{name} is given twice" if name in named else "it is not NAME=FILE"
            raise click.BadParameter(f"{other!r}: {why}", param_hint="--other")
        named[name] = Path(path)
    return named


def _load(path: Path, like: tuple[Path, Dump] | None = None) -> Dump:
    """Read a dump that has tokens, and the layers and heads of the first."""
    dump = load_dump(path)
    if like is not None:
        _check_same(*like, path, dump)
    if dump.num_tokens <= dump.first_token:
        raise DumpError(f"{path}: none of its tokens count: num_tokens is {dump.num_tokens}: dump the tokens before it")
    return dump


def _check_same(first: Path, a: Dump, second: Path, b: Dump) -> None:
    """Refuse dumps of different layers, heads or bytes a token."""
    pairs = {
        "layers": (list(a.layer_numbers), list(b.layer_numbers)),
        "number of heads": (a.kv.shape[1], b.kv.shape[1]),
        "first head": (a.first_head, b.first_head),
        "bytes a token": (a.kv.shape[3], b.kv.shape[3]),
    }
    differ = [f"{what} {one} and {other}" for what, (one, other) in pairs.items() if one != other]
    if differ:
        raise DumpError(f"{first} and {second} cannot be compared: {'; '.join(differ)}: dump the same of both")


def _blocks(dump: Dump, end: int | None = None) -> KVBlocks:
    kv = dump.kv if end is None else dump.kv[:, :, : end - dump.first_token]
    return KVBlocks(kv, dump.block_size, dump.first_token, dump.layer_numbers, dump.first_head)


def _notes(p: Dump, d: Dump, first: int, end: int) -> list[str]:
    """What was not compared although a dump holds it, and why a comparison may mislead."""
    notes = []
    if d.first_token < first:
        notes.append(
            f"P's dump begins at token {first}: D's {numbered('token', range(d.first_token, first))} not compared"
        )
    if p.num_tokens != d.num_tokens:
        notes.append(f"P counts {count(p.num_tokens, 'token')} and D {d.num_tokens}: compared up to token {end - 1}")
    return notes


def _as_text(diagnosis: Diagnosis, first: int, end: int, notes: list[str]) -> str:
    tokens = numbered("token", range(first, end))
    lines = [f"identical: {tokens}" if diagnosis.damage is None else f"different: {diagnosis.damage}"]
    lines += [f"  {number}. {text}" for number, text in enumerate(diagnosis.texts, 1)]
    return "\n".join(lines + [f"note: {note}" for note in notes])


def _as_json(diagnosis: Diagnosis, first: int, end: int, notes: list[str]) -> str:
    return json.dumps(
        {
            "identical": diagnosis.damage is None,
            "compared": {"first_token": first, "num_tokens": end - first},
            "damage": diagnosis.damage,
            "hypotheses": [asdict(hypothesis) for hypothesis in diagnosis.hypotheses],
            "notes": notes,
        }
    )
