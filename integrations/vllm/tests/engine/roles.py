"""Starts and talks to engines that `role.py` runs, and plays the proxy between two of them."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

ANSWER_S = 240
MEETINGS = 6
BLOCK = 32
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "UCX_TLS": "tcp,self,sm",
    # As vLLM sets it before it imports NIXL, which is imported earlier here.
    "UCX_RCACHE_MAX_UNRELEASED": "1024",
    "UCX_NET_DEVICES": "lo",
}


class RoleEndedError(RuntimeError):
    """The engine's process ended, or did not answer. The message ends with what it printed last."""


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Engine:
    """An engine in a process of its own."""

    def __init__(self, name: str, model: Path, log: Path, **changes: Any) -> None:
        transfer = changes.pop("kv_transfer_config", None)
        tp = changes.get("tensor_parallel_size", 1)
        arguments = {
            "model": str(model),
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "dtype": "float32",
            "max_model_len": 1024,
            "max_num_seqs": 8,
            "num_gpu_blocks_override": 256,
            "block_size": BLOCK,
            "distributed_executor_backend": "uni" if tp == 1 else "mp",
            "disable_log_stats": False,
            "kv_transfer_config": transfer,
        } | changes
        read, write = os.pipe()
        environment = os.environ | ENVIRONMENT | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
        self.name, self.log = name, log
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("role.py")), str(write), json.dumps(arguments)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(write,),
                env=environment,
                text=True,
                # A group of its own, so that its workers can be ended with it.
                start_new_session=True,
            )
        os.close(write)
        self._answers = os.fdopen(read)
        self.refused: str | None = None

    def wait_until_ready(self) -> Engine:
        """Wait for the engine to be up; `refused` says why it is not."""
        self.refused = self._answer().get("refused")
        return self

    def __call__(self, command: str, **arguments: Any) -> Any:
        """Run a command of `role.py`."""
        assert self._process.stdin is not None
        print(json.dumps([command, arguments]), file=self._process.stdin, flush=True)
        return self._answer()["result"]

    def text(self) -> str:
        """What the process has printed so far."""
        return self.log.read_text(errors="replace")

    def stop(self) -> None:
        """End the process and its workers."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._process.stdin.close()
            self._process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._answers.close()

    def _answer(self) -> dict[str, Any]:
        ready, _, _ = select.select([self._answers], [], [], ANSWER_S)
        line = self._answers.readline() if ready else ""
        if not line:
            what = "ended" if ready else f"gave no answer in {ANSWER_S} s"
            raise RoleEndedError(f"engine {self.name} {what}:\n{self.text()[-4000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def checksum_transfer(role: str = "kv_both", policy: str = "fail", **extra: Any) -> dict[str, Any]:
    """A KVTransferConfig with our connector."""
    return {
        "kv_connector": "ChecksumNixlConnector",
        "kv_connector_module_path": "kvchaos_vllm.connector",
        "kv_role": role,
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": extra,
    }


def prefill(p: Engine, prompts: list[list[int]], **params: Any) -> list[dict[str, Any]]:
    """Send prompts to P as a proxy does; gives the parameters for D."""
    wanted = {"do_remote_decode": True, "do_remote_prefill": False} | params
    requests = [{"prompt": prompt, "max_tokens": 1, "params": wanted} for prompt in prompts]
    return [answer["params"] for answer in p("generate", requests=requests)]


def decode(d: Engine, prompts: list[list[int]], params: list[dict[str, Any]], tokens: int = 12) -> list[dict[str, Any]]:
    """Send prompts to D with what P answered."""
    requests = [
        {"prompt": prompt, "max_tokens": tokens, "params": each} for prompt, each in zip(prompts, params, strict=True)
    ]
    answers: list[dict[str, Any]] = d("generate", requests=requests)
    return answers


def meet(p: Engine, d: Engine) -> None:
    """Let D shake hands with P, which vLLM does at the first load, and waits 5 s for: more may be needed on a machine
    that is busy. A load fails then, and the next one tries again.
    """
    prompt = [[3 + n % 500 for n in range(BLOCK + 1)]]
    for _ in range(MEETINGS):
        decode(d, prompt, prefill(p, prompt), tokens=1)
        verdicts = d("take_verdicts")
        for engine in (p, d):
            engine("reset_prefix_cache")
        if verdicts and verdicts[0]["reason"] != "load_failed":
            return
    raise RoleEndedError(f"engine {d.name} cannot shake hands with {p.name}:\n{d.text()[-4000:]}")


def plain(engine: Engine, prompts: list[list[int]], tokens: int = 12) -> list[list[int]]:
    """The tokens of prompts without P/D."""
    requests = [{"prompt": prompt, "max_tokens": tokens} for prompt in prompts]
    return [answer["tokens"] for answer in engine("generate", requests=requests)]
