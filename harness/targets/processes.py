"""Targets whose engines are real processes: KV over NIXL, requests over HTTP. `local` starts them on this machine.

The same scenarios, faults, oracles and judge as in the simulator: handlers run here, the engines ask at each seam.
Time is the number of events handled. What overlaps how is up to the machine, so histories differ from run to run;
verdicts must not.
"""

from __future__ import annotations

import atexit
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, cast

import httpx

from engine.cache import KVMemory
from engine.checksum.verdict import NotCheckedReason, UnverifiedReason, Verdict, VerdictStatus
from engine.proxy import Prompt
from engine.request import FinishReason, RequestOutput
from engine.seams import SEAMS, Seams, Stage, Verified
from engine.server.incoming import REQUEST_ID_HEADER
from faults.levers import CLOCK, COMPETITORS, PROCESS, Levers
from harness.errors import CheckerError
from harness.history import History
from harness.oracles.view import EngineView
from harness.plan import Cell
from harness.remote.harness_side import RemoteCommandError
from harness.targets import conduct
from harness.targets.attached import attached_pair, check_attached
from harness.targets.conduct import Conductor, plain_output
from harness.targets.local_pair import LocalPair
from harness.targets.pair import Pair, PairError
from harness.targets.workload import CONSUMER, PRODUCER, PROXY, engine_config, make_competitors, make_prompts

_REQUEST_S = 60.0
_QUIET_S = 10.0
_POLL_S = 0.005
_NOT_REACHED = frozenset({"transfer.carrier_pass"})  # seams of connectors that only the simulator has


class PairTarget:
    """Runs cells on one pair, which is made for the first cell and kept."""

    takes_connector = False

    def __init__(
        self,
        name: str,
        summary: str,
        make_pair: Callable[[], Pair],
        check: Callable[[], None] = lambda: None,
        levers: frozenset[str] = frozenset(),
    ) -> None:
        """`levers` are those that its pairs have beside the clock and competitors.

        `check` raises InputError where `make_pair` cannot work; it is called before a run begins.
        """
        self.provides = frozenset(SEAMS) - _NOT_REACHED | {CLOCK, COMPETITORS} | levers
        self.check = check
        self.name = name
        self.summary = summary
        self._make_pair = make_pair
        self._pair: Pair | None = None

    def run(self, cell: Cell, history: History) -> None:
        """Run the cell and write its history."""
        Conductor.begin(cell, history, self.name)
        if cell.missing:
            return
        pair = self._ready_pair()
        try:
            _PairRun(cell, history, pair).run()
        except CheckerError as error:
            history.add("checker.crashed", error=str(error))
        except RemoteCommandError as error:
            history.add("engine.crashed", error=pair.died() or str(error))
            history.add("end", t=pair.dispatcher.now, finished=None, held=[])
            self.close()

    def _ready_pair(self) -> Pair:
        pair = self._pair
        if pair is not None and (pair.killed or pair.died() is not None) and not self._mended(pair):
            self.close()
        if self._pair is None:
            self._pair = self._make_pair()
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


DOCKER = PairTarget("docker", "the containers of docker-compose.yml, which run already", attached_pair, check_attached)
LOCAL = PairTarget(
    "local",
    "producer, consumer and proxy as processes on this machine, KV over NIXL",
    LocalPair,
    levers=frozenset({PROCESS}),
)


@dataclass(slots=True, eq=False)
class _Clock:
    pair: Pair

    def end_lease(self, request_id: str) -> bool:
        return bool(self.pair.links[PRODUCER].call("end_lease", request_id))


@dataclass(slots=True, eq=False)
class _Competitors:
    """Prefills that fill the producer's pool, sent to it directly."""

    send: Callable[[Prompt], object]
    waiting: list[Prompt]
    finished: set[str] = field(default_factory=set)
    threads: list[threading.Thread] = field(default_factory=list)

    def release(self) -> str | None:
        if not self.waiting:
            return None
        prompt = self.waiting.pop(0)
        thread = threading.Thread(target=self._run, args=(prompt,), daemon=True)
        self.threads.append(thread)
        thread.start()
        return prompt.request_id

    def has_finished(self, request_id: str) -> bool:
        return request_id in self.finished

    def _run(self, prompt: Prompt) -> None:
        self.send(prompt)
        self.finished.add(prompt.request_id)


class _PairRun:
    """One cell on a pair."""

    def __init__(self, cell: Cell, history: History, pair: Pair) -> None:
        self._cell = cell
        self._history = history
        self._pair = pair
        self._conductor = Conductor(cell, history)
        self._verdicts: dict[str, Verdict] = {}
        self._client = httpx.Client(timeout=_REQUEST_S, trust_env=False)
        self._prompts = make_prompts(cell.scenario, cell.data_seed)

    def run(self) -> None:
        topology = self._cell.scenario.topology
        producer = engine_config(self._cell, PRODUCER, topology.producer)
        consumer = engine_config(self._cell, CONSUMER, topology.consumer)
        self._conductor.expect(self._prompts)
        self._pair.dispatcher.begin(Seams())
        try:
            self._pair.configure(producer, consumer)
        except RemoteCommandError as error:
            if self._pair.died() is not None:
                raise
            self._history.add("engine.refused", error=str(error))
            return
        rng = random.Random(self._cell.world_seed)
        competitors = _Competitors(self._to_producer, make_competitors(self._cell.scenario, rng, producer))
        self._attach(competitors)
        try:
            answered = self._make_requests()
            if self._pair.processes is not None:
                self._pair.processes.resume_all()
            while competitors.release() is not None:
                pass
            for thread in competitors.threads:
                thread.join(_REQUEST_S)
            quiet = self._wait_until_quiet()
        finally:
            self._client.close()
        now, broken = self._pair.dispatcher.now, self._pair.dispatcher.error
        self._pair.dispatcher.begin(Seams(), gone=self._pair.killed)
        if broken is not None:
            raise broken
        self._conductor.end(now, answered and quiet, [])

    def _attach(self, competitors: _Competitors) -> None:
        prompts = {prompt.request_id: prompt.token_ids for prompt in (*self._prompts, *competitors.waiting)}
        stage = conduct.Stage(
            producer=self._view(PRODUCER),
            consumer=self._view(CONSUMER),
            levers=Levers(_Clock(self._pair), competitors, self._pair.processes),
            now=lambda: self._pair.dispatcher.now,
            prompts=prompts,
        )
        self._conductor.attach(stage)
        self._conductor.seams.on("consumer.verified", self._remember_verdict, Stage.AFTER)
        self._pair.dispatcher.begin(self._conductor.seams)

    def _remember_verdict(self, event: Verified) -> None:
        self._verdicts[event.request_id] = event.verdict

    def _view(self, name: str) -> EngineView:
        def pool() -> tuple[int, int]:
            state = self._pair.state(name)
            return state["free"], state["total"]

        # It has the methods of KVMemory, and asks the engine's process for each.
        memory = cast(KVMemory, self._pair.links[name].memory)
        return EngineView(name, memory, pool, lambda: name in self._pair.killed)

    def _make_requests(self) -> bool:
        """Send the prompts to the proxy, all at once or in turn. False: one was not answered in time."""
        in_turn = self._cell.scenario.workload.in_turn
        with ThreadPoolExecutor(1 if in_turn else len(self._prompts)) as pool:
            futures = [pool.submit(self._request, prompt) for prompt in self._prompts]
            answered = [future.result() for future in futures]
        return all(answered)

    def _request(self, prompt: Prompt) -> bool:
        try:
            answer = self._post(PROXY, prompt)
        except httpx.HTTPError:
            return False
        output = self._output(prompt, answer)
        self._history.add("answer", t=self._pair.dispatcher.now, engine=CONSUMER, **plain_output(output))
        return True

    def _to_producer(self, prompt: Prompt) -> None:
        self._post(PRODUCER, prompt)

    def _post(self, name: str, prompt: Prompt) -> httpx.Response:
        body = {"prompt": list(prompt.token_ids), "max_tokens": prompt.max_tokens}
        headers = {REQUEST_ID_HEADER: prompt.request_id}
        return self._client.post(f"{self._pair.url(name)}/v1/completions", json=body, headers=headers)

    def _output(self, prompt: Prompt, answer: httpx.Response) -> RequestOutput:
        body: dict[str, Any] = answer.json()
        load = body.get("kv_load") or {"verdict": "no_load", "reason": None, "recomputed": False}
        verdict = self._verdicts.get(prompt.request_id) or _verdict(load)
        if answer.status_code == 200:
            choice = body["choices"][0]
            tokens, reason, error = tuple(choice["token_ids"]), FinishReason(choice["finish_reason"]), None
        else:
            tokens, reason, error = (), FinishReason.ERROR, str(body.get("error", {}).get("message"))
        return RequestOutput(prompt.request_id, tokens, reason, error, None, verdict, bool(load["recomputed"]))

    def _wait_until_quiet(self) -> bool:
        """Until nothing is left in either engine. What only a lease keeps is let go, as time would."""
        deadline = time.monotonic() + _QUIET_S
        ended = False
        while time.monotonic() < deadline:
            engines = [name for name in (PRODUCER, CONSUMER) if name not in self._pair.killed]
            states = [self._pair.state(name) for name in engines]
            if not any(state[what] for state in states for what in ("unfinished", "loading", "leases", "fenced")):
                return True
            if not ended and PRODUCER in engines and time.monotonic() > deadline - _QUIET_S / 2:
                self._pair.links[PRODUCER].call("end_leases")
                ended = True
            time.sleep(_POLL_S)
        return False


def _verdict(load: dict[str, Any]) -> Verdict:
    """A verdict as an answer tells it: without its groups."""
    status = VerdictStatus(load["verdict"])
    reason = load["reason"]
    if reason is None:
        return Verdict(status)
    reasons: type[NotCheckedReason] | type[UnverifiedReason] = (
        NotCheckedReason if status is VerdictStatus.NOT_CHECKED else UnverifiedReason
    )
    return Verdict(status, reasons(reason))
