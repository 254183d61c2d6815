from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

Run = Callable[..., Any]
Write = Callable[..., Path]
REUSE = {"kind": "early_reuse", "when": {"load": 1, "at": "before_read"}}
WORKLOAD = {"requests": 2, "prompt_tokens": [20, 40], "output_tokens": 3, "competitors": 1}


def cells(done: Any) -> dict[str, Any]:
    return {cell["id"]: cell for cell in done.json["cells"]}


def without_rerun(cell: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in cell.items() if name != "rerun"}


def test_what_a_run_leaves(kvchaos: Run, write_scenario: Write) -> None:
    done = kvchaos("run", write_scenario(), "--seed", "5", "--json")
    run_dir = Path(done.json["run_dir"])
    assert re.fullmatch(r"runs/flip/\d{4}-\d\d-\d\dT\d{6}Z", str(run_dir))
    assert Path("runs/latest").resolve() == run_dir.resolve()
    assert sorted(path.name for path in run_dir.iterdir()) == [
        "cells", "history.jsonl", "junit.xml", "manifest.json", "report.html", "results.json", "summary.md",
        "timing.jsonl",
    ]  # fmt: skip
    assert sorted(path.name for path in (run_dir / "cells").iterdir()) == sorted(cells(done))
    assert not [path for path in Path("runs").rglob("*") if ".tmp" in path.name]
    manifest = json.loads((run_dir / "manifest.json").read_text())
    assert manifest["plan"] == list(cells(done))
    assert manifest["options"]["seed"] == done.json["seed"] == 5
    suite = ElementTree.parse(run_dir / "junit.xml").getroot()
    assert len(list(suite.iter("testcase"))) == 4
    html = (run_dir / "report.html").read_text()
    assert "<html" in html
    assert "flip" in html


def test_a_run_is_named_after_its_first_path(kvchaos: Run, write_scenario: Write, tmp_path: Path) -> None:
    one = write_scenario("one")
    two = write_scenario("two", "other folder")
    for path, name in ((one, "one"), (two.parent, "other folder"), (tmp_path / "scenarios" / "..", tmp_path.name)):
        done = kvchaos("run", path, two, "--policy", "off", "--json")
        assert Path(done.json["run_dir"]).parent.name == name
        assert done.json["name"] == name


def test_a_file_that_is_given_twice_is_run_once(kvchaos: Run, write_scenario: Write) -> None:
    path = write_scenario()
    done = kvchaos("run", path, path, path.parent, "--policy", "off", "--json")
    assert len(done.json["cells"]) == 2


def test_only_the_policies_that_are_asked_for(kvchaos: Run, write_scenario: Write) -> None:
    done = kvchaos("run", write_scenario(), "--policy", "fail_open", "--policy", "fail_open", "--json")
    assert {cell["policy"] for cell in done.json["cells"]} == {"fail_open"}
    assert len(done.json["cells"]) == 2


def test_the_same_seed_gives_the_same_history_and_another_another(kvchaos: Run, write_scenario: Write) -> None:
    path = write_scenario()

    def history(*arguments: object) -> bytes:
        return (Path(kvchaos("run", path, "--json", *arguments).json["run_dir"]) / "history.jsonl").read_bytes()

    first = history("--seed", 7)
    assert history("--seed", 7) == first
    assert history("--seed", 7, "--jobs", 2) == first
    assert history("--seed", 8) != first


def test_each_rerun_command_gives_its_cell_again(kvchaos: Run, write_scenario: Write, clean: dict[str, Any]) -> None:
    """Also a twin's, which runs one of the scenarios that share it, and a repeat's."""
    write_scenario("reuse", faults=[REUSE], workload=WORKLOAD)
    write_scenario("same-twin", faults=[{"kind": "bit_flip", "when": {"load": 2, "at": "before_verify"}, "flips": 3}])
    write_scenario("clean", "scenarios/deep er", **clean)
    write_scenario("flip")
    whole = cells(kvchaos("run", "scenarios", "--seed", 11, "--policy", "fail_open", "--repeat", 100, "--json"))
    assert {cell["role"] for cell in whole.values()} == {"fault", "twin", "repeat"}
    assert len({cell["twin"] for cell in whole.values()} - {None}) == 2
    commands = {cell["rerun"] for cell in whole.values()}
    again: dict[str, dict[str, Any]] = {}
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "kvchaos"
        again[command] = cells(kvchaos(*arguments, "--json"))
    for cell_id, cell in whole.items():
        assert without_rerun(again[cell["rerun"]][cell_id]) == without_rerun(cell), cell_id


@pytest.mark.parametrize("folder", ["-options", "with space", "qu'ote \"s", "dïr [x]", "$HOME `x` ; *", "new\nline"])
def test_strange_names_are_only_names(kvchaos: Run, write_scenario: Write, folder: str) -> None:
    write_scenario("flip", folder)
    done = kvchaos("run", "--policy", "off", "--runs-dir", f"{folder} runs", "--json", "--", folder)
    assert done.code == 0
    run_dir = Path(done.json["run_dir"])
    assert run_dir.parent == Path(f"{folder} runs", folder)
    assert Path(f"{folder} runs", "latest").resolve() == run_dir.resolve()
    first = next(iter(done.json["cells"]))
    again = kvchaos(*shlex.split(first["rerun"])[1:], "--json")
    assert [without_rerun(cell) for cell in again.json["cells"]] == [without_rerun(c) for c in done.json["cells"]]
    assert kvchaos("run", "--policy", "off", "--", folder).code == 0
    assert kvchaos("analyze", "--", run_dir).code == 0


def test_names_that_are_no_text(kvchaos: Run, write_scenario: Write, tmp_path: Path) -> None:
    folder = os.fsdecode(b"b\xff")
    write_scenario("flip", folder)
    done = kvchaos("run", folder, "--policy", "off", "--runs-dir", folder + "-runs")
    assert done.code == 0
    run_dir = next(Path(folder + "-runs", folder).iterdir())
    assert (run_dir / "report.html").exists()
    assert kvchaos("analyze", run_dir).code == 0


def test_links_to_scenarios_are_followed(kvchaos: Run, write_scenario: Write, tmp_path: Path) -> None:
    path = write_scenario("flip", "real")
    (tmp_path / "folder").symlink_to("real")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "flip.yaml").symlink_to(path)
    for given in ("folder", "other", "other/flip.yaml"):
        done = kvchaos("run", given, "--policy", "off", "--json")
        assert done.code == 0
        first = next(iter(cells(done).values()))
        assert kvchaos(*shlex.split(first["rerun"])[1:]).code == 0
    (tmp_path / "loop").symlink_to("loop")
    assert "symbolic links" in kvchaos("run", "loop").err


def test_a_folder_that_looks_like_a_file_and_the_other_way_round(
    kvchaos: Run, write_scenario: Write, tmp_path: Path
) -> None:
    write_scenario("flip", "x.yaml/flip.yaml")
    done = kvchaos("run", "x.yaml", "--policy", "off", "--json")
    assert done.code == 0
    first = next(iter(cells(done).values()))
    again = kvchaos(*shlex.split(first["rerun"])[1:], "--json")
    assert set(cells(again)) == set(cells(done))


def test_a_scenario_called_latest(kvchaos: Run, write_scenario: Write) -> None:
    flip = Path(kvchaos("run", write_scenario(), "--policy", "off", "--json").json["run_dir"])
    before = sorted(path.name for path in flip.iterdir())
    done = kvchaos("run", write_scenario("latest"), "--policy", "off", "--json")
    assert done.code == 0
    assert sorted(path.name for path in flip.iterdir()) == before
    assert kvchaos("analyze", "runs/latest", "--json").json["name"] == "latest"
    assert kvchaos("analyze", done.json["run_dir"]).code == 0


def test_names_that_a_folder_can_just_have(kvchaos: Run, write_scenario: Write) -> None:
    path = write_scenario("a" * 100, "b" * 255)
    assert kvchaos("run", path.parent, "--repeat", 100).code == 0


@pytest.mark.parametrize("width", ["1", "10", "40", "79", "300", "wide"])
def test_a_terminal_of_any_width(
    kvchaos: Run, write_scenario: Write, monkeypatch: pytest.MonkeyPatch, width: str
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    done = kvchaos("run", write_scenario(), "--policy", "off")
    assert (done.code, done.err) == (0, "")
    assert "off" in done.out.replace("\n", "")


def test_without_provenance_reads_are_judged_by_bytes(kvchaos: Run, write_scenario: Write) -> None:
    path = write_scenario()
    with_it, without = (cells(kvchaos("run", path, "--json", *extra)) for extra in ((), ("--no-provenance",)))
    for cell_id, cell in with_it.items():
        other = without[cell_id]
        assert other["result"] == cell["result"] == "pass"
        assert [load["read"] for load in other["loads"]] == [load["read"] for load in cell["loads"]]
        assert other["rerun"] == f"{cell['rerun']} --no-provenance"
