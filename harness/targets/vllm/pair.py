"""A producer and a consumer, each a vLLM engine in a process of its own, and what a run asks of them."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.checksum.policy import ChecksumSettings, resolve
from harness.targets.ports import free_ports
from harness.targets.vllm.process import TOKEN_VARIABLE, OnEvent, OnWait, RoleGoneError, RoleProcess
from harness.targets.vllm.settings import Settings
from harness.targets.workload import CONSUMER, PRODUCER

BLOCK_SIZE = 32
"""The smallest that vLLM takes on a CPU."""
_MODULE = "kvchaos_vllm_faults.engine"
_START_S = 300.0
_SETTLE_ROUNDS = 20
_MEETINGS = 6

MakeProcess = Callable[[str, Sequence[str], Mapping[str, str], Path], RoleProcess]


class VLLMPair:
    """Two processes from construction to `stop`. A cell sets their policy and clears their caches; they stay."""

    patience_s = 120.0
    """How long a process may say nothing."""

    def __init__(self, settings: Settings, make_process: MakeProcess = RoleProcess) -> None:
        """Wait until both are up. Raises RoleGoneError if one does not come up."""
        self._token = secrets.token_hex(16)
        self._logs = tempfile.TemporaryDirectory(prefix="kvchaos-vllm-")
        self._roles: dict[str, RoleProcess] = {}
        try:
            for role, port in zip((PRODUCER, CONSUMER), free_ports(2), strict=True):
                command = [str(settings.python), "-m", _MODULE, "--role", role, "--port", str(port)]
                command += ["--block-size", str(BLOCK_SIZE)]
                command += [] if settings.model is None else ["--model", str(settings.model)]
                self._roles[role] = make_process(role, command, self._environment(), self._log(role))
            self.about = {role: process.ready(_START_S) for role, process in self._roles.items()}
            self._meet()
        except BaseException:
            self.stop()
            raise

    @property
    def producer(self) -> RoleProcess:
        return self._roles[PRODUCER]

    @property
    def block_size(self) -> int:
        return int(self.about[CONSUMER]["block_size"])

    @property
    def num_blocks(self) -> int:
        """Of the smaller pool, without the null block."""
        return min(int(about["num_blocks"]) for about in self.about.values()) - 1

    @property
    def pids(self) -> dict[str, int]:
        """The process of each role."""
        return {role: process.pid for role, process in self._roles.items()}

    def prepare(self, settings: ChecksumSettings) -> None:
        """Before a cell: the policy of both, no fault, nothing in a prefix cache."""
        policy = resolve(settings)
        mode = "off" if not policy.enabled else "enforce" if policy.fail_closed else "log"
        self.producer.call("end_leases", timeout_s=self.patience_s)  # of a cell that did not come to its end
        for process in self._roles.values():
            process.call("disarm", timeout_s=self.patience_s)
            process.call("policy", mode=mode, load_failure=policy.load_failure, timeout_s=self.patience_s)
            process.call("reset", timeout_s=self.patience_s)

    def plain_answers(self, requests: list[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """What the consumer's engine gives without P/D; it forgets them afterwards."""
        process = self._roles[CONSUMER]
        process.call("reset", timeout_s=self.patience_s)
        found: Sequence[dict[str, Any]] = process.call("generate", requests=requests, timeout_s=self.patience_s)
        process.call("reset", timeout_s=self.patience_s)
        return found

    def arm(self, side: str, order: Mapping[str, Any]) -> None:
        self._roles[side].call("arm", token=self._token, order=dict(order), timeout_s=self.patience_s)

    def generate(
        self, side: str, requests: list[dict[str, Any]], on_event: OnEvent, on_wait: OnWait
    ) -> list[dict[str, Any]]:
        """Run requests to their end, telling of their moments. One without a finish reason has none by the deadline."""
        found: list[dict[str, Any]] = self._roles[side].call(
            "generate", requests=requests, timeout_s=self.patience_s, on_event=on_event, on_wait=on_wait
        )
        return found

    def pool(self, side: str) -> tuple[int, int]:
        """(free blocks, all blocks) as the engine counts them, without the null block."""
        state = self._roles[side].call("state", timeout_s=self.patience_s)
        return int(state["free"]), int(state["total"])

    def settle(self) -> bool:
        """Let both hear of what is done, and leases end as time would end them. False: something is left."""
        for attempt in range(_SETTLE_ROUNDS):
            states = [process.call("tick", timeout_s=self.patience_s) for process in self._roles.values()]
            if all(not state["unfinished"] and state["free"] == state["total"] for state in states):
                return True
            if attempt == _SETTLE_ROUNDS // 2:
                self.producer.call("end_leases", timeout_s=self.patience_s)
        return not any(state["unfinished"] for state in states)

    def stop(self) -> None:
        """End the processes that this pair started."""
        for process in self._roles.values():
            process.stop()
        with contextlib.suppress(OSError):
            self._logs.cleanup()

    def _meet(self) -> None:
        """Let D shake hands with P, which vLLM does at the first load, and waits 5 s for: more may be needed on a
        machine that is busy. A load fails then, and the next one tries again.
        """
        prompt = [3 + n % 100 for n in range(BLOCK_SIZE + 1)]
        for attempt in range(_MEETINGS):
            request: dict[str, Any] = {"name": f"meet{attempt}", "prompt": prompt, "max_tokens": 1, "follow": False}
            params = {"do_remote_decode": True, "do_remote_prefill": False}
            for process in self._roles.values():
                [answer] = process.call("generate", requests=[request | {"params": params}], timeout_s=self.patience_s)
                params = answer["params"]
            if answer["finish_reason"] == "length":
                return
        raise RoleGoneError(f"the {CONSUMER} cannot shake hands with the {PRODUCER}: its loads fail")

    def _log(self, role: str) -> Path:
        return Path(self._logs.name) / f"{role}.log"

    def _environment(self) -> dict[str, str]:
        # One thread, loopback only: what is measured here is right or wrong, not fast.
        defaults = {"OMP_NUM_THREADS": "1", "UCX_TLS": "tcp,self,sm", "UCX_NET_DEVICES": "lo"}
        return defaults | dict(os.environ) | {TOKEN_VARIABLE: self._token}
