"""Two engines as the target sees them, played in this process: no vLLM, the same commands, events and answers.

A played engine keeps a few bytes a token, moves them from P to D, checks them as it is told to, and gives wrong tokens
where they are wrong. `faults` are bit flips only.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.history import History, Line
from harness.judge import judge
from harness.observe import observe
from harness.plan import Cell, plan_cells
from harness.targets.vllm.pair import VLLMPair
from harness.targets.vllm.process import RoleError, RoleGoneError
from harness.targets.vllm.settings import Settings
from harness.targets.vllm.target import VLLMTarget
from reports.results import CellResult
from scenarios.schema import Scenario
from scenarios.words import Policy

LAYERS, HEADS, WIDTH, BLOCK, POOL = 2, 2, 16, 32, 127
ABOUT = {
    "vllm": "played", "block_size": BLOCK, "num_blocks": POOL + 1, "num_layers": LAYERS, "num_heads": HEADS,
    "bytes_per_token": WIDTH, "dtype": "torch.float32",
}  # fmt: skip


def right_kv(prompt: Sequence[int]) -> np.ndarray:
    """uint8 [layers, heads, slots of whole blocks, bytes] of a prompt."""
    seed = int.from_bytes(hashlib.blake2b(bytes(prompt), digest_size=8).digest(), "big")
    slots = -(-len(prompt) // BLOCK) * BLOCK
    return np.random.default_rng(seed).integers(0, 256, (LAYERS, HEADS, slots, WIDTH), dtype=np.uint8)


def tokens_of(prompt: Sequence[int], count: int, *, right: bool = True) -> list[int]:
    digest = hashlib.blake2b(bytes(prompt), digest_size=32).digest()[:count]
    return [byte ^ (not right) for byte in digest]


def checksum(kv: np.ndarray, num_tokens: int) -> str:
    return hashlib.blake2b(kv[:, :, :num_tokens].tobytes()).hexdigest()


@dataclass
class World:
    """What both played engines share: P's KV by request, and every command that was given."""

    held: dict[str, np.ndarray] = field(default_factory=dict)
    commands: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    refuses: str | None = None
    never_answers: str | None = None
    starts: bool = True
    tokens_go_wrong: bool = False
    lose_events: frozenset[str] = frozenset()
    running: int = 0


class PlayedRole:
    """One engine. Its constructor and methods are those of `RoleProcess`."""

    def __init__(
        self, world: World, role: str, command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> None:
        self.world, self.role, self.environment = world, role, environment
        self.pid = 0
        self._orders: list[dict[str, Any]] = []
        self._mode, self._load_failure = "off", "fail"
        world.running += 1

    def ready(self, timeout_s: float) -> Mapping[str, Any]:
        if not self.world.starts:
            raise RoleGoneError("the process of the producer ended with 1: no memory")
        return ABOUT

    def stop(self) -> None:
        self.world.running -= 1

    def call(
        self,
        name: str,
        *,
        timeout_s: float,
        on_event: Callable[[Mapping[str, Any]], None] = lambda event: None,
        on_wait: Callable[[str, str], None] | None = None,
        **arguments: Any,
    ) -> Any:
        self.world.commands.append((self.role, name, arguments))
        if name == self.world.refuses:
            raise RoleError(f"{self.role}: {name}: it will not")
        self._on_wait = on_wait
        self._emit = lambda event: None if event["event"] in self.world.lose_events else on_event(event)
        return getattr(self, f"_{name}")(**arguments)

    def _policy(self, mode: str, load_failure: str) -> None:
        self._mode, self._load_failure = mode, load_failure

    def _disarm(self) -> None:
        self._orders = []

    def _reset(self) -> None: ...

    def _arm(self, token: str, order: dict[str, Any]) -> None:
        assert token == self.environment["KVCHAOS_VLLM_FAULT_TOKEN"]
        self._orders.append(order)

    def _state(self) -> dict[str, int]:
        return {"free": POOL, "total": POOL, "unfinished": 0}

    _tick = _state

    def _end_leases(self) -> None: ...

    def _compete(self) -> None: ...

    def _reuse(self, request: str, competitor: str) -> None:
        self.world.held[request] = self.world.held[request] ^ 1
        self._prove("early_reuse", request, "transfer.op_posted")
        kv = self.world.held[request]
        self._tell("producer.reused", request, kv, kv.shape[2], competitor=competitor)

    def _generate(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [self._one(**request) for request in requests]

    def _one(
        self, name: str, prompt: list[int], max_tokens: int, params: dict[str, Any] | None, follow: bool = True
    ) -> dict[str, Any]:
        if params is None:
            return self._answered(name, tokens_of(prompt, max_tokens))
        if name == self.world.never_answers and self.role == "consumer":
            return self._answered(name, []) | {"finish_reason": None}
        return self._prefill(name, prompt) if self.role == "producer" else self._load(name, prompt, max_tokens, params)

    def _answered(self, name: str, tokens: list[int]) -> dict[str, Any]:
        logprobs = [-float(token) for token in tokens]
        return {
            "name": name,
            "tokens": tokens,
            "logprobs": logprobs,
            "finish_reason": "length",
            "error": None,
            "params": None,
        }

    def _prefill(self, name: str, prompt: list[int]) -> dict[str, Any]:
        kv = right_kv(prompt)
        self._tell("producer.kv_final", name, kv, len(prompt))
        self._flip("before_checksum", "producer.kv_final", name, kv)
        summed = checksum(kv, len(prompt))
        self._tell("producer.checksummed", name, kv, len(prompt))
        self._flip("after_checksum", "producer.checksummed", name, kv)
        self.world.held[name] = kv
        params = {"remote_block_ids": [list(range(1, kv.shape[2] // BLOCK + 1))], "remote_request_id": name}
        if self._mode != "off":
            params["kv_checksums"] = summed
        return self._answered(name, tokens_of(prompt, 1)) | {"params": params}

    def _load(self, name: str, prompt: list[int], max_tokens: int, params: dict[str, Any]) -> dict[str, Any]:
        self._emit({"event": "proxy.params_pass", "request": name, "params": params})
        num_tokens = len(prompt)
        self._tell("consumer.load_scheduled", name, right_kv(prompt), num_tokens, bytes_too=False)
        for order in self._orders:
            if order["request"] == name and order["kind"] == "early_reuse":
                self._on_wait(name, "early_reuse")
        kv = self.world.held[name].copy()
        self._flip("before_verify", "consumer.load_finished", name, kv)
        self._tell("consumer.load_finished", name, kv, num_tokens)
        good = self._judge(name, params, checksum(kv, num_tokens), kv.shape[2] // BLOCK)
        self._flip("after_verify", "consumer.verified", name, kv)
        if not good and self._mode == "enforce":
            if self._load_failure == "fail":
                return self._answered(name, []) | {"finish_reason": "error", "error": "KV load failed"}
            self._emit({"event": "consumer.recompute_start", "request": name})
            return self._answered(name, tokens_of(prompt, max_tokens))
        self._tell("consumer.first_use", name, kv, num_tokens)
        right = (kv[:, :, :num_tokens] == right_kv(prompt)[:, :, :num_tokens]).all()
        return self._answered(name, tokens_of(prompt, max_tokens, right=bool(right) and not self.world.tokens_go_wrong))

    def _judge(self, name: str, params: dict[str, Any], summed: str, num_blocks: int) -> bool:
        if self._mode == "off":
            return True
        good = params["kv_checksums"] == summed
        positions = list(range(num_blocks))
        status = "verified" if good else "mismatch"
        group = {"group_id": 0, "status": status, "reason": None, "loaded": positions, "compared": positions}
        verdict = {"status": status, "reason": None, "groups": [group | {"differing": [] if good else positions}]}
        self._emit({"event": "consumer.verified", "request": name, "verdict": verdict})
        return good

    def _flip(self, at: str, moment: str, name: str, kv: np.ndarray) -> None:
        for order in self._orders:
            if (order["request"], order["at"]) == (name, at):
                if order["kind"] == "bit_flip":
                    kv[0, 0, 0, 0] ^= 1
                self._prove(order["kind"], name, moment)

    def _prove(self, kind: str, name: str, moment: str) -> None:
        told = {"fault": kind, "request": name, "moment": moment, "what": "played", "before": "a", "after": "b"}
        self._emit({"event": "evidence", **told})

    def _tell(
        self, event: str, name: str, kv: np.ndarray, num_tokens: int, *, bytes_too: bool = True, **more: Any
    ) -> None:
        count = kv.shape[2] // BLOCK
        told = {"start": 0, "block_ids": list(range(1, count + 1)), "block_size": BLOCK, "num_tokens": num_tokens}
        told |= {"layers": LAYERS, "heads": HEADS, "layer_numbers": list(range(LAYERS))} if bytes_too else {}
        told |= {"element_bytes": 4} if bytes_too else {}
        told |= {"kv": base64.b64encode(kv.tobytes()).decode()} if bytes_too else {}
        self._emit({"event": event, "request": name, **told, **more})


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def target(world: World) -> VLLMTarget:
    """The target, with played engines."""

    def make_process(*arguments: Any) -> PlayedRole:
        return PlayedRole(world, *arguments)

    return VLLMTarget(lambda settings: VLLMPair(Settings(Path("python")), make_process))


@dataclass(frozen=True)
class Ran:
    lines: list[Line]
    result: CellResult


@pytest.fixture
def run(target: VLLMTarget) -> Callable[..., Ran]:
    """Runs one cell of a scenario on the played engines, and judges it."""

    def run_one(scenario: Scenario, policy: Policy = Policy.FAIL_OPEN, *, twin: bool = False) -> Ran:
        cells: list[Cell] = plan_cells([scenario], [policy], 1, target.provides)
        history = History()
        target.run(cells[1] if twin else cells[0], history)
        return Ran(history.lines, judge(observe(history.lines), ""))

    return run_one
