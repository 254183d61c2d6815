"""Which vLLM is run: options, the environment, and what is said where there is none."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import InputError
from harness.targets.vllm import settings
from harness.targets.vllm.settings import MODEL_VARIABLE, PYTHON_VARIABLE, Settings, check, look, say


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    # Set first, so that what `say` puts there is taken away again at the end.
    for name in (PYTHON_VARIABLE, MODEL_VARIABLE):
        monkeypatch.setenv(name, "")


def test_the_default_is_the_environment_that_make_makes() -> None:
    assert Settings.of_environment() == Settings(Path(".venv-vllm/bin/python"))


def test_what_is_said_is_found_by_every_process(tmp_path: Path) -> None:
    say(tmp_path / "python", tmp_path / "model")
    assert Settings.of_environment() == Settings(tmp_path / "python", tmp_path / "model")
    say(None, None)
    assert Settings.of_environment() == Settings(tmp_path / "python", tmp_path / "model")


def test_an_interpreter_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no interpreter at .*gone.*make vllm-env"):
        check(Settings(tmp_path / "gone"))


def test_an_interpreter_without_vllm() -> None:
    there, found = look(Settings(Path(sys.executable)))
    assert not there
    assert "missing: vllm, kvchaos_vllm, kvchaos_vllm_faults" in found


def test_a_model_that_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "look", lambda _: (True, "vllm 1"))
    with pytest.raises(InputError, match=r"no config\.json there"):
        check(Settings(Path(sys.executable), tmp_path))
    (tmp_path / "config.json").write_text("{}")
    check(Settings(Path(sys.executable), tmp_path))


def test_the_options_are_of_this_target_only(kvchaos: Callable[..., Any], write_scenario: Callable[..., Path]) -> None:
    done = kvchaos("run", write_scenario(), "--model", "m")
    assert done.code == 64
    assert "--vllm-python and --model are of target vllm" in done.err


def test_a_run_without_vllm_says_how_to_get_one(
    kvchaos: Callable[..., Any], write_scenario: Callable[..., Path], tmp_path: Path
) -> None:
    done = kvchaos(
        "run", write_scenario(), "--target", "vllm", "--vllm-python", tmp_path / "none", "--runs-dir", tmp_path
    )
    assert done.code == 64
    assert "make vllm-env" in done.err
    assert not (tmp_path / "scenarios" / "latest").exists()
