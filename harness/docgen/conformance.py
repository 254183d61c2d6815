"""docs/conformance.md: every id of docs/spec.md with the tests that cover it.

From the marks of the tests (`@pytest.mark.req("DEF-2")`), which are read and not run: what a mark says is that its test
would fail if the requirement did not hold, and only a person can know that.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.docgen.markdown import generated, table
from scenarios.loader import load_scenario

INTRO = """\
Every requirement of [spec.md](spec.md) with the tests that say that they cover it (`@pytest.mark.req("DEF-2")`); for a
known gap also the scenarios that reproduce it. A test covers what it checks, and no more: that an id has one does not
mean that nothing of it is left."""

WITHOUT_TEST: Mapping[str, str] = {
    "EXT-4": "Mooncake is not built here.",
    "CLM-1": "Upstream's measurement on other hardware; [overhead.md](overhead.md) has ours.",
}
"""The only ids that need no test, each with the reason."""

_FAMILY = re.compile(r"^## ([A-Z]{3}): (.+)$")
_REQUIREMENT = re.compile(r"^- ([A-Z]{3}-\d+) (.+)$")
_SENTENCE = re.compile(r"(?<=\.) (?=[A-Z(*`])")

Tests = Mapping[str, Mapping[str, list[str]]]
"""Of each id, per file below tests/ (as a path with slashes): the tests, or an empty list for the whole file."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """An id of the specification and its first sentence."""

    id: str
    text: str


def conformance_page(root: Path) -> str:
    """The page, from docs/spec.md, tests/ and scenarios/ below `root`."""
    families = read_spec((root / "docs" / "spec.md").read_text(encoding="utf-8"))
    tests = read_tests(root / "tests")
    gaps = _gap_scenarios(root)
    every = [requirement for _, requirements in families for requirement in requirements]
    covered = [requirement for requirement in every if requirement.id in tests or requirement.id in gaps]
    lines = ["# Conformance", "", generated("docs/spec.md, tests/ and scenarios/", "conformance"), ""]
    lines += [*INTRO.splitlines(), "", f"{len(covered)} of {len(every)} ids are covered.", ""]
    for title, requirements in families:
        rows = [[r.id, r.text, _where(r.id, tests, gaps)] for r in requirements if r in covered]
        if rows:
            lines += [f"## {title}", "", *table(("id", "requirement", "tests"), rows), ""]
    missing = [[r.id, r.text, WITHOUT_TEST.get(r.id, "")] for r in every if r not in covered]
    if missing:
        lines += ["## Not covered", "", *table(("id", "requirement", "why"), missing), ""]
    return "\n".join(lines).rstrip() + "\n"


def read_spec(text: str) -> list[tuple[str, list[Requirement]]]:
    """The families of the specification in order, each with its requirements."""
    families: list[tuple[str, list[Requirement]]] = []
    item: list[str] = []

    def close() -> None:
        if item:
            identifier, *words = " ".join(item).split()
            families[-1][1].append(Requirement(identifier, _SENTENCE.split(" ".join(words), maxsplit=1)[0]))
            item.clear()

    for line in text.splitlines():
        if line.startswith("  ") and item:
            item.append(line)
            continue
        close()
        if match := _FAMILY.match(line):
            families.append((f"{match.group(1)}: {match.group(2)}", []))
        elif families and _REQUIREMENT.match(line):
            item.append(line.removeprefix("- "))
    close()
    return families


def read_tests(folder: Path) -> Tests:
    """The tests that carry each id, in the order of their files."""
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(folder.rglob("*.py")):
        file = path.relative_to(folder).as_posix()
        for identifier, test in marks(path.read_text(encoding="utf-8")):
            tests = found[identifier][file]
            if test and test not in tests:
                tests.append(test)
    return found


def marks(source: str) -> Iterator[tuple[str, str]]:
    """(id, test) of each `pytest.mark.req(...)`; the test is empty where the mark is on the whole file.

    A mark belongs to the function or class that it decorates, or in whose decorators or body it is written.
    """
    yield from _marks(ast.parse(source), "")


def _marks(node: ast.AST, owner: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        owner = f"{owner}::{node.name}" if owner else node.name
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("mark.req"):
        for argument in node.args:
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield argument.value, owner
    for child in ast.iter_child_nodes(node):
        yield from _marks(child, owner)


def _gap_scenarios(root: Path) -> Mapping[str, list[str]]:
    """Per known gap the scenarios that reproduce it, as links."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted((root / "scenarios").rglob("*.yaml"), key=lambda path: path.stem):
        for gap in sorted(set(load_scenario(path).known_gap.values())):
            found[gap].append(f"[{path.name}](../{path.relative_to(root).as_posix()})")
    return found


def _where(identifier: str, tests: Tests, gaps: Mapping[str, list[str]]) -> str:
    places = []
    for file, names in tests.get(identifier, {}).items():
        link = f"[{file}](../tests/{file})"
        places.append(f"{link}: {', '.join(names)}" if names else link)
    return "<br>".join([*places, *gaps.get(identifier, [])])
