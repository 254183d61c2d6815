"""One cell on a pair: prompts go to its proxy, handlers run here, and the engines ask at each seam."""

from __future__ import annotations

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
from engine.config import EngineConfig
from engine.proxy import Prompt
from engine.request import FinishReason, RequestOutput
from engine.seams import Seams, Stage, Verified
from engine.server.incoming import REQUEST_ID_HEADER
from faults.levers import Levers
from faults.registry import FAULTS
from harness.history import History
from harness.oracles.view import EngineView
from harness.plan import Cell
from harness.remote.harness_side import RemoteCommandError
from harness.targets import conduct
from harness.targets.conduct import Conductor, plain_output
from harness.targets.pairs.pair import Pair
from harness.targets.pairs.restarts import Restarts
from harness.targets.workload import CONSUMER, PRODUCER, PROXY, engine_config, make_competitors, make_prompts

_REQUEST_S = 60.0
# After a partition TCP waits as long as it has waited already before it sends again, and the blocks wait with it.
_QUIET_S = 30.0
_LEASES_S = 5.0
_POLL_S = 0.005


@dataclass(slots=True, eq=False)
class _Clock:
    pair: Pair

    def end_lease(self, request_id: str) -> bool:
        if self.pair.processes is not None and PRODUCER in self.pair.processes.paused:
            # It answers when it goes on, and whoever is to let it go on must not wait for that.
            threading.Thread(target=self._tell, args=(request_id,), daemon=True).start()
            return True
        return bool(self._tell(request_id))

    def _tell(self, request_id: str) -> object:
        return self.pair.links[PRODUCER].call("end_lease", request_id)


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
        try:
            self.send(prompt)
        except httpx.HTTPError:  # a producer that a fault has killed or stopped, and a prefill that never finishes
            return
        self.finished.add(prompt.request_id)


class PairRun:
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
        self._pair.prepare(needed_names(self._cell))
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
        restarts = Restarts(self._pair, {PRODUCER: producer, CONSUMER: consumer}, self._came_back)
        self._attach(competitors, restarts)
        try:
            try:
                answered = self._make_requests()
            finally:
                self._pair.restore()
            restarts.join()
            while competitors.release() is not None:
                pass
            for thread in competitors.threads:
                thread.join(_REQUEST_S)
            quiet = self._wait_until_quiet(0.0 if restarts.any else _LEASES_S)
        finally:
            restarts.close()
            self._client.close()
        now, broken = self._pair.dispatcher.now, self._pair.dispatcher.error
        self._pair.dispatcher.begin(Seams(), gone=self._pair.killed)
        if broken is not None:
            raise broken
        self._conductor.end(now, answered and quiet, [])

    def _attach(self, competitors: _Competitors, restarts: Restarts) -> None:
        prompts = {prompt.request_id: prompt.token_ids for prompt in (*self._prompts, *competitors.waiting)}
        stage = conduct.Stage(
            producer=self._view(PRODUCER),
            consumer=self._view(CONSUMER),
            levers=Levers(_Clock(self._pair), competitors, self._pair.processes, restarts, self._pair.network),
            now=lambda: self._pair.dispatcher.now,
            prompts=prompts,
        )
        self._conductor.attach(stage)
        self._conductor.seams.on("consumer.verified", self._remember_verdict, Stage.AFTER)
        self._pair.dispatcher.begin(self._conductor.seams)

    def _came_back(self, config: EngineConfig) -> None:
        """An engine that a fault has killed is there again. It says nothing at a seam before this has returned."""
        memory = self._pair.memory(config.engine_id)
        self._conductor.restarted(config, cast(KVMemory, memory), self._pair.dispatcher.now)

    def _remember_verdict(self, event: Verified) -> None:
        self._verdicts[event.request_id] = event.verdict

    def _view(self, name: str) -> EngineView:
        def pool() -> tuple[int, int]:
            state = self._pair.state(name)
            return state["free"], state["total"]

        # It has the methods of KVMemory, and asks the engine's process for each.
        memory = cast(KVMemory, self._pair.memory(name))
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

    def _wait_until_quiet(self, lease_s: float) -> bool:
        """Until nothing is left in either engine. What only a lease keeps is let go after `lease_s`, as time would.

        A D that was started again knows nothing of what its predecessor was to read, and tells P nothing of it.
        """
        deadline = time.monotonic() + _QUIET_S
        leases_end = time.monotonic() + lease_s
        ended = False
        while time.monotonic() < deadline:
            engines = [name for name in (PRODUCER, CONSUMER) if name not in self._pair.killed]
            states = [self._pair.state(name) for name in engines]
            if not any(state[what] for state in states for what in ("unfinished", "loading", "leases", "fenced")):
                return True
            if not ended and PRODUCER in engines and time.monotonic() > leases_end:
                self._pair.links[PRODUCER].call("end_leases")
                ended = True
            time.sleep(_POLL_S)
        return False


def needed_names(cell: Cell) -> frozenset[str]:
    """The seams and levers that the cell's faults need."""
    return frozenset().union(*(FAULTS[params.kind].needs(params) for params in cell.scenario.faults))


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
