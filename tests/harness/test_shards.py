from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from engine.errors import InputError
from harness.plan import Cell, plan_cells
from harness.shards import REPEAT_SUFFIX, Shard, with_repeats
from harness.targets import TARGETS
from scenarios.words import Policy, Role


@pytest.fixture
def cells(scenario_of: Callable[..., Any]) -> list[Cell]:
    scenarios = [scenario_of(f"s{n}", workload={"requests": 2 + n}) for n in range(12)]
    return plan_cells(scenarios, list(Policy), 3, TARGETS["sim"].provides)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 1000])
def test_every_cell_is_in_one_shard(cells: list[Cell], count: int) -> None:
    held = [[cell for cell in cells if Shard(index, count).holds(cell)] for index in range(1, min(count, 50) + 1)]
    ids = [cell.id for part in held for cell in part]
    assert len(ids) == len(set(ids))
    if count < 50:
        assert set(ids) == {cell.id for cell in cells}
    if count in (2, 3):
        assert min(len(part) for part in held) > len(cells) / count / 2


def test_a_cell_stays_in_its_shard_whatever_else_is_planned(cells: list[Cell]) -> None:
    shard = Shard(2, 3)
    assert [cell.id for cell in reversed(cells) if shard.holds(cell)] == [c.id for c in cells if shard.holds(c)][::-1]
    for cell in cells:
        assert shard.holds(cell) == shard.holds(replace(cell, seed=0)) == shard.holds_id(cell.id)


def test_a_repeat_goes_with_what_it_repeats(cells: list[Cell]) -> None:
    for cell in with_repeats(cells, 100, 0):
        assert Shard(1, 4).holds(cell) == Shard(1, 4).holds_id(cell.id.removesuffix(REPEAT_SUFFIX))


@pytest.mark.parametrize(
    "text",
    ["", "1", "/", "1/", "/2", "0/2", "3/2", "-1/2", "1/0", "a/b", "1/2/3", " 1/2", "1.0/2", "\u0661/2", "\u00b2/3"],
)
def test_what_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"^--shard .*(use i/n|i runs from 1 to n)"):
        Shard.parse(text)


def test_a_shard_is_read_as_it_is_written() -> None:
    assert Shard.parse("2/5") == Shard(2, 5)
    assert str(Shard(2, 5)) == "2/5"


def test_repeats_are_the_cell_itself_under_another_name(cells: list[Cell]) -> None:
    every = with_repeats(cells, 100, 0)
    assert every[: len(cells)] == cells
    for cell, again in zip(cells, every[len(cells) :], strict=True):
        assert (again.id, again.role, again.repeats) == (f"{cell.id}--repeat", Role.REPEAT, cell.id)
        assert replace(again, id=cell.id, role=cell.role, repeats=None) == cell


def test_about_as_many_are_repeated_as_are_asked_for(cells: list[Cell]) -> None:
    assert with_repeats(cells, 0, 0) == cells
    some = with_repeats(cells, 50, 0)[len(cells) :]
    assert 0.25 < len(some) / len(cells) < 0.75
    assert with_repeats(cells, 50, 0)[len(cells) :] == some
    assert with_repeats(cells, 50, 1)[len(cells) :] != some


def test_what_is_not_run_is_not_repeated(scenario_of: Callable[..., Any]) -> None:
    drop = {"kind": "drop_checksums", "when": {"load": 1}}
    planned = plan_cells([scenario_of(faults=[drop])], [Policy.OFF], 0, TARGETS["sim"].provides)
    assert with_repeats(planned, 100, 0) == planned
