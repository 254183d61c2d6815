"""One cell on two vLLM engines: P prefills, D loads and decodes, faults act in their processes, oracles listen here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engine.checksum.verdict import NO_LOAD, NotCheckedReason, Verdict, not_checked
from engine.proxy import Prompt
from engine.request import FinishReason, RequestOutput
from faults.base import FaultParams, digest
from harness.guard import GuardedSeams
from harness.history import History
from harness.oracles.bookkeeping import BookkeepingOracle
from harness.oracles.diagnosis import DiagnosisOracle
from harness.oracles.kv_bytes import BytesOracle
from harness.oracles.view import EngineView
from harness.plan import Cell
from harness.recorder import Recorder
from harness.seeds import derive
from harness.targets.conduct import plain_output
from harness.targets.vllm.golden import Golden, GoldenTokens
from harness.targets.vllm.mapping import order_params
from harness.targets.vllm.moments import Message, Moments
from harness.targets.vllm.pair import VLLMPair
from harness.targets.workload import CONSUMER, PRODUCER, make_prompts, request_id
from scenarios.words import Policy

_ON_PRODUCER = ("before_checksum", "after_checksum")
_REUSE = "early_reuse"
_REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}


class VLLMRun:
    """One run of one cell, whose scenario is in the engines' sizes."""

    def __init__(self, cell: Cell, history: History, pair: VLLMPair, golden: GoldenTokens) -> None:
        self._cell = cell
        self._history = history
        self._pair = pair
        self._golden = golden
        self._prompts = make_prompts(cell.scenario, cell.data_seed)
        self._seams = GuardedSeams()
        self._moments = Moments(self._seams)
        self._proofs: Counter[tuple[str, str]] = Counter()  # pieces of evidence of each fault and request
        self._params: dict[str, Mapping[str, Any]] = {}
        self._competitors = cell.scenario.workload.competitors

    def run(self) -> None:
        """Everything from the golden tokens to the last line. Raises RoleGoneError where a process has ended."""
        wanted = self._expect()
        self._pair.prepare(self._cell.policy.settings(self._cell.scenario.load_failure))
        bookkeeping = self._attach()
        faults = list(enumerate(self._cell.scenario.faults))
        for index, params in faults:
            if params.when.at in _ON_PRODUCER or params.kind == _REUSE:
                self._arm(PRODUCER, index, params)
        answered = True
        for wave in self._waves():
            prefilled = self._prefill(wave)
            for index, params in faults:
                if params.when.at not in _ON_PRODUCER and request_id(params.when.load) in prefilled:
                    self._arm(CONSUMER, index, params)
            answered &= self._decode([prompt for prompt in wave if prompt.request_id in prefilled], wanted)
            answered &= len(prefilled) == len(wave)
        if self._competitors:
            self._pair.producer.call("compete", timeout_s=self._pair.patience_s)
        quiet = self._pair.settle()
        for params in self._cell.scenario.faults:
            name = request_id(params.when.load)
            count = self._proofs[params.kind, name]
            self._history.add("fault.done", fault=params.kind, request=name, evidence=count)
        bookkeeping.finish()
        self._history.add("end", t=self._moments.now, finished=answered and quiet, held=[])

    def _expect(self) -> dict[str, Golden]:
        """Write down the requests that will be made, and the tokens that they must give."""
        for load, prompt in enumerate(self._prompts, start=1):
            self._history.add("request", request=prompt.request_id, load=load, tokens=len(prompt.token_ids))
        wanted = self._golden.of(self._prompts, self._pair.plain_answers)
        for name, golden in wanted.items():
            self._history.add("oracle.tokens", request=name, tokens=list(golden.tokens))
        return wanted

    def _attach(self) -> BookkeepingOracle:
        Recorder(self._history, lambda: self._moments.now).attach(self._seams)
        BytesOracle(self._history, self._pair.block_size, self._cell.scenario.checksum.version).attach(self._seams)
        DiagnosisOracle(self._history).attach(self._seams)
        views = (self._view(PRODUCER), self._view(CONSUMER))
        bookkeeping = BookkeepingOracle(self._history, views)
        bookkeeping.attach(self._seams)
        return bookkeeping

    def _view(self, name: str) -> EngineView:
        # Nobody who gets this view asks for the memory: what engines held comes with their events.
        return EngineView(name, None, lambda: self._pair.pool(name))  # type: ignore[arg-type]

    def _arm(self, side: str, index: int, params: FaultParams) -> None:
        name = request_id(params.when.load)
        other = getattr(params, "other_load", None)
        order = {
            "kind": params.kind,
            "request": name,
            "at": params.when.at,
            "params": order_params(params),
            "seed": derive(self._cell.seed, index),
            "held": self._held(name),
            "other": None if other is None else self._params.get(request_id(other)),
        }
        self._pair.arm(side, order)

    def _held(self, name: str) -> dict[str, str]:
        """Digests of what P's blocks held of a request when its KV was final, by block position."""
        if name not in self._moments.final:
            return {}
        blocks, memory = self._moments.final[name]
        size = blocks.block_size
        kv = memory.tokens(blocks)
        return {str(p): digest(kv[:, :, p * size : (p + 1) * size]) for p in blocks.positions}

    def _waves(self) -> Iterator[list[Prompt]]:
        """Prompts that are prefilled together: all, or one at a time, or as many as a pool holds."""
        waves: list[list[Prompt]] = [[]]
        used = 0
        for prompt in self._prompts:
            need = -(-(len(prompt.token_ids) + prompt.max_tokens) // self._pair.block_size)
            if waves[-1] and (self._cell.scenario.workload.in_turn or used + need > self._pair.num_blocks):
                waves.append([])
                used = 0
            waves[-1].append(prompt)
            used += need
        yield from waves

    def _prefill(self, prompts: Sequence[Prompt]) -> set[str]:
        """P computes these prompts. Returns the requests that it answered with parameters; others have ended."""
        requests = [self._request(prompt, _REMOTE_DECODE) | {"max_tokens": 1} for prompt in prompts]
        for answer in self._call(PRODUCER, requests):
            name = answer["name"]
            self._moments.ended(PRODUCER, name, answer["finish_reason"] or "abort")
            if answer["params"]:
                self._params[name] = answer["params"]
                self._moments.left(name, answer["params"])
            else:
                self._answer(PRODUCER, name, answer, "P's answer has no kv_transfer_params")
        return {prompt.request_id for prompt in prompts if prompt.request_id in self._params}

    def _decode(self, prompts: Sequence[Prompt], wanted: Mapping[str, Golden]) -> bool:
        """D loads and goes on, as many at once as the scenario's D takes. False: one was not answered in time."""
        at_once = self._cell.scenario.topology.consumer.max_num_seqs
        answered = True
        for first in range(0, len(prompts), at_once):
            some = prompts[first : first + at_once]
            requests = [self._request(prompt, self._params[prompt.request_id]) for prompt in some]
            for answer in self._call(CONSUMER, requests):
                name = answer["name"]
                if answer["finish_reason"] is None:
                    answered = False
                    continue
                self._moments.ended(CONSUMER, name, answer["finish_reason"])
                self._answer(CONSUMER, name, answer, answer.get("error"))
                distance = wanted[name].distance(answer["tokens"], answer["logprobs"])
                self._history.add("oracle.logprobs", request=name, max_difference=distance)
        return answered

    def _request(self, prompt: Prompt, params: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "name": prompt.request_id,
            "prompt": list(prompt.token_ids),
            "max_tokens": prompt.max_tokens,
            "params": dict(params),
        }

    def _call(self, side: str, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return self._pair.generate(side, requests, self._tell, self._reuse)

    def _tell(self, message: Message) -> None:
        if message["event"] != "evidence":
            self._moments.tell(message)
            return
        self._proofs[str(message["fault"]), str(message["request"])] += 1
        told = {key: message[key] for key in ("fault", "request", "what", "before", "after")}
        self._history.add("evidence", t=self._moments.now, seam=message["moment"], **told)

    def _reuse(self, name: str, why: str) -> None:
        """D waits: end P's lease on a request's blocks, and let a competitor have them."""
        if not self._competitors:
            return
        self._competitors -= 1
        self._pair.producer.call(
            "reuse", request=name, competitor="c1", timeout_s=self._pair.patience_s, on_event=self._tell
        )

    def _answer(self, engine: str, name: str, answer: Mapping[str, Any], error: str | None) -> None:
        reason = FinishReason(answer["finish_reason"])
        failed = reason is FinishReason.ERROR
        output = RequestOutput(
            name,
            () if failed else tuple(answer["tokens"]),
            reason,
            error or (f"vLLM ended it with {reason}" if failed else None),
            None,
            self._verdict(name),
            name in self._moments.recomputed,
        )
        self._history.add("answer", t=self._moments.now, engine=engine, **plain_output(output))

    def _verdict(self, name: str) -> Verdict:
        """The protection's; without it a load is not checked."""
        known = self._moments.verdicts.get(name)
        if known is not None:
            return known
        if self._cell.policy is not Policy.OFF or name not in self._moments.loaded:
            return NO_LOAD
        failed = name in self._moments.failed
        return not_checked(NotCheckedReason.LOAD_FAILED if failed else NotCheckedReason.OFF)
