"""Where requests of each arm go and what they say of checksums; and proof that the engines did as they were told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from engine.errors import InputError
from harness.errors import RunError
from harness.overhead.design import Kind
from harness.overhead.rows import ARM_OFF, ARM_ON, Row

COMPLETIONS = "/v1/completions"
DEFAULT_SWITCH = "kv_checksum"
_CHECKED = frozenset({"verified", "mismatch", "unverified"})


class StudyError(RunError):
    """What was measured is not what was to be compared, or nothing answers. The rows are kept."""


@dataclass(frozen=True, slots=True)
class Route:
    """One way to ask: `base` is a server's URL, `extra` goes into the body of each request."""

    base: str
    extra: Mapping[str, bool] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """Where completions are asked for."""
        return self.base.rstrip("/") + COMPLETIONS


def check_url(option: str, text: str) -> None:
    """Raises InputError for what is no URL of a server."""
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise InputError(f"{option} {text}: use a URL, such as http://127.0.0.1:8000")


def switched(base: str, switch: str) -> dict[str, Route]:
    """Both arms at one server, told apart by a key of the body that is false or true."""
    return {ARM_OFF: Route(base, {switch: False}), ARM_ON: Route(base, {switch: True})}


def two_servers(off: str, on: str) -> dict[str, Route]:
    """An arm at each of two servers, where no switch is known."""
    return {ARM_OFF: Route(off), ARM_ON: Route(on)}


def for_kind(kind: Kind, routes: Mapping[str, Route]) -> dict[str, Route]:
    """In an A/A study both arms take the way without checksums."""
    return {**routes, ARM_ON: routes[ARM_OFF]} if kind is Kind.AA else dict(routes)


def check_arms(kind: Kind, rows: Iterable[Row]) -> None:
    """Compare what the engines say of each load with what its arm wanted. An engine that says nothing is believed.

    Raises:
        StudyError: a request without checksums was checked, or one with them was not.
    """
    for row in rows:
        if not row.ok or not row.verdict:
            continue
        wanted = row.arm == ARM_ON and kind is not Kind.AA
        if (row.verdict in _CHECKED) is not wanted:
            raise StudyError(
                f"request {row.request_id} was to go {'with' if wanted else 'without'} checksums, and its load is "
                f"{row.verdict}: the arms would not differ as they say. Does the server know the switch, and are the "
                "engine's checksums on?"
            )
