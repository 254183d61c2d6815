from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import merging
from harness.targets import TARGETS

Run = Callable[..., Any]
Write = Callable[..., Path]


@pytest.fixture
def scenarios(write_scenario: Write, clean: dict[str, Any]) -> Path:
    for n in range(3):
        write_scenario(f"flip-{n}")
    return write_scenario("clean", **clean).parent


@pytest.fixture
def shards(kvchaos: Run, scenarios: Path) -> list[Path]:
    """Both shards of a plan with repeats."""
    arguments = ("run", scenarios, "--repeat", 50, "--json", "--seed", 4)
    done = [kvchaos(*arguments, "--shard", f"{n}/2", "--runs-dir", f"part-{n}") for n in (1, 2)]
    assert [part.code for part in done] == [0, 0]
    return [Path(part.json["run_dir"]) for part in done]


def one_line(done: Any) -> str:
    assert (done.code, done.out) == (64, "")
    (line,) = done.err.splitlines()
    return line


@pytest.mark.parametrize("order", [1, -1])
def test_merged_shards_are_byte_for_byte_the_whole_run(
    kvchaos: Run, scenarios: Path, shards: list[Path], order: int
) -> None:
    whole = kvchaos("run", scenarios, "--repeat", 50, "--json", "--seed", 4).json
    merged = kvchaos("merge", *shards[::order], "--json", "--runs-dir", "merged").json
    ours, theirs = Path(merged.pop("run_dir")), Path(whole.pop("run_dir"))
    assert merged == whole
    for name in ("history.jsonl", "results.json", "junit.xml"):
        assert (ours / name).read_bytes() == (theirs / name).read_bytes()
    assert {path.name for path in (ours / "cells").iterdir()} == {path.name for path in (theirs / "cells").iterdir()}
    assert len((ours / "timing.jsonl").read_text().splitlines()) == len(merged["cells"])
    assert kvchaos("analyze", "merged/latest").code == 0


def test_a_shard_alone_is_whole_in_itself_but_no_plan(kvchaos: Run, shards: list[Path]) -> None:
    assert kvchaos("analyze", shards[0]).code == 0
    line = one_line(kvchaos("merge", shards[0], "--runs-dir", "merged"))
    assert "cells of no shard given" in line
    assert not Path("merged").exists()


def test_a_shard_that_is_given_twice(kvchaos: Run, shards: list[Path]) -> None:
    assert "give each shard once" in one_line(kvchaos("merge", shards[0], shards[1], shards[0]))


def test_shards_of_different_plans(kvchaos: Run, scenarios: Path, shards: list[Path]) -> None:
    other = kvchaos("run", scenarios, "--shard", "2/2", "--repeat", 50, "--seed", 5, "--json").json["run_dir"]
    assert "its options differ" in one_line(kvchaos("merge", shards[0], other, "--runs-dir", "merged"))
    assert not Path("merged").exists()


def test_a_cell_that_did_not_finish_is_missing(
    kvchaos: Run, scenarios: Path, shards: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder is there, with what it had come to."""
    last = json.loads((shards[0] / "history.jsonl").read_text().splitlines()[0])["id"]

    def run(cell: Any, history: Any) -> None:
        history.add("cell", id=cell.id)
        if cell.id == last:
            raise KeyboardInterrupt

    monkeypatch.setattr(TARGETS["sim"], "run", run)
    arguments = ("run", scenarios, "--repeat", 50, "--seed", 4, "--shard", "1/2", "--runs-dir", "stopped")
    kvchaos(*arguments)
    (stopped,) = (path for path in Path("stopped/scenarios").iterdir())
    assert (stopped / "cells" / last / "history.jsonl").exists()
    assert f"cells of no shard given: {last}" in one_line(kvchaos("merge", stopped, shards[1]))


@pytest.mark.parametrize("damage", ["no manifest", "no history", "cut history", "no cell", "climbing plan"])
def test_a_damaged_shard_is_64_in_one_line_and_nothing_is_made(kvchaos: Run, shards: list[Path], damage: str) -> None:
    first = shards[0]
    if damage == "no manifest":
        (first / "manifest.json").unlink()
    elif damage == "no history":
        (first / "history.jsonl").unlink()
    elif damage == "cut history":
        (first / "history.jsonl").write_bytes((first / "history.jsonl").read_bytes()[:-40])
    elif damage == "no cell":
        shutil.rmtree(next((first / "cells").iterdir()))
    else:
        manifest = json.loads((first / "manifest.json").read_text())
        manifest["plan"][0] = "../../../elsewhere"
        (first / "manifest.json").write_text(json.dumps(manifest))
    one_line(kvchaos("merge", *shards, "--runs-dir", "merged"))
    assert not Path("merged").exists()


def test_damaged_timing_is_no_obstacle(kvchaos: Run, shards: list[Path]) -> None:
    (shards[0] / "timing.jsonl").write_text("nonsense\n{}\n")
    (shards[1] / "timing.jsonl").unlink()
    assert kvchaos("merge", *shards, "--runs-dir", "merged").code == 0


def test_a_full_disk_is_70_in_one_line(kvchaos: Run, shards: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(merging.shutil, "copytree", full)
    done = kvchaos("merge", *shards, "--runs-dir", "merged")
    assert done.code == 70
    assert len(done.err.splitlines()) == 1
