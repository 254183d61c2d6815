"""Targets whose engines are real processes: KV over NIXL, requests over HTTP. `local` starts them on this machine.

The same scenarios, faults, oracles and judge as in the simulator: handlers run here, the engines ask at each seam.
Time is the number of events handled. What overlaps how is up to the machine, so histories differ from run to run;
verdicts must not.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable

from engine.seams import SEAMS
from faults.levers import CLOCK, COMPETITORS, LOAD_TIMEOUT, NETWORK, PROCESS, RANKS, RESTART, LeverError
from harness.errors import CheckerError
from harness.history import History
from harness.plan import Cell
from harness.remote.harness_side import RemoteCommandError
from harness.targets.conduct import Conductor
from harness.targets.pairs.attached import PAIR_VARIABLE, attached_pair, check_attached
from harness.targets.pairs.docker import DockerPair, check_docker
from harness.targets.pairs.local import LocalPair
from harness.targets.pairs.pair import IMPATIENT_MS, PATIENT_MS, Pair, PairError
from harness.targets.pairs.run import PairRun, needed_names

_NOT_REACHED = frozenset({"transfer.carrier_pass"})  # seams of connectors that only the simulator has


class PairTarget:
    """Runs cells on one pair, which is made for the first cell and kept."""

    takes_connector = False

    def __init__(
        self,
        name: str,
        summary: str,
        make_pair: Callable[[int], Pair],
        check: Callable[[], None] = lambda: None,
        levers: frozenset[str] = frozenset(),
    ) -> None:
        """`levers` are those that its pairs have beside the clock and competitors.

        `make_pair` is told after how many ms a load is to be given up: another pair is made where that changes.
        `check` raises InputError where `make_pair` cannot work; it is called before a run begins.
        """
        self.provides = frozenset(SEAMS) - _NOT_REACHED | {CLOCK, COMPETITORS, RANKS} | levers
        self.check = check
        self.name = name
        self.summary = summary
        self._make_pair = make_pair
        self._pair: Pair | None = None
        self._load_timeout_ms = PATIENT_MS

    def run(self, cell: Cell, history: History) -> None:
        """Run the cell and write its history."""
        Conductor.begin(cell, history, self.name)
        if cell.missing:
            return
        pair = self._ready_pair(IMPATIENT_MS if LOAD_TIMEOUT in needed_names(cell) else PATIENT_MS)
        try:
            PairRun(cell, history, pair).run()
        except CheckerError as error:
            history.add("checker.crashed", error=str(error))
        except LeverError as error:
            history.add("checker.crashed", error=str(error))
            self.close()
        except RemoteCommandError as error:
            history.add("engine.crashed", error=pair.died() or str(error))
            history.add("end", t=pair.dispatcher.now, finished=None, held=[])
            self.close()

    def _ready_pair(self, load_timeout_ms: int) -> Pair:
        if load_timeout_ms != self._load_timeout_ms:
            self.close()
            self._load_timeout_ms = load_timeout_ms
        pair = self._pair
        if pair is not None and (pair.killed or pair.died() is not None) and not self._mended(pair):
            self.close()
        if self._pair is None:
            self._pair = self._make_pair(load_timeout_ms)
            atexit.register(self.close)
        return self._pair

    @staticmethod
    def _mended(pair: Pair) -> bool:
        try:
            return pair.mend()
        except (PairError, OSError):
            return False

    def close(self) -> None:
        """Let go of the pair; the next cell makes another."""
        pair, self._pair = self._pair, None
        if pair is not None:
            pair.stop()


def _is_attached() -> bool:
    return PAIR_VARIABLE in os.environ


def _container_pair(load_timeout_ms: int) -> Pair:
    return attached_pair() if _is_attached() else DockerPair(load_timeout_ms)


def _check_containers() -> None:
    if _is_attached():
        check_attached()
    else:
        check_docker()


LOCAL = PairTarget(
    "local",
    "producer, consumer and proxy as processes on this machine, KV over NIXL",
    LocalPair,
    levers=frozenset({PROCESS, RESTART, LOAD_TIMEOUT}),
)
# Containers that were started by somebody else are not this end's to kill: whoever attaches to them has no levers.
DOCKER = PairTarget(
    "docker",
    f"the containers of docker-compose.yml, started by kvchaos; those that {PAIR_VARIABLE} names, where it is set",
    _container_pair,
    _check_containers,
    levers=frozenset() if _is_attached() else frozenset({PROCESS, RESTART, NETWORK, LOAD_TIMEOUT}),
)
