"""Scenario files to scenarios. Every problem of every file is reported at once, each with its line."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from scenarios.checks import cross_issues
from scenarios.document import Node, parse_document
from scenarios.problems import Issue, Problem, ScenarioError, field_name, shown
from scenarios.schema import Scenario, read_plain

MAX_BYTES = 1 << 20
"""Of one file. A scenario is about a thousand bytes."""

SUFFIXES = (".yaml", ".yml")


def parse_scenario(text: str, file: str = "<string>") -> Scenario:
    """Read a scenario from YAML text. `file` is the name that errors give.

    Raises:
        ScenarioError: with every problem of the text.
    """
    return _parse(text, file, name=None)


def load_scenario(path: Path) -> Scenario:
    """Read one file.

    Raises:
        ScenarioError: with every problem of the file; also when it cannot be read, or is not named as its scenario.
    """
    return _parse(_read_text(path), str(path), name=path.stem)


def load_scenarios(paths: Sequence[Path]) -> list[Scenario]:
    """Read files, and all `*.yaml` and `*.yml` below directories. A file given twice is read once.

    Returns:
        the scenarios sorted by name, however they were given.

    Raises:
        ScenarioError: with every problem of every file; also when a path is missing, a directory holds no scenario,
            or two files have the same name.
    """
    if not paths:
        raise ScenarioError([Problem("scenarios", 0, "", "no path is given: name a file or a directory of scenarios")])
    problems: list[Problem] = []
    seen: dict[str, Path] = {}
    scenarios: list[Scenario] = []
    for path in _files(paths, problems):
        # The name of a scenario is its file's, so equal names show even when one of the files has other problems.
        if first := seen.get(path.stem):
            message = f"{path.stem} is the name of {first} too: rename one, or give only one"
            problems.append(Problem(str(path), 0, "name", message))
        seen.setdefault(path.stem, path)
        try:
            scenarios.append(load_scenario(path))
        except ScenarioError as error:
            problems += error.problems
    if problems:
        raise ScenarioError(problems)
    return sorted(scenarios, key=lambda scenario: scenario.name)


def _parse(text: str, file: str, name: str | None) -> Scenario:
    root, data = parse_document(text, file)
    scenario, faults, issues = read_plain(data)
    if isinstance(data, dict):
        issues += cross_issues(data, faults, issues)
        written = data.get("name")
        if name is not None and isinstance(written, str) and written != name:
            issues.append(Issue(("name",), f"name is {shown(written)}, but the file is {shown(name)}: make them equal"))
    if scenario is None or issues:
        raise ScenarioError(_located(issue, root, file) for issue in issues)
    return scenario


def _located(issue: Issue, root: Node, file: str) -> Problem:
    """The issue at the line of its field, or of what else it names, or of the deepest part that is written."""
    line, depth = root.line_at(issue.loc)
    if depth < len(issue.loc) - 1:
        for other in issue.also:
            other_line, written = root.line_at(other)
            if written == len(other):
                line = other_line
                break
    return Problem(file, line, field_name(issue.loc), issue.message)


def _files(paths: Sequence[Path], problems: list[Problem]) -> Iterator[Path]:
    """The files to read, each real path once. What cannot be listed goes to `problems`."""
    seen: set[str] = set()
    for path in paths:
        # Not Path.is_dir, which raises where it may not look; reading the file says that better.
        found = list(_below(path, problems)) if os.path.isdir(path) else [path]
        if not found:
            message = f"no {' or '.join(f'*{suffix}' for suffix in SUFFIXES)} file is in it: name another directory"
            problems.append(Problem(str(path), 0, "", message))
        for file in found:
            real = os.path.realpath(file)
            if real not in seen:
                seen.add(real)
                yield file


def _below(directory: Path, problems: list[Problem]) -> Iterator[Path]:
    def report(error: OSError) -> None:
        problems.append(_unreadable(str(error.filename), error))

    for folder, folders, names in os.walk(directory, onerror=report):
        folders.sort()
        for name in sorted(names):
            if name.endswith(SUFFIXES):
                yield Path(folder, name)


def _read_text(path: Path) -> str:
    file = str(path)
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            # Opening a pipe would wait for someone to write to it.
            raise ScenarioError([Problem(file, 0, "", "not a regular file: name a YAML file or a directory")])
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise ScenarioError([_unreadable(file, error)]) from None
    if len(content) > MAX_BYTES:
        raise ScenarioError([Problem(file, 0, "", f"larger than {MAX_BYTES} bytes: a scenario is much smaller")])
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        message = f"byte {content[error.start]:#04x} is not UTF-8: save the file as UTF-8"
        raise ScenarioError([Problem(file, line, "", message)]) from None


def _unreadable(file: str, error: OSError) -> Problem:
    reason = (error.strerror or str(error)).lower()
    return Problem(file, 0, "", f"cannot be read ({reason}): check the path and its permissions")
