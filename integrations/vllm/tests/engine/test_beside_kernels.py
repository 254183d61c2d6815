"""Beside Hugging Face's package `kernels`, in an environment with vLLM, both can be imported."""

from __future__ import annotations

import os
import subprocess
import sys

CODE = """
import kernels, kvchaos_vllm.connector
assert hasattr(kernels, "get_kernel"), kernels.__file__
print(kernels.__file__, kvchaos_vllm.__file__, sep="\\n")
"""


def test_both_can_be_imported(tmp_path):
    """kvchaos itself has a package named `kernels`: the protection must not bring it along."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--disable-pip-version-check"]
    subprocess.run([*pip, "--target", str(tmp_path), "kernels"], check=True)
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{tmp_path}{os.sep}kernels" in done.stdout
