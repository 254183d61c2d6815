"""`make gpu-check`: one command that says on a machine with a GPU whether the Triton kernel may be trusted there.

It prints a table, writes the same as JSON, and ends with 0 if everything was exact and nothing waited for the device.
Without a GPU it measures nothing and says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

EXIT_WRONG, EXIT_NO_GPU = 1, 2


@dataclass(frozen=True, slots=True)
class GpuCheck:
    """Everything that was found, as plain values of `harness/bench/gpu.py`'s records."""

    device: str
    versions: dict[str, str]
    exact: list[dict[str, object]]
    speeds: list[dict[str, float]]
    step: dict[str, float]
    host_sync: str | None

    @property
    def wrong(self) -> list[dict[str, object]]:
        """The shapes on which the kernel differed."""
        return [found for found in self.exact if found["differing"]]

    @property
    def exit_code(self) -> int:
        """0 exact everywhere and no host sync, else 1."""
        return EXIT_WRONG if self.wrong or self.host_sync is not None else 0


def why_not() -> str | None:
    """Why nothing can be checked here; None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return "torch sees no CUDA device"


def check() -> GpuCheck:
    """Check and measure, in a few minutes."""
    import triton

    from harness.bench import gpu

    versions = {"torch": torch.__version__, "triton": triton.__version__, "cuda": str(torch.version.cuda)}
    exact = gpu.exactness(list(gpu.shapes()), "cuda")
    return GpuCheck(
        torch.cuda.get_device_name(),
        versions,
        [asdict(found) for found in exact],
        [asdict(found) for found in gpu.speeds()],
        asdict(gpu.step()),
        gpu.host_syncs(),
    )


def lines(found: GpuCheck) -> Iterator[str]:
    """What a person reads."""
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    yield f"{found.device} ({versions})"
    yield f"exact on {len(found.exact) - len(found.wrong)} of {len(found.exact)} shapes"
    for wrong in found.wrong:
        yield f"  WRONG at {wrong['differing']} blocks of {wrong['shape']}"
    yield f"{'tokens':>8} {'MiB':>8} {'triton GB/s':>12} {'torch GB/s':>12} {'copy GB/s':>12} {'triton ms':>10}"
    for row in found.speeds:
        speeds = [row["size"] / row[f"{name}_ms"] / 1e6 for name in ("triton", "torch", "copy")]
        cells = " ".join(f"{speed:12.1f}" for speed in speeds)
        yield f"{row['tokens']:8,.0f} {row['size'] / 2**20:8,.0f} {cells} {row['triton_ms']:10.3f}"
    yield "  (GB/s of KV read; the copy also writes as much)"
    step = found.step
    yield (
        f"a step: {step['without_ms']:.3f} ms without checksums, {step['with_ms']:.3f} ms with those of a prompt of "
        f"{step['prompt_tokens']:,.0f} tokens"
    )
    yield "no host sync" if found.host_sync is None else f"HOST SYNC: {found.host_sync}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, print, write; the exit code."""
    parser = argparse.ArgumentParser(prog="gpu-check", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-check.json"), help="the JSON (default: %(default)s)")
    options = parser.parse_args(arguments)
    reason = why_not()
    if reason is not None:
        print(f"gpu-check: no GPU here ({reason}): nothing was checked and nothing was measured", file=sys.stderr)
        return EXIT_NO_GPU
    found = check()
    for line in lines(found):
        print(line)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(asdict(found), indent=1) + "\n", encoding="utf-8")
    print(f"written to {options.out}")
    return found.exit_code


if __name__ == "__main__":
    sys.exit(main())
