"""The campaign: every fault model against every checksum, with exact intervals, and version 1's theory beside them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from harness.strength.block import Block
from harness.strength.checksums import CHECKSUMS, Checksum
from harness.strength.intervals import clopper_pearson
from harness.strength.models import MODELS, FaultModel
from harness.strength.pairs import PairCount, all_pairs_of_bit_63, many_pairs
from harness.strength.results import ModelResult, Rate, StrengthResult
from harness.strength.theory import EXACT, VERSION_1

CHUNK_PIECES = 1 << 18
NARROW = 8
"""Models that change at most so many pieces get all samples; wider ones as many as cost the same."""
FEWEST = 200
MOST_PAIRED = 1 << 26


def steps(seed: int, samples: int, block: Block) -> Iterator[tuple[str, Callable[[], ModelResult | list[PairCount]]]]:
    """Name every part of a campaign and how to run it; `collect` puts their results together."""
    for model in MODELS:
        yield model.name, partial(run_model, model, seed, samples, block)
    yield "all pairs of bit 63", partial(all_pairs_of_bit_63, block, seed)
    yield "pairs of many changes", partial(many_pairs, min(10 * samples, MOST_PAIRED), seed)


def collect(seed: int, samples: int, block: Block, results: Sequence[ModelResult | list[PairCount]]) -> StrengthResult:
    """Put the results of `steps` together."""
    models = tuple(result for result in results if isinstance(result, ModelResult))
    pairs = tuple(count for result in results if isinstance(result, list) for count in result)
    return StrengthResult(seed, samples, block, models, pairs)


def run_model(model: FaultModel, seed: int, samples: int, block: Block) -> ModelResult:
    """Draw corruptions of one model, the same for each checksum, and count what each misses."""
    # The seed is of the model's name: adding a model changes no other's corruptions.
    rng = np.random.Generator(np.random.PCG64([seed, zlib.crc32(model.name.encode())]))
    width = model.width(block)
    wanted = samples if width <= NARROW else max(FEWEST, min(samples, samples * NARROW // width))
    misses, seen = dict.fromkeys(CHECKSUMS, 0), dict.fromkeys(CHECKSUMS, 0)
    for start in range(0, wanted, max(1, CHUNK_PIECES // width)):
        changes = model.draw(rng, block, min(max(1, CHUNK_PIECES // width), wanted - start))
        changes = changes.only(changes.real)
        for checksum in CHECKSUMS:
            looked = changes if checksum.most is None else changes.first(checksum.most - seen[checksum])
            seen[checksum] += len(looked.index)
            misses[checksum] += int(checksum.misses(block, looked).sum()) if len(looked.index) else 0
    rates = tuple(_rate(checksum, misses[checksum], seen[checksum]) for checksum in CHECKSUMS)
    theory = None if model.theory is None else VERSION_1[model.theory](block)
    return ModelResult(model.name, theory, model.theory in EXACT, rates)


def _rate(checksum: Checksum, misses: int, samples: int) -> Rate:
    low, high = clopper_pearson(misses, samples)
    return Rate(checksum.name, misses, samples, low, high)
