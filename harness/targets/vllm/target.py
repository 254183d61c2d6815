"""Target `vllm`: a producer and a consumer of a real vLLM, KV over NIXL, the same scenarios, oracles and judge.

Faults act in the engines' processes (`integrations/vllm-faults`), and so they are others than those of `faults/`, under
the same names. Nobody watches attention reads there: what a request reads is judged by the bytes that it is about to
read first. docs/vllm.md says what that cannot see.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from dataclasses import replace

from faults.levers import CLOCK, COMPETITORS
from harness.errors import CheckerError
from harness.history import History, error_text
from harness.plan import Cell
from harness.targets.conduct import Conductor
from harness.targets.vllm.golden import GoldenTokens
from harness.targets.vllm.mapping import in_blocks_of, lacking, outside
from harness.targets.vllm.pair import BLOCK_SIZE, VLLMPair
from harness.targets.vllm.process import RoleError, RoleGoneError
from harness.targets.vllm.run import VLLMRun
from harness.targets.vllm.settings import Settings, check

_SEAMS = frozenset(
    {
        "producer.kv_final", "producer.checksummed", "producer.params_leave", "proxy.params_pass",
        "transfer.op_posted", "transfer.completion", "consumer.load_scheduled", "consumer.load_finished",
        "consumer.verified", "consumer.first_use", "consumer.recompute_start", "request.ended",
    }
)  # fmt: skip


class VLLMTarget:
    """Runs cells on one pair of vLLM engines, which is made for the first cell that needs it and kept."""

    name = "vllm"
    summary = "a producer and a consumer of a real vLLM in processes of their own, KV over NIXL"
    provides = _SEAMS | {CLOCK, COMPETITORS}
    takes_connector = False

    def __init__(self, make_pair: Callable[[Settings], VLLMPair] = VLLMPair) -> None:
        self._make_pair = make_pair
        self._pair: VLLMPair | None = None
        self._golden = GoldenTokens()

    def check(self) -> None:
        """Raise InputError where there is no vLLM to run. Called before a run begins."""
        check(Settings.of_environment())

    def run(self, cell: Cell, history: History) -> None:
        """Run the cell and write its history."""
        # The history says what is watched: nobody sees who wrote what vLLM's attention reads.
        cell = replace(cell, provenance=False)
        missing = tuple(sorted({*cell.missing, *lacking(cell.scenario, cell.policy)}))
        if missing:
            Conductor.begin(replace(cell, missing=missing), history, self.name)
            return
        cell = replace(cell, scenario=in_blocks_of(cell.scenario, BLOCK_SIZE))
        try:
            pair = self._ready_pair()
        except (RoleGoneError, OSError) as error:
            Conductor.begin(cell, history, self.name)
            history.add("checker.crashed", error=error_text(error))
            return
        about = pair.about["consumer"]
        missing = tuple(place for params in cell.scenario.faults for place in outside(params, about))
        Conductor.begin(replace(cell, missing=missing), history, self.name)
        if missing:
            return
        for role, told in pair.about.items():
            history.add("engine.about", engine=role, **told)
        try:
            VLLMRun(cell, history, pair, self._golden).run()
        except (CheckerError, RoleError) as error:
            history.add("checker.crashed", error=error_text(error))
            self.close()
        except RoleGoneError as error:
            history.add("engine.crashed", error=error_text(error))
            history.add("end", t=0, finished=None, held=[])
            self.close()

    def _ready_pair(self) -> VLLMPair:
        if self._pair is None:
            self._pair = self._make_pair(Settings.of_environment())
            atexit.register(self.close)
        return self._pair

    def close(self) -> None:
        """End the pair; the next cell makes another."""
        pair, self._pair = self._pair, None
        if pair is not None:
            pair.stop()


VLLM = VLLMTarget()
