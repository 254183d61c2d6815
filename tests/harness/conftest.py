"""Scenarios to run, the command line as a function, and observations built by hand."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.checksum.verdict import VerdictStatus
from harness.cli import main
from harness.observe import CellObservation, KVView, RequestObservation
from reports.results import GroupCoverage
from scenarios.loader import parse_scenario
from scenarios.schema import Scenario
from scenarios.words import Outcome, Policy, Role

CLEAN = {
    "off": {"verdict": "not_checked", "outcome": "served", "truth": "intact", "tokens": "right"},
    "fail_open": {"verdict": "verified", "outcome": "served", "truth": "intact", "tokens": "right"},
}
FLIP = {"kind": "bit_flip", "when": {"load": 2, "at": "before_verify"}}
FLIPPED = {
    "off": {"verdict": "not_checked", "outcome": "served", "truth": "corrupted"},
    "fail_open": {"verdict": "mismatch", "outcome": "served", "truth": "corrupted"},
}
SMALL = {"requests": 2, "prompt_tokens": [20, 40], "output_tokens": 3}


def scenario_plain(name: str = "flip", **changes: Any) -> dict[str, Any]:
    """A small scenario as its file says it: one bit flips, under two policies."""
    plain = {
        "schema_version": 1,
        "name": name,
        "summary": f"The scenario {name} of a test.",
        "policies": ["off", "fail_open"],
        "workload": SMALL,
        "faults": [FLIP],
        "expect": FLIPPED,
    } | changes
    return {key: value for key, value in plain.items() if value is not None}


@pytest.fixture(scope="session")
def clean() -> dict[str, Any]:
    """Changes that make the small scenario one without a fault."""
    return {"faults": None, "expect": CLEAN}


@pytest.fixture(scope="session")
def scenario_of() -> Callable[..., Scenario]:
    """The small scenario, with changes."""

    def make(name: str = "flip", **changes: Any) -> Scenario:
        return parse_scenario(json.dumps(scenario_plain(name, **changes)))

    return make


@pytest.fixture
def write_scenario(tmp_path: Path) -> Callable[..., Path]:
    """The small scenario, with changes, as a file of its name (JSON is YAML)."""

    def write(name: str = "flip", folder: str | Path = "scenarios", **changes: Any) -> Path:
        path = tmp_path / folder / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(scenario_plain(name, **changes)), encoding="utf-8")
        return path

    return write


@dataclass(frozen=True)
class Done:
    """What a command left. `code` is the exit code."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def kvchaos(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Done]:
    """The command `kvchaos`, in this process, in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["kvchaos", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = capsys.readouterr()
        assert isinstance(stopped.value.code, int)
        return Done(stopped.value.code, captured.out, captured.err)

    return run


# ---- observations by hand: three blocks of 16 tokens, 45 of them prompt


@pytest.fixture(scope="session")
def view_of() -> Callable[..., KVView]:
    """Digests by name: the same name is the same bytes. Sums follow the digests unless they are given."""

    def make(digests: str = "a b c", sums: str | None = None, start: int = 0, grid: int = 16) -> KVView:
        names = tuple(digests.split())
        return KVView(grid, start, names, names if sums is None else tuple(sums.split()))

    return make


@pytest.fixture(scope="session")
def load_of(view_of: Callable[..., KVView]) -> Callable[..., RequestObservation]:
    """A request that was served from a verified load of the right bytes, with changes."""

    def make(load: int = 1, **changes: Any) -> RequestObservation:
        verdict = VerdictStatus(changes.pop("verdict", "verified"))
        compared = tuple(changes.pop("compared", (0, 1, 2) if verdict in ("verified", "mismatch") else ()))
        rest = tuple(p for p in (0, 1, 2) if p not in compared)
        group = GroupCoverage(0, verdict, None, (0, 1, 2), compared, rest, ())
        fields: dict[str, Any] = {
            "load": load,
            "request_id": f"r{load}",
            "block_size": 16,
            "num_prompt_tokens": 45,
            "outcome": Outcome.SERVED,
            "error": None,
            "verdict": verdict,
            "reason": None,
            "groups": (group,),
            "tokens": (5, 6, 7),
            "wanted": (5, 6, 7),
            "kv_final": view_of(),
            "checksummed": view_of(),
            "load_finished": view_of(),
            "to_be_read": view_of("a b c-"),
            "first_use": view_of("a b c-"),
            "foreign": (),
            "landed": (0, 1, 2),
            "checksums_altered": False,
            "damage": None,
            "hypotheses": (),
        }
        return RequestObservation(**(fields | changes))

    return make


@pytest.fixture(scope="session")
def cell_of(scenario_of: Callable[..., Scenario]) -> Callable[..., CellObservation]:
    """A cell of the small scenario that ran to its end with its evidence, with changes."""

    def make(
        *requests: RequestObservation,
        policy: str = "fail_open",
        scenario: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> CellObservation:
        fields: dict[str, Any] = {
            "id": f"flip--{policy}",
            "target": "sim",
            "scenario": scenario_of(**(scenario or {})),
            "policy": Policy(policy),
            "role": Role.FAULT,
            "seed": 1,
            "twin": None,
            "missing": (),
            "repeats": None,
            "provenance": True,
            "requests": requests,
            "evidence": (),
            "undone": (),
            "violations": (),
            "problems": (),
        }
        return CellObservation(**(fields | changes))

    return make
