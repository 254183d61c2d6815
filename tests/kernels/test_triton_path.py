"""The Triton kernel without a GPU: interpreted in a process of its own, and compiled ahead of time with gates."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not made for this platform")

ROOT = Path(__file__).parents[2]
# More would leave fewer than six programs of four warps on a multiprocessor with 65,536 registers.
MAX_REGISTERS = 80


@pytest.mark.req("EXT-6", "DEF-1", "DEF-4", "DEF-7", "DEF-8")
def test_interpreted_it_gives_the_definition():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, "tests/kernels/interpreted_triton.py"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 17


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """Compile the kernel for an architecture: its PTX, and what ptxas says of registers and spills."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource

    from kernels import triton_path

    def compiled(arch, aligned, parts):
        constants = {
            "parts": parts,
            "tile_tokens": triton_path.TILE_TOKENS,
            "tile_pieces": triton_path.tile_pieces_limit(aligned),
            "aligned": aligned,
        }
        pointers = dict.fromkeys(("layers", "rows", "sums"), "*i64")
        source = ASTSource(
            fn=triton_path.sum_rows_kernel,
            signature=pointers | dict.fromkeys(constants, "constexpr"),
            constexprs=constants,
            attrs={(at,): [["tt.divisibility", 16]] for at in range(len(pointers))},
        )
        options = {"num_warps": triton_path.NUM_WARPS}
        ptx = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options).asm["ptx"]
        file = tmp_path / "kernel.ptx"
        file.write_text(ptx)
        name = re.search(r"\.target (sm_\w+)", ptx)[1]
        arguments = ["-v", f"--gpu-name={name}", str(file), "-o", os.devnull]
        done = subprocess.run([get_ptxas(arch).path, *arguments], capture_output=True, text=True, check=True)
        return ptx, done.stderr

    return compiled


@pytest.mark.req("EXT-6")
@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize(("aligned", "parts"), [(True, 2), (True, 1), (False, 2)])
def test_ahead_of_time_it_fits_and_loads_vectors(compiled, arch, aligned, parts):
    ptx, said = compiled(arch, aligned, parts)
    assert int(re.search(r"Used (\d+) registers", said)[1]) <= MAX_REGISTERS, said
    assert re.search(r"\b0 bytes spill stores, 0 bytes spill loads", said), said
    loads = Counter(re.findall(r"ld\.global[\w.:]*", ptx))
    # Two loads of a pair of pieces by each thread and part; single ones only read the tables.
    vectors = sum(count for load, count in loads.items() if ".v2.b64" in load)
    assert vectors == (2 * parts if aligned else 0), loads
    tables = 3 + 5 + 6 * parts
    assert loads["ld.global.b64"] == tables + (0 if aligned else 2 * parts), loads


@pytest.mark.req("EXT-6")
def test_ahead_of_time_it_reads_nothing_twice(compiled):
    """One atomic addition a program, nothing written but that: no partial sums go through memory."""
    ptx, _ = compiled(90, True, 2)
    assert len(re.findall(r"\b(?:atom|red)\.[\w.]*global", ptx)) == 1
    assert not re.findall(r"\bst\.global", ptx)
