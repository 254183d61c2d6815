"""The exactness claim: sums of what the engine sums are those of integers, in any order, also at the extremes."""

import math
import random
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.config import PRESETS
from engine.numerics import (
    ACTIVATION_LIMIT,
    ACTIVATION_SCALE,
    MAX_CONTEXT,
    WEIGHT_LIMIT,
    WEIGHT_SCALE,
    exp_negative,
    exp_table,
    quantize_,
    quantize_weights,
    rms_norm,
)

ACTIVATION_MAX = int(ACTIVATION_LIMIT * ACTIVATION_SCALE)
WEIGHT_MAX = int(WEIGHT_LIMIT * WEIGHT_SCALE)
PROBABILITY_SCALE = 2**18
WIDEST = max(max(c.hidden_size, c.num_heads * c.head_dim, c.mlp_size) for c in PRESETS.values())
TABLE = exp_table("cpu")


def integers(seed, shape, largest, kind):
    """int64 numerators: random, or as large as they get."""
    rng = np.random.default_rng(seed)
    if kind == "random":
        return rng.integers(-largest, largest + 1, shape)
    return np.full(shape, largest) if kind == "largest" else rng.choice([-largest, largest], shape)


def exact_product(a, b):
    """a @ b in Python's integers, which never round."""
    return a.astype(object) @ b.astype(object)


def as_integers(x, scale):
    """The numerators of a float64 array over `scale`; every one must be whole."""
    return [[int(Fraction(float(value)) * scale) for value in row] for row in x]


KINDS = pytest.mark.parametrize("kind", ["random", "largest", "mixed"])


@KINDS
@pytest.mark.parametrize("width", [1, 64, WIDEST])
def test_activations_times_weights_are_exact_in_any_order(kind, width):
    a, w = integers(1, (3, width), ACTIVATION_MAX, kind), integers(2, (width, 5), WEIGHT_MAX, kind)
    x, y = torch.from_numpy(a / ACTIVATION_SCALE), torch.from_numpy(w / WEIGHT_SCALE)
    product = x @ y
    assert as_integers(product, int(ACTIVATION_SCALE * WEIGHT_SCALE)) == exact_product(a, w).tolist()
    order = torch.from_numpy(np.random.default_rng(3).permutation(width))
    assert torch.equal(x[:, order] @ y[order], product)
    assert torch.equal(torch.stack([x[row] @ y for row in range(3)]), product)
    assert torch.equal(x[:, : width // 2] @ y[: width // 2] + x[:, width // 2 :] @ y[width // 2 :], product)


@KINDS
def test_scores_are_exact(kind):
    dim = max(config.head_dim for config in PRESETS.values())
    q, k = integers(4, (7, dim), ACTIVATION_MAX, kind), integers(5, (dim, 9), ACTIVATION_MAX, kind)
    product = torch.from_numpy(q / ACTIVATION_SCALE) @ torch.from_numpy(k / ACTIVATION_SCALE)
    assert as_integers(product, int(ACTIVATION_SCALE**2)) == exact_product(q, k).tolist()


@KINDS
def test_the_widest_sum_is_exact(kind):
    """Attention over the longest context: probabilities times values."""
    p = np.abs(integers(6, (2, MAX_CONTEXT), PROBABILITY_SCALE, kind))
    v = integers(7, (MAX_CONTEXT, 3), ACTIVATION_MAX, kind)
    x, y = torch.from_numpy(p / PROBABILITY_SCALE), torch.from_numpy(v / ACTIVATION_SCALE)
    assert as_integers(x @ y, int(PROBABILITY_SCALE * ACTIVATION_SCALE)) == exact_product(p, v).tolist()
    order = torch.from_numpy(np.random.default_rng(8).permutation(MAX_CONTEXT))
    assert torch.equal(x[:, order] @ y[order], x @ y)


def test_without_the_grid_the_order_would_show():
    """The control: these tests can see an order."""
    rng = np.random.default_rng(9)
    x, y = torch.from_numpy(rng.standard_normal((3, WIDEST))), torch.from_numpy(rng.standard_normal((WIDEST, 5)))
    order = torch.from_numpy(rng.permutation(WIDEST))
    assert not torch.equal(x[:, order] @ y[order], x @ y)


@given(st.floats(allow_nan=False, allow_infinity=False, width=32))
def test_quantize_rounds_to_the_nearest_multiple_and_ties_to_even(value):
    wanted = Fraction(round(Fraction(value) * int(ACTIVATION_SCALE)), int(ACTIVATION_SCALE))
    wanted = min(max(wanted, -Fraction(ACTIVATION_LIMIT)), Fraction(ACTIVATION_LIMIT))
    assert Fraction(float(quantize_(torch.tensor([value], dtype=torch.float64)))) == wanted


def test_quantize_takes_whatever_a_fault_leaves():
    x = quantize_(torch.tensor([math.nan, math.inf, -math.inf, 1e300], dtype=torch.float64))
    assert x.tolist() == [0.0, ACTIVATION_LIMIT, -ACTIVATION_LIMIT, ACTIVATION_LIMIT]


def test_quantize_works_in_place():
    x = torch.tensor([1 / 3], dtype=torch.float64)
    assert quantize_(x) is x


def test_weights_are_on_their_grid():
    weights = quantize_weights(np.random.default_rng(0).standard_normal((40, 30)) * 2, "cpu")
    assert weights.abs().max() == WEIGHT_LIMIT
    numerators = weights * WEIGHT_SCALE
    assert torch.equal(numerators, numerators.round())


def test_the_table_is_exp_rounded():
    rng = random.Random(0)
    for i in [0, 1, 2**16 - 1, *(rng.randrange(2**16) for _ in range(300))]:
        exact = (Decimal(-i) / 4096).exp() * PROBABILITY_SCALE
        assert int(TABLE[i] * PROBABILITY_SCALE) == int(exact.to_integral_value()), i
    assert torch.all(TABLE[1:] <= TABLE[:-1])


def test_exp_negative_takes_the_nearest_entry():
    t = torch.tensor([0.0, 1.0, 1.0 + 0.4 / 4096, 1.0 + 0.6 / 4096, 15.99, 1e9], dtype=torch.float64)
    wanted = TABLE[torch.tensor([0, 4096, 4096, 4097, 65495, 65535])]
    assert torch.equal(exp_negative(t, TABLE), wanted)


def test_exp_negative_of_nan_and_infinity_is_the_smallest_entry():
    t = torch.tensor([math.nan, math.inf], dtype=torch.float64)
    assert exp_negative(t, TABLE).tolist() == [float(TABLE[-1])] * 2


@pytest.mark.parametrize("width", [64, 128])
def test_rms_norm_rounds_once_an_operation(width):
    """The mean square is exact up to its last addition; then follow single IEEE operations, here Python's."""
    rows = integers(10, (5, width), ACTIVATION_MAX, "random")
    rows[1] = 0
    normed = rms_norm(torch.from_numpy(rows / ACTIVATION_SCALE))
    for row, got in zip(rows.tolist(), normed.tolist(), strict=True):
        mean = Fraction(sum(x * x for x in row), width) / int(ACTIVATION_SCALE) ** 2
        assert Fraction(float(mean)) == mean
        root = math.sqrt(float(mean) + 2.0**-20)
        quotients = torch.tensor([x / ACTIVATION_SCALE / root for x in row], dtype=torch.float64)
        assert got == quantize_(quotients).tolist()
