"""The bench's bars are what they say, and a small run has every figure. No figure is judged here."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from engine.errors import InputError
from harness.bench.checksum import SIZES, Bar, Row, bars, run_bench
from harness.commands.bench import bench


@pytest.fixture(scope="module")
def small():
    told = []
    found = run_bench([65536], rounds=1, advance=told.append)
    assert told == ["65536 bytes", "payload", "growth"]
    return found


def rows(*speeds):
    """Rows of (shape, size, name, seconds)."""
    return [Row(shape, size, name, seconds) for shape, size, name, seconds in speeds]


def test_bars_are_ratios_of_speeds():
    large, middle = SIZES[2], SIZES[1]
    found = bars(
        rows(
            ("flat", large, "cpu", 2.0),
            ("flat", large, "xxh3_64", 1.9),
            ("flat", middle, "cpu", 3.0),
            ("flat", middle, "xxh3_64", 1.0),
            ("HND", large, "cpu", 4.0),
            ("HND", large, "torch", 16.0),
            ("NHD", large, "cpu", 3.0),
        ),
        {"decode and compare": 0.0005},
    )
    by_what = {bar.what: (bar.measured, bar.met) for bar in found}
    assert by_what["64 MiB flat: cpu / xxh3_64"] == (pytest.approx(0.95), True)
    assert by_what["1 MiB flat: cpu / xxh3_64"] == (pytest.approx(1 / 3), False)
    assert by_what["64 MiB paged HND: cpu / its flat"] == (pytest.approx(0.5), False)
    assert by_what["64 MiB paged NHD: cpu / its flat"] == (pytest.approx(2 / 3), True)
    assert by_what["64 MiB HND: cpu / torch"] == (pytest.approx(4), True)
    assert by_what["64 MiB NHD: cpu / torch"] == (None, None)
    assert by_what["1 MiB paged HND: cpu / its flat"] == (None, None)
    assert by_what["decode and compare 131,072 tokens, ms"] == (pytest.approx(0.5), True)


def test_a_payload_that_takes_a_millisecond_misses_its_bar():
    assert [bar.met for bar in bars([], {"decode and compare": 0.001})][-1] is False


def test_a_small_run_has_every_figure(small):
    plain = json.loads(json.dumps(small.as_json()))
    assert {(row["shape"], row["name"]) for row in plain["rows"]} >= {("flat", "cpu"), ("HND", "cpu"), ("NHD", "torch")}
    assert all(row["seconds"] is None if row["missing"] else row["gb_per_s"] > 0 for row in plain["rows"])
    assert set(plain["payload_s"]) == {"encode", "decode", "compare", "decode and compare"}
    assert len({(row["tokens"], row["layers"]) for row in plain["growth"]}) == 8
    assert plain["machine"]["processor"]


def test_sizes_are_whole_blocks():
    with pytest.raises(InputError, match=r"--size: sizes \[1000\] must be multiples of 65536"):
        CliRunner().invoke(bench, ["checksum", "--size", "1000"], catch_exceptions=False)


@pytest.fixture
def measured(small, monkeypatch):
    """What the command measures is the small run."""
    asked = []
    monkeypatch.setattr(
        "harness.commands.bench.bench_checksum.run_bench",
        lambda sizes, rounds, advance: asked.append((tuple(sizes), rounds)) or small,
    )
    return asked


def test_json_is_all_of_it(small, measured):
    result = CliRunner().invoke(bench, ["checksum", "--json", "--rounds", "3"], catch_exceptions=False)
    assert json.loads(result.stdout) == json.loads(json.dumps(small.as_json()))
    assert measured == [(SIZES, 3)]


def test_text_has_a_row_for_everybody_and_the_bars(small, measured):
    result = CliRunner().invoke(bench, ["checksum", "--size", "65536"], catch_exceptions=False)
    assert measured[0][0] == (65536,)
    assert result.exit_code == 0
    words = result.stdout
    for row in small.rows:
        assert row.name in words
    assert "64 MiB flat: cpu / xxh3_64" in words
    assert "not measured" in words
    assert "gpu-check" in words


@pytest.mark.parametrize(("mets", "exit_code"), [((True, True), 0), ((True, False), 1), ((True, None), 1)])
def test_check_exits_with_1_where_a_bar_is_missed_or_was_not_measured(small, monkeypatch, mets, exit_code):
    found = replace(small, bars=tuple(Bar("speed", ">= 1", None if met is None else 1.0, met) for met in mets))
    monkeypatch.setattr("harness.commands.bench.bench_checksum.run_bench", lambda *args: found)
    assert CliRunner().invoke(bench, ["checksum", "--check"]).exit_code == exit_code
