"""docs/interop: vectors for whoever implements the checksums elsewhere, made by our own code from fixed bytes.

The bytes of a vector are SHA-256 of its name and a counter, so that anybody can make them again without our random
generator.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.checksum.hardened import bound, prompt_binding
from engine.checksum.payload import Payload, PayloadGroup, encode, fingerprint
from kernels import definition, definition_v2

VERSIONS = {"1": definition.block_checksums, "2": definition_v2.block_checksums}
LICENCE = "CC0 1.0: in the public domain"
_SHAPES = {
    "one piece": {"layers": [0], "heads": 1, "block_size": 1, "bytes_per_token": 8},
    "layer and head 0 are not special": {"layers": [0, 1], "heads": 2, "block_size": 2, "bytes_per_token": 16},
    "layers and heads of a worker": {"layers": [3, 31], "heads": 2, "first_head": 6, "block_size": 4},
    "the last head of all": {"layers": [7], "heads": 1, "first_head": 2**16 - 1, "block_size": 2},
    "two blocks": {"layers": [0], "heads": 1, "blocks": 2, "block_size": 4},
    "a later block": {"layers": [2], "heads": 2, "first_token": 48, "block_size": 16},
    "a last block in part": {"layers": [2], "heads": 1, "first_token": 8, "block_size": 4, "num_tokens": 10},
    "tokens that do not count": {"layers": [2], "heads": 1, "blocks": 2, "block_size": 4, "num_tokens": 4},
    "no token counts": {"layers": [2], "heads": 1, "block_size": 4, "num_tokens": 0},
    "far into a request": {"layers": [120], "heads": 1, "first_token": 2**40, "block_size": 4},
    "one latent row": {"layers": [5], "heads": 1, "block_size": 2, "bytes_per_token": 72},
}
_LAYERS = (
    (("model.layers.0.self_attn.attn", "full_attention", "bfloat16"),),
    tuple((f"model.layers.{n}.self_attn.attn", "full_attention", "float16") for n in range(4)),
    (("model.layers.1.attn", "mla", "bfloat16"), ("model.layers.0.attn", "sliding_window", "bfloat16")),
)


def drawn(name: str, size: int) -> bytes:
    """The first `size` bytes of SHA-256 of `name/0`, `name/1` and so on."""
    chunks = [hashlib.sha256(f"{name}/{i}".encode()).digest() for i in range(-(-size // 32))]
    return b"".join(chunks)[:size]


def checksum_vectors(root: Path) -> str:
    """docs/interop/checksums.json."""
    return _page({"vectors": [*_plain_vectors(), *_gap_vectors()]})


def fingerprint_vectors(root: Path) -> str:
    """docs/interop/fingerprints.json."""
    vectors = [{"layers": layers, "fingerprint": f"{fingerprint(layers):016x}"} for layers in _LAYERS]
    return _page({"vectors": vectors})


def payload_vectors(root: Path) -> str:
    """docs/interop/payloads.json."""
    vectors = []
    for name, num_tokens, groups in (
        ("one value", 1, [(0, 16, 0, 1)]),
        ("every length of integer", 70_000, [(1, 300, 1, 3), (300, 70_000, 0, 1)]),
        ("behind a local prefix", 77, [(0, 16, 2, 3)]),
        ("more than 31 values", 640, [(0, 16, 0, 40)]),
        ("no group", 5, []),
    ):
        payload = Payload(1, num_tokens, tuple(_group(name, *group) for group in groups))
        vectors.append(_payload(name, payload, payload))
        prompt = list(np.frombuffer(drawn(f"{name}/prompt", 2 * min(num_tokens, 100)), dtype="<u2").tolist())
        if len(prompt) == num_tokens:
            salt = "tenant-7" if len(groups) == 1 and num_tokens > 1 else ""
            sent = bound(Payload(1, num_tokens, payload.groups, 2), prompt_binding(prompt, salt))
            vectors.append({**_payload(f"{name}, version 2", sent, payload), "prompt": prompt, "cache_salt": salt})
    return _page({"vectors": vectors})


def _plain_vectors() -> Iterator[dict[str, Any]]:
    for name, shape in _SHAPES.items():
        blocks = int(str(shape.get("blocks", 1)))
        arguments: dict[str, Any] = {"first_head": 0, "first_token": 0, "bytes_per_token": 32, **shape}
        arguments.pop("blocks", None)
        tokens = blocks * arguments["block_size"]
        arguments.setdefault("num_tokens", arguments["first_token"] + tokens)
        size = len(arguments["layers"]) * arguments["heads"] * tokens * arguments["bytes_per_token"]
        yield _vector(name, drawn(name, size), arguments)


def _gap_vectors() -> Iterator[dict[str, Any]]:
    """The smallest examples of what version 1 cannot see: pairs of vectors that it gives one checksum."""
    arguments = {
        "layers": [0], "first_head": 0, "heads": 2, "block_size": 1, "first_token": 0, "num_tokens": 1,
        "bytes_per_token": 24,
    }  # fmt: skip
    kv = drawn("gaps", 48)
    yield _vector("gaps: as it was", kv, arguments)
    x = np.frombuffer(kv, dtype="<u8")
    flipped, exchanged, cancelling = x.copy(), x.copy(), x.copy()
    flipped[:2] ^= np.uint64(1 << 63)
    exchanged[[1, 3]] = x[[3, 1]]
    cancelling[:3] += np.array([5, 2**64 - 10, 5], dtype=np.uint64)
    yield _vector("GAP-8: bit 63 of pieces 0 and 1 flipped", flipped.tobytes(), arguments)
    yield _vector("GAP-10: head 0 piece 1 and head 1 piece 0 exchanged", exchanged.tobytes(), arguments)
    yield _vector("GAP-11: +5, -10, +5 on the pieces of head 0", cancelling.tobytes(), arguments)


def _vector(name: str, kv: bytes, arguments: Mapping[str, Any]) -> dict[str, Any]:
    layers, heads, width = arguments["layers"], arguments["heads"], arguments["bytes_per_token"]
    array: npt.NDArray[np.uint8] = np.frombuffer(kv, dtype=np.uint8).reshape(len(layers), heads, -1, width)
    names = ("first_head", "block_size", "first_token", "num_tokens")
    checksums = {
        version: [f"{int(value):016x}" for value in compute(array, layers, *(arguments[name] for name in names))]
        for version, compute in VERSIONS.items()
    }
    return {"name": name, "arguments": dict(arguments), "kv": kv.hex(), "checksums": checksums}


def _group(name: str, group_id: int, block_size: int, start: int, count: int) -> PayloadGroup:
    values = np.frombuffer(drawn(f"{name}/{group_id}", 8 * count), dtype="<u8").astype(np.uint64)
    return PayloadGroup(group_id, fingerprint(_LAYERS[group_id % len(_LAYERS)]), block_size, start, values)


def _payload(name: str, sent: Payload, meant: Payload) -> dict[str, Any]:
    groups = [
        [g.group_id, f"{g.fingerprint:016x}", g.block_size, g.start, [f"{int(v):016x}" for v in g.values]]
        for g in meant.groups
    ]
    read = {"version": sent.version, "tp_size": sent.tp_size, "num_tokens": sent.num_tokens, "groups": groups}
    return {"name": name, "text": encode(sent), "payload": read}


def _page(content: Mapping[str, Sequence[Any]]) -> str:
    return json.dumps({"licence": LICENCE, "made by": "make docs", **content}, indent=1) + "\n"
