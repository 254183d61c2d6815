"""The root of the error tree: an error of kvchaos says what was wrong, where, and what to do.

Every package subclasses `KVChaosError`; the command line turns one into a single line and the exit
code that the error carries. Anything else that escapes is a bug of ours and shows a traceback.
"""

from __future__ import annotations

EXIT_USAGE = 64
EXIT_SOFTWARE = 70


class KVChaosError(Exception):
    """An error a person can act on. `exit_code` is what the command line exits with."""

    exit_code = EXIT_SOFTWARE


class InputError(KVChaosError):
    """What the user gave (a file, an argument, a scenario) cannot be used as it is."""

    exit_code = EXIT_USAGE


class StartupError(KVChaosError):
    """An engine refuses to start with this configuration (POL-1, CAR-3)."""


class RequestError(KVChaosError):
    """A request that an engine cannot take: it is refused and nothing of it is kept."""
