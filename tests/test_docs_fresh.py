"""The generated pages of docs/ are what is generated now, and what makes them reads its sources rightly."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

import pytest

from engine.seams import Seams
from faults.base import Fault, FaultParams, When
from faults.registry import FAULTS, PARAMS
from harness.docgen.conformance import WITHOUT_TEST, Requirement, conformance_page, marks, read_spec, read_tests
from harness.docgen.faults import faults_page
from harness.docgen.markdown import table
from harness.docgen.pages import PAGES, Page
from scenarios.json_schema import own_kinds

SPEC = """\
# What it does

## AAA: the first
- AAA-1 One sentence, e.g. this
  one. (ours) Another.
- AAA-2 Has `a | b` in it.

Prose.

## GAP: what cannot be seen
- GAP-1 Nothing. More.
"""
TESTS = """
pytestmark = pytest.mark.req("AAA-1")

@pytest.mark.req("AAA-2", "AAA-3")
def test_one(): ...

class TestTwo:
    @pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.req("AAA-2"))])
    def test_in_it(self, x): ...
"""


@pytest.mark.parametrize("page", PAGES.values(), ids=list(PAGES))
def test_a_committed_page_is_fresh(page: Page, root: Path) -> None:
    path = root / page.path
    assert path.is_file(), f"run `make {page.target}`"
    assert path.read_text(encoding="utf-8") == page.text(root), f"{page.path} is stale: run `make {page.target}`"


@pytest.mark.parametrize("page", PAGES.values(), ids=list(PAGES))
def test_its_make_target_exists(page: Page, root: Path) -> None:
    name = next(name for name, other in PAGES.items() if other is page)
    rule = (root / "Makefile").read_text().partition(f"\n{page.target}:")[2].partition("\n\n")[0]
    assert "harness.docgen" in rule
    assert f" {name}" in rule


def test_requirements_are_read_from_the_specification() -> None:
    assert read_spec(SPEC) == [
        (
            "AAA: the first",
            [Requirement("AAA-1", "One sentence, e.g. this one."), Requirement("AAA-2", "Has `a | b` in it.")],
        ),
        ("GAP: what cannot be seen", [Requirement("GAP-1", "Nothing.")]),
    ]


def test_marks_belong_to_the_test_around_them() -> None:
    assert list(marks(TESTS)) == [
        ("AAA-1", ""),
        ("AAA-2", "test_one"),
        ("AAA-3", "test_one"),
        ("AAA-2", "TestTwo::test_in_it"),
    ]


def test_the_page_of_conformance(tmp_path: Path, root: Path) -> None:
    for folder in ("docs", "tests/e", "scenarios"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "docs" / "spec.md").write_text(SPEC)
    (tmp_path / "tests" / "e" / "test_a.py").write_text(TESTS.replace("AAA-1", "AAA-9"))
    assert _rows(conformance_page(tmp_path)) == [
        "1 of 3 ids are covered.",
        "## AAA: the first",
        "| AAA-2 | Has `a \\| b` in it. | [e/test_a.py](../tests/e/test_a.py): test_one, TestTwo::test_in_it |",
        "## Not covered",
        "| AAA-1 | One sentence, e.g. this one. | - |",
        "| GAP-1 | Nothing. | - |",
    ]
    shutil.copy(root / "scenarios" / "smoke" / "flip-before-checksum.yaml", tmp_path / "scenarios")
    gap = "| GAP-1 | Nothing. | [flip-before-checksum.yaml](../scenarios/flip-before-checksum.yaml) |"
    assert gap in _rows(conformance_page(tmp_path))


def test_every_requirement_has_a_test(root: Path) -> None:
    """Also a known gap: a test shows it. The only exceptions are written down, each with its reason."""
    families = read_spec((root / "docs" / "spec.md").read_text(encoding="utf-8"))
    every = {requirement.id for _, requirements in families for requirement in requirements}
    tested = set(read_tests(root / "tests"))
    assert sorted(every - tested) == sorted(WITHOUT_TEST), "mark a test of it, or say in WITHOUT_TEST why there is none"


def _rows(page: str) -> list[str]:
    return [
        line
        for line in page.splitlines()
        if line.startswith(("## ", "| AAA", "| GAP")) or line.endswith("ids are covered.")
    ]


class LaterWhen(When):
    at: Literal["mid_read", "after_read"] = "mid_read"


class LaterParams(FaultParams):
    kind: Literal["later"]
    when: LaterWhen
    target: int
    shares: tuple[float, float] | None = None


class Later(Fault[LaterParams]):
    """Acts later.

    As S03 of docs/incidents.md says (owner/repo#12).
    """

    kind = "later"
    params_model = LaterParams

    @classmethod
    def needs(cls, params: FaultParams) -> frozenset[str]:
        assert isinstance(params, LaterParams)
        return frozenset({"lever.clock" if params.when.at == "mid_read" else f"lever.{params.target}"})

    def attach(self, seams: Seams) -> None:
        """Nothing."""


def test_a_new_kind_of_fault_needs_no_editing(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    monkeypatch.setitem(FAULTS, "later", Later)
    monkeypatch.setitem(PARAMS, "later", LaterParams)
    section = faults_page(root).partition("\n## later\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line and not line.startswith("|---")]
    assert lines[0].endswith(" Acts later.")
    assert lines[1:] == [
        "| `at` | reached at | needs |",
        "| `mid_read` (default) | `transfer.op_posted` | `lever.clock` |",
        "| `after_read` | `transfer.completion` | depends on its parameters |",
        "| parameter | values | default | meaning |",
        "| `target` | whole number | required | - |",
        "| `shares` | [number, number] | none | - |",
        "From [incidents.md](incidents.md):",
        next(line for line in lines if line.startswith("- S03: second READ with consumed params")),
        "- owner/repo#12",
        "No scenario uses it.",
    ]


def test_every_kind_has_a_section(root: Path) -> None:
    page = faults_page(root)
    assert [line[3:] for line in page.splitlines() if line.startswith("## ")] == own_kinds()


def test_a_table_cannot_be_broken_by_its_cells() -> None:
    assert table(("a", "b"), [("x|y", "two\nlines"), ("", "z")]) == [
        "| a | b |",
        "|---|---|",
        "| x\\|y | two lines |",
        "| - | z |",
    ]
    assert table(("a",), []) == []
