"""What goes wrong with reports themselves: a file that cannot be written, or a stored result that cannot be read."""

from __future__ import annotations

from engine.errors import EXIT_USAGE, KVChaosError


class ReportError(KVChaosError):
    """A report cannot be written. The message names the file and what to do."""


class BrokenResultsError(ReportError):
    """A stored result is not what this version writes. The message names the file, the field and what to do."""

    exit_code = EXIT_USAGE
