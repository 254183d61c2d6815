"""Rows of studies whose truth is known."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from harness.overhead.rows import Row

CELL = "1000tok-low"


def row(block: int, slot: int, arm: str, ttft_s: float | None, **changes) -> Row:
    """One request, answered unless `ttft_s` is None. A slot every second."""
    at = 10.0 * block + slot
    answered = ttft_s is not None
    values = {
        "study": "aa",
        "block": block,
        "slot": slot,
        "arm": arm,
        "cell": CELL,
        "prompt_tokens": 1000,
        "load": "low",
        "prompt_id": f"b{block}-p0",
        "request_id": f"b{block}-s{slot}",
        "warmup": 0,
        "intended_s": at,
        "sent_s": at,
        "first_token_s": at + ttft_s if answered else None,
        "end_s": at + (ttft_s + 0.03 if answered else 60.0),
        "ttft_s": ttft_s,
        "itl_s": 0.01 if answered else None,
        "output_tokens": 4 if answered else 0,
        "status": 200 if answered else 0,
        "error": "" if answered else "timeout",
        "verdict": "",
    }
    return Row(**{**values, **changes})


def block_of(number: int, ttfts: Iterable[float | None], **changes) -> list[Row]:
    """Four rows: A B B A in even blocks, B A A B in odd ones."""
    arms = "ABBA" if number % 2 == 0 else "BAAB"
    return [row(number, slot, arm, ttft, **changes) for slot, (arm, ttft) in enumerate(zip(arms, ttfts, strict=True))]


def study(
    blocks: int,
    noise: float = 0.01,
    cost: float = 0.0,
    level: Callable[[float], float] = lambda at: 0.1,
    seed: int = 0,
) -> list[Row]:
    """A study in which B costs `cost` seconds more. `level(at)` is what a request without noise takes at a time."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(blocks):
        arms = "ABBA" if number % 2 == 0 else "BAAB"
        ttfts = [level(10.0 * number + s) + noise * rng.normal() + cost * (arm == "B") for s, arm in enumerate(arms)]
        rows += block_of(number, ttfts)
    return rows
