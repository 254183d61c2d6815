"""What this machine has of what kvchaos uses: each check says what it found, or what to install.

What can crash or hang (a NIXL agent, a docker client) is tried in a process of its own, with a time limit.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib.metadata
import importlib.util
import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

DISTRIBUTION = "kvchaos"
PACKAGES = ("kernels", "engine", "faults", "scenarios", "reports", "harness")
MIN_PYTHON = (3, 11)
_PATIENCE_S = 60.0
_CHROMIUMS = ("chromium", "chromium-browser", "google-chrome")
_NIXL_HINT = "pip install --no-deps nixl nixl-cu12 (the plain install may replace torch by another build)"
_TRY_NIXL = """
import os, sys
from nixl._api import nixl_agent, nixl_agent_config
agent = nixl_agent("kvchaos-doctor", nixl_agent_config(backends=["UCX"]))
print("found UCX" if "UCX" in agent.backends else "found no UCX")
sys.stdout.flush()
os._exit(0)
"""
_TRY_TORCH = """
import json, torch
cuda = torch.cuda.is_available()
names = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())] if cuda else []
print(json.dumps({"version": torch.__version__, "devices": names, "built": torch.version.cuda}))
"""
_TRY_COMPILED = "from kernels import paths; print(paths.why_not_compiled() or '')"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked for. `required`: kvchaos does not work without it. `advice`: for where it is not ok."""

    name: str
    ok: bool
    required: bool
    found: str
    advice: str = ""


def examine() -> Iterator[Check]:
    """All checks, in the order in which they are shown. Each takes at most a minute."""
    yield python()
    yield from packages()
    yield dependencies()
    yield from torch_and_cuda()
    yield compiled()
    yield nixl()
    yield vllm()
    yield docker()
    yield traffic_control()
    yield chromium()


def python() -> Check:
    """The interpreter."""
    found = f"{platform.python_version()} at {sys.executable}"
    wanted = ".".join(map(str, MIN_PYTHON))
    return Check("python", sys.version_info >= MIN_PYTHON, True, found, f"Python {wanted} or newer")


def packages() -> Iterator[Check]:
    """Whether what `import kernels` and the like give is ours: the names are common ones."""
    home = Path(__file__).resolve().parent.parent
    owners = importlib.metadata.packages_distributions()
    advice = f"install {DISTRIBUTION} in an environment of its own: another distribution has packages of the same name"
    strangers = {name: sorted(set(owners.get(name, ())) - {DISTRIBUTION}) for name in PACKAGES}
    shadowed = [f"{name} is {where}" for name in PACKAGES if (where := _elsewhere(name, home)) is not None]
    if shadowed:
        yield Check("packages", False, True, "; ".join(shadowed), advice)
        return
    mixed = [f"{name} is also in {', '.join(others)}" for name, others in strangers.items() if others]
    yield Check("packages", not mixed, False, "; ".join(mixed) or f"ours, in {home}", advice)


def _elsewhere(name: str, home: Path) -> str | None:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return "missing"
    return None if Path(spec.origin).resolve().parent == home / name else spec.origin


def dependencies() -> Check:
    """What kvchaos cannot be without, as its own metadata names it."""
    try:
        wanted = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return Check("dependencies", False, True, f"{DISTRIBUTION} is not installed", "pip install -e .")
    names = [re.split(r"[^\w.-]", line)[0] for line in wanted if "extra ==" not in line]
    missing = [name for name in names if _version(name) is None]
    found = (
        f"missing: {', '.join(missing)}" if missing else f"all {len(names)} of {DISTRIBUTION} {_version(DISTRIBUTION)}"
    )
    return Check("dependencies", not missing, True, found, f"pip install {' '.join(missing)}")


def torch_and_cuda() -> Iterator[Check]:
    """torch and numpy work together, and whether there is a GPU."""
    done = _try([sys.executable, "-c", _TRY_TORCH])
    if done is None or done.returncode != 0:
        yield Check("torch", False, True, _last_line(done), "pip install torch")
        return
    about = json.loads(done.stdout)
    yield Check("torch", True, True, f"{about['version']}, numpy {_version('numpy')}")
    if about["devices"]:
        yield Check("cuda", True, False, ", ".join(about["devices"]))
    else:
        why = "this torch is built without CUDA" if about["built"] is None else "torch sees no CUDA device"
        yield Check("cuda", False, False, why, "nothing: engines run on the CPU; --device cuda needs a GPU")


def compiled() -> Check:
    """Sums in host memory are compiled: without numba, or with one for another numpy, torch sums, and takes longer."""
    done = _try([sys.executable, "-c", _TRY_COMPILED])
    why = _last_line(done) if done is None or done.returncode else done.stdout.strip()
    if not why:
        return Check("compiled", True, False, f"numba {_version('numba')}")
    advice = "pip install numba, in a version for this numpy"
    return Check("compiled", False, False, f"not there, so torch sums: {why.splitlines()[0][:200]}", advice)


def nixl() -> Check:
    """An agent can be made: without one there are no targets with real processes."""
    done = _try([sys.executable, "-c", _TRY_NIXL])
    if done is not None and "found UCX" in done.stdout:
        return Check("nixl", True, False, f"{_version('nixl')}, with UCX")
    if _version("nixl") is None:
        return Check("nixl", False, False, "not installed: no `kvchaos serve engine`, no target local", _NIXL_HINT)
    return Check("nixl", False, False, f"installed, but makes no agent: {_last_line(done)}", _NIXL_HINT)


def vllm() -> Check:
    """An environment of its own that holds a vLLM, with the packages of integrations/: only target vllm needs it."""
    # Not at the top: it brings our packages, and which ones these are is looked at first.
    from harness.targets.vllm.settings import HINT, Settings, look

    there, found = look(Settings.of_environment())
    return Check("vllm", there, False, found, f"{HINT}; only target vllm needs it")


def docker() -> Check:
    """A daemon answers, has compose, and can be reached from Python."""
    advice = "start the docker daemon, or install docker with its compose plugin; only target docker needs it"
    if shutil.which("docker") is None:
        return Check("docker", False, False, "no docker command", advice)
    done = _try(["docker", "version", "--format", "{{.Server.Version}}"])
    if done is None or done.returncode != 0:
        return Check("docker", False, False, f"no daemon answers: {_last_line(done)}", advice)
    compose = _try(["docker", "compose", "version", "--short"])
    if compose is None or compose.returncode != 0:
        return Check("docker", False, False, f"{done.stdout.strip()}, without compose", advice)
    found = f"{done.stdout.strip()}, compose {compose.stdout.strip()}"
    sdk = _version("docker")
    if sdk is None:
        return Check("docker", False, False, f"{found}, without the SDK for Python", "pip install docker")
    return Check("docker", True, False, f"{found}, SDK {sdk}")


def traffic_control() -> Check:
    """What this kernel has to slow a link with. Where containers run in a virtual machine, that one has its own."""
    name, advice = "links", "a kernel with netem or tbf; only the fault slow_link on target docker needs one"
    config = _kernel_config()
    if config is None:
        return Check(name, True, False, "this kernel does not tell whether it has netem and tbf")
    has = {kind: re.search(rf"^CONFIG_NET_SCH_{kind.upper()}=[ym]$", config, re.MULTILINE) for kind in ("netem", "tbf")}
    found = ", ".join(f"{kind}: {'yes' if there else 'no'}" for kind, there in has.items())
    return Check(name, any(has.values()), False, found, advice)


def _kernel_config() -> str | None:
    """How the running kernel was built, where it says so."""
    for path in (Path("/proc/config.gz"), Path(f"/boot/config-{platform.release()}")):
        with contextlib.suppress(OSError, EOFError):
            raw = path.read_bytes()
            return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8", "replace")
    return None


def chromium() -> Check:
    """A browser, for the tests of the report page."""
    path = next((found for name in _CHROMIUMS if (found := shutil.which(name))), None)
    advice = "your system's package chromium; only `make test-browser` needs it"
    return Check("chromium", path is not None, False, path or "no browser found", advice)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _try(command: Sequence[str]) -> subprocess.CompletedProcess[str] | None:
    """The finished process; None if it could not be started or did not end."""
    try:
        return subprocess.run(
            list(command),
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=_PATIENCE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def _last_line(done: subprocess.CompletedProcess[str] | None) -> str:
    if done is None:
        return f"it cannot be started, or does not end within {_PATIENCE_S:.0f} s"
    lines = (done.stderr or done.stdout).strip().splitlines()
    return lines[-1][:200] if lines else f"it ends with {done.returncode}"
