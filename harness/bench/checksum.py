"""What a checksum costs beside what memory allows and beside other hashes, and whether our bars are met.

One thread, one process, all contenders interleaved (`harness/bench/timing.py`).
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from engine.checksum.payload import Payload, PayloadGroup, PayloadLimits, decode, encode
from engine.checksum.records import GroupBlocks, Merge, MergedGroup
from engine.checksum.verdict import VerdictStatus, judge_load
from harness.bench.contenders import BLOCK_BYTES, BLOCK_TOKENS, LAYOUTS, Contender, flat_contenders, paged_contenders
from harness.bench.growth import Growth, measure_growth
from harness.bench.timing import medians

SIZES = (64 * 2**10, 2**20, 64 * 2**20)
ROUNDS = 41
PAYLOAD_TOKENS = 131_072
FLAT = "flat"


@dataclass(frozen=True, slots=True)
class Row:
    """One contender on one buffer: `seconds` a call (median), None where it is `missing`."""

    shape: str
    size: int
    name: str
    seconds: float | None
    missing: str = ""

    @property
    def gb_per_s(self) -> float | None:
        """10**9 bytes a second."""
        return None if self.seconds is None else self.size / self.seconds / 1e9


@dataclass(frozen=True, slots=True)
class Bar:
    """What must hold. `measured` is None where a contender or a size was missing."""

    what: str
    wanted: str
    measured: float | None
    met: bool | None


@dataclass(frozen=True, slots=True)
class ChecksumBench:
    """All figures of one run. `payload_s`: seconds to encode, decode and compare (median)."""

    machine: dict[str, str]
    rounds: int
    rows: tuple[Row, ...]
    payload_s: dict[str, float]
    growth: tuple[Growth, ...]
    bars: tuple[Bar, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        found = asdict(self)
        for row, plain in zip(self.rows, found["rows"], strict=True):
            plain["gb_per_s"] = row.gb_per_s
        return found


def run_bench(
    sizes: Sequence[int] = SIZES, rounds: int = ROUNDS, advance: Callable[[str], None] = lambda _: None
) -> ChecksumBench:
    """Measure everything, in one thread. `advance` is told what comes next.

    Args:
        sizes: of the buffers, in bytes, each whole blocks of a paged cache (64 KiB).
        rounds: how often each contender is measured.

    Raises:
        ValueError: a size that is not whole blocks.
    """
    if any(size < 1 or size % BLOCK_BYTES for size in sizes):
        raise ValueError(f"sizes {list(sizes)} must be multiples of {BLOCK_BYTES} bytes, the blocks of the paged cache")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows: list[Row] = []
        for size in sizes:
            advance(f"{size} bytes")
            rows += _rows(size, rounds)
        advance("payload")
        payload = _payload(rounds)
        advance("growth")
        growth = measure_growth(rounds)
    finally:
        torch.set_num_threads(threads)
    return ChecksumBench(_machine(), rounds, tuple(rows), payload, growth, tuple(bars(rows, payload)))


def _rows(size: int, rounds: int) -> list[Row]:
    """Flat and paged contenders of one size, all in one interleaved run."""
    buffer = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    contenders: list[tuple[str, Contender]] = [(FLAT, contender) for contender in flat_contenders(buffer)]
    for layout in LAYOUTS:
        contenders += [(layout, contender) for contender in paged_contenders(buffer, layout)]
    jobs = {f"{shape} {c.name}": c.job for shape, c in contenders if c.job is not None}
    seconds = medians(jobs, rounds)
    return [Row(shape, size, c.name, seconds.get(f"{shape} {c.name}"), c.missing) for shape, c in contenders]


def _payload(rounds: int) -> dict[str, float]:
    """Encode, decode and compare the checksums of one request of 131,072 tokens, one group of 16-token blocks."""
    blocks = PAYLOAD_TOKENS // BLOCK_TOKENS
    values = np.random.default_rng(0).integers(0, 2**64, blocks, dtype=np.uint64)
    sent = Payload(1, PAYLOAD_TOKENS, (PayloadGroup(0, 2**63 + 1, BLOCK_TOKENS, 0, values),))
    text = encode(sent)
    limits = PayloadLimits.for_engine(PAYLOAD_TOKENS, [BLOCK_TOKENS]).for_request(PAYLOAD_TOKENS)
    loaded = {0: GroupBlocks(0, BLOCK_TOKENS, 0, tuple(range(1, blocks + 1)), PAYLOAD_TOKENS)}
    merged = {0: MergedGroup(loaded[0], 2**63 + 1, values.copy())}
    merge = Merge(merged, False, frozenset(), frozenset(), frozenset())

    def decode_and_compare() -> VerdictStatus:
        return judge_load(decode(text, limits), loaded, merge).status

    if decode_and_compare() is not VerdictStatus.VERIFIED:
        raise AssertionError("the bench compares a payload that does not verify")
    jobs = {
        "encode": lambda: encode(sent),
        "decode": lambda: decode(text, limits),
        "compare": lambda: judge_load(sent, loaded, merge),
        "decode and compare": decode_and_compare,
    }
    return medians(jobs, rounds)


def bars(rows: Iterable[Row], payload_s: dict[str, float]) -> list[Bar]:
    """What the project asks of the CPU path, against what these rows measured."""
    speed = {(row.shape, row.size, row.name): row.gb_per_s for row in rows}
    large, middle = SIZES[2], SIZES[1]
    ratios = [
        ("64 MiB flat: cpu / xxh3_64", 0.9, (FLAT, large, "cpu"), (FLAT, large, "xxh3_64")),
        ("1 MiB flat: cpu / xxh3_64", 0.5, (FLAT, middle, "cpu"), (FLAT, middle, "xxh3_64")),
    ]
    for size, word in ((large, "64 MiB"), (middle, "1 MiB")):
        ratios += [
            (f"{word} paged {layout}: cpu / its flat", 0.6, (layout, size, "cpu"), (FLAT, size, "cpu"))
            for layout in LAYOUTS
        ]
    for shape in (FLAT, *LAYOUTS):
        ratios.append((f"64 MiB {shape}: cpu / torch", 4.0, (shape, large, "cpu"), (shape, large, "torch")))
    found = []
    for what, wanted, upper, lower in ratios:
        above, below = speed.get(upper), speed.get(lower)
        ratio = above / below if above and below else None
        found.append(Bar(what, f">= {wanted}", ratio, None if ratio is None else ratio >= wanted))
    ms = payload_s["decode and compare"] * 1e3
    found.append(Bar(f"decode and compare {PAYLOAD_TOKENS:,} tokens, ms", "< 1", ms, ms < 1))
    return found


def _machine() -> dict[str, str]:
    return {
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
    }


def _processor() -> str:
    """The model's name, where the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
