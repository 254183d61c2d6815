"""The settings in `kv_connector_extra_config`, and what they mean together.

`kv_load_failure_policy`, what a load that failed does, is vLLM's own: a field of its KVTransferConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvchaos_vllm.errors import StartupError

ChecksumMode = Literal["off", "log", "enforce"]
MODES: Mapping[str, tuple[bool, bool]] = {"off": (False, False), "log": (True, False), "enforce": (True, True)}
"""Per mode whether checksums are enabled, and whether fail-closed."""

_FLAGS = ("enable_kv_checksum", "kv_checksum_fail_closed", "allow_checksum_switch")
_PREFIXES = ("kv_checksum", "enable_kv_check", "allow_checksum")


@dataclass(frozen=True, slots=True)
class ChecksumSettings:
    """The settings as a user gives them; None means not given. `resolve` says what they mean.

    Attributes:
        enable_kv_checksum: P sends checksums, D compares them.
        kv_checksum_fail_closed: a load that did not verify fails; otherwise it is logged and used.
        kv_checksum_mode: the same as one word: `off`, `log` (enabled, fail-open), `enforce` (enabled, fail-closed).
        allow_checksum_switch: a request may say `kv_checksum: false` among its `kv_transfer_params`. For studies:
            whoever enforces checksums must not let a client decide.
    """

    enable_kv_checksum: bool | None = None
    kv_checksum_fail_closed: bool | None = None
    kv_checksum_mode: ChecksumMode | None = None
    allow_checksum_switch: bool = False

    @classmethod
    def from_extra_config(cls, extra_config: Mapping[str, Any]) -> ChecksumSettings:
        """Read the settings from among a connector's others, which are not looked at.

        Raises:
            StartupError: a value of another type, or a name that looks like a setting of ours and is none.
        """
        known = (*_FLAGS, "kv_checksum_mode")
        for name in extra_config:
            if isinstance(name, str) and name.startswith(_PREFIXES) and name not in known:
                raise StartupError(f"kv_connector_extra_config has {name!r}: the settings are {', '.join(known)}")
        found = {name: extra_config[name] for name in known if extra_config.get(name) is not None}
        for name in _FLAGS:
            if name in found and not isinstance(found[name], bool):
                raise StartupError(f"kv_connector_extra_config: {name} is {found[name]!r}: use true or false")
        return cls(**found)


@dataclass(frozen=True, slots=True)
class ChecksumPolicy:
    """What the settings mean. Fail-closed: a load that is not verified fails as one that the connector reports."""

    enabled: bool
    fail_closed: bool
    switchable: bool = False


DISABLED = ChecksumPolicy(enabled=False, fail_closed=False)


def resolve(settings: ChecksumSettings) -> ChecksumPolicy:
    """Turn settings into a policy.

    Raises:
        StartupError: a mode contradicts a boolean, fail-closed without enabled, or an unknown mode.
    """
    mode = settings.kv_checksum_mode
    if mode is None:
        enabled = bool(settings.enable_kv_checksum)
        fail_closed = bool(settings.kv_checksum_fail_closed)
    elif mode not in MODES:
        raise StartupError(f"kv_checksum_mode is {mode!r}: use off, log or enforce")
    else:
        enabled, fail_closed = MODES[mode]
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
    return ChecksumPolicy(enabled, fail_closed, settings.allow_checksum_switch)
