"""What a failed check does (POL-1): the flags of an engine, and what they mean together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from engine.errors import StartupError

ChecksumMode = Literal["off", "log", "enforce"]
LoadFailurePolicy = Literal["fail", "recompute"]
EXTENSIONS: Mapping[str, str] = {
    "EXT-1": "check_replicas",
    "EXT-2": "compare_block_sizes",
    "EXT-5": "checksum_states",
    "EXT-9": "several_caches",
}
"""The switch of each part of the series beyond the base: a field of `ChecksumSettings`, on unless set to False."""


@dataclass(frozen=True, slots=True)
class ChecksumSettings:
    """The flags as a user gives them; None means not given. `resolve` says what they mean.

    `EXTENSIONS` says which of docs/spec.md the switches at the end are.
    """

    enable_kv_checksum: bool | None = None
    kv_checksum_fail_closed: bool | None = None
    kv_checksum_mode: ChecksumMode | None = None
    kv_load_failure_policy: LoadFailurePolicy = "fail"
    check_replicas: bool = True
    compare_block_sizes: bool = True
    checksum_states: bool = True
    several_caches: bool = True


@dataclass(frozen=True, slots=True)
class ChecksumPolicy:
    """Resolved flags. `load_failure` says what any failed load does, checked or not."""

    enabled: bool
    fail_closed: bool
    load_failure: LoadFailurePolicy


def resolve(settings: ChecksumSettings) -> ChecksumPolicy:
    """Turn flags into a policy.

    Raises:
        StartupError: a mode contradicts a boolean, fail-closed without enabled, or an unknown value.
    """
    mode = settings.kv_checksum_mode
    if mode not in (None, "off", "log", "enforce"):
        raise StartupError(f"kv_checksum_mode is {mode!r}: use off, log or enforce")
    if settings.kv_load_failure_policy not in ("fail", "recompute"):
        raise StartupError(f"kv_load_failure_policy is {settings.kv_load_failure_policy!r}: use fail or recompute")
    if mode is None:
        enabled = bool(settings.enable_kv_checksum)
        fail_closed = bool(settings.kv_checksum_fail_closed)
    else:
        enabled, fail_closed = mode != "off", mode == "enforce"
        for flag, given, meant in (
            ("enable_kv_checksum", settings.enable_kv_checksum, enabled),
            ("kv_checksum_fail_closed", settings.kv_checksum_fail_closed, fail_closed),
        ):
            if given is not None and given != meant:
                raise StartupError(
                    f"kv_checksum_mode={mode} contradicts {flag}={given}: drop {flag}, the mode says it all"
                )
    if fail_closed and not enabled:
        raise StartupError("kv_checksum_fail_closed=True without enable_kv_checksum=True: enable checksums as well")
    return ChecksumPolicy(enabled, fail_closed, settings.kv_load_failure_policy)
