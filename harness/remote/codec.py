"""Seam events and what they hold as msgpack, both ways: only types that are listed here, and nothing is executed.

A `KVMemory` travels as the name of the engine that owns it; each side resolves it to what it has for that engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

import msgpack  # type: ignore[import-untyped]
import numpy as np

from engine.cache import GroupShape, PeerMemory
from engine.checksum.payload import Payload, PayloadGroup
from engine.checksum.records import GroupBlocks, GroupSums, WorkerRecord
from engine.checksum.verdict import GroupVerdict, NotCheckedReason, UnverifiedReason, Verdict, VerdictStatus
from engine.errors import KVChaosError
from engine.groups import CacheRow, KVGroup
from engine.seams import SEAMS, CopyOp

MAX_MESSAGE_BYTES = 256 * 2**20
_DATACLASSES: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        *(event for event, _ in SEAMS.values()),
        CopyOp, GroupBlocks, GroupSums, WorkerRecord, Payload, PayloadGroup, Verdict, GroupVerdict,
        GroupShape, KVGroup, CacheRow,
    )
}  # fmt: skip
_ENUMS: dict[str, type[StrEnum]] = {kind.__name__: kind for kind in (VerdictStatus, UnverifiedReason, NotCheckedReason)}


class WireError(KVChaosError):
    """What arrived is no message of this protocol."""


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryOf:
    """Stands for the KV memory of an engine while it travels."""

    engine: str


def pack(value: Any, engine_of: Callable[[Any], str | None]) -> bytes:
    """Encode a value; `engine_of` names the engine of a memory object, and gives None for anything else."""
    packed: bytes = msgpack.packb(_to_plain(value, engine_of))
    return packed


def unpack(data: bytes, memory_of: Callable[[str], Any]) -> Any:
    """Decode what `pack` gave; `memory_of` gives the memory object of an engine.

    Raises:
        WireError: anything else.
    """
    try:
        return _from_plain(msgpack.unpackb(data, strict_map_key=False), memory_of)
    except (
        *(ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, SyntaxError),
        msgpack.UnpackException,
    ) as error:
        raise WireError(f"not a message of this protocol ({type(error).__name__}: {error})") from None


def _to_plain(value: Any, engine_of: Callable[[Any], str | None]) -> Any:
    if isinstance(value, StrEnum):
        return ["enum", type(value).__name__, str(value)] if type(value).__name__ in _ENUMS else str(value)
    if value is None or isinstance(value, bool | int | str | bytes | float):
        return value
    if isinstance(value, MemoryOf | PeerMemory):
        return ["memory", value.engine]
    engine = engine_of(value)
    if engine is not None:
        return ["memory", engine]
    if isinstance(value, np.ndarray):
        return ["array", value.dtype.str, list(value.shape), np.ascontiguousarray(value).tobytes()]
    if isinstance(value, tuple | list):
        return ["tuple" if isinstance(value, tuple) else "list", [_to_plain(item, engine_of) for item in value]]
    if isinstance(value, Mapping):
        return ["map", [[_to_plain(key, engine_of), _to_plain(item, engine_of)] for key, item in value.items()]]
    name = type(value).__name__
    if _DATACLASSES.get(name) is type(value):
        fields = {f.name: _to_plain(getattr(value, f.name), engine_of) for f in dataclasses.fields(value)}
        return ["data", name, fields]
    raise WireError(f"{name} cannot travel between processes")


def _from_plain(value: Any, memory_of: Callable[[str], Any]) -> Any:
    if not isinstance(value, list):
        return value
    kind = value[0]
    if kind == "memory":
        return memory_of(value[1])
    if kind == "array":
        return np.frombuffer(value[3], dtype=np.dtype(value[1])).reshape(value[2]).copy()
    if kind in ("tuple", "list"):
        items = [_from_plain(item, memory_of) for item in value[1]]
        return tuple(items) if kind == "tuple" else items
    if kind == "map":
        return {_from_plain(key, memory_of): _from_plain(item, memory_of) for key, item in value[1]}
    if kind == "enum":
        return _ENUMS[value[1]](value[2])
    if kind == "data":
        return _DATACLASSES[value[1]](**{name: _from_plain(item, memory_of) for name, item in value[2].items()})
    raise ValueError(f"unknown kind {kind!r}")
