"""The distribution kvchaos-vllm: its own tests that need no vLLM, its types, and that it goes beside others.

Its tests with real engines are `make test-vllm`.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PACKAGE = Path("integrations") / "vllm"


def run(root: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, *command], cwd=root, env=inherited | environment, capture_output=True, text=True
    )


def test_its_own_tests_pass(root: Path) -> None:
    """Among them that its copies of the definition and the codec agree with ours on every vector."""
    path = os.pathsep.join([str(root / PACKAGE / "src"), str(root)])
    done = run(root, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(PACKAGE / "tests" / "unit"), PYTHONPATH=path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"(\d+) passed", done.stdout)
    assert "skipped" not in done.stdout


def test_it_depends_on_numpy_and_msgpack_only_and_holds_no_faults(root: Path) -> None:
    """A platform team deploys the protection without anything that could break a request."""
    project = tomllib.loads((root / PACKAGE / "pyproject.toml").read_text())["project"]
    names = {re.split("[<>=]", requirement)[0] for requirement in project["dependencies"]}
    assert names == {"numpy", "msgpack"}
    nodes = [n for path in (root / PACKAGE / "src").rglob("*.py") for n in ast.walk(ast.parse(path.read_text()))]
    modules = [name.name for node in nodes if isinstance(node, ast.Import) for name in node.names]
    modules += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    others = {module.partition(".")[0] for module in modules} - set(sys.stdlib_module_names)
    assert others == {"kvchaos_vllm", "numpy", "msgpack", "torch", "vllm"}


def test_its_types_hold(root: Path) -> None:
    config = str(PACKAGE / "pyproject.toml")
    done = run(root, "-m", "mypy", "--config-file", config, str(PACKAGE / "src" / "kvchaos_vllm"))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def site(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which a copy of the package was installed, so that building it leaves nothing here."""
    folder = tmp_path_factory.mktemp("vllm-package")
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "tests")
    shutil.copytree(root / PACKAGE, folder / "source", ignore=unwanted)
    options = ["-q", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    done = run(root, "-m", "pip", "install", *options, "--target", str(folder / "site"), str(folder / "source"))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


def test_what_it_installs_shadows_no_other_package(site: Path) -> None:
    """kvchaos' own packages have short names, `kernels` among them, which Hugging Face has a package of as well."""
    assert {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")} == {"kvchaos_vllm"}


def test_vllm_finds_its_plugin(root: Path, site: Path) -> None:
    code = (
        "from importlib.metadata import distributions\n"
        f"[d] = [d for d in distributions(path=[{str(site)!r}]) if d.name == 'kvchaos-vllm']\n"
        "[e] = [e for e in d.entry_points if e.group == 'vllm.general_plugins']\n"
        "print(e.load().__module__)"
    )
    done = run(site, "-c", code, PYTHONPATH=str(site))
    assert done.stdout.strip() == "kvchaos_vllm.plugin", done.stdout + done.stderr
