"""Who may arm a fault: whoever started the process with a token in its environment, and says the same token again."""

from __future__ import annotations

import hmac
import os

VARIABLE = "KVCHAOS_VLLM_FAULT_TOKEN"
MIN_CHARACTERS = 16


class ArmError(ValueError):
    """A fault cannot be armed: the message says why, and what to do."""


def why_not_armable() -> str | None:
    """Why no fault can be armed in this process, or None."""
    token = os.environ.get(VARIABLE, "")
    if not token:
        return f"{VARIABLE} is not set"
    if len(token) < MIN_CHARACTERS:
        return f"{VARIABLE} has {len(token)} characters, of the {MIN_CHARACTERS} that a token needs"
    return None


def check(token: str) -> None:
    """Raise ArmError unless this is the token of the process's environment."""
    reason = why_not_armable()
    if reason is not None:
        raise ArmError(f"no fault can be armed here: {reason}")
    if not hmac.compare_digest(token.encode(), os.environ[VARIABLE].encode()):
        raise ArmError(f"the token of the command is not that of {VARIABLE}")
