from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from engine.errors import EXIT_USAGE
from scenarios.loader import MAX_BYTES, load_scenario, load_scenarios
from scenarios.problems import Problem, ScenarioError


@pytest.fixture
def folder(tmp_path: Path, sound: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder below the working directory, so that messages hold short paths."""
    monkeypatch.chdir(tmp_path)
    Path("some").mkdir()
    return Path("some")


def write(folder: Path, name: str, text: str, suffix: str = ".yaml") -> Path:
    path = folder / f"{name}{suffix}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.replace("name: stale-read", f"name: {name}"), encoding="utf-8")
    return path


def errors(*paths: Path) -> list[str]:
    with pytest.raises(ScenarioError) as caught:
        load_scenarios(paths)
    assert caught.value.exit_code == EXIT_USAGE
    return str(caught.value).splitlines()


def names(*paths: Path) -> list[str]:
    return [scenario.name for scenario in load_scenarios(paths)]


def test_directories_are_read_whole_and_the_order_is_by_name(folder: Path, sound: str) -> None:
    b = write(folder / "z", "b", sound)
    c = write(folder, "c", sound, ".yml")
    a = write(folder / "z" / "deeper", "a", sound)
    (folder / "README.md").write_text("not a scenario")
    assert names(folder) == names(c, b, a) == names(a, c, b) == ["a", "b", "c"]


def test_a_file_given_twice_is_read_once(folder: Path, sound: str) -> None:
    path = write(folder, "a", sound)
    link = folder / "link.yaml"
    link.symlink_to("a.yaml")
    assert names(path, folder / ".." / "some" / "a.yaml", folder, path.resolve()) == ["a"]


def test_equal_names_are_an_error_even_when_a_file_is_broken(folder: Path, sound: str) -> None:
    write(folder / "x", "a", sound)
    write(folder / "y", "a", "name: a\n\t")
    first, second = errors(folder)
    assert first == "some/y/a.yaml: name: a is the name of some/x/a.yaml too: rename one, or give only one"
    assert second.startswith("some/y/a.yaml:2: file: not valid YAML")


def test_the_name_is_the_files(folder: Path, sound: str) -> None:
    path = folder / "other.yaml"
    path.write_text(sound.replace("output_tokens: 16", "output_tokens: 0"))
    assert errors(path) == [
        "some/other.yaml:2: name: name is 'stale-read', but the file is 'other': make them equal",
        "some/other.yaml:10: workload.output_tokens: output_tokens is 0: use at least 1",
    ]


def test_problems_of_all_files_come_sorted(folder: Path, sound: str) -> None:
    b = write(folder, "b", sound.replace("pull", "pus"))
    a = write(folder, "a", sound.replace("requests: 4", "requests: 0").replace("layout: HND", "layout: HN"))
    wanted = [
        "nowhere: cannot be read (no such file or directory): check the path and its permissions",
        "some/a.yaml:6: topology.producer.layout: layout is 'HN': use one of HND, NHD; did you mean 'HND'?",
        "some/a.yaml:10: workload.requests: requests is 0: use at least 1",
        "some/b.yaml:8: topology.transfer: transfer is 'pus': use one of pull, push; did you mean 'push'?",
    ]
    assert errors(b, Path("nowhere"), a) == errors(Path("nowhere"), folder) == wanted


def test_nothing_to_run_is_an_error(folder: Path) -> None:
    assert errors() == ["scenarios: no path is given: name a file or a directory of scenarios"]
    assert errors(folder) == ["some: no *.yaml or *.yml file is in it: name another directory"]


def test_what_is_no_file_is_not_opened(folder: Path) -> None:
    os.mkfifo(folder / "pipe.yaml")
    (folder / "dir.yaml").mkdir()
    (folder / "gone.yaml").symlink_to("nowhere")
    assert errors(folder) == [
        "some/gone.yaml: cannot be read (no such file or directory): check the path and its permissions",
        "some/pipe.yaml: not a regular file: name a YAML file or a directory",
    ]


def test_size_and_encoding(folder: Path, sound: str) -> None:
    big = folder / "big.yaml"
    big.write_bytes(b"#" * (MAX_BYTES + 1))
    latin = folder / "latin.yaml"
    latin.write_bytes(b"schema_version: 1\nname: caf\xe9\n")
    assert errors(folder) == [
        f"some/big.yaml: larger than {MAX_BYTES} bytes: a scenario is much smaller",
        "some/latin.yaml:2: byte 0xe9 is not UTF-8: save the file as UTF-8",
    ]
    fits = write(folder, "fits", sound)
    fits.write_bytes(b"\xef\xbb\xbf" + fits.read_bytes().replace(b"\n", b"\r\n") + b"#" * 1000)
    assert load_scenario(fits).name == "fits"


def test_unreadable_files_and_folders_are_named(folder: Path, sound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(folder / "locked", "a", sound)

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied", str(args[0]))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        assert errors(path) == [
            "some/locked/a.yaml: cannot be read (permission denied): check the path and its permissions"
        ]
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refuse)
        assert errors(folder)[0] == "some: cannot be read (permission denied): check the path and its permissions"


def test_an_error_is_an_input_error_that_survives_another_process(folder: Path) -> None:
    with pytest.raises(ScenarioError) as caught:
        load_scenario(folder / "gone.yaml")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (
        again.problems == caught.value.problems == (Problem(again.problems[0].file, 0, "", again.problems[0].message),)
    )
    assert str(again) == str(caught.value)


def test_problems_are_sorted_and_once() -> None:
    one, two, ten = Problem("a", 1, "x", "m"), Problem("a", 2, "x", "m"), Problem("a", 10, "x", "m")
    assert ScenarioError([ten, two, one, two]).problems == (one, two, ten)
