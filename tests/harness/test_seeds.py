from __future__ import annotations

import subprocess
import sys

import pytest

from harness.seeds import derive, short_hash


@pytest.mark.parametrize(
    ("parts", "seed"),
    [
        ((), 2858069222894195974),
        (("cell", 0, "stale-read", "off"), 1992302092087801313),
        ((7, 1), 843124892043230816),
        (({"b": [1, 2], "a": None},), 973133284253710471),
    ],
)
def test_a_seed_never_changes(parts: tuple, seed: int) -> None:
    """Whoever kept a seed of an old run must be able to run it again."""
    assert derive(*parts) == seed


def test_the_order_of_keys_does_not_count_and_that_of_parts_does() -> None:
    assert derive({"a": 1, "b": 2}) == derive({"b": 2, "a": 1})
    assert derive(1, 2) != derive(2, 1)
    assert derive("1") != derive(1)
    assert derive(12) != derive(1, 2)


def test_seeds_are_63_bits_that_differ() -> None:
    seeds = {derive("cell", n) for n in range(500)}
    assert len(seeds) == 500
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62


def test_a_short_hash_is_eight_digits_of_the_seed() -> None:
    assert short_hash("x") == f"{derive('x'):016x}"[-8:]
    assert all(len(short_hash(n)) == 8 for n in range(50))


def test_another_process_with_another_hash_seed_gives_the_same() -> None:
    code = "from harness.seeds import derive; print(derive('cell', 3, {'z': 1, 'y': ['x']}))"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": "12345"}, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == derive("cell", 3, {"z": 1, "y": ["x"]})
