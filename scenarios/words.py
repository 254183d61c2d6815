"""The words a scenario may use for what must come out. One place, so that a typo is an error.

`Verdict` and `Reason` are the engine's own; the rest belong to the judge (docs/structure.md).
"""

from __future__ import annotations

from enum import StrEnum

from engine.checksum.policy import ChecksumSettings, LoadFailurePolicy
from engine.checksum.verdict import NotCheckedReason, UnverifiedReason, VerdictStatus

__all__ = [
    "NotCheckedReason",
    "Outcome",
    "Policy",
    "Result",
    "Role",
    "Tokens",
    "Truth",
    "UnverifiedReason",
    "VerdictStatus",
    "Violation",
]


class Policy(StrEnum):
    """The harness's four policies (POL-1)."""

    OFF = "off"
    FAIL_OPEN = "fail_open"
    FAIL_CLOSED_FAIL = "fail_closed_fail"
    FAIL_CLOSED_RECOMPUTE = "fail_closed_recompute"

    @property
    def fail_closed(self) -> bool:
        return self in (Policy.FAIL_CLOSED_FAIL, Policy.FAIL_CLOSED_RECOMPUTE)

    def settings(self, load_failure: LoadFailurePolicy | None = None) -> ChecksumSettings:
        """The engine flags of this policy. `load_failure` overrides `fail` for off and fail_open."""
        if self is Policy.OFF:
            return ChecksumSettings(kv_checksum_mode="off", kv_load_failure_policy=load_failure or "fail")
        if self is Policy.FAIL_OPEN:
            return ChecksumSettings(kv_checksum_mode="log", kv_load_failure_policy=load_failure or "fail")
        closed: LoadFailurePolicy = "recompute" if self is Policy.FAIL_CLOSED_RECOMPUTE else "fail"
        return ChecksumSettings(kv_checksum_mode="enforce", kv_load_failure_policy=closed)


class Outcome(StrEnum):
    """How a request ended."""

    SERVED = "served"
    RECOMPUTED = "recomputed"
    FAILED = "failed"
    ABORTED = "aborted"
    HUNG = "hung"
    CRASHED = "crashed"
    REFUSED = "refused"


class Violation(StrEnum):
    """What must never happen, whatever the outcome.

    `UNEXPLAINED_VERIFIED`: a load is verified and corrupted, and no known gap's predicate holds.
    `UNEXPLAINED_TOKENS`: the tokens are wrong although nothing that was read is corrupted.
    `STALE_RECOMPUTE`: a request was recomputed and read corrupted KV all the same.
    """

    LEAK = "leak"
    DOUBLE_FREE = "double_free"
    TWO_TERMINAL_STATES = "two_terminal_states"
    NO_PROGRESS = "no_progress"
    UNEXPLAINED_VERIFIED = "unexplained_verified"
    UNEXPLAINED_TOKENS = "unexplained_tokens"
    STALE_RECOMPUTE = "stale_recompute"


class Truth(StrEnum):
    """Whether bytes were what the producer held; `NONE` where nothing was delivered or read."""

    INTACT = "intact"
    CORRUPTED = "corrupted"
    NONE = "none"


class Tokens(StrEnum):
    """Whether the tokens are the token oracle's; `NONE` where the request gave no answer."""

    RIGHT = "right"
    WRONG = "wrong"
    NONE = "none"


class Role(StrEnum):
    """Why a cell was run."""

    FAULT = "fault"
    TWIN = "twin"
    REPEAT = "repeat"


class Result(StrEnum):
    """What the judge says of a cell."""

    PASS = "pass"
    FAIL = "fail"
    UNKNOWN = "unknown"
    KNOWN_GAP = "known_gap"
    NOT_APPLICABLE = "not_applicable"
