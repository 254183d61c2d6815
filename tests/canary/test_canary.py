"""The canaries stay red: scenarios that are wrong on purpose, through the command line, in every report."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

from harness.cli import main

HERE = Path(__file__).parent
FAILING = ("canary-wrong-verdict", "canary-gap-that-is-none")
UNKNOWN = ("canary-fault-without-effect",)


@dataclass(frozen=True)
class Ran:
    """What the run of one canary left."""

    code: int
    terminal: str
    run_dir: Path

    def text(self, name: str) -> str:
        return (self.run_dir / name).read_text(encoding="utf-8")

    def tagged(self, tag: str) -> list[str]:
        """The messages of the test cases of junit.xml that have this tag."""
        document = ElementTree.parse(self.run_dir / "junit.xml").getroot()
        return [element.get("message", "") for element in document.iter(tag)]


@pytest.fixture(scope="module", params=[*FAILING, *UNKNOWN])
def canary(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Ran]:
    name: str = request.param
    folder = tmp_path_factory.mktemp(name)
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out):
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["kvchaos", "run", str(HERE / f"{name}.yaml")])
        with pytest.raises(SystemExit) as stopped:
            main()
    assert isinstance(stopped.value.code, int)
    return name, Ran(stopped.value.code, out.getvalue(), (folder / "runs" / "latest").resolve())


def test_every_canary_is_tried() -> None:
    assert {path.stem for path in HERE.glob("*.y*ml")} == {*FAILING, *UNKNOWN}


def test_the_exit_code_is_red(canary: tuple[str, Ran]) -> None:
    name, ran = canary
    assert ran.code == (1 if name in FAILING else 2)


def test_junit_is_red(canary: tuple[str, Ran]) -> None:
    name, ran = canary
    red, other = ("failure", "error") if name in FAILING else ("error", "failure")
    assert len(ran.tagged(red)) == 1
    assert ran.tagged(other) == []


@pytest.mark.parametrize("report", ["the terminal", "summary.md", "report.html"])
def test_every_report_says_so_first_and_where(canary: tuple[str, Ran], report: str) -> None:
    name, ran = canary
    text = ran.terminal if report == "the terminal" else ran.text(report)
    word, of_run = ("FAIL", "FAILED") if name in FAILING else ("unknown", "UNKNOWN")
    assert of_run in text
    assert "PASSED" not in text
    assert text.lower().count(word.lower()) > 1
    assert name in text


@pytest.mark.parametrize("name", [*FAILING, *UNKNOWN])
def test_a_canary_says_that_it_is_wrong_on_purpose(name: str) -> None:
    assert (HERE / f"{name}.yaml").read_text(encoding="utf-8").startswith("# Wrong on purpose: ")
