"""What a clean run gives under each policy: the default for requests without a fault, and for twins."""

from __future__ import annotations

from scenarios.schema import Expectation
from scenarios.words import NotCheckedReason, Outcome, Policy, Tokens, Truth, VerdictStatus


def clean_expectation(policy: Policy) -> Expectation:
    """Served, intact, the oracle's tokens; verified wherever checksums are on."""
    checked = policy is not Policy.OFF
    return Expectation(
        verdict=VerdictStatus.VERIFIED if checked else VerdictStatus.NOT_CHECKED,
        reason=None if checked else NotCheckedReason.OFF,
        outcome=Outcome.SERVED,
        truth=Truth.INTACT,
        tokens=Tokens.RIGHT,
    )
