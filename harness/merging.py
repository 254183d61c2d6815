"""Shards of one plan, checked to fit together and put in plan order."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.errors import InputError
from harness.errors import RunError
from harness.history import read_cells
from harness.rundir import CELLS_DIR, HISTORY_FILE, TIMING_FILE, Options, read_manifest
from reports.files import write_atomically


@dataclass(frozen=True, slots=True)
class MergedRuns:
    """All cells of a plan, each with the shard that ran it."""

    options: Options
    plan: tuple[str, ...]
    found: dict[str, Path]

    def write(self, run_dir: Path) -> None:
        """Copy every cell, and write the run's history and timing in plan order.

        Raises:
            RunError: something cannot be copied.
        """
        timings = self._timings()
        histories = []
        try:
            for cell_id in self.plan:
                source = self.found[cell_id] / CELLS_DIR / cell_id
                shutil.copytree(source, run_dir / CELLS_DIR / cell_id)
                histories.append((source / HISTORY_FILE).read_text(encoding="utf-8"))
        except OSError as error:
            raise RunError(f"{run_dir}: the shards cannot be copied there ({error.strerror or error})") from None
        write_atomically(run_dir / HISTORY_FILE, "".join(histories))
        write_atomically(run_dir / TIMING_FILE, "".join(timings.get(cell_id, "") for cell_id in self.plan))

    def _timings(self) -> dict[str, str]:
        """The line of each cell that has one. No verdict depends on them."""
        lines: dict[str, str] = {}
        for shard in set(self.found.values()):
            with contextlib.suppress(OSError, ValueError):
                for line in (shard / TIMING_FILE).read_text(encoding="utf-8").splitlines(keepends=True):
                    lines[line.split('"')[3] if line.startswith('{"cell": "') else ""] = line
        return lines


def merge_runs(run_dirs: Sequence[Path]) -> MergedRuns:
    """Check that these runs are the shards of one plan and hold all of it.

    Raises:
        InputError: they differ in what they ran, a cell is missing, is there twice, or cannot be read.
    """
    manifests = [(run_dir, read_manifest(run_dir)) for run_dir in run_dirs]
    first_dir, first = manifests[0]
    found: dict[str, Path] = {}
    for run_dir, manifest in manifests:
        for part in ("options", "plan", "versions"):
            if manifest[part] != first[part]:
                raise InputError(f"{run_dir}: its {part} differ from {first_dir}'s: merge shards of one plan only")
        # A cell that did not finish has a folder, but no place in the run's history.
        for cell_id in (str(lines[0].get("id")) for lines in read_cells(run_dir / HISTORY_FILE)):
            if not (run_dir / CELLS_DIR / cell_id / HISTORY_FILE).is_file():
                raise InputError(f"{run_dir}: cell {cell_id} has no history of its own: the run is damaged")
            if cell_id in found:
                raise InputError(f"{run_dir}: cell {cell_id} is also in {found[cell_id]}: give each shard once")
            found[cell_id] = run_dir
    missing = [cell_id for cell_id in first["plan"] if cell_id not in found]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise InputError(f"cells of no shard given: {', '.join(missing[:3])}{more}: give every shard of the plan")
    return MergedRuns(Options.from_plain(first["options"]), tuple(first["plan"]), found)
