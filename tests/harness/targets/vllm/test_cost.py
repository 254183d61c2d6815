"""The cost study: what it sends, in which order, with which policy, and what it says of times that are known."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.overhead.rows import RowsFile, read_rows
from harness.targets.vllm import cost
from harness.targets.vllm.cost import CostStudy, told
from harness.targets.vllm.target import VLLMTarget


@pytest.fixture
def study(target: VLLMTarget, world: Any, tmp_path: Path) -> Iterator[CostStudy]:
    pair = target._make_pair(None)  # type: ignore[arg-type]
    with RowsFile(tmp_path / "rows.csv") as rows:
        yield CostStudy(pair, rows, 64, seed=3)
    pair.stop()


def test_blocks_are_abba_with_one_prompt_each(study: CostStudy, world: Any, tmp_path: Path) -> None:
    found = study.run(8)
    assert found.blocks == 8
    rows = read_rows(tmp_path / "rows.csv")
    assert len(rows) == 4 * (8 + 2)
    first = [row for row in rows if row.block == 0]
    assert "".join(row.arm for row in first) == "ABBA"
    assert len({row.prompt_id for row in first}) == 1
    assert not any(row.error for row in rows)


def test_each_request_meets_the_policy_of_its_arm_and_empty_caches(study: CostStudy, world: Any) -> None:
    study.run(8)
    policies = [arguments["mode"] for role, name, arguments in world.commands if (role, name) == ("consumer", "policy")]
    assert policies[8:16] == ["off", "enforce", "enforce", "off", "enforce", "off", "off", "enforce"]
    names = [name for role, name, _ in world.commands if role == "consumer"]
    assert names.count("reset") == 40
    assert names.count("generate") == 40 + 1  # the two have met


def test_nobody_watches_what_is_timed(study: CostStudy, world: Any) -> None:
    study.run(8)
    requests = [r for _, name, arguments in world.commands if name == "generate" for r in arguments["requests"]]
    assert requests
    assert not any(request["follow"] for request in requests)


def test_times_that_differ_by_a_tenth_are_told_so(study: CostStudy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock moves by what the arm costs: 10 ms without checksums, 11 ms with."""
    now = [0.0]
    monkeypatch.setattr(cost.time, "monotonic", lambda: now[0])
    ask = study._ask

    def slow(side: str, *arguments: Any) -> Any:
        mode = study._pair._roles["consumer"]._mode  # type: ignore[attr-defined]
        now[0] += 0.0055 if mode == "enforce" else 0.005
        return ask(side, *arguments)

    monkeypatch.setattr(study, "_ask", slow)
    found = study.run(10)
    assert found.diff_s == pytest.approx(0.001)
    assert found.relative == pytest.approx(0.1)
    text = told(found)
    assert "difference +1.00 ms" in text
    assert "overhead" in text.lower()
