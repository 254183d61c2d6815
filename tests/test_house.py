"""The house rules of CONTRIBUTING.md, held mechanically."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PACKAGES = ("kernels", "engine", "faults", "scenarios", "reports", "harness")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

# Patterns, so written that none of them matches its own source.
FORBIDDEN = {
    "a path of one machine": r"(?<!\w)/(?:work|farm|root|home/\w+|Users/\w+|tmp/[a-z]|opt/(?:wheels|pypi))(?!\w)",
    "a folder outside the repository": r"\.\./shared|\bshared/(?:design|spec|incidents|environment|tools|vectors|vllm)",
    "a package index's host": r"\b(?:pypi|pythonhosted|npmjs|crates|anaconda)\.(?:org|com|io)\b"
    r"|\b(?:download\.pytorch|deb\.debian)\.org\b",
    "where packages come from, which is for pip's configuration": r"index[-]url|find[-]links *=",
}
LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\(([^()\s]+)\)|!\[[^\]\n]*\]\(([^()\s]+)\)")


def of_package(files: list[Path], root: Path) -> list[Path]:
    return [f for f in files if f.suffix == ".py" and f.relative_to(root).parts[0] in PACKAGES]


def texts(files: list[Path]) -> Iterator[tuple[Path, str]]:
    for path in files:
        data = path.read_bytes()
        if b"\0" not in data:
            yield path, data.decode()


def modules(files: list[Path]) -> Iterator[tuple[Path, str, ast.Module]]:
    for path, text in texts([f for f in files if f.suffix == ".py"]):
        yield path, text, ast.parse(text, str(path))


def listed(lines: list[str]) -> str:
    return "\n" + "\n".join(lines)


def test_no_file_names_a_machine_or_a_package_index(repo_files: list[Path], root: Path) -> None:
    found = [
        f"{path.relative_to(root)}:{number}: {what}: {match.group()}"
        for path, text in texts(repo_files)
        for number, line in enumerate(text.splitlines(), 1)
        for what, pattern in FORBIDDEN.items()
        if (match := re.search(pattern, line))
    ]
    assert not found, listed(found)


@pytest.mark.parametrize(
    "parts",
    [
        ("", "work", "main"),
        ("", "root", ".pyenv"),
        ("", "opt", "wheels"),
        ("..", "shared", "spec.md"),
        ("see shared", "spec.md"),
        ("https:", "", ".".join(("pypi", "org")), "simple"),
        ("pip install --index" + "-url x",),
    ],
)
def test_the_search_for_machines_and_indexes_finds_them(parts: tuple[str, ...]) -> None:
    text = "/".join(parts)
    assert any(re.search(pattern, text) for pattern in FORBIDDEN.values()), text


def test_no_python_file_is_too_long(repo_files: list[Path], root: Path) -> None:
    found = [
        f"{path.relative_to(root)}: {count} lines"
        for path, text, _ in modules(repo_files)
        if (count := len(text.splitlines())) > MAX_FILE_LINES
    ]
    assert not found, listed(found)


def test_no_function_is_too_long(repo_files: list[Path], root: Path) -> None:
    found = [
        f"{path.relative_to(root)}:{node.lineno}: {node.name} has {count} lines"
        for path, _, tree in modules(repo_files)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (count := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]
    assert not found, listed(found)


def test_every_module_opens_with_why_it_exists(repo_files: list[Path], root: Path) -> None:
    """An `__init__.py` without code is a mark for the import system, and has nothing to explain."""
    found = [
        str(path.relative_to(root))
        for path, _, tree in modules(of_package(repo_files, root))
        if not ast.get_docstring(tree) and (tree.body or path.name != "__init__.py")
    ]
    assert not found, listed(found)


def test_no_test_sleeps(repo_files: list[Path], root: Path) -> None:
    """`asyncio.sleep(0)` only lets others run. Real-time faults on docker are excepted."""
    tests, excepted = root / "tests", root / "tests" / "docker"
    judged = [f for f in repo_files if f.is_relative_to(tests) and not f.is_relative_to(excepted)]
    found = [
        f"{path.relative_to(root)}:{node.lineno}: {ast.unparse(node)}"
        for path, _, tree in modules(judged)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "sleep"
        if [ast.unparse(argument) for argument in node.args] != ["0"]
    ]
    assert not found, listed(found)


def test_tests_are_no_packages(repo_files: list[Path], root: Path) -> None:
    """Else `tests/engine/__init__.py` could be imported as `engine`."""
    assert [f for f in repo_files if f.is_relative_to(root / "tests") and f.name == "__init__.py"] == []


def test_the_arrows_between_packages_hold(root: Path) -> None:
    command = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = subprocess.run([sys.executable, "-c", command, "--no-cache"], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_contract_covers_every_package(root: Path) -> None:
    contract = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]
    assert set(contract["root_packages"]) == set(PACKAGES)
    assert contract["contracts"][0]["layers"] == ["harness", "reports", "scenarios", "faults", "engine", "kernels"]


def test_links_in_the_docs_resolve(repo_files: list[Path], root: Path) -> None:
    found = []
    for path, text in texts([f for f in repo_files if f.suffix == ".md"]):
        prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        for match in LINK.finditer(prose):
            target = (match.group(1) or match.group(2)).partition("#")[0]
            if target and not re.match(r"[a-z]+:", target) and not (path.parent / target).exists():
                found.append(f"{path.relative_to(root)}: {target}")
    assert not found, listed(found)


def test_every_direct_requirement_is_pinned_within_its_range(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    lines = (root / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    wanted = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    for requirement in map(Requirement, wanted):
        version = pins.get(canonicalize_name(requirement.name))
        assert version is not None, f"constraints.txt does not pin {requirement.name}"
        assert version in requirement.specifier, f"constraints.txt pins {requirement.name} to {version}: {requirement}"


def make_dry_run(root: Path, *arguments: str) -> str:
    """What make would do. It runs nothing; MAKEFLAGS would make it a part of the make that runs the tests."""
    if shutil.which("make") is None:
        pytest.skip("needs make")
    inherited = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL"}
    environment = {name: value for name, value in os.environ.items() if name not in inherited}
    done = subprocess.run(["make", "-n", *arguments], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("target", "command"),
    [
        ("demo", "kvchaos run scenarios/smoke"),
        ("test", "-m pytest -q"),
        ("lint", "lint-imports"),
        ("format", "ruff format"),
        ("typecheck", "mypy"),
    ],
)
def test_a_make_target_needs_nothing_before_it(root: Path, target: str, command: str) -> None:
    """With constraints.txt taken as changed, the environment is brought up to date first."""
    commands = make_dry_run(root, "-W", "constraints.txt", target)
    assert command in commands
    assert commands.index("pip install") < commands.index(command)


def test_make_lists_its_targets(root: Path) -> None:
    makefile = (root / "Makefile").read_text()
    phony = set(re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1].split()) - {"stale"}
    described = set(re.findall(r"^([a-z-]+):.*## \w", makefile, re.MULTILINE))
    assert described == phony
    assert "awk" in make_dry_run(root)


def test_ci_runs_the_make_targets(root: Path) -> None:
    script = root / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "for target in lint test demo; do" in script.read_text()
    workflow = (root / ".github" / "workflows" / "ci.yml").read_text()
    assert [target for target in ("lint", "test", "demo") if f"run: make {target}\n" not in workflow] == []
