"""What a failed check does (POL-1): the flags of an engine, what they mean together, and what a request may change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from engine.errors import RequestError, StartupError

ChecksumMode = Literal["off", "log", "enforce"]
LoadFailurePolicy = Literal["fail", "recompute"]
Trigger = Literal["prompt_end", "cache", "on_write"]
TRIGGERS: tuple[Trigger, ...] = get_args(Trigger)
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

    `allow_checksum_switch`: a request may switch its own checksums off. For studies; whoever enforces checksums must
    not let a client decide. `kv_checksum_version`: what a producer sends, 1 or 2 (hardened); a consumer reads both.
    `kv_checksum_trigger`: when a producer sums (`engine/checksum/when.py`).
    `EXTENSIONS` says which of docs/spec.md the switches at the end are.
    """

    enable_kv_checksum: bool | None = None
    kv_checksum_fail_closed: bool | None = None
    kv_checksum_mode: ChecksumMode | None = None
    kv_load_failure_policy: LoadFailurePolicy = "fail"
    allow_checksum_switch: bool = False
    kv_checksum_version: int = 1
    kv_checksum_trigger: Trigger = "prompt_end"
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
    switchable: bool = False
    version: int = 1
    trigger: Trigger = "prompt_end"

    def check_switch(self, asked: bool | None) -> None:
        """Refuse what a request asks of its checksums (None: nothing) where it cannot be had, or must not.

        Raises:
            RequestError: it wants them switched off and may not decide that, or on where there are none.
        """
        if asked is not None and type(asked) is not bool:
            raise RequestError(f"kv_checksum is {asked!r}: use true or false")
        if asked and not self.enabled:
            raise RequestError("kv_checksum is true, but this engine has no checksums: drop it, or start one that has")
        if asked is False and self.enabled and not self.switchable:
            raise RequestError(
                "kv_checksum is false, but requests may not switch the checksums of this engine off: drop it, or start "
                "the engine with --allow-checksum-switch"
            )


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
    version = settings.kv_checksum_version
    if version not in (1, 2):
        raise StartupError(f"kv_checksum_version is {version!r}: use 1 or 2")
    trigger = settings.kv_checksum_trigger
    if trigger not in TRIGGERS:
        raise StartupError(f"kv_checksum_trigger is {trigger!r}: use {', '.join(TRIGGERS)}")
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
    return ChecksumPolicy(
        enabled, fail_closed, settings.kv_load_failure_policy, settings.allow_checksum_switch, version, trigger
    )
