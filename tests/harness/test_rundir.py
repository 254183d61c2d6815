from __future__ import annotations

import json
import os
import shlex
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from engine.errors import InputError
from harness import rundir
from harness.errors import HistoryError
from harness.rundir import CELLS_DIR, MANIFEST_FILE, Options, create, point_latest, read_manifest, read_options
from scenarios.words import Policy

NOW = datetime(2031, 2, 3, 4, 5, 6, tzinfo=UTC)
OPTIONS = Options("smoke", "sim", 7, (Policy.OFF, Policy.FAIL_OPEN), {"a": "scenarios/a.yaml", "b": "my dir/b.yaml"})


def new_run(runs: Path, options: Options = OPTIONS, now: datetime = NOW) -> Path:
    return create(runs, options, ["a--off", "b--off"], "1/2", ["kvchaos", "run", "my dir"], now)


def test_a_run_has_a_folder_of_its_name_and_time(tmp_path: Path) -> None:
    run = new_run(tmp_path / "deep" / "runs")
    assert run == tmp_path / "deep" / "runs" / "smoke" / "2031-02-03T040506Z"
    assert [path.name for path in sorted(run.iterdir())] == [CELLS_DIR, MANIFEST_FILE]


def test_the_time_is_utc(tmp_path: Path) -> None:
    assert new_run(tmp_path, now=NOW.astimezone(timezone(timedelta(hours=9)))).name == "2031-02-03T040506Z"


def test_runs_of_the_same_second_do_not_meet(tmp_path: Path) -> None:
    names = [new_run(tmp_path).name for _ in range(4)]
    assert names == [f"2031-02-03T040506Z{suffix}" for suffix in ("", "-2", "-3", "-4")]


def test_after_a_thousand_runs_in_a_second_it_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "mkdir", _taken)
    with pytest.raises(InputError, match="thousand"):
        rundir._fresh(tmp_path, "x")


def _taken(self: Path, *args: Any, **kwargs: Any) -> None:
    raise FileExistsError


@pytest.mark.parametrize("inside", ["file/x", "file/x/y"])
def test_where_no_folder_can_be_made_it_says_so(tmp_path: Path, inside: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot keep runs here \(Not a directory\): choose another --runs-dir"):
        new_run(tmp_path / inside)


def test_where_nothing_may_be_written_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(InputError, match=r"cannot keep runs here \(Permission denied\)"):
        new_run(tmp_path)


def test_the_manifest_says_how_the_run_was_made(tmp_path: Path) -> None:
    manifest = json.loads((new_run(tmp_path) / MANIFEST_FILE).read_text())
    assert manifest["created"] == "2031-02-03T04:05:06+00:00"
    assert manifest["command"] == "kvchaos run 'my dir'"
    assert manifest["plan"] == ["a--off", "b--off"]
    assert manifest["shard"] == "1/2"
    assert manifest["options"]["seed"] == 7
    assert manifest["options"]["policies"] == ["off", "fail_open"]
    assert {"python", "kvchaos", "torch", "numpy"} <= set(manifest["versions"])


def test_options_and_plan_are_read_again(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    assert read_options(run) == OPTIONS
    assert read_manifest(run)["plan"] == ["a--off", "b--off"]


@pytest.mark.parametrize(
    "damage",
    [
        None,
        "",
        "{",
        "[]",
        "{}",
        "[" * 5000,
        {"options": None},
        {"options": {"policies": ["never"]}},
        {"options": {"name": 3}},
        {"options": {"seed": "7"}},
        {"options": {"seed": True}},
        {"options": {"sources": {"a": 1}}},
        {"options": {"sources": ["ab", "cd"]}},
        {"options": {"policies": "off"}},
        {"options": {"target": None}},
        {"options": {"provenance": 1}},
        {"plan": None},
        {"plan": "ab"},
        {"plan": [1]},
        {"shard": 3},
    ],
)
def test_a_damaged_manifest_is_refused(tmp_path: Path, damage: Any) -> None:
    run = new_run(tmp_path)
    path = run / MANIFEST_FILE
    if damage is None:
        path.unlink()
    elif isinstance(damage, str):
        path.write_text(damage)
    else:
        manifest = json.loads(path.read_text())
        for key, value in damage.items():
            manifest[key] = manifest[key] | value if isinstance(value, dict) else value
        path.write_text(json.dumps(manifest))
    with pytest.raises(HistoryError, match=r"manifest\.json: cannot be read"):
        read_options(run)


# ---- latest


def test_latest_is_a_relative_link_to_the_newest(tmp_path: Path) -> None:
    for _ in range(2):
        run = new_run(tmp_path)
        point_latest(tmp_path, run)
        assert not Path(os.readlink(tmp_path / "latest")).is_absolute()
        assert (tmp_path / "latest").resolve() == run.resolve()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "smoke"]


@pytest.mark.parametrize("target", ["gone", "latest", "smoke"])
def test_an_old_link_is_replaced_wherever_it_pointed(tmp_path: Path, target: str) -> None:
    (tmp_path / "latest").symlink_to(target)
    run = new_run(tmp_path)
    point_latest(tmp_path, run)
    assert (tmp_path / "latest").resolve() == run.resolve()


@pytest.mark.parametrize("folder", [True, False])
def test_what_is_no_link_is_left_alone(tmp_path: Path, folder: bool) -> None:
    latest = tmp_path / "latest"
    if folder:
        latest.mkdir()
        (latest / "mine").touch()
    else:
        latest.write_text("mine")
    point_latest(tmp_path, new_run(tmp_path))
    assert not latest.is_symlink()
    assert (latest / "mine").exists() if folder else latest.read_text() == "mine"


def test_where_links_cannot_be_made_the_run_is_no_worse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *args: Any, **kwargs: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    run = new_run(tmp_path)
    monkeypatch.setattr(Path, "symlink_to", refuse)
    point_latest(tmp_path, run)
    assert not (tmp_path / "latest").exists()


def test_a_run_called_latest_does_not_go_where_the_link_is(tmp_path: Path) -> None:
    """With `runs/latest` a link to another run, its folder would be made inside of that run."""
    point_latest(tmp_path, first := new_run(tmp_path))
    second = new_run(tmp_path, Options("latest", "sim", 0, (Policy.OFF,), {}))
    assert first not in second.parents
    assert (tmp_path / "latest").resolve() == first.resolve()
    point_latest(tmp_path, second)
    assert (tmp_path / "latest").resolve() == second.resolve()
    assert read_options(second).name == "latest"


# ---- rerun


def test_a_cell_is_run_again_from_its_own_file() -> None:
    command = shlex.split(OPTIONS.rerun("b", Policy.OFF))
    assert command == ["kvchaos", "run", "my dir/b.yaml", "--policy", "off", "--seed", "7", "--target", "sim"]


def test_what_changes_a_verdict_is_in_the_command() -> None:
    command = replace(OPTIONS, provenance=False).rerun("b", Policy.OFF, repeat=True)
    assert command.endswith("--target sim --repeat 100 --no-provenance")


def test_a_scenario_of_which_no_file_is_known_is_looked_for_in_all() -> None:
    command = shlex.split(OPTIONS.rerun("twin-0", Policy.OFF))
    assert command[2:4] == ["my dir/b.yaml", "scenarios/a.yaml"]


def test_a_file_whose_path_looks_like_an_option_is_no_option() -> None:
    options = Options("x", "sim", 0, (Policy.OFF,), {"a": "-d/a.yaml"})
    assert shlex.split(options.rerun("a", Policy.OFF))[2] == "./-d/a.yaml"


def test_a_rerun_on_vllm_names_its_environment_and_model_and_both_are_kept(tmp_path: Path) -> None:
    options = replace(OPTIONS, target="vllm", vllm_python="v env/bin/python", model="m")
    command = shlex.split(options.rerun("b", Policy.OFF))
    assert command[-4:] == ["--vllm-python", "v env/bin/python", "--model", "m"]
    assert read_options(new_run(tmp_path, options)) == options


def test_a_run_from_before_there_was_a_vllm_can_be_read() -> None:
    plain = {key: value for key, value in OPTIONS.to_plain().items() if key not in ("vllm_python", "model")}
    assert Options.from_plain(plain) == OPTIONS
    with pytest.raises(TypeError, match="is no path"):
        Options.from_plain({**plain, "model": 7})
