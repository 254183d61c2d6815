"""Seeds by name: a stable hash of what a choice depends on, never an index or Python's `hash`."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def derive(*parts: Any) -> int:
    """A 63-bit seed of JSON-able parts; the same on every machine and in every process."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def short_hash(*parts: Any) -> str:
    """Eight hex digits that name the parts."""
    return f"{derive(*parts):016x}"[-8:]
