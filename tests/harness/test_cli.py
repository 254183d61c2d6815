"""The command line as its user sees it: exit codes, one clear line an error, nothing half-written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from harness import cli
from harness.errors import RunError
from harness.oracles.kv_bytes import BytesOracle
from harness.targets import TARGETS

Run = Callable[..., Any]
Write = Callable[..., Path]
BIG = {side: {"num_blocks": 1000} for side in ("producer", "consumer")}


def test_every_cell_as_expected_is_0(kvchaos: Run, write_scenario: Write) -> None:
    done = kvchaos("run", write_scenario())
    assert (done.code, done.err) == (0, "")
    assert "PASSED" in done.out


def test_the_heading_of_the_table_is_whole_above_a_short_name(kvchaos: Run, write_scenario: Write) -> None:
    out = kvchaos("run", write_scenario("x"), "--policy", "off").out
    assert any(line.startswith("scenario  off") for line in out.splitlines())


def test_a_wrong_expectation_is_1_and_names_the_cell(kvchaos: Run, write_scenario: Write) -> None:
    expect = {"off": {"verdict": "not_checked", "outcome": "failed"}, "fail_open": {"verdict": "mismatch"}}
    path = write_scenario(expect=expect)
    done = kvchaos("run", path)
    assert done.code == 1
    assert "FAIL: flip, off" in done.out
    assert "r2 (load 2): outcome is served, expected failed" in done.out
    assert "FAILED: 1 of 4 cells failed." in done.out
    again = kvchaos("run", path, "--json")
    assert again.json["exit_code"] == again.code == 1
    failed = [cell["id"] for cell in again.json["cells"] if cell["result"] == "fail"]
    assert failed == ["flip--off"]


def test_a_fault_that_finds_nothing_is_2_and_names_the_cell(kvchaos: Run, write_scenario: Write) -> None:
    flip = {"kind": "bit_flip", "when": {"load": 2, "at": "before_verify"}, "token": 4000}
    done = kvchaos("run", write_scenario(faults=[flip]), "--policy", "off")
    assert done.code == 2
    assert "unknown: flip, off" in done.out
    assert "no evidence that bit_flip on r2 happened" in done.out


def test_a_failed_cell_wins_over_an_unknown_one(kvchaos: Run, write_scenario: Write) -> None:
    flip = {"kind": "bit_flip", "when": {"load": 2, "at": "before_verify"}, "layer": 40}
    write_scenario("unknown", faults=[flip])
    path = write_scenario("wrong", faults=None, expect={p: {"verdict": "no_load"} for p in ("off", "fail_open")})
    assert kvchaos("run", path.parent, "--policy", "off").code == 1


def test_a_crash_in_a_checker_is_2_and_the_rest_goes_on(
    kvchaos: Run, write_scenario: Write, clean: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle breaks in one cell only."""
    original = BytesOracle._first_use
    calls: list[str] = []

    def first_use(self: BytesOracle, event: Any) -> None:
        calls.append(event.request_id)
        if len(calls) == 1:
            raise ZeroDivisionError("planted")
        original(self, event)

    monkeypatch.setattr(BytesOracle, "_first_use", first_use)
    done = kvchaos("run", write_scenario(**clean), "--json")
    assert done.code == 2
    results = {cell["id"]: cell for cell in done.json["cells"]}
    assert {cell_id: cell["result"] for cell_id, cell in results.items()} == {
        "flip--off": "unknown",
        "flip--fail_open": "pass",
    }
    assert "a checker crashed" in results["flip--off"]["why"][0]
    assert "ZeroDivisionError: planted" in results["flip--off"]["why"][0]


def test_nothing_that_passes_is_no_pass(kvchaos: Run, write_scenario: Write) -> None:
    drop = {"kind": "drop_checksums", "when": {"load": 2}}
    done = kvchaos("run", write_scenario(faults=[drop]), "--policy", "off")
    assert done.code == 2
    assert "None of 1 cell passed" in done.out


# ---- 64: bad arguments and scenarios


def one_line(done: Any) -> str:
    """The error, which must be one line on stderr, with nothing on stdout."""
    assert (done.code, done.out) == (64, "")
    (line,) = done.err.splitlines()
    assert line.startswith("kvchaos: ")
    return line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "flip.yaml:1"),
        ("a: b: c", "flip.yaml:1"),
        ("", "flip.yaml:1: file: the file is empty"),
        ("[1, 2]", "the top level is [1, 2]: use a mapping"),
        ("\x00", "flip.yaml"),
        ("name: &a [*a]", "flip.yaml"),
    ],
)
def test_broken_yaml(kvchaos: Run, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "flip.yaml").write_text(text)
    assert message in one_line(kvchaos("run", "flip.yaml", "--runs-dir", "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"faults": [{"kind": "meteor", "when": {"load": 1}}]},
            "faults[0].kind: kind is 'meteor': use one of bit_flip",
        ),
        ({"topology": {"producer": {"block_size": 24}}}, "block_size is 24: use one of 8, 16, 32, 64"),
        ({"topology": {"consumer": {"block_size": 0}}}, "block_size is 0"),
        ({"workload": {"prompt_tokens": 0}}, "prompt_tokens"),
        ({"workload": {"prompt_tokens": [50, 20]}}, "prompt_tokens"),
        ({"workload": {"prompt_tokens": 100_000}}, "num_blocks"),
        ({"workload": {"prompt_tokens": 9000}, "topology": BIG}, "an engine computes at most 8192"),
        ({"topology": {**BIG, "consumer": BIG["consumer"] | {"max_model_len": 9000}}}, "max_model_len is 9000"),
        ({"name": "a" * 101}, "use up to 100 characters"),
        ({"faults": [{"kind": "bit_flip", "when": {"load": 9, "at": "before_verify"}}]}, "use 1 to 2"),
        ({"expect": {"off": {"verdict": "not_checked"}}}, "expect lacks fail_open"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_scenario_that_cannot_be(kvchaos: Run, write_scenario: Write, changes: dict[str, Any], message: str) -> None:
    path = write_scenario(**({"name": "flip"} | changes))
    for command in (("run", path, "--runs-dir", "out"), ("validate", path), ("list", "scenarios", path)):
        text = "\n".join(kvchaos(*command).err.splitlines())
        assert message in text
        assert kvchaos(*command).code == 64
    assert not Path("out").exists()


def test_every_problem_has_a_line(kvchaos: Run, write_scenario: Write) -> None:
    write_scenario("a", workload={"requests": 0})
    path = write_scenario("b", checksum={"version": 7})
    done = kvchaos("run", path.parent)
    assert done.code == 64
    lines = done.err.splitlines()
    assert [line.split(":")[1].rpartition("/")[2] for line in lines] == ["a.yaml", "b.yaml"]


@pytest.mark.parametrize("arguments", [("run", "nowhere.yaml"), ("validate", "nowhere"), ("list", "scenarios", "no")])
def test_a_file_that_is_missing(kvchaos: Run, arguments: tuple[str, ...]) -> None:
    assert f"{arguments[-1]}: cannot be read (no such file or directory)" in one_line(kvchaos(*arguments))


def test_a_truncated_dump(kvchaos: Run, root: Path, tmp_path: Path) -> None:
    whole = (root / "tests" / "vectors" / "case_001.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    assert "cut.npz" in one_line(kvchaos("checksum", "cut.npz"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run",), "Missing argument"),
        (("run", "x", "--seed", "-1"), "--seed"),
        (("run", "x", "--seed", str(2**63)), "--seed"),
        (("run", "x", "--seed", "one"), "--seed"),
        (("run", "x", "--jobs", "0"), "--jobs"),
        (("run", "x", "--jobs", "100000"), "--jobs"),
        (("run", "x", "--policy", "maybe"), "--policy"),
        (("run", "x", "--target", "moon"), "--target"),
        (("run", "x", "--nonsense"), "--nonsense"),
        (("analyze",), "Missing argument"),
        (("nonsense",), "No such command"),
        (("list", "nonsense"), "No such command"),
        (("payload", "decode"), "Missing argument"),
    ],
)
def test_bad_arguments(kvchaos: Run, arguments: tuple[str, ...], message: str) -> None:
    done = kvchaos(*arguments)
    assert (done.code, done.out) == (64, "")
    assert message in done.err
    assert "Traceback" not in done.err
    assert not Path("runs").exists()


def test_a_policy_that_no_scenario_runs(kvchaos: Run, write_scenario: Write) -> None:
    line = one_line(kvchaos("run", write_scenario(), "--policy", "fail_closed_fail", "--runs-dir", "out"))
    assert "none of the 1 scenarios runs under --policy fail_closed_fail" in line
    assert not Path("out").exists()


@pytest.mark.parametrize("inside", ["file", "file/x"])
def test_a_runs_dir_that_cannot_be(kvchaos: Run, write_scenario: Write, inside: str) -> None:
    Path("file").touch()
    done = kvchaos("run", write_scenario(), "--runs-dir", inside)
    assert done.code == 64
    assert "file" in done.err
    assert "Traceback" not in done.err


def test_no_arguments_at_all_shows_help(kvchaos: Run) -> None:
    done = kvchaos()
    assert done.code == 64
    assert "Commands:" in done.err + done.out


# ---- 70, 130


def test_what_the_harness_cannot_do_is_70_in_one_line(
    kvchaos: Run, write_scenario: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise RunError("runs/x: cannot be written (No space left on device)")

    monkeypatch.setattr("harness.commands.run.run_cells", fail)
    done = kvchaos("run", write_scenario())
    assert (done.code, done.err) == (70, "kvchaos: runs/x: cannot be written (No space left on device)\n")


def test_a_bug_of_the_harness_is_70_and_not_1(
    kvchaos: Run, write_scenario: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 would say that a cell failed."""

    def fail(*args: Any) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr("harness.commands.finish.write_reports", fail)
    done = kvchaos("run", write_scenario())
    assert done.code == 70
    assert "ZeroDivisionError: planted" in done.err
    assert done.err.splitlines()[-1] == "kvchaos: this is a bug of kvchaos, not of what it tests: please report it"


def test_ctrl_c_is_130_and_keeps_what_finished(
    kvchaos: Run, write_scenario: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = TARGETS["sim"].run

    def run(cell: Any, history: Any) -> None:
        if cell.id == "flip--fail_open":
            raise KeyboardInterrupt
        original(cell, history)

    monkeypatch.setattr(TARGETS["sim"], "run", run)
    done = kvchaos("run", write_scenario(), "--json")
    assert done.code == 130
    assert done.json["interrupted"] is True
    assert [cell["id"] for cell in done.json["cells"]] == ["flip--off"]
    run_dir = Path(done.json["run_dir"])
    assert {path.name for path in run_dir.iterdir()} >= {"history.jsonl", "results.json", "junit.xml", "report.html"}
    again = kvchaos("analyze", run_dir)
    assert again.code == 130
    assert "Judged differently from results.json: nothing." in again.out


@pytest.mark.parametrize("arguments", [("list", "faults"), ("--help",), ("run", "x")])
def test_ctrl_c_while_a_command_is_imported(
    kvchaos: Run, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    def interrupt(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.importlib, "import_module", interrupt)
    done = kvchaos(*arguments)
    assert (done.code, done.out, done.err.strip()) == (130, "", "")


# ---- help


def commands(group: Any, context: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = [path]
    for name in group.list_commands(context) if hasattr(group, "list_commands") else ():
        found += commands(group.get_command(context, name), context, (*path, name))
    return found


def test_every_command_explains_itself(kvchaos: Run) -> None:
    paths = commands(cli.cli, click.Context(cli.cli))
    assert ("list", "scenarios") in paths
    assert {path[0] for path in paths if path} == set(cli.COMMANDS)
    for path in paths:
        done = kvchaos(*path, "--help")
        assert (done.code, done.err) == (0, "")
        assert done.out.startswith(f"Usage: kvchaos {' '.join(path)}".rstrip())
    # Not for every command: click keeps the options of one that another test has called without its parent.
    assert kvchaos("-h").out == kvchaos("--help").out


def test_the_exit_codes_of_the_help_are_those_of_the_code(kvchaos: Run) -> None:
    text = " ".join(kvchaos("--help").out.split())
    for code in (0, 1, 2, 64, 70, 130):
        assert f"{code} " in text.partition("Exit codes:")[2]


def test_the_help_of_run_names_what_it_leaves(kvchaos: Run, write_scenario: Write) -> None:
    text = kvchaos("run", "--help").out
    run_dir = Path(kvchaos("run", write_scenario(), "--json").json["run_dir"])
    for name in ("results.json", "junit.xml", "summary.md", "report.html"):
        assert name in text
        assert (run_dir / name).stat().st_size > 0
    for default in ("[default: sim]", "[default: 0", "[default: 1", "[default: runs]"):
        assert default in text


def test_the_version(kvchaos: Run) -> None:
    assert kvchaos("--version").out.startswith("kvchaos, version ")


def test_what_is_printed_as_json_is_only_json(kvchaos: Run, write_scenario: Write) -> None:
    path = write_scenario()
    for arguments in (
        ("run", path, "--json"),
        ("analyze", "runs/latest", "--json"),
        ("validate", path, "--json"),
        ("list", "scenarios", path, "--json"),
        ("list", "faults", "--json"),
        ("list", "policies", "--json"),
        ("list", "targets", "--json"),
        ("payload", "decode", "--json", "lAEBKJGVAAUQAMQQAAAAAAAAAAAAAAAAAAAAAA=="),
    ):
        done = kvchaos(*arguments)
        assert (done.code, done.err) == (0, "")
        assert json.loads(done.out)
        assert done.out.count("\n") == 1
    shutil.rmtree("runs")
