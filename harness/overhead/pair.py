"""The pair that a study drives by default: a producer, a consumer and the proxy on this machine, as a user runs them.

No control channel: a seam that asks a harness for its opinion would cost more than what is to be measured. No prefix
cache: the four slots of a block send the same prompts.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from engine.errors import KVChaosError
from harness.overhead.design import CAPACITY_REQUESTS, Design

_START_S = 120.0
_STOP_S = 10.0
_POLL_S = 0.05
_BLOCK_SIZE = 16
_LISTENS = re.compile(r" listens on (http://\S+)")


class PairStartError(KVChaosError):
    """A server of the study's pair did not come up."""


@dataclass(frozen=True, slots=True)
class PairSettings:
    """What the engines are started with.

    Attributes:
        model: the preset. seed: of the weights.
        longest: tokens of the longest request, prompt and output.
        at_once: requests that must fit into the pool together.
        chunk: most tokens that a step computes.
        plant_delay: what the producer adds to requests that are summed, such as `5%`; None: nothing.
    """

    longest: int
    at_once: int
    model: str = "tiny"
    seed: int = 0
    chunk: int = 512
    plant_delay: str | None = None

    @classmethod
    def for_design(cls, design: Design, model: str, chunk: int, plant_delay: str | None) -> Self:
        """What this design needs."""
        at_once = max(CAPACITY_REQUESTS, design.high_requests) + 2  # Leases of what has just ended.
        return cls(max(design.lengths) + design.output_tokens, at_once, model, design.seed, chunk, plant_delay)

    def engine_arguments(self, role: str) -> list[str]:
        """The arguments of `kvchaos serve engine`."""
        blocks = self.at_once * -(-(self.longest + 1) // _BLOCK_SIZE) + 1
        arguments = ["--role", role, "--model", self.model, "--seed", str(self.seed), "--no-prefix-caching"]
        arguments += ["--block-size", str(_BLOCK_SIZE), "--num-blocks", str(blocks)]
        arguments += ["--max-batched-tokens", str(self.chunk), "--max-num-seqs", str(self.at_once)]
        arguments += ["--kv-checksum-mode", "log", "--allow-checksum-switch"]
        if role == "producer" and self.plant_delay is not None:
            arguments += ["--plant-delay", self.plant_delay]
        return arguments


class OwnPair:
    """Three processes between `with` and its end. `url` is the proxy's, `engines` those of producer and consumer."""

    def __init__(self, settings: PairSettings) -> None:
        self._settings = settings
        self._logs = tempfile.TemporaryDirectory(prefix="kvchaos-overhead-")
        self._processes: list[subprocess.Popen[bytes]] = []
        self.url = ""
        self.engines: dict[str, str] = {}

    def __enter__(self) -> Self:
        try:
            engine = self._settings.engine_arguments
            self.engines["producer"] = producer = self._start("producer", ["engine", *engine("producer")])
            peer = ["--peer", f"producer={producer}"]
            self.engines["consumer"] = consumer = self._start("consumer", ["engine", *engine("consumer"), *peer])
            self.url = self._start("proxy", ["proxy", "--producer", producer, "--consumer", consumer])
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def _start(self, name: str, arguments: list[str]) -> str:
        """Start a server and wait for the URL that it listens on. Raises PairStartError."""
        log = Path(self._logs.name) / f"{name}.log"
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "UCX_TLS": os.environ.get("UCX_TLS", "tcp,self,sm"),
            "UCX_NET_DEVICES": os.environ.get("UCX_NET_DEVICES", "lo"),
        }
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "harness.cli", "serve", *arguments, "--port", "0"],
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                env=environment,
                # Ctrl-C is for the study, which then ends its servers: they must not leave before it has its rows.
                process_group=0,
            )
        self._processes.append(process)
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            said = log.read_text(encoding="utf-8", errors="replace")
            if found := _LISTENS.search(said):
                return found[1]
            if process.poll() is not None:
                last = (said.strip().splitlines() or ["it said nothing"])[-1]
                raise PairStartError(f"the {name} ended with {process.returncode}: {last}: see `kvchaos doctor`")
            time.sleep(_POLL_S)
        raise PairStartError(f"the {name} is not ready after {_START_S:.0f} s: is this machine busy?")

    def _end(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._logs.cleanup()
