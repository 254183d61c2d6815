"""gpu-check without a GPU: it says so and measures nothing; what it would print and conclude, from made-up findings."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from harness.bench import gpu_check
from harness.bench.gpu_check import GpuCheck, lines, main

ROOT = Path(__file__).parents[3]
STEP = {"prompt_tokens": 8192, "without_ms": 10.0, "with_ms": 10.5}
GOOD = GpuCheck(
    "a device",
    {"torch": "1"},
    [{"shape": {"heads": 1}, "differing": 0}, {"shape": {"heads": 2}, "differing": 0}],
    [{"tokens": 1024, "size": 2**30, "triton_ms": 1.0, "torch_ms": 8.0, "copy_ms": 2.0}],
    STEP,
    None,
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it runs for minutes: make gpu-check")
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path, capsys):
    assert main(["--out", str(tmp_path / "out.json")]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "no GPU here" in said.err
    assert "nothing was measured" in said.err
    assert list(tmp_path.iterdir()) == []


def test_what_was_found_is_printed_and_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu_check, "why_not", lambda: None)
    monkeypatch.setattr(gpu_check, "check", lambda: GOOD)
    out = tmp_path / "new" / "out.json"
    assert main(["--out", str(out)]) == 0
    assert json.loads(out.read_text()) == asdict(GOOD)
    text = capsys.readouterr().out
    assert "exact on 2 of 2 shapes" in text
    assert "1073.7" in text  # 2**30 bytes in 1 ms
    assert "536.9" in text
    assert "10.000 ms without checksums, 10.500 ms with those of a prompt of 8,192 tokens" in text
    assert "no host sync" in text


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"exact": [{"shape": {"heads": 1}, "differing": 3}]}, "WRONG at 3 blocks"),
        ({"host_sync": "called a synchronizing operation"}, "HOST SYNC: called"),
    ],
)
def test_what_is_wrong_is_said_and_fails(changes, says):
    found = GpuCheck(**(asdict(GOOD) | changes))
    assert found.exit_code == 1
    assert says in "\n".join(lines(found))


@pytest.mark.req("EXT-6")
def test_its_shapes_are_exact_in_the_interpreter():
    """The very function that a GPU will run, on shapes small enough for Triton's interpreter."""
    pytest.importorskip("triton", reason="Triton is not made for this platform")
    code = """if True:
        from dataclasses import replace
        from harness.bench import gpu
        small = [replace(shape, layers=1, heads=min(2, shape.heads), blocks=2) for shape in gpu.shapes()]
        small = small[:: len(small) // 12]
        found = gpu.exactness(small, "cpu")
        print(len(found), sum(one.differing for one in found))
        original = gpu.triton_path.rows_of
        gpu.triton_path.rows_of = lambda ids, size, start, tokens: original(ids, size, start + 1, tokens + size)
        print(*(one.differing for one in gpu.exactness(small[:2], "cpu")))
    """
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    right, wrong = done.stdout.splitlines()
    assert int(right.split()[0]) >= 12
    assert right.split()[1] == "0"
    assert all(int(differing) > 0 for differing in wrong.split())
