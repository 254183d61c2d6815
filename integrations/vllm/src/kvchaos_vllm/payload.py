"""The wire format of checksums, version 1: what P's text may be, and nothing else.

The text reaches D through proxies and a request's parameters: anything may arrive. `decode` is total: it returns what P
can have sent or raises `PayloadInvalid`, in memory bounded by the limits, which are checked before anything is decoded.
One payload has one text: what does not encode back to itself is refused. A copy of kvchaos' own codec without version
2, which this package takes for invalid, as a consumer of version 1 does; kvchaos' tests hold the two equal.
"""

from __future__ import annotations

import base64
import binascii
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgpack  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt

VERSION = 1

_MAX_INTEGER = 2**64 - 1
_FIELDS = ("version", "tp_size", "num_tokens", "groups")
_GROUP_FIELDS = ("group_id", "fingerprint", "block_size", "start", "values")
_INTEGER_BYTES = 9
_BIN_HEADER_BYTES = 5
_VALUE_BYTES = 8


class PayloadInvalid(ValueError):  # noqa: N818 - the verdict's word: the payload is invalid
    """A text that is not a payload. The message says where and why, never what the text holds."""


@dataclass(frozen=True, slots=True, eq=False)
class PayloadGroup:
    """The checksums of one KV cache group.

    Attributes:
        values: uint64 [blocks], read-only: the checksums at block positions `start` on.
        fingerprint: of the group's layers (`fingerprint.py`).
        block_size: tokens a block.
    """

    group_id: int
    fingerprint: int
    block_size: int
    start: int
    values: npt.NDArray[np.uint64]

    def __post_init__(self) -> None:
        if not isinstance(self.values, np.ndarray) or self.values.dtype != np.uint64 or self.values.ndim != 1:
            raise ValueError("values must be a numpy uint64 array [blocks]")
        values = self.values.astype(np.uint64)
        values.setflags(write=False)
        object.__setattr__(self, "values", values)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PayloadGroup):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[int, int, int, int, bytes]:
        return self.group_id, self.fingerprint, self.block_size, self.start, self.values.tobytes()


@dataclass(frozen=True, slots=True)
class Payload:
    """What P sends of one request: groups in ascending id; tp_size is informational."""

    tp_size: int
    num_tokens: int
    groups: tuple[PayloadGroup, ...]


@dataclass(frozen=True, slots=True)
class PayloadLimits:
    """What a payload can be at most for one consumer.

    Attributes:
        max_base64: characters of text.
        max_groups: groups in it.
        max_num_tokens: tokens of the request on D.
    """

    max_base64: int
    max_groups: int
    max_num_tokens: int

    @classmethod
    def for_engine(cls, max_model_len: int, block_sizes: Sequence[int]) -> PayloadLimits:
        """Limits for the longest request (tokens) of an engine with KV cache groups of these block sizes.

        The text may be twice what P needs for that, plus 1 KiB; the groups twice as many.
        """
        if max_model_len < 1 or not block_sizes or min(block_sizes) < 1:
            raise ValueError(f"max_model_len {max_model_len} and block sizes {list(block_sizes)} must be at least 1")
        values = sum(-(-max_model_len // block_size) for block_size in block_sizes)
        overhead = 4 * _INTEGER_BYTES + len(block_sizes) * (5 * _INTEGER_BYTES + _BIN_HEADER_BYTES)
        needed = -(-(values * _VALUE_BYTES + overhead) // 3) * 4
        return cls(2 * needed + 1024, 2 * len(block_sizes), max_model_len)

    def for_request(self, num_tokens: int) -> PayloadLimits:
        """The limits for a request of num_tokens tokens on D."""
        return replace(self, max_num_tokens=num_tokens)


def encode(payload: Payload) -> str:
    """Write a payload as text: padded base64 of msgpack `[version, tp_size, num_tokens, groups]`.

    Raises:
        PayloadInvalid: a field that `decode` would refuse whatever its limits.
    """
    groups = [_group_fields(group) for group in payload.groups]
    fields: list[object] = [VERSION, payload.tp_size, payload.num_tokens, groups]
    _read_payload(fields, max_groups=len(payload.groups), max_num_tokens=_MAX_INTEGER)
    return base64.b64encode(msgpack.packb(fields)).decode("ascii")


def decode(text: object, limits: PayloadLimits) -> Payload:
    """Read a payload from whatever arrived in its place.

    Args:
        text: usually a str; anything else is invalid.
        limits: of the consumer, with `max_num_tokens` of this request.

    Raises:
        PayloadInvalid: and nothing else.
    """
    raw = _from_base64(text, limits.max_base64)
    fields = _from_msgpack(raw, limits.max_groups)
    payload = _read_payload(fields, limits.max_groups, limits.max_num_tokens)
    # Only now: what was not read yet may be nested deeper than msgpack can write.
    if msgpack.packb(fields) != raw:
        raise PayloadInvalid("payload: its msgpack is not the shortest form of its fields")
    return payload


def _group_fields(group: PayloadGroup) -> list[object]:
    values = group.values.astype("<u8").tobytes()
    return [group.group_id, group.fingerprint, group.block_size, group.start, values]


def _from_base64(text: object, max_base64: int) -> bytes:
    if not isinstance(text, str):
        raise PayloadInvalid(f"payload: it is a {type(text).__name__}, not a text")
    if len(text) > max_base64:
        raise PayloadInvalid(f"payload: {len(text)} characters are more than the {max_base64} that it can need")
    if not text.isascii():
        raise PayloadInvalid("payload: it has characters that are not ASCII")
    try:
        raw = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise PayloadInvalid(f"payload: not standard padded base64: {error}") from error
    if base64.b64encode(raw) != text.encode("ascii"):
        raise PayloadInvalid("payload: its base64 is not canonical: bits that nothing uses are set")
    return raw


def _from_msgpack(raw: bytes, max_groups: int) -> object:
    # An array header makes msgpack allocate the array before its elements arrive, at every level of nesting (up to
    # 1,024): only a small limit bounds that. Maps, texts and extensions have no place in a payload at all.
    array_len = max(len(_GROUP_FIELDS), max_groups)
    try:
        fields: object = msgpack.unpackb(
            raw, max_array_len=array_len, max_bin_len=len(raw), max_map_len=0, max_str_len=0, max_ext_len=0
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise PayloadInvalid(f"payload: its bytes are not the msgpack of one: {error}") from error
    return fields


def _read_payload(fields: object, max_groups: int, max_num_tokens: int) -> Payload:
    if type(fields) is not list or not fields:
        raise PayloadInvalid(f"payload: it holds a {type(fields).__name__}, not an array of fields")
    version = _integer(fields[0], "version", 0)
    if version != VERSION:
        raise PayloadInvalid(f"payload: version is {version}, this package reads {VERSION}")
    if len(fields) != len(_FIELDS):
        raise PayloadInvalid(f"payload: {len(fields)} fields, not {', '.join(_FIELDS)}")
    tp_size = _integer(fields[1], "tp_size", 1)
    num_tokens = _integer(fields[2], "num_tokens", 1, max_num_tokens)
    if type(fields[3]) is not list or len(fields[3]) > max_groups:
        raise PayloadInvalid(f"payload: groups is not an array of at most {max_groups}")
    groups = tuple(_read_group(group, f"groups[{index}]") for index, group in enumerate(fields[3]))
    for before, after in itertools.pairwise(groups):
        if after.group_id <= before.group_id:
            raise PayloadInvalid(f"payload: group {after.group_id} comes after group {before.group_id}: not ascending")
    return Payload(tp_size, num_tokens, groups)


def _read_group(fields: object, where: str) -> PayloadGroup:
    if type(fields) is not list or len(fields) != len(_GROUP_FIELDS):
        raise PayloadInvalid(f"payload: {where} is not an array of {', '.join(_GROUP_FIELDS)}")
    lowest = (0, 0, 1, 0)
    integers = [
        _integer(value, f"{where}.{name}", low)
        for value, name, low in zip(fields[:4], _GROUP_FIELDS[:4], lowest, strict=True)
    ]
    values = fields[4]
    if type(values) is not bytes or len(values) % _VALUE_BYTES:
        raise PayloadInvalid(f"payload: {where}.values is not a bin of whole {_VALUE_BYTES}-byte values")
    group_id, layers, block_size, start = integers
    return PayloadGroup(group_id, layers, block_size, start, np.frombuffer(values, dtype="<u8").astype(np.uint64))


def _integer(value: object, where: str, low: int, high: int = _MAX_INTEGER) -> int:
    if type(value) is not int:
        raise PayloadInvalid(f"payload: {where} is a {type(value).__name__}, not an integer")
    if not low <= value <= high:
        raise PayloadInvalid(f"payload: {where} is {value}, outside {low} to {high}")
    return value
