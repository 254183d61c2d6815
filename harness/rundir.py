"""The folder of a run: where it is, what says how it was made, and which one is the newest."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from engine.connectors import DEFAULT_CONNECTOR
from engine.errors import InputError
from engine.extensions import LOADED
from harness.errors import HistoryError
from harness.history import error_text
from reports.files import write_atomically
from scenarios.words import Policy

MANIFEST_FILE = "manifest.json"
HISTORY_FILE = "history.jsonl"
TIMING_FILE = "timing.jsonl"
CELLS_DIR = "cells"
LATEST = "latest"
_PACKAGES = ("kvchaos", "torch", "numpy", "msgpack", "pydantic")


@dataclass(frozen=True, slots=True)
class Options:
    """Every option of a run that can change a verdict. `sources` maps a scenario to its file, as it was given."""

    name: str
    target: str
    seed: int
    policies: tuple[Policy, ...]
    sources: dict[str, str]
    provenance: bool = True
    connector: str = DEFAULT_CONNECTOR
    vllm_python: str | None = None
    model: str | None = None

    def rerun(self, scenario: str, policy: Policy, *, repeat: bool = False) -> str:
        """The command that runs a cell of this scenario again, with its twin; if it was a repeat, twice.

        A scenario that no file is known of is looked for in all.
        """
        paths = [self.sources[scenario]] if scenario in self.sources else sorted(set(self.sources.values()))
        paths = [f"./{path}" if path.startswith("-") else path for path in paths]
        command = ["kvchaos", "run", *paths, "--policy", str(policy), "--seed", str(self.seed), "--target", self.target]
        command += ["--repeat", "100"] if repeat else []
        command += [] if self.connector == DEFAULT_CONNECTOR else ["--connector", self.connector]
        command += [] if self.provenance else ["--no-provenance"]
        command += [] if self.vllm_python is None else ["--vllm-python", self.vllm_python]
        command += [] if self.model is None else ["--model", self.model]
        return shlex.join(command)

    def to_plain(self) -> dict[str, Any]:
        """The options as JSON values; `from_plain` reads them back."""
        return {**asdict(self), "policies": [str(policy) for policy in self.policies]}

    @classmethod
    def from_plain(cls, data: dict[str, Any]) -> Self:
        """Read what `to_plain` gave. Raises KeyError, TypeError or ValueError for anything else."""
        # A run from before these could be chosen.
        data = {"connector": DEFAULT_CONNECTOR, "vllm_python": None, "model": None, **data}
        kinds = {"name": str, "target": str, "seed": int, "policies": list, "sources": dict, "provenance": bool}
        kinds |= {"connector": str}
        for name, kind in kinds.items():
            if type(data[name]) is not kind:
                raise TypeError(f"{name} is no {kind.__name__}")
        if not all(isinstance(data[name], str | None) for name in ("vllm_python", "model")):
            raise TypeError("vllm_python or model is no path")
        if not all(isinstance(source, str) for source in data["sources"].values()):
            raise TypeError("sources holds something that is no path")
        return cls(**{**data, "policies": tuple(Policy(policy) for policy in data["policies"])})


def create(
    runs_dir: Path, options: Options, plan: Sequence[str], shard: str | None, command: Sequence[str], now: datetime
) -> Path:
    """Make the folder of a new run, with its manifest. `plan` holds the ids of all cells, also of other shards.

    Raises:
        InputError: the folder cannot be made.
    """
    run_dir = make_folder(runs_dir, options.name, now, (CELLS_DIR,))
    manifest = {"options": options.to_plain(), "plan": list(plan), "shard": shard, **circumstances(command, now)}
    write_atomically(run_dir / MANIFEST_FILE, json.dumps(manifest, indent=2) + "\n")
    return run_dir


def make_folder(runs_dir: Path, name: str, now: datetime, inside: Sequence[str] = ()) -> Path:
    """Make the folder of a new run of this name, called after the time, and these empty ones in it.

    Raises:
        InputError: the folder cannot be made.
    """
    stamp = now.astimezone(UTC).strftime("%Y-%m-%dT%H%M%SZ")
    try:
        # `latest` is the link to the newest run: a folder of that name would be made inside of another run.
        parent = runs_dir / (name if name != LATEST else f"{LATEST}-")
        parent.mkdir(parents=True, exist_ok=True)
        run_dir = _fresh(parent, stamp)
        for folder in inside:
            (run_dir / folder).mkdir()
        return run_dir
    except OSError as error:
        raise InputError(f"{runs_dir}: cannot keep runs here ({error.strerror}): choose another --runs-dir") from None


def point_latest(runs_dir: Path, run_dir: Path) -> None:
    """Let `latest` point to this run. A `latest` that is no link is left alone, and so is a folder that takes none."""
    link = runs_dir / LATEST
    if os.path.lexists(link) and not link.is_symlink():
        return
    draft = runs_dir / f".{LATEST}.{os.getpid()}"
    with contextlib.suppress(OSError):
        draft.unlink(missing_ok=True)
        draft.symlink_to(os.path.relpath(run_dir, runs_dir), target_is_directory=True)
        draft.replace(link)


def read_manifest(run_dir: Path) -> dict[str, Any]:
    """The manifest of a stored run, with options that `Options.from_plain` reads.

    Raises:
        HistoryError: there is no readable manifest.
    """
    path = run_dir / MANIFEST_FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        Options.from_plain(data["options"])
        # The ids are names of folders.
        if not isinstance(data["plan"], list) or not all(map(re.compile(r"[\w-]+").fullmatch, data["plan"])):
            raise TypeError("plan is no list of cells")
        if data["shard"] is not None and not isinstance(data["shard"], str):
            raise TypeError("shard is no i/n")
        return {name: data[name] for name in ("options", "plan", "shard", "versions")}
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = error_text(error)
    raise HistoryError(f"{path}: cannot be read ({reason}): give the folder of a finished run")


def read_options(run_dir: Path) -> Options:
    """The options of a stored run. Raises HistoryError like `read_manifest`."""
    return Options.from_plain(read_manifest(run_dir)["options"])


def _fresh(parent: Path, stamp: str) -> Path:
    for suffix in ("", *(f"-{n}" for n in range(2, 1000))):
        run_dir = parent / f"{stamp}{suffix}"
        try:
            run_dir.mkdir()
        except FileExistsError:
            continue
        return run_dir
    raise InputError(f"{parent}: a thousand runs began in this second: try again")


def circumstances(command: Sequence[str], now: datetime) -> dict[str, Any]:
    """What a manifest says of how a run was made: when, by which command, with which versions, on what."""
    return {
        "schema_version": 1,
        "created": now.astimezone(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(command),
        "device": "cpu",
        "versions": {"python": platform.python_version()} | {name: version(name) for name in _PACKAGES} | LOADED,
        "platform": f"{sys.platform} {platform.machine()}",
    }
