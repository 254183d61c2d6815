"""The errors of this package that a person can act on. Anything else that escapes is a bug."""

from __future__ import annotations


class StartupError(ValueError):
    """vLLM must not start with this configuration: the message says what contradicts what, and what to do."""
