"""Which path an engine's checksums take, and that nothing is imported or compiled before it is needed."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels import cpu_path, paths, torch_path
from kernels.torch_path import LayerCache

ROOT = Path(__file__).parents[2]
LAYERS = [LayerCache(3, 1, (torch.arange(512).view(4, 4, 4, 8),))]
HOW = {"block_size": 4, "start": 1, "num_tokens": 10}


def test_host_memory_goes_through_the_compiled_path(monkeypatch):
    calls = []
    original = cpu_path.sum_blocks
    monkeypatch.setattr(cpu_path, "sum_blocks", lambda *args, **how: calls.append(how) or original(*args, **how))
    paths.block_checksums(LAYERS, [2, 0], **HOW)
    assert [how["num_tokens"] for how in calls] == [10]


def test_a_device_goes_through_torch():
    on_meta = [LayerCache(3, 1, tuple(part.to("meta") for part in LAYERS[0].parts))]
    assert paths.block_checksums(on_meta, [2, 0], **HOW).device.type == "meta"


@pytest.mark.parametrize("version", [1, 2])
def test_every_version_is_that_of_torch(version):
    got = paths.block_checksums(LAYERS, [2, 0], **HOW, version=version)
    assert got.tolist() == torch_path.block_checksums(LAYERS, [2, 0], **HOW, version=version).tolist()


def test_no_layers_and_no_such_version_are_refused_as_by_torch():
    with pytest.raises(ValueError, match="at least one"):
        paths.block_checksums([], [0], **HOW)
    with pytest.raises(ValueError, match="version is 3"):
        paths.block_checksums(LAYERS, [0], **HOW, version=3)


def test_the_compiled_path_is_there():
    assert paths.why_not_compiled() is None


def run_python(code):
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_without_numba_torch_does_it_and_the_reason_is_said():
    code = """if True:
        import sys
        sys.modules["numba"] = None
        import torch
        from kernels import paths, torch_path
        layers = [torch_path.LayerCache(3, 1, (torch.arange(512).view(4, 4, 4, 8),))]
        how = dict(block_size=4, start=1, num_tokens=10)
        paths.prepare(torch.device("cpu"))
        assert paths.block_checksums(layers, [2], **how).equal(torch_path.block_checksums(layers, [2], **how))
        assert paths.block_checksums(layers, [2], **how, version=2).equal(
            torch_path.block_checksums(layers, [2], **how, version=2)
        )
        print(paths.why_not_compiled())
    """
    assert run_python(code).startswith("ModuleNotFoundError: import of numba halted")


@pytest.mark.parametrize("imported", ["harness.cli", "kernels.paths", "engine.checksum.worker"])
def test_numba_is_imported_only_where_it_is_used(imported):
    assert run_python(f"import sys, {imported}; print('numba' in sys.modules)") == "False"


def test_preparing_is_what_imports_it():
    code = "import sys, torch, kernels.paths as p; p.prepare(torch.device('meta')); before = 'numba' in sys.modules; "
    code += "p.prepare(torch.device('cpu')); "
    code += "print(before, *(f'kernels.cpu_compiled{v}' in sys.modules for v in ('', '_v2')))"
    assert run_python(code) == "False True True"


def test_no_step_compiles_for_the_version_that_a_producer_chose():
    """After `prepare` a first sum of either version starts no compiler."""
    code = """if True:
        import torch
        from kernels import paths
        from kernels.torch_path import LayerCache
        paths.prepare(torch.device("cpu"))
        from numba.core import compiler
        compiler.compile_extra = None
        layers = [LayerCache(3, 1, (torch.arange(512).view(4, 4, 4, 8),))]
        for version in (1, 2):
            paths.block_checksums(layers, [2], block_size=4, start=1, num_tokens=10, version=version)
        from kernels import cpu_compiled, cpu_compiled_v2
        print(*(len(module.add_sums.signatures) for module in (cpu_compiled, cpu_compiled_v2)))
    """
    assert run_python(code) == "1 1"
