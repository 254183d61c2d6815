"""A faulted cell and its clean twin on the simulated target, and KV memory with random contents to act on."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import torch

from engine.cache import KVMemory, PagedKVCache
from engine.checksum.records import GroupBlocks
from engine.config import EngineConfig, KVDtype, Layout
from engine.seams import CopyOp, LoadScheduled, OpLanded, OpPosted, Seams
from faults.base import Evidence, FaultContext
from faults.levers import Levers
from faults.registry import FAULTS
from harness.history import History, Line, find_all
from harness.judge import judge
from harness.observe import CellObservation, KVView, RequestObservation, observe
from harness.plan import Cell, plan_cells
from harness.targets import TARGETS
from reports.results import CellResult
from scenarios.loader import parse_scenario
from scenarios.words import Policy

TARGET = TARGETS["sim"]
HEX_DIGITS = 8  # of one (layer, head) in a digest of the bytes oracle


@dataclass(frozen=True)
class Ran:
    """A cell that ran, and what the oracles and the judge say of it."""

    cell: Cell
    lines: list[Line]

    @property
    def seen(self) -> CellObservation:
        return observe(self.lines)

    @property
    def result(self) -> CellResult:
        return judge(self.seen, "kvchaos run")

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        return self.seen.evidence

    def load(self, number: int = 2) -> RequestObservation:
        return next(request for request in self.seen.requests if request.load == number)

    def all(self, event: str, request: str = "r2") -> list[Line]:
        return [line for line in find_all(self.lines, event) if line["request"] == request]


@dataclass(frozen=True)
class Pair:
    """The cell with its fault, and the same without."""

    fault: Ran
    twin: Ran


def _run(cell: Cell) -> Ran:
    history = History()
    TARGET.run(cell, history)
    return Ran(cell, history.lines)


@lru_cache(maxsize=512)
def _pair(scenario: str, policy: Policy, seed: int) -> Pair:
    cells = plan_cells([parse_scenario(scenario)], [policy], seed, TARGET.provides)
    fault, twin = (_run(cell) for cell in cells)
    return Pair(fault, twin)


@pytest.fixture(scope="session")
def sim() -> Callable[..., Pair]:
    """Run faults and their twin: two requests of 40 to 60 tokens, unless `workload` or `topology` say otherwise."""

    def run(
        *faults: Mapping[str, Any],
        policy: str = "off",
        seed: int = 0,
        topology: Mapping[str, Any] | None = None,
        expect: Mapping[str, Any] | None = None,
        **workload: Any,
    ) -> Pair:
        scenario = {
            "schema_version": 1,
            "name": "cell",
            "summary": "one cell of a test",
            "policies": [policy],
            "topology": topology or {},
            "workload": {"requests": 2, "prompt_tokens": [40, 60], "output_tokens": 4} | workload,
            "faults": faults,
            "expect": {policy: expect or {"verdict": "not_checked"}},
        }
        return _pair(json.dumps(scenario), Policy(policy), seed)

    return run


@pytest.fixture(scope="session")
def changed() -> Callable[[KVView | None, KVView | None], set[tuple[int, int, int]]]:
    """(layer, head, grid position) whose bytes differ between two views of the preset `tiny`, 2 layers of 2 heads."""

    def differing(before: KVView | None, after: KVView | None) -> set[tuple[int, int, int]]:
        assert before is not None
        assert after is not None
        assert before.positions() == after.positions()
        return {
            (column // 2, column % 2, position)
            for position in before.positions()
            for column in range(4)
            if _part(before, position, column) != _part(after, position, column)
        }

    def _part(view: KVView, position: int, column: int) -> str:
        digest = view.digest(position)
        assert digest is not None
        assert len(digest) == 4 * HEX_DIGITS
        return digest[column * HEX_DIGITS : (column + 1) * HEX_DIGITS]

    return differing


@pytest.fixture
def memory_of() -> Callable[..., KVMemory]:
    """KV memory of 12 blocks of 16 slots, 2 layers of 2 heads, 64 bytes a token, every bit drawn."""

    def make(layout: Layout = "HND", kv_dtype: KVDtype = "bfloat16", seed: int = 0) -> KVMemory:
        cache = PagedKVCache(EngineConfig("engine", layout=layout, kv_dtype=kv_dtype, num_blocks=12))
        generator = torch.Generator().manual_seed(seed)
        for layer in cache.layers:
            values = torch.randint(-(2**15), 2**15, tuple(layer.shape), generator=generator, dtype=torch.int16)
            layer.copy_(values.view(cache.dtype))
        return KVMemory(cache)

    return make


@pytest.fixture
def attach() -> Callable[..., tuple[Seams, FaultContext]]:
    """One fault on seams of its own, acting on request r2."""

    def make(params: Mapping[str, Any], seed: int = 0, levers: Levers | None = None) -> tuple[Seams, FaultContext]:
        fault = FAULTS[params["kind"]]
        requests = {1: "r1", 2: "r2", 3: "r3"}
        context = FaultContext("r2", random.Random(seed), levers or Levers(), requests=requests)
        seams = Seams()
        fault(fault.params_model.model_validate(params), context).attach(seams)
        return seams, context

    return make


class Read:
    """The read of r2 from blocks 1, 2, 4 of P into 5, 3, 9 of D, operation by operation: 24 of 16 slots."""

    blocks = GroupBlocks(0, 16, 0, (5, 3, 9), 45)

    def __init__(
        self, params: Mapping[str, Any], levers: Levers, seed: int, attach: Any, memory_of: Callable[..., KVMemory]
    ) -> None:
        self.producer, self.consumer = memory_of(seed=1), memory_of(seed=2)
        self.seams: Seams
        self.context: FaultContext
        self.seams, self.context = attach(params, seed=seed, levers=levers)
        self.seams.emit(LoadScheduled("consumer", "r2", {0: self.blocks}, self.consumer))
        places = [(p, layer, part, head) for p in range(3) for layer in (0, 1) for part in (0, 1) for head in (0, 1)]
        self.ops = [
            CopyOp(n, p, layer, part, head, (1, 2, 4)[p], 0, (5, 3, 9)[p], 0, 16)
            for n, (p, layer, part, head) in enumerate(places)
        ]

    def post(self, op: CopyOp, request: str = "r2") -> Any:
        return self.seams.emit(OpPosted("consumer", request, op, len(self.ops), self.producer, self.consumer))

    def land(self, op: CopyOp, request: str = "r2") -> None:
        source = self.producer.region(op.layer, op.source_block, op.part, op.head, 0, 16)
        self.consumer.region(op.layer, op.target_block, op.part, op.head, 0, 16).copy_(source)
        self.seams.emit(OpLanded("consumer", request, op, len(self.ops), self.producer, self.consumer))

    def until_held(self) -> tuple[int, Any]:
        """Index of the operation that is held, and its hold. None has landed by then."""
        for op in self.ops:
            if holds := self.post(op).holds:
                return op.index, holds[0]
        raise AssertionError("no operation was held")

    def until_struck(self) -> tuple[int, Any]:
        """Post up to the operation that is held, and land all before: the hold may be asked."""
        index, hold = self.until_held()
        for op in self.ops[:index]:
            assert not hold.until()
            self.land(op)
        return index, hold


@pytest.fixture
def read_of(attach: Any, memory_of: Callable[..., KVMemory]) -> Callable[..., Read]:
    """A read with one fault on its seams."""

    def make(params: Mapping[str, Any], levers: Levers | None = None, seed: int = 0) -> Read:
        return Read(params, levers or Levers(), seed, attach, memory_of)

    return make
