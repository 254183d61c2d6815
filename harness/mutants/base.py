"""What a planted bug is, and how it is put in: one named callable replaced wherever it is bound, and always put back.

The engine knows nothing of mutants. A replacement counts its calls, so that a mutant that nothing ever reached is not
taken for one that was noticed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from types import ModuleType
from typing import Any, Literal

from harness.mutants.bench import Bench, MutantError

PACKAGES = ("kernels", "engine", "faults", "scenarios", "reports", "harness")

Area = Literal["engine", "checksum", "verifier", "policy", "injector", "judge", "reporter"]
Function = Callable[..., Any]
Check = Callable[[Bench], str | None]
Probe = str | Check


@dataclass(frozen=True, slots=True)
class Mutant:
    """A planted bug, as data.

    Attributes:
        name: small letters and hyphens.
        what: what is broken, in one sentence.
        target: the dotted path of what is replaced: a module's function, or a class's method or property.
        replace: takes the original and gives what is called in its place.
        killers: what must notice it. A scenario ("flip-before-verify") under all its policies, one cell
            ("flip-before-verify--fail_open"), or a check, which says what it noticed, or None.
        control: what must not notice it, because the damage does not concern it.
    """

    name: str
    area: Area
    what: str
    target: str
    replace: Callable[[Function], Function]
    killers: tuple[Probe, ...]
    control: Probe


def probe_name(probe: Probe) -> str:
    """The scenario or cell, or the check in words."""
    if isinstance(probe, str):
        return probe
    return probe.__name__.strip("_").replace("_", " ")


@dataclass(slots=True, eq=False)
class Calls:
    """How often a replacement was called."""

    count: int = 0


@contextmanager
def applied(mutant: Mutant) -> Iterator[Calls]:
    """Put a mutant in for as long as the context lasts.

    Whatever our modules keep between calls is forgotten before and after, so that a broken engine is not helped by
    what a sound one computed, nor the other way round.

    Raises:
        MutantError: there is no such callable, or the replacement is the original.
    """
    owner, name = _owner(mutant)
    calls = Calls()
    if isinstance(owner, ModuleType):
        original = getattr(owner, name)
        mutated = _counted(mutant, original, calls)
        undo = _bind(original, mutated)
    else:
        original = owner.__dict__[name]
        mutated = _mutated_attribute(mutant, original, calls)
        setattr(owner, name, mutated)
        undo = [(owner, name)]
    _forget()
    try:
        yield calls
    finally:
        for place, key in undo:
            _set(place, key, original)
        # A module that was first imported in the meantime has bound the mutated callable.
        _bind(mutated, original)
        _forget()


def resolve(target: str) -> tuple[ModuleType | type, str]:
    """The module or class that holds a target, and its name in it.

    Raises:
        MutantError: there is no such callable.
    """
    parts = target.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            owner: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:-1]:
            owner = getattr(owner, part, None)
        if isinstance(owner, ModuleType | type) and parts[-1] in vars(owner):
            return owner, parts[-1]
        break
    raise MutantError(f"{target}: there is no such function, method or property: was it renamed?")


def _owner(mutant: Mutant) -> tuple[ModuleType | type, str]:
    try:
        return resolve(mutant.target)
    except MutantError as error:
        raise MutantError(f"mutant {mutant.name}: {error}") from None


def _mutated_attribute(mutant: Mutant, original: Any, calls: Calls) -> Any:
    """A class's attribute, wrapped again as what it was."""
    if isinstance(original, property) and original.fget is not None:
        return property(_counted(mutant, original.fget, calls))
    if isinstance(original, staticmethod | classmethod):
        return type(original)(_counted(mutant, original.__func__, calls))
    return _counted(mutant, original, calls)


def _counted(mutant: Mutant, original: Any, calls: Calls) -> Function:
    if not callable(original):
        raise MutantError(f"mutant {mutant.name}: {mutant.target} is a {type(original).__name__}, not a callable")
    replacement = mutant.replace(original)
    if replacement is original:
        raise MutantError(f"mutant {mutant.name}: its replacement is the original")

    @wraps(original)
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.count += 1
        return replacement(*args, **kwargs)

    return counted


def _bind(old: object, new: object) -> list[tuple[Any, str]]:
    """Bind `new` wherever one of our modules has `old`: as an attribute, or as a value of a table. Returns where."""
    places: list[tuple[Any, str]] = []
    for module in _ours():
        tables = [value for name, value in vars(module).items() if type(value) is dict and not name.startswith("__")]
        for place in (vars(module), *tables):
            places += [(place, name) for name, value in place.items() if value is old]
    for place, name in places:
        _set(place, name, new)
    return places


def _set(place: Any, name: str, value: object) -> None:
    if isinstance(place, dict):
        place[name] = value
    else:
        setattr(place, name, value)


def _forget() -> None:
    """Clear what our modules cache."""
    for module in _ours():
        for value in list(vars(module).values()):
            clear = getattr(value, "cache_clear", None)
            if callable(clear):
                clear()


def _ours() -> list[ModuleType]:
    return [module for name, module in list(sys.modules.items()) if name.partition(".")[0] in PACKAGES]
