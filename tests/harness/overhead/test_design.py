"""The design: which arm comes when, and on which prompts."""

from __future__ import annotations

from typing import Any

import pytest

from harness.errors import PlanError
from harness.overhead.design import Cell, Design, Load, arms, prompt, prompt_id

CELL = Cell(40, Load.LOW)
DESIGN = Design(lengths=(40,))


@pytest.mark.parametrize(("block", "order"), [(0, "ABBA"), (1, "BAAB"), (2, "ABBA"), (7, "BAAB")])
def test_the_order_of_arms(block: int, order: str) -> None:
    assert "".join(arms(block)) == order


@pytest.mark.parametrize("block", [0, 1])
def test_a_steady_drift_cancels_in_a_block(block: int) -> None:
    """Slot n is n worse, whatever the arm: the difference of the arms is 0."""
    slots = dict(enumerate(arms(block)))
    assert sum(n for n, arm in slots.items() if arm == "A") == sum(n for n, arm in slots.items() if arm == "B")


def test_all_slots_of_a_block_send_the_same_prompts() -> None:
    assert len({tuple(prompt(DESIGN, CELL, 3, slot, 0)) for slot in range(4)}) == 1


def test_every_block_request_and_cell_has_prompts_of_its_own() -> None:
    other = Cell(40, Load.HIGH)
    places = [(cell, block, index) for cell in (CELL, other) for block in (-1, 0, 1) for index in (0, 1)]
    prompts = {tuple(prompt(DESIGN, cell, block, 0, index)) for cell, block, index in places}
    assert len(prompts) == len({prompt_id(*place) for place in places}) == len(places)
    assert {len(tokens) for tokens in prompts} == {40}


def test_prompts_come_from_the_seed_and_not_from_the_grid() -> None:
    more = Design(lengths=(40, 8000), loads=(Load.LOW,))
    assert prompt(DESIGN, CELL, 3, 0, 0) == prompt(more, CELL, 3, 0, 0)
    assert prompt(DESIGN, CELL, 3, 0, 0) != prompt(Design(lengths=(40,), seed=1), CELL, 3, 0, 0)


def test_unique_starts_leave_the_rest_and_the_length() -> None:
    design = Design(lengths=(40,), unique_starts=True)
    slots = [prompt(design, CELL, 3, slot, 0) for slot in range(4)]
    assert len({tuple(tokens[:4]) for tokens in slots}) == 4
    assert {tuple(tokens[4:]) for tokens in slots} == {tuple(prompt(DESIGN, CELL, 3, 0, 0)[4:])}


def test_the_grid() -> None:
    cells = [cell.id for cell in Design().cells]
    assert cells == ["1000tok-low", "1000tok-high", "8000tok-low", "8000tok-high"]
    assert [cell.id for cell in Design().high_cells] == ["1000tok-high", "8000tok-high"]
    assert [Design(high_requests=5).count(cell) for cell in Design().cells] == [1, 5, 1, 5]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"lengths": ()}, "no prompt length"),
        ({"loads": ()}, "no prompt length or no load"),
        ({"lengths": (4,)}, "a prompt of 4 tokens"),
        ({"lengths": (8189,)}, "8193 tokens of prompt and output: an engine holds 8192"),
        ({"margin": 0.0}, "a margin of 0"),
        ({"margin": 1.0}, "a margin of 1"),
        ({"margin": float("nan")}, "a margin of nan"),
        ({"utilisation": 1.0}, "queues grow"),
        ({"utilisation": float("nan")}, "queues grow"),
        ({"min_blocks": 1}, "takes 2 or more"),
        ({"max_blocks": 4}, "at most 4 blocks, but 8"),
    ],
)
def test_what_cannot_be_run(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(PlanError, match=why):
        Design(**changes)
