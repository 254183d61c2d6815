"""Pydantic's validation errors in the words of a scenario file: the value given, what is allowed, the likely typo.

Everything is validated as strict JSON, also models that are not strict themselves: `true` is no number and `"16"`
no integer, while lists and plain words still become tuples and enums.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from enum import Enum
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from scenarios.problems import Issue, Loc, did_you_mean, leaf_name, listed, shown

ModelT = TypeVar("ModelT", bound=BaseModel)

MAX_ISSUES = 100
"""Beyond this a file is not a scenario with mistakes; it also bounds the time spent on wording."""

_PLAIN: Mapping[str, str] = {
    "bool_type": "use true or false",
    "dict_type": "use a mapping (key: value)",
    "finite_number": "use a finite number",
    "float_type": "use a plain number, such as 0.5",
    "int_from_float": "use a plain whole number, such as 16",
    "int_type": "use a plain whole number, such as 16",
    "list_type": "use a list, such as [a, b]",
    "model_type": "use a mapping (key: value)",
    "string_type": "use text (quotes make a number text)",
    "tuple_type": "use a list, such as [a, b]",
}
_BOUNDS: Mapping[str, tuple[str, str]] = {
    "greater_than": ("gt", "use more than {}"),
    "greater_than_equal": ("ge", "use at least {}"),
    "less_than": ("lt", "use less than {}"),
    "less_than_equal": ("le", "use at most {}"),
    "multiple_of": ("multiple_of", "use a multiple of {}"),
    "string_pattern_mismatch": ("pattern", "use text that matches {}"),
    "string_too_long": ("max_length", "use at most {} characters"),
    "string_too_short": ("min_length", "use at least {} characters"),
    "too_long": ("max_length", "give at most {} items"),
    "too_short": ("min_length", "give at least {} items"),
}


def read_model(model: type[ModelT], data: Mapping[str, Any], base: Loc = ()) -> tuple[ModelT | None, list[Issue]]:
    """Validate plain JSON values, strictly. Returns the model, or None and what is wrong, in the order of `data`.

    Args:
        base: where `data` is in its scenario; put before every location.
    """
    try:
        return model.model_validate_json(json.dumps(data), strict=True), []
    except ValidationError as error:
        details = error.errors(include_url=False)
    issues: list[Issue] = []
    advice: dict[Loc, list[str]] = {}
    first: dict[Loc, ErrorDetails] = {}
    for detail in details[:MAX_ISSUES]:
        # A union reports once for each branch, under a name that is not in the data: one problem, several ways out.
        loc = _written(data, detail)
        first.setdefault(loc, detail)
        advice.setdefault(loc, []).append(_advice(model, detail))
    for loc, detail in first.items():
        ways = " or ".join(dict.fromkeys(advice[loc]))
        issues.append(Issue(base + loc, f"{_subject(base + loc, detail)}: {ways}"))
    if len(details) > MAX_ISSUES:
        issues.append(Issue(base, f"{len(details) - MAX_ISSUES} more problems are not listed: fix these first"))
    return None, issues


def _written(data: Any, detail: ErrorDetails) -> Loc:
    """The part of a location that exists in the data, and for a missing key that key."""
    loc = detail["loc"]
    for depth, part in enumerate(loc):
        known = (isinstance(data, dict) and part in data) or (
            isinstance(data, list) and isinstance(part, int) and part < len(data)
        )
        if not known:
            missing = detail["type"] == "missing" and depth == len(loc) - 1
            return loc[: depth + 1] if missing else loc[:depth]
        data = data[part]
    return loc


def _subject(loc: Loc, detail: ErrorDetails) -> str:
    name = leaf_name(loc)
    if detail["type"] == "missing":
        return f"{name} is missing"
    if detail["type"] == "extra_forbidden" or _is_key(detail):
        return f"{name} is not known here"
    return f"{name} is {shown(detail['input'])}"


def _advice(model: type[BaseModel], detail: ErrorDetails) -> str:
    """What to do about one error."""
    kind, ctx = detail["type"], detail.get("ctx", {})
    if kind == "missing":
        choices = _choices_at(model, detail["loc"])
        return f"add it and {listed(choices)}" if choices else "add it"
    if kind == "extra_forbidden":
        keys = sorted({key for owner in _models_at(model, detail["loc"][:-1]) for key in owner.model_fields})
        return f"{listed(keys)}{did_you_mean(detail['loc'][-1], keys)}"
    if kind in ("enum", "literal_error"):
        words = [word.strip("'") for word in re.split(r", | or ", str(ctx["expected"]))]
        return f"{listed(words)}{did_you_mean(detail['input'], words)}"
    if kind in _PLAIN:
        return _PLAIN[kind]
    if kind in _BOUNDS:
        key, text = _BOUNDS[kind]
        return text.format(ctx[key])
    # Validators of our own and of faults raise ValueError with advice as its text.
    message = detail["msg"].removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


def _is_key(detail: ErrorDetails) -> bool:
    return detail["loc"][-1:] == ("[key]",)


def _models_at(model: type[BaseModel], loc: Loc) -> list[type[BaseModel]]:
    """The models that describe the mapping at a location: several only under a union."""
    owners = [model]
    for part in loc:
        below = [m for o in owners if part in o.model_fields for m in _models_in(o.model_fields[str(part)].annotation)]
        owners = below or owners  # an index or key of a container: its elements' models were found already
    return owners


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and get_origin(annotation) is None and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for arg in get_args(annotation) for model in _models_in(arg)]


def _choices_at(model: type[BaseModel], loc: Loc) -> list[str]:
    """The words that a missing field may hold, if it holds words."""
    for owner in _models_at(model, loc[:-1]):
        field = owner.model_fields.get(str(loc[-1]))
        annotation = field.annotation if field else None
        if get_origin(annotation) is Literal:
            return [str(arg) for arg in get_args(annotation)]
        if isinstance(annotation, type) and issubclass(annotation, Enum):
            return [str(member.value) for member in annotation]
    return []
