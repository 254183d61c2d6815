from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from engine.core import EngineCore
from engine.errors import StartupError
from engine.kv_manager import KVManager
from faults.bit_flip import BitFlip
from harness.history import History, Line, dump_line, find_all
from harness.judge import judge
from harness.observe import observe
from harness.oracles.kv_bytes import BytesOracle
from harness.plan import Cell, plan_cells
from harness.targets import TARGETS
from reports.results import CellResult
from scenarios.words import Outcome, Policy, Result

SIM = TARGETS["sim"]
Make = Callable[..., Any]


@pytest.fixture
def cell(scenario_of: Make) -> Callable[..., Cell]:
    def make(policy: Policy = Policy.FAIL_OPEN, seed: int = 1, **changes: Any) -> Cell:
        return plan_cells([scenario_of(**changes)], [policy], seed, SIM.provides)[0]

    return make


def run(cell: Cell) -> list[Line]:
    history = History()
    SIM.run(cell, history)
    return history.lines


def judged(cell: Cell) -> CellResult:
    return judge(observe(run(cell)), "")


def test_a_history_begins_with_its_cell_and_ends_with_its_end(cell: Make) -> None:
    first, *_, last = run(cell())
    assert (first["event"], first["id"], first["target"]) == ("cell", "flip--fail_open", "sim")
    assert (last["event"], last["finished"], last["held"]) == ("end", True, [])


def test_a_cell_that_does_not_apply_is_not_run(cell: Make) -> None:
    drop = {"kind": "drop_checksums", "when": {"load": 1}}
    lines = run(cell(Policy.OFF, faults=[drop]))
    assert len(lines) == 1
    assert judge(observe(lines), "").result is Result.NOT_APPLICABLE


def test_the_same_cell_gives_the_same_lines_and_another_seed_others(cell: Make) -> None:
    assert run(cell()) == run(cell())
    assert run(cell(seed=2)) != run(cell())


def test_a_history_holds_no_time_path_address_pid_or_kv(cell: Make) -> None:
    for line in run(cell(seed=5)):
        text = dump_line(line)
        assert not re.search(r"0x[0-9a-f]{6,}|/(?:tmp|usr|home)/|[0-9]{4}-[0-9]{2}-[0-9]{2}", text), text
        assert not any(len(word) > 64 for word in re.findall(r"[0-9a-f]+", text)), text
        assert json.loads(text) == line
    fields = {name for line in run(cell()) for name in line}
    assert not fields & {"time", "wall", "pid", "path", "seconds", "host"}


# ---- whose fault is it


def raising(*args: Any) -> None:
    raise ZeroDivisionError("planted")


@pytest.mark.parametrize(
    ("owner", "name", "where"),
    [
        (BytesOracle, "_load_finished", "consumer.load_finished"),
        (BytesOracle, "_kv_final", "producer.kv_final"),
        (BitFlip, "_choose", "consumer.load_finished"),
    ],
)
def test_a_broken_oracle_or_fault_makes_the_cell_unknown(
    cell: Make, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, where: str
) -> None:
    monkeypatch.setattr(owner, name, raising)
    result = judged(cell())
    assert result.result is Result.UNKNOWN
    assert re.search(rf"a checker crashed: .* at {where}: ZeroDivisionError: planted", result.why[0])


def test_a_broken_oracle_outside_of_seams_makes_the_cell_unknown(cell: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.oracles.bookkeeping.BookkeepingOracle.finish", raising)
    with pytest.raises(ZeroDivisionError):
        run(cell())  # the runner writes it down: tests/harness/test_runner.py


def test_an_engine_that_raises_fails_the_cell(cell: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    original = EngineCore.collect

    def collect(self: EngineCore) -> None:
        if self.config.engine_id == "consumer":
            raise ZeroDivisionError("planted")
        original(self)

    monkeypatch.setattr(EngineCore, "collect", collect)
    lines = run(cell(Policy.OFF, faults=None, expect={"off": {"verdict": "not_checked"}}, policies=["off"]))
    assert find_all(lines, "engine.crashed") == [{"event": "engine.crashed", "error": "ZeroDivisionError: planted"}]
    result = judge(observe(lines), "")
    assert {load.outcome for load in result.loads} == {Outcome.CRASHED}
    clean = {"off": {"verdict": "not_checked", "outcome": "served"}}
    assert judged(cell(Policy.OFF, faults=None, expect=clean, policies=["off"])).result is Result.FAIL


def test_an_engine_that_refuses_to_start_is_refused(cell: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise StartupError("engine producer: no")

    monkeypatch.setattr("harness.targets.sim.SimWorld", refuse)
    expect = {"off": {"verdict": "no_load", "outcome": "refused"}}
    result = judged(cell(Policy.OFF, faults=None, expect=expect, policies=["off"]))
    assert result.result is Result.PASS
    assert {(load.outcome, load.error) for load in result.loads} == {(Outcome.REFUSED, "engine producer: no")}


def test_an_engine_that_does_nothing_hangs(cell: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.targets.sim_world.deadline_of", lambda topology, prompts: 60)
    result = judged(cell())
    assert {load.outcome for load in result.loads} == {Outcome.HUNG}
    lines = run(cell(Policy.OFF, faults=None, expect={"off": {"verdict": "not_checked"}}, policies=["off"]))
    hung = judge(observe(lines), "")
    assert hung.result is Result.FAIL
    assert any(violation.startswith("no_progress") for violation in hung.violations)


def test_a_leak_is_found(cell: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    original = KVManager.free

    def free(self: KVManager, request_id: str, block_ids: list[int], last_step: int) -> None:
        original(self, request_id, block_ids[1:], last_step)

    monkeypatch.setattr(KVManager, "free", free)
    result = judged(cell())
    assert result.result is Result.FAIL
    assert sum(violation.startswith("leak: 2 of 63 blocks of the") for violation in result.violations) == 2
