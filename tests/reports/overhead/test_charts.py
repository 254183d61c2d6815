"""The pictures: what is where, what is cut, and what is said to who cannot see it. Positions are computed by hand."""

from __future__ import annotations

import math
import re

import pytest

from reports.overhead.axes import Scale, quantile, scale_over, tick_text
from reports.overhead.curves import ecdf, quantiles, timeline
from reports.overhead.forest import forest
from reports.overhead.results import OverheadVerdict, Sample, StageCost
from reports.overhead.waterfall import waterfall

EQUIVALENT, OVERHEAD, INCONCLUSIVE = OverheadVerdict


def paths(drawing, cls):
    return [line.d for line in drawing.lines if line.cls == cls]


def numbers(path):
    return [float(n) for n in re.findall(r"-?\d+(?:\.\d+)?", path)]


def test_a_scale_is_linear_and_has_round_ticks():
    scale = Scale(0, 10, 100, 200)
    assert [scale.at(v) for v in (-5, 0, 2.5, 10, 99)] == [100, 100, 125, 200, 200]
    assert scale.ticks(5) == [0, 2, 4, 6, 8, 10]
    assert Scale(-0.013, 0.021, 0, 1).ticks(4) == pytest.approx([-0.01, 0, 0.01, 0.02])
    assert Scale(-0.0, 3, 0, 1).holds(3)


@pytest.mark.parametrize("values", [[], [5.0], [0.0, 0.0], [1e-9, 1e9], [-3.0]])
def test_any_values_get_a_scale_of_some_width(values):
    for from_zero in (False, True):
        scale = scale_over(values, 0, 100, from_zero=from_zero)
        assert scale.low < scale.high
        assert all(scale.holds(value) for value in values)
        assert not from_zero or scale.holds(0)


def test_ticks_have_the_digits_that_tell_them_apart():
    assert [tick_text(t, [0, 0.005], 100, "%") for t in (0, 0.005, -0.01)] == ["0.0%", "0.5%", "-1.0%"]
    assert tick_text(2, [0, 2], 1, " s") == "2 s"


def test_a_quantile_is_an_order_statistic():
    assert [quantile([1, 2, 3, 4], share) for share in (0.01, 0.25, 0.5, 0.99)] == [1, 1, 2, 4]


def test_the_forest_shows_interval_and_margin_on_one_scale(make):
    drawing = forest([make.estimate("c", EQUIVALENT, -0.002, 0.004)])
    left, right = numbers(paths(drawing, "band")[0])[0], numbers(paths(drawing, "band")[0])[2]
    zero = numbers(paths(drawing, "zero")[0])[0]
    assert right - zero == pytest.approx(zero - left, abs=0.2)
    low, _, high = numbers(paths(drawing, "whisker v-equivalent")[0])
    assert (low - zero, high - zero) == pytest.approx((-0.2 * (right - zero), 0.4 * (right - zero)), abs=0.2)
    assert "c: +0.10%, interval -0.20% to +0.40%, margin +1.00%, EQUIVALENT." in drawing.words


def test_an_unbounded_interval_ends_in_an_arrow_at_the_edge(make):
    drawing = forest([make.estimate("c", INCONCLUSIVE, -0.01, math.inf)])
    ends = paths(drawing, "whisker v-inconclusive")[1]
    assert ends.count("L") == 2
    assert "unbounded" in drawing.words
    assert all(math.isfinite(n) for line in drawing.lines for n in numbers(line.d))
    assert forest([]).lines


def test_the_ecdf_ends_at_the_share_that_was_answered():
    a = Sample("off", (0.0, 1.0, 2.0, 3.0), (0.1, 0.2, 0.3, 0.4))
    b = Sample("on", (0.0, 1.0), (0.1, 0.4), (2.0, 3.0))
    drawing = ecdf(a, b)
    ends = {cls: [float(y) for y in re.findall(r"V([\d.]+)", paths(drawing, cls)[0])] for cls in "ab"}
    bottom, top = 250, 34
    assert ends["a"] == pytest.approx([bottom - (bottom - top) * k / 4 for k in (1, 2, 3, 4)], abs=0.1)
    assert ends["b"] == pytest.approx([bottom - (bottom - top) * k / 4 for k in (1, 2)], abs=0.1)
    assert "Median of A 200 ms, of B 100 ms" in drawing.words
    assert quantiles(b)[-1] == math.inf
    assert quantiles(Sample("none", (), ())) == ()


def test_slow_requests_are_cut_and_counted():
    times = tuple([0.1 + 0.001 * n for n in range(199)] + [50.0])
    a = Sample("off", tuple(map(float, range(200))), times)
    b = Sample("on", (), (), (3.0,))
    assert any("1 slower request not drawn" in label.text for label in ecdf(a, b).labels)
    drawing = timeline(a, b)
    assert any("1 slower request at the upper edge" in label.text for label in drawing.labels)
    assert len(re.findall("M", paths(drawing, "dot-a")[0])) == 200
    assert len(re.findall("M", paths(drawing, "cross-b")[0])) == 1
    assert "1 failed request." in drawing.words


def test_very_many_requests_are_thinned_and_the_curve_still_reaches_its_end():
    n = 20_000
    many = Sample("off", tuple(map(float, range(n))), tuple(1 + k / n for k in range(n)))
    assert len(re.findall("M", paths(timeline(many, many), "dot-a")[0])) <= 1500
    path = paths(ecdf(many, many), "a")[0]
    assert path.count("V") <= 700
    assert float(re.findall(r"V([\d.]+)", path)[-1]) == 34


def test_a_timeline_says_how_the_halves_differ():
    drifting = Sample("off", tuple(map(float, range(10))), tuple(0.1 * (n + 1) for n in range(10)))
    assert "off: median 300 ms in the first half, 800 ms in the second." in timeline(drifting, drifting).words
    alone = Sample("on", (0.0,), (1.0,))
    assert "on: 1 answered request." in timeline(alone, alone).words


def test_bars_of_the_waterfall_begin_where_the_one_before_ended(make):
    found = make.estimate("c", OVERHEAD, 0.02, 0.03)
    drawing = waterfall([StageCost("one", 0.002), StageCost("two", 0.004), StageCost("three", -0.001)], found)
    bars = [numbers(d) for d in paths(drawing, "bar")]
    (total,) = [numbers(d) for d in paths(drawing, "bar total")]
    starts, ends = [bar[0] for bar in bars], [bar[2] for bar in bars]
    assert starts[1:] == ends[:-1]
    zero = numbers(paths(drawing, "zero")[0])[0]
    assert (starts[0], total[0], total[2]) == (zero, zero, ends[-1])
    assert ends[1] - zero == pytest.approx(3 * (ends[0] - zero), abs=0.3)
    low, _, high = numbers(paths(drawing, "whisker")[-1])[:3]
    assert (low - zero) / (ends[0] - zero) == pytest.approx(0.004 / 0.002, abs=0.02)
    assert (high - zero) / (ends[0] - zero) == pytest.approx(0.006 / 0.002, abs=0.02)
    assert "sum of the stages: +5.00 ms." in drawing.words
    assert "measured difference: +5.00 ms (+4.00 ms to +6.00 ms)." in drawing.words
