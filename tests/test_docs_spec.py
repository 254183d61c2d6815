"""Requirement ids are those of docs/spec.md: in the marks of tests, and wherever code or prose names one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

DEFINED = re.compile(r"^- ([A-Z]{3}-\d+) ", re.MULTILINE)


@pytest.fixture(scope="module")
def spec_ids(root: Path) -> list[str]:
    return DEFINED.findall((root / "docs" / "spec.md").read_text())


def req_marks(text: str) -> list[tuple[int, str | None]]:
    """Line and id of each `pytest.mark.req(...)`; None for an argument that is not a literal string."""
    return [
        (argument.lineno, argument.value if isinstance(argument, ast.Constant) else None)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("mark.req")
        for argument in node.args
    ]


def test_every_id_is_defined_once(spec_ids: list[str]) -> None:
    assert spec_ids
    assert sorted(set(spec_ids)) == sorted(spec_ids)


def test_the_ids_of_a_family_have_no_holes(spec_ids: list[str]) -> None:
    """A hole would be a requirement that got lost, or an id that was renumbered."""
    for family in {identifier[:3] for identifier in spec_ids}:
        numbers = [int(identifier[4:]) for identifier in spec_ids if identifier.startswith(family)]
        assert numbers == list(range(1, len(numbers) + 1)), family


def test_every_req_mark_names_an_id_of_the_spec(repo_files: list[Path], root: Path, spec_ids: list[str]) -> None:
    found = [
        f"{path.relative_to(root)}:{line}: {identifier or 'not a literal id'}"
        for path in repo_files
        if path.suffix == ".py"
        for line, identifier in req_marks(path.read_text())
        if identifier not in spec_ids
    ]
    assert not found, "\n" + "\n".join(found)


def test_marks_are_found_wherever_pytest_takes_them() -> None:
    source = """
pytestmark = pytest.mark.req("A-1")
@pytest.mark.req("A-2", "A-3")
@pytest.mark.parametrize("x", [pytest.param(1, marks=[pytest.mark.req("A-4"), mark.req(WHICH)])])
def test_x(x): ...
"""
    assert {identifier for _, identifier in req_marks(source)} == {"A-1", "A-2", "A-3", "A-4", None}


def test_every_id_that_is_mentioned_exists(repo_files: list[Path], root: Path, spec_ids: list[str]) -> None:
    """In code, scenarios and documents; tests may name ids that do not exist, to see them refused."""
    families = "|".join(sorted({identifier[:3] for identifier in spec_ids}))
    mention = re.compile(rf"\b(?:{families})-\d+\b")
    found = [
        f"{path.relative_to(root)}:{number}: {identifier}"
        for path in repo_files
        if path.suffix in {".py", ".yaml", ".md", ".j2", ".html"} and not path.is_relative_to(root / "tests")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for identifier in mention.findall(line)
        if identifier not in spec_ids
    ]
    assert not found, "\n" + "\n".join(found)
