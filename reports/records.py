"""Frozen dataclasses to plain JSON values and back, strictly.

A stored result is evidence: a field that is missing, unknown or of another type is an error that names its place,
never a default that is filled in silently.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from enum import Enum
from functools import cache
from typing import Any, TypeVar, cast

from reports.errors import BrokenResultsError
from reports.text import clip, visible

T = TypeVar("T")


def to_json(value: Any) -> Any:
    """Plain JSON values: a dataclass becomes a dict, a tuple a list, a string enum its string."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return value


def from_json(cls: type[T], value: object, where: str = "") -> T:
    """The `cls` (a dataclass) that `to_json` turned into `value`.

    Args:
        where: the place of `value` in its document, for the error.

    Raises:
        BrokenResultsError: a field is missing, unknown, or not of its type.
    """
    return cast(T, _record(cls, value, where))


def _record(cls: type, value: object, where: str) -> object:
    if not isinstance(value, dict):
        raise _broken(where, "an object", value)
    fields = _fields(cls)
    for name in value:
        if name not in fields:
            raise BrokenResultsError(f"{_inside(where, str(name))}: not a field of {cls.__name__}")
    for name in fields:
        if name not in value:
            raise BrokenResultsError(f"{_inside(where, name)}: missing")
    return cls(**{name: _read(kind, value[name], _inside(where, name)) for name, kind in fields.items()})


@cache
def _fields(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _read(kind: Any, value: object, where: str) -> object:
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        (inner,) = (arg for arg in typing.get_args(kind) if arg is not types.NoneType)
        return None if value is None else _read(inner, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise _broken(where, "a list", value)
        item, _ = typing.get_args(kind)
        return tuple(_read(item, each, f"{where}[{i}]") for i, each in enumerate(value))
    if dataclasses.is_dataclass(kind):
        return _record(cast(type, kind), value, where)
    if issubclass(kind, Enum):
        known = [member.value for member in kind]
        if value not in known or not isinstance(value, str):
            raise _broken(where, "one of " + ", ".join(known), value)
        return kind(value)
    # `type` and not isinstance: True is an int to Python, but not to whoever reads a count.
    if type(value) is not kind:
        raise _broken(where, {str: "a string", int: "a whole number", bool: "true or false"}[kind], value)
    return value


def _inside(where: str, name: str) -> str:
    return f"{where}.{visible(name)}" if where else visible(name)


def _broken(where: str, wanted: str, value: object) -> BrokenResultsError:
    return BrokenResultsError(f"{where or 'the document'}: not {wanted}: {clip(repr(value), 60)}")
