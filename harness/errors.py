"""Errors of the harness."""

from __future__ import annotations

from engine.errors import InputError, KVChaosError


class PlanError(InputError):
    """Nothing can be run as asked."""


class HistoryError(InputError):
    """A stored history cannot be read."""


class RunError(KVChaosError):
    """The harness itself cannot go on: what finished is kept."""


class OutputError(KVChaosError):
    """Standard output cannot be written."""


class CheckerError(KVChaosError):
    """A fault or an oracle raised: its cell is unknown, whatever the engine did."""
