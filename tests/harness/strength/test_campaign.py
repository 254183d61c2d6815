"""Theory against enumeration, rates against theory, and a campaign that comes out the same twice."""

import itertools

import numpy as np
import pytest

from harness.strength.block import Block
from harness.strength.campaign import collect, run_model, steps
from harness.strength.intervals import clopper_pearson
from harness.strength.models import ALL_BITS, MODELS, SIGNS_16
from harness.strength.pairs import all_pairs_of_bit_63, count_cancelling, many_pairs
from harness.strength.results import ModelResult, Rate
from harness.strength.theory import EXACT, VERSION_1, two_flips
from kernels import definition

MOD = 2**64


@pytest.mark.req("GAP-8")
@pytest.mark.parametrize("lanes", [ALL_BITS, SIGNS_16, (62,), (3, 61)])
def test_the_rate_of_double_flips_is_that_of_trying_all_of_them(lanes):
    """Every pair of bits with every pair of signs, in plain integers, in a block whose factors collide."""
    block = Block(1, 2, 2, 2)
    bits = [(factor, lane) for factor in block.factors.tolist() for lane in lanes]
    cancelling = pairs = 0
    for (w1, b1), (w2, b2) in itertools.combinations(bits, 2):
        for s1, s2 in itertools.product((1, -1), repeat=2):
            pairs += 1
            cancelling += (s1 * w1 * 2**b1 + s2 * w2 * 2**b2) % MOD == 0
    assert two_flips(block, lanes) == pytest.approx(cancelling / pairs, rel=1e-12)


def test_the_factors_and_keys_are_those_of_the_definitions(block):
    for number in (0, block.size // 2, block.size - 1):
        kv = np.zeros(block.shape, dtype=np.uint64)
        kv.ravel()[number] = 1
        as_bytes = kv.view(np.uint8).reshape(block.layers, block.heads, block.tokens, -1)
        arguments = (range(block.layers), 0, block.tokens, block.first_token, block.first_token + block.tokens)
        assert definition.block_checksums(as_bytes, *arguments).tolist() == [block.factors[number]]
    assert len(set(block.keys.tolist())) == block.size


def test_the_rate_of_an_exchange_is_that_of_trying_all_pairs(block):
    pairs = list(itertools.combinations(block.factors.tolist(), 2))
    missed = sum(1 if a == b else 2.0 ** ((a - b & b - a).bit_length() - 1 - 64) for a, b in pairs)
    assert VERSION_1["exchange"](block) == pytest.approx(missed / len(pairs), rel=1e-12)


def test_the_rates_of_swaps_are_those_of_def_5():
    def factor(layer, head, token):
        return (2 * (layer * 2**16 + head) + 1) * (2 * 4 * token + 1)

    def mean(values):
        gaps = [abs(a - b) for a, b in itertools.combinations(values, 2)]
        return sum(2.0 ** ((gap & -gap).bit_length() - 1 - 64) for gap in gaps) / len(gaps)

    block = Block(3, 4, 4, 4)
    assert VERSION_1["tokens"](block) == pytest.approx(mean([factor(0, 0, t) for t in range(4)]))
    assert VERSION_1["heads"](block) == pytest.approx(mean([factor(0, h, 0) for h in range(4)]))
    assert VERSION_1["layers"](block) == pytest.approx(mean([factor(layer, 0, 0) for layer in range(3)]))


@pytest.mark.req("DEF-5", "DEF-9", "GAP-8", "GAP-10", "GAP-11")
@pytest.mark.parametrize("model", [m for m in MODELS if m.theory in EXACT], ids=lambda model: model.name)
def test_version_1_misses_what_was_counted_and_version_2_nothing(model, block):
    result = run_model(model, 0, 20_000, block)
    assert result.meets_theory
    assert result.rate("version 2").misses == 0
    assert result.rate("version 2").samples > 15_000 or model.width(block) > 8


@pytest.mark.parametrize(("misses", "samples"), [(0, 10), (3, 10), (10, 10), (50, 100_000)])
def test_the_interval_is_where_the_tails_are(misses, samples):
    from scipy.stats import binom

    low, high = clopper_pearson(misses, samples)
    assert low == 0 if misses == 0 else binom.sf(misses - 1, samples, low) == pytest.approx(0.0005)
    assert high == 1 if misses == samples else binom.cdf(misses, samples, high) == pytest.approx(0.0005)


def test_an_interval_of_nothing_is_refused():
    with pytest.raises(ValueError, match="3 of 2 is no rate"):
        clopper_pearson(3, 2)


@pytest.mark.parametrize("seed", range(5))
def test_cancelling_pairs_are_counted(seed):
    values = np.random.default_rng(seed).integers(-3, 4, 40)
    expected = sum((a + b) % MOD == 0 for a, b in itertools.combinations(values.tolist(), 2))
    assert count_cancelling(values.astype(np.int64).view(np.uint64)) == expected
    own_opposites = np.array([2**63, 2**63, 2**63, 5, MOD - 5], dtype=np.uint64)
    assert count_cancelling(own_opposites) == 4


@pytest.mark.req("GAP-8")
def test_all_pairs_of_bit_63(block):
    first, second = all_pairs_of_bit_63(block, 1)
    assert first.cancelling == first.pairs == block.size * (block.size - 1) // 2
    assert second.cancelling == 0


def test_many_pairs_are_of_both_mixes():
    counts = many_pairs(2000, 1)
    assert [count.what.rpartition(", ")[2] for count in counts] == ["version 2"] * 2 + ["with two rounds"] * 2
    assert [count.cancelling for count in counts] == [0] * 4


def test_a_campaign_is_the_same_twice_and_without_surprises():
    small = Block(2, 2, 4, 4)
    once, again = (collect(4, 1000, small, [run() for _, run in steps(4, 1000, small)]) for _ in range(2))
    assert once == again
    assert once.surprises == []


def test_what_must_not_come_out_is_a_surprise():
    small = Block(1, 2, 2, 2)
    seen = [Rate("version 1", 1, 1000, 0.0, 0.01), Rate("version 2", 1, 1000, 0.0, 0.01)]
    off = ModelResult("2 bit flips", 0.5, True, tuple(seen))
    found = collect(0, 1000, small, [off, all_pairs_of_bit_63(small, 0)]).surprises
    assert found == ["2 bit flips: version 1 is not what was counted", "2 bit flips: version 2 missed one"]
