"""Proof that a fault happened: what was touched, before and after, as digests."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Evidence:
    """`moment` is where it happened, `request` the request that it happened to."""

    fault: str
    moment: str
    request: str
    what: str
    before: str | None
    after: str | None

    def to_plain(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)


def digest(data: npt.NDArray[np.uint8] | bytes) -> str:
    """64-bit BLAKE2b of some bytes, in hex: enough to tell before from after, too little to hold KV."""
    raw = data if isinstance(data, bytes) else np.ascontiguousarray(data).tobytes()
    return hashlib.blake2b(raw, digest_size=8).hexdigest()
