"""What every test shares: one thread a process, a Hypothesis profile, and the files of the repository."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import HealthCheck, settings

# Before anything imports torch: tests run in several processes, and more threads only make them wait for each other.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

# A shell ignores Ctrl-C for what it leaves in the background, and nohup a closed terminal. Tests send both.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

# Scenarios below tests/ are what tests are about, and not tests themselves.
collect_ignore_glob = ["*.yaml", "*.yml"]

ROOT = Path(__file__).resolve().parent.parent

# A distribution of its own: test_example_package.py installs it, and runs its tests.
collect_ignore = ["example_package"]

# No deadline and no "too slow" check, since no test asserts a wall time. In CI the examples are the same in every run;
# elsewhere they are new ones, and a failure prints what reproduces it.
for _profile, _derandomize in (("kvchaos", False), ("kvchaos-ci", True)):
    settings.register_profile(
        _profile,
        deadline=None,
        derandomize=_derandomize,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("kvchaos-ci" if os.environ.get("CI") else "kvchaos")


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def repo_files() -> list[Path]:
    """Every file that is committed or would be (new and not ignored), absolute, in order."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout: git says which files belong to the project")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    paths = (ROOT / name for name in sorted(set(listed.split("\0"))) if name)
    return [path for path in paths if path.is_file()]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Put a distribution on the path, for this test: its entry points in one group, and its modules as text."""
    from engine.extensions import LOADED
    from faults import registry
    from harness.plugins import REGISTRIES

    site, before, modules_before = tmp_path / "site", dict(LOADED), set(sys.modules)

    def install(
        name: str, group: str, points: Mapping[str, str], modules: Mapping[str, str] | None = None, version: str = "1.0"
    ) -> None:
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = [f"{point} = {value}" for point, value in points.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
        for module, text in (modules or {}).items():
            (site / f"{module}.py").write_text(dedent(text))
        monkeypatch.syspath_prepend(site)
        for found in REGISTRIES.values():
            found.forget()

    monkeypatch.setattr(registry, "PARAMS", dict(registry.PARAMS))
    yield install
    for found in REGISTRIES.values():
        found.forget()
    LOADED.clear()
    LOADED.update(before)
    for module in set(sys.modules) - modules_before:
        if str(getattr(sys.modules[module], "__file__", "")).startswith(str(site)):
            del sys.modules[module]
