"""`kvchaos doctor`: what it finds on a machine that lacks things, and that it finds this one usable."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import doctor
from harness.doctor import Check

Answers = Callable[..., None]


def done(stdout: str = "", stderr: str = "", code: int = 0) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess([], code, stdout, stderr)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """What processes say, by a word of their command line; None: they do not start or end."""

    def set_answers(**said: subprocess.CompletedProcess[str] | None) -> None:
        def answer(command: list[str]) -> subprocess.CompletedProcess[str] | None:
            return next(value for word, value in said.items() if any(word in part for part in command))

        monkeypatch.setattr(doctor, "_try", answer)

    return set_answers


def test_this_machine_can_run_kvchaos() -> None:
    command = [sys.executable, "-c", "from harness.cli import main; main()", "doctor", "--json"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    checks = {check["name"]: check for check in json.loads(run.stdout)}
    assert list(checks) == [
        "python",
        "packages",
        "dependencies",
        "torch",
        "cuda",
        "compiled",
        "nixl",
        "vllm",
        "docker",
        "links",
        "chromium",
    ]
    assert all(checks[name]["ok"] for name in ("python", "packages", "dependencies", "torch"))
    assert all(check["advice"] for check in checks.values() if not check["ok"])


@pytest.mark.parametrize("as_json", [False, True])
def test_something_required_that_is_broken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    from harness.commands.doctor import doctor as command

    checks = [
        Check("a", True, True, "here"),
        Check("b", False, False, "gone", "get b"),
        Check("c", False, True, "x", "y"),
    ]
    monkeypatch.setattr("harness.commands.doctor.examine", lambda: iter(checks))
    code = command.main(["--json"] if as_json else [], standalone_mode=False)
    assert code == 70
    said = capsys.readouterr().out
    if as_json:
        assert [(check["name"], check["ok"]) for check in json.loads(said)] == [("a", True), ("b", False), ("c", False)]
    else:
        assert [line.split()[1] for line in said.splitlines()] == ["ok", "missing", "get", "BROKEN", "y"]


def test_what_is_optional_may_be_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from harness.commands.doctor import doctor as command

    monkeypatch.setattr("harness.commands.doctor.examine", lambda: iter([Check("b", False, False, "gone", "get b")]))
    assert command.main([], standalone_mode=False) == 0
    assert "get b" in capsys.readouterr().out


def test_packages_of_the_same_name_elsewhere(tmp_path: Path) -> None:
    """Another `kernels` that comes first on the path."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").touch()
    code = (
        f"import sys; sys.path.insert(0, {str(Path(doctor.__file__).parent.parent)!r}); import harness.doctor as d\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "print([(c.ok, c.required, c.found) for c in d.packages()])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("[(False, True, 'kernels is ")
    assert str(tmp_path) in run.stdout


def test_packages_that_another_distribution_has_too(monkeypatch: pytest.MonkeyPatch) -> None:
    owners = {"kernels": ["kvchaos", "kernels"], "engine": ["kvchaos"]}
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: owners)
    (check,) = doctor.packages()
    assert (check.ok, check.required, check.found) == (False, False, "kernels is also in kernels")


def test_dependencies_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["no-such-thing>=1", "numpy>=1.26", 'ruff>=0.9; extra == "dev"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: wanted)
    check = doctor.dependencies()
    assert (check.ok, check.found, check.advice) == (False, "missing: no-such-thing", "pip install no-such-thing")


def test_kvchaos_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "DISTRIBUTION", "no-such-thing")
    assert not doctor.dependencies().ok


def test_torch_that_cannot_be_imported(answers: Answers) -> None:
    answers(torch=done(stderr="Traceback\nImportError: libfoo.so", code=1))
    (check,) = doctor.torch_and_cuda()
    assert (check.ok, check.required, check.found) == (False, True, "ImportError: libfoo.so")


@pytest.mark.parametrize(
    ("about", "ok", "found"),
    [
        ({"version": "2.9.0+cu128", "devices": ["NVIDIA H200"], "built": "12.8"}, True, "NVIDIA H200"),
        ({"version": "2.9.0+cu128", "devices": [], "built": "12.8"}, False, "torch sees no CUDA device"),
        ({"version": "2.9.0+cpu", "devices": [], "built": None}, False, "this torch is built without CUDA"),
    ],
)
def test_cuda(answers: Answers, about: dict[str, object], ok: bool, found: str) -> None:
    answers(torch=done(json.dumps(about)))
    torch, cuda = doctor.torch_and_cuda()
    assert torch.ok
    assert (cuda.ok, cuda.required, cuda.found) == (ok, False, found)


@pytest.mark.parametrize(
    ("said", "ok", "found"),
    [
        (done("\n"), True, "numba 0.66.0"),
        (done("ImportError: Numba needs NumPy 2.2\nor less\n"), False, "ImportError: Numba needs NumPy 2.2"),
        (done(stderr="Traceback\nModuleNotFoundError: torch", code=1), False, "ModuleNotFoundError: torch"),
        (done(code=-11), False, "it ends with -11"),
        (None, False, "it cannot be started, or does not end within 60 s"),
    ],
)
def test_the_compiled_path(
    answers: Answers,
    monkeypatch: pytest.MonkeyPatch,
    said: subprocess.CompletedProcess[str] | None,
    ok: bool,
    found: str,
) -> None:
    answers(why_not_compiled=said)
    monkeypatch.setattr(doctor, "_version", {"numba": "0.66.0"}.get)
    check = doctor.compiled()
    assert (check.ok, check.required) == (ok, False)
    assert check.found == (found if ok else f"not there, so torch sums: {found}")
    assert ok or "numba" in check.advice


@pytest.mark.parametrize(
    ("said", "installed", "ok", "found"),
    [
        (done("NIXL INFO\nfound UCX\n"), "1.5.1", True, "1.5.1, with UCX"),
        (done("found no UCX\n"), "1.5.1", False, "installed, but makes no agent: found no UCX"),
        (done(code=-11), "1.5.1", False, "installed, but makes no agent: it ends with -11"),
        (None, "1.5.1", False, "does not end within 60 s"),
        (done(stderr="ModuleNotFoundError: nixl", code=1), None, False, "not installed"),
    ],
)
def test_nixl(
    answers: Answers,
    monkeypatch: pytest.MonkeyPatch,
    said: subprocess.CompletedProcess[str] | None,
    installed: str | None,
    ok: bool,
    found: str,
) -> None:
    answers(nixl=said)
    monkeypatch.setattr(doctor, "_version", lambda _: installed)
    check = doctor.nixl()
    assert (check.ok, check.required) == (ok, False)
    assert found in check.found
    assert ok or "--no-deps" in check.advice


@pytest.mark.parametrize(
    ("daemon", "compose", "ok", "found"),
    [
        (done("27.0\n"), done("2.30\n"), True, "27.0, compose 2.30"),
        (done("27.0\n"), done(code=1), False, "27.0, without compose"),
        (done(stderr="Cannot connect", code=1), None, False, "no daemon answers: Cannot connect"),
        (None, None, False, "no daemon answers: it cannot be started"),
    ],
)
def test_docker(
    answers: Answers,
    monkeypatch: pytest.MonkeyPatch,
    daemon: subprocess.CompletedProcess[str] | None,
    compose: subprocess.CompletedProcess[str] | None,
    ok: bool,
    found: str,
) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/bin/{name}")
    answers(**{"{{.Server": daemon, "compose": compose})
    check = doctor.docker()
    assert check.ok is ok
    assert check.found.startswith(found)


def test_docker_without_its_sdk(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(doctor, "_version", lambda distribution: None)
    answers(**{"{{.Server": done("20.10"), "compose": done("2.26")})
    check = doctor.docker()
    assert (check.ok, check.found) == (False, "20.10, compose 2.26, without the SDK for Python")
    assert check.advice == "pip install docker"


@pytest.mark.parametrize(
    ("config", "ok", "found"),
    [
        ("# CONFIG_NET_SCH_NETEM is not set\nCONFIG_NET_SCH_TBF=y\n", True, "netem: no, tbf: yes"),
        ("CONFIG_NET_SCH_NETEM=m\n", True, "netem: yes, tbf: no"),
        ("CONFIG_NET_SCH_HTB=y\n", False, "netem: no, tbf: no"),
        (None, True, "this kernel does not tell whether it has netem and tbf"),
    ],
)
def test_what_links_can_be_slowed_with(
    monkeypatch: pytest.MonkeyPatch, config: str | None, ok: bool, found: str
) -> None:
    monkeypatch.setattr(doctor, "_kernel_config", lambda: config)
    check = doctor.traffic_control()
    assert (check.ok, check.required, check.found) == (ok, False, found)


def test_a_machine_with_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    for check in (doctor.docker(), doctor.chromium()):
        assert (check.ok, check.required) == (False, False)
        assert check.advice


def test_a_process_that_cannot_be_started_or_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._try(["/no/such/command"]) is None
    monkeypatch.setattr(doctor, "_PATIENCE_S", 0.01)
    assert doctor._try([sys.executable, "-c", "import threading; threading.Event().wait()"]) is None
