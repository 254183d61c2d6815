"""What a campaign measured, as it is stored in docs/strength.json."""

from __future__ import annotations

from dataclasses import dataclass

from harness.strength.block import Block
from harness.strength.pairs import PairCount


@dataclass(frozen=True, slots=True)
class Rate:
    """How often a checksum missed a fault model: misses of samples, and the interval of 99.9% (Clopper-Pearson)."""

    checksum: str
    misses: int
    samples: int
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class ModelResult:
    """One fault model's rates. `theory` is version 1's expected rate, `exact` if it is counted and must be met."""

    model: str
    theory: float | None
    exact: bool
    rates: tuple[Rate, ...]

    def rate(self, checksum: str) -> Rate:
        return next(rate for rate in self.rates if rate.checksum == checksum)

    @property
    def meets_theory(self) -> bool:
        """Version 1's exact expectation lies in its interval."""
        rate = self.rate("version 1")
        return not self.exact or self.theory is None or rate.low <= self.theory <= rate.high


@dataclass(frozen=True, slots=True)
class StrengthResult:
    """What a campaign measured."""

    seed: int
    samples: int
    block: Block
    models: tuple[ModelResult, ...]
    pairs: tuple[PairCount, ...]

    @property
    def surprises(self) -> list[str]:
        """What did not come out as it must: version 1 off its theory, or anything that version 2 missed."""
        found = [f"{m.model}: version 1 is not what was counted" for m in self.models if not m.meets_theory]
        found += [f"{m.model}: version 2 missed one" for m in self.models if m.rate("version 2").misses]
        found += [f"{m.model}: version 1 missed one" for m in self.models if m.theory == 0 and not _no_miss(m)]
        return found + [f"{p.what}: a pair cancels" for p in self.pairs if "version 2" in p.what and p.cancelling]


def _no_miss(model: ModelResult) -> bool:
    return model.rate("version 1").misses == 0
