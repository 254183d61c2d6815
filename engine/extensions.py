"""What other distributions add to kvchaos by name: found through entry points, imported when it is asked for.

A registry is a dict that holds kvchaos' own things from the start. A name that it lacks is looked up among the entry
points of its group, imported, checked, and kept. So a broken extension troubles nobody who does not ask for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from engine.errors import InputError

OWN = "kvchaos"
LOADED: dict[str, str] = {}
"""Version of every distribution that something of this process came from, by its name."""

T = TypeVar("T")
Check = Callable[[Any], str | None]
"""What is wrong with an extension in the words "it ...", or None."""


class ExtensionError(InputError):
    """An installed extension cannot be used. The text names its distribution and entry point."""


class Registry(dict[str, T]):
    """Extensions of one kind by name. Iteration and `in` see kvchaos' own and what was asked for until now."""

    def __init__(
        self, group: str, noun: str, api_version: int, own: Mapping[str, T], check: Check, name_attribute: str = "name"
    ) -> None:
        """
        Args:
            group: the group of entry points.
            noun: what errors call such a thing.
            api_version: the `API_VERSION` that an extension must declare.
            own: kvchaos' own, by name.
            check: what else an extension must fulfil.
            name_attribute: where an extension says its own name.
        """
        super().__init__(own)
        self.group = group
        self.noun = noun
        self.api_version = api_version
        self._own = frozenset(own)
        self._check = check
        self._name_attribute = name_attribute
        self._found: dict[str, list[EntryPoint]] | None = None

    @property
    def names(self) -> list[str]:
        """Every name that can be asked for. Nothing is imported for it."""
        return sorted({*self, *self._installed})

    @property
    def installed(self) -> list[str]:
        """The names that other distributions have entry points for. Nothing is imported for it."""
        return sorted(self._installed)

    def distribution(self, name: str) -> str:
        """Where a thing comes from, such as `kvchaos-example 0.1.0`."""
        entries = [] if name in self._own else self._installed.get(name, [])
        return " and ".join(_distribution(entry) for entry in entries) or OWN

    def choose(self, name: str) -> T:
        """The thing of that name, for someone who named it: unlike `[name]`, never one of two that have the name.

        Raises:
            KeyError: there is none.
            ExtensionError: it cannot be used.
        """
        if name in self._own and name in self._installed:
            raise ExtensionError(self._contested(name))
        return self[name]

    def register(self, name: str, extension: Any) -> None:
        """Check an extension and keep it under its name, for this process.

        Raises:
            ExtensionError: it cannot be used under this name.
        """
        self._keep(name, extension, f"{self.noun} {name}")

    def forget(self) -> None:
        """Drop what was loaded, and look for entry points anew: something was installed while this process ran."""
        for name in set(self) - self._own:
            del self[name]
        self._found = None

    def __missing__(self, name: str) -> T:
        entries = self._installed.get(name, [])
        if not entries:
            raise KeyError(name)
        if len(entries) > 1:
            raise ExtensionError(self._contested(name))
        extension = self._import(entries[0])
        self._keep(name, extension, self._where(entries[0]))
        if entries[0].dist is not None:
            LOADED[entries[0].dist.name] = entries[0].dist.version
        return self[name]

    @property
    def _installed(self) -> Mapping[str, list[EntryPoint]]:
        if self._found is None:
            found: dict[str, list[EntryPoint]] = defaultdict(list)
            for entry in sorted(entry_points(group=self.group), key=lambda entry: (entry.name, _distribution(entry))):
                found[entry.name].append(entry)
            self._found = dict(found)
        return self._found

    def _import(self, entry: EntryPoint) -> Any:
        try:
            return entry.load()
        except (Exception, SystemExit) as error:
            first, *_ = str(error).splitlines() or [""]
            told = f"{type(error).__name__}: {first}" if first else type(error).__name__
            advice = f"repair or uninstall {_distribution(entry)}"
            raise ExtensionError(f"{self._where(entry)} cannot be imported ({told}): {advice}") from error

    def _keep(self, name: str, extension: Any, where: str) -> None:
        if name in self._own:
            raise ExtensionError(f"{where}: the name is taken by one of kvchaos' own: use another")
        declared = getattr(extension, "API_VERSION", None)
        if type(declared) is not int:
            raise ExtensionError(f"{where} declares no API_VERSION: set API_VERSION = {self.api_version}")
        if declared != self.api_version:
            advice = "install versions of the two that fit each other"
            raise ExtensionError(
                f"{where} declares API_VERSION {declared}, this kvchaos takes {self.api_version}: {advice}"
            )
        wrong, called = self._check(extension), getattr(extension, self._name_attribute, None)
        if wrong is None and called != name:
            wrong = f"has the {self._name_attribute} {called!r}: let it and the entry point have the same name"
        if wrong is not None:
            raise ExtensionError(f"{where} {wrong}")
        self[name] = extension

    def _where(self, entry: EntryPoint) -> str:
        point = f"entry point {entry.name} = {entry.value} in {self.group}"
        return f"{self.noun} {entry.name} of {_distribution(entry)} ({point})"

    def _contested(self, name: str) -> str:
        owners = [OWN] if name in self._own else []
        owners += [_distribution(entry) for entry in self._installed[name]]
        points = "; ".join(f"{name} = {entry.value}" for entry in self._installed[name])
        listed = ", ".join(owners[:-1]) + f" and {owners[-1]}"
        told = f"{listed} have one each (entry points in {self.group}: {points})"
        return f"{self.noun} {name}: {told}: uninstall or rename all but one"


def lacks(extension: Any, texts: tuple[str, ...], methods: tuple[str, ...]) -> str | None:
    """What an object lacks of a Protocol: texts (non-empty strings) and methods; None: nothing."""
    if isinstance(extension, type):
        return f"is the class {extension.__name__}: let the entry point name an instance of it"
    for name in texts:
        value = getattr(extension, name, None)
        if not isinstance(value, str) or not value.strip() or len(value.splitlines()) > 1:
            return f"has no {name}, one line of text"
    missing = [name for name in methods if not callable(getattr(extension, name, None))]
    return f"lacks the method{'' if len(missing) == 1 else 's'} {', '.join(missing)}" if missing else None


def _distribution(entry: EntryPoint) -> str:
    return "an unknown distribution" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
