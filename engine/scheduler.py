"""Continuous batching: chunked prefill, prefix cache, preemption, asynchronous remote loads, steps in flight.

The scheduler plans a step without waiting for the output of earlier ones. It counts what they will have computed
(`num_computed_tokens`) and sampled (`num_placeholders`), and drops what arrives for a request that has been
restarted since (`epoch`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.checksum.consumer import CHECKSUMS_PARAM, ConsumerChecksums
from engine.checksum.policy import ChecksumPolicy
from engine.checksum.producer import ProducerChecksums
from engine.checksum.records import GroupBlocks, WorldShape
from engine.checksum.verdict import NotCheckedReason, Verdict, VerdictStatus, not_checked
from engine.config import EngineConfig
from engine.connectors.base import LoadSpec, SchedulerConnector, TransferResults
from engine.errors import RequestError
from engine.kv_manager import KVManager, cdiv
from engine.request import FinishReason, Request, RequestOutput, Status
from engine.seams import BlocksToChecksum, ParamsLeave, Preempted, RecomputeStart, RequestEnded, Seams
from engine.step import ScheduledRequest, StepOutput, StepPlan
from engine.tokenizer import EOS, VOCAB_SIZE

GROUP = 0  # one full-attention KV cache group


@dataclass(frozen=True, slots=True)
class Load:
    """A load in flight, or just judged."""

    request: Request
    groups: Mapping[int, GroupBlocks]


@dataclass(slots=True, eq=False)
class _Draft:
    """A step while it is being planned."""

    step_id: int
    budget: int
    requests: list[ScheduledRequest]
    loads: list[LoadSpec]
    kv_final: dict[str, Mapping[int, GroupBlocks]]
    checksum_sends: dict[str, Mapping[int, GroupBlocks]]


class Scheduler:
    """The scheduler of one engine. `policy` is resolved, and disabled where nothing can carry checksums."""

    def __init__(
        self,
        config: EngineConfig,
        policy: ChecksumPolicy,
        world: WorldShape,
        connector: SchedulerConnector | None,
        seams: Seams,
    ) -> None:
        self._config = config
        self._policy = policy
        self._connector = connector
        self._seams = seams
        self.kv = KVManager(
            config.engine_id, config.num_blocks, config.block_size, config.prefix_caching, seams
        )
        self.sends = ProducerChecksums(world)
        self.checks = ConsumerChecksums(config.engine_id, world, config.context_limit, seams)
        self._requests: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._loading: dict[str, Load] = {}
        self._first_use: dict[str, Mapping[int, GroupBlocks]] = {}
        self._leased: dict[str, list[int]] = {}
        self._last_step = 0
        self._collected_step = 0
        self._ended: list[str] = []
        self._finished: list[RequestOutput] = []

    # ---- requests in and out

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: it can never run here, or its id is in use; nothing of it is kept.
        """
        where = f"request {request.request_id}"
        if request.request_id in self._requests or request.request_id in self._leased:
            raise RequestError(f"{where}: the id is in use: wait for that request to end or take another id")
        if not request.prompt_token_ids or request.max_tokens < 1:
            raise RequestError(f"{where}: needs a prompt of one token or more and max_tokens of 1 or more")
        if not all(0 <= token < VOCAB_SIZE for token in request.prompt_token_ids):
            raise RequestError(f"{where}: token ids run from 0 to {VOCAB_SIZE - 1}")
        needed, limit = request.num_prompt_tokens + request.max_tokens, self._config.context_limit
        if needed > limit:
            raise RequestError(f"{where}: prompt and output are {needed} tokens, max_model_len is {limit}")
        if self._connector is not None:
            self._connector.check_params(request)
        self._requests[request.request_id] = request
        self._waiting.append(request)

    def abort(self, request_id: str) -> None:
        """End a request. Blocks that a load still writes are kept until it has finished."""
        request = self._requests.get(request_id)
        if request is not None:
            if request_id in self._loading:
                request.verdict = not_checked(NotCheckedReason.REQUEST_ENDED)
            self._finish(request, FinishReason.ABORT, "aborted")

    def take_finished(self) -> list[RequestOutput]:
        """Outputs of requests that ended since the last call."""
        finished, self._finished = self._finished, []
        return finished

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    @property
    def num_loading(self) -> int:
        return len(self._loading)

    @property
    def has_work(self) -> bool:
        """Something may happen in a step: a request waits or runs, a load is polled, a lease may end."""
        return bool(self._requests or self._loading or self._leased)

    # ---- planning a step

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None if it would do nothing that a step in flight does not do."""
        self._free_expired()
        self.kv.release(self._collected_step)
        draft = _Draft(self._last_step + 1, self._config.max_batched_tokens, [], [], {}, {})
        if not self._schedule_running(draft):
            self._schedule_waiting(draft)
        polls = (self._loading or self._leased) and self._last_step == self._collected_step
        if not (draft.requests or draft.loads or polls or self._ended):
            return None
        self._last_step += 1
        ended, self._ended = tuple(self._ended), []
        return StepPlan(
            step_id=self._last_step,
            requests=tuple(draft.requests),
            loads=tuple(draft.loads),
            kv_final=draft.kv_final,
            checksum_sends=draft.checksum_sends,
            checksum_loads=self._policy.enabled,
            ended=ended,
        )

    def _schedule_running(self, draft: _Draft) -> bool:
        """Schedule running requests, oldest first. True if one had to be preempted or must wait for blocks."""
        for request in list(self._running):
            num_tokens = min(request.num_to_compute, draft.budget)
            if num_tokens == 0 or request not in self._running:
                continue
            while not self.kv.grow(request, request.num_computed_tokens + num_tokens):
                # Blocks behind the fence come back by themselves: wait for them before taking more away.
                if self.kv.num_fenced:
                    return True
                victim = self._running[-1]
                self._preempt(victim)
                if victim is request:
                    return True
            self._plan(request, num_tokens, draft)
        return False

    def _schedule_waiting(self, draft: _Draft) -> None:
        while self._waiting and draft.budget and len(self._running) + len(self._loading) < self._config.max_num_seqs:
            request = self._waiting[0]
            if not request.block_ids and not self._admit(request, draft):
                return
            self._waiting.popleft()
            if request.status is Status.WAITING_FOR_REMOTE_KVS:
                continue
            request.status = Status.RUNNING
            self._running.append(request)
            self._plan(request, min(request.num_to_compute, draft.budget), draft)

    def _admit(self, request: Request, draft: _Draft) -> bool:
        """Give a request its first blocks, and start its load if it wants one. False: no room now."""
        shared = self.kv.cached_prefix(request)
        local = len(shared) * self._config.block_size
        remote = 0
        if self._connector is not None and request.wants_remote_prefill:
            remote = self._connector.matched_tokens(request, local)
        num_tokens = local + (remote or min(request.num_tokens - local, draft.budget))
        if not self.kv.admit(request, shared, num_tokens):
            return False
        request.num_computed_tokens = local
        if remote and self._connector is not None:
            self._start_load(request, len(shared), self._connector, draft)
        return True

    def _start_load(self, request: Request, start: int, connector: SchedulerConnector, draft: _Draft) -> None:
        groups = {GROUP: self._blocks(request, start, request.num_prompt_tokens)}
        request.load_started = True
        request.status = Status.WAITING_FOR_REMOTE_KVS
        if not self._policy.enabled:
            request.verdict = not_checked(NotCheckedReason.OFF)
        elif connector.kv_checksum_carrier(request, receiving=True) is None:
            request.verdict = not_checked(NotCheckedReason.NO_CARRIER)
        else:
            self.checks.start(request, groups)
        self._loading[request.request_id] = Load(request, groups)
        draft.loads.append(connector.plan_load(request, groups))

    def _plan(self, request: Request, num_tokens: int, draft: _Draft) -> None:
        first = request.num_computed_tokens
        request.num_computed_tokens += num_tokens
        sample = request.num_computed_tokens == request.num_tokens + request.num_placeholders
        draft.budget -= num_tokens
        draft.requests.append(
            ScheduledRequest(
                request_id=request.request_id,
                epoch=request.epoch,
                token_ids=tuple(request.all_token_ids[first : first + num_tokens]),
                first_position=first,
                num_tokens=num_tokens,
                block_ids=tuple(request.block_ids),
                sample=sample,
                loaded=self._first_use.pop(request.request_id, None),
            )
        )
        request.num_placeholders += sample
        if request.wants_remote_decode and first < request.num_prompt_tokens <= request.num_computed_tokens:
            self._prompt_done(request, draft)

    def _prompt_done(self, request: Request, draft: _Draft) -> None:
        """The step that is being planned finishes a prompt that a consumer will read (PRO-1, PRO-4)."""
        groups = {GROUP: self._blocks(request, 0, request.num_prompt_tokens)}
        draft.kv_final[request.request_id] = groups
        connector = self._connector
        if connector is None or not self._policy.enabled:
            return
        if connector.kv_checksum_carrier(request, receiving=False) is None:
            return
        self.sends.register(request.request_id, draft.step_id, groups)
        outcome = self._seams.emit(BlocksToChecksum(self._config.engine_id, request.request_id, groups))
        if not outcome.dropped:
            draft.checksum_sends[request.request_id] = outcome.event.groups

    def _blocks(self, request: Request, start: int, num_tokens: int) -> GroupBlocks:
        size = self._config.block_size
        block_ids = tuple(request.block_ids[start : cdiv(num_tokens, size)])
        return GroupBlocks(GROUP, size, start, block_ids, num_tokens)

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._restart(request)
        self._seams.emit(Preempted(self._config.engine_id, request.request_id))

    def _restart(self, request: Request) -> None:
        """Take a request's blocks away and queue it first; what is in flight for it will be dropped."""
        self.kv.free(request.request_id, request.block_ids, self._last_step)
        request.block_ids = []
        request.num_computed_tokens = 0
        request.num_placeholders = 0
        request.epoch += 1
        request.status = Status.WAITING
        self._first_use.pop(request.request_id, None)
        self._waiting.appendleft(request)

    # ---- taking a step's output

    def update(self, plan: StepPlan, output: StepOutput) -> list[Load]:
        """Take the output of the oldest step in flight. Returns the loads that were judged."""
        self._collected_step = plan.step_id
        for request_id, records in output.records.items():
            self.sends.add(plan.step_id, request_id, records)
            self.checks.add(request_id, records)
        for scheduled in plan.requests:
            self._take_tokens(scheduled, output.sampled)
        judged = self._take_transfers(output.transfers)
        self.kv.release(self._collected_step)
        return judged

    def _take_tokens(self, scheduled: ScheduledRequest, sampled: Mapping[str, int]) -> None:
        request = self._requests.get(scheduled.request_id)
        if request is None or request.epoch != scheduled.epoch or request.finish_reason is not None:
            return
        if scheduled.sample:
            token = sampled[scheduled.request_id]
            request.output_token_ids.append(token)
            request.num_placeholders -= 1
            reason = FinishReason.LENGTH if len(request.output_token_ids) >= request.max_tokens else None
            if token == EOS:
                reason = FinishReason.STOP
        else:
            reason = None
        self.kv.cache(request, scheduled.first_position + scheduled.num_tokens)
        if reason is not None:
            self._finish(request, reason)

    def _take_transfers(self, transfers: TransferResults) -> list[Load]:
        for request_id in sorted(transfers.finished_sending):
            if self._connector is not None and self._connector.sent(request_id):
                self._free_leased(request_id)
        for request_id in sorted(transfers.failed_receiving):
            load = self._loading.pop(request_id, None)
            if load is not None:
                self.checks.drop(request_id)
                self._end_failed_load(load)
        judged = []
        for request_id in sorted(transfers.finished_receiving):
            load = self._loading.pop(request_id, None)
            if load is None:
                continue
            if load.request.finish_reason is not None:
                self._free(load.request)
                continue
            self._judge(load)
            judged.append(load)
        return judged

    def _judge(self, load: Load) -> None:
        request = load.request
        if request.verdict.status is not VerdictStatus.NOT_CHECKED:
            request.verdict = self.checks.judge(request.request_id)
        if self._policy.fail_closed and not request.verdict.acceptable:
            self._fail_load(load, _describe(request.verdict))
            return
        # The prompt's last token is computed again, so that there is something to sample from.
        request.num_computed_tokens = request.num_prompt_tokens - 1
        self.kv.cache(request, request.num_prompt_tokens)
        self._first_use[request.request_id] = load.groups
        request.status = Status.WAITING
        self._waiting.appendleft(request)

    def _end_failed_load(self, load: Load) -> None:
        """A load that the connector reports as failed: not compared (CON-4)."""
        if load.request.finish_reason is not None:
            self._free(load.request)
            return
        load.request.verdict = not_checked(NotCheckedReason.LOAD_FAILED)
        self._fail_load(load, "the connector reports a failed transfer")

    def _fail_load(self, load: Load, why: str) -> None:
        """The one path of failed loads, checked or reported (POL-3)."""
        request = load.request
        if self._policy.load_failure == "fail":
            self._finish(request, FinishReason.ERROR, f"KV load failed: {why}")
            return
        self._seams.emit(RecomputeStart(self._config.engine_id, request.request_id))
        request.recomputed = True
        self._restart(request)

    # ---- ending

    def _finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        request.finish_reason, request.error, request.status = reason, error, Status.FINISHED
        if request in self._running:
            self._running.remove(request)
        if request in self._waiting:
            self._waiting.remove(request)
        del self._requests[request.request_id]
        self._first_use.pop(request.request_id, None)
        self.checks.drop(request.request_id)
        params = self._params(request) if reason.normal else None
        self.sends.drop(request.request_id)
        if params is not None:
            self._leased[request.request_id] = request.block_ids
            request.block_ids = []
        elif request.request_id not in self._loading:
            self._free(request)
        self._ended.append(request.request_id)
        self._seams.emit(RequestEnded(self._config.engine_id, request.request_id, reason))
        self._finished.append(
            RequestOutput(
                request.request_id,
                tuple(request.output_token_ids),
                reason,
                error,
                params,
                request.verdict,
                request.recomputed,
            )
        )

    def _params(self, request: Request) -> Mapping[str, Any] | None:
        """What the consumer gets: the connector's parameters, with the checksums added (PRO-6)."""
        if self._connector is None:
            return None
        params = self._connector.request_finished(request, {GROUP: request.block_ids})
        if params is None:
            return None
        if self._policy.enabled and self._connector.kv_checksum_carrier(request, receiving=False) is not None:
            text = self.sends.take(request.request_id)
            if text is not None:
                params[CHECKSUMS_PARAM] = text
        event = ParamsLeave(self._config.engine_id, request.request_id, params)
        return self._seams.emit(event).event.params

    def _free(self, request: Request) -> None:
        self.kv.free(request.request_id, request.block_ids, self._last_step)
        request.block_ids = []

    def _free_leased(self, request_id: str) -> None:
        self.kv.free(request_id, self._leased.pop(request_id), self._last_step)

    def _free_expired(self) -> None:
        if self._connector is not None:
            for request_id in self._connector.expired():
                self._free_leased(request_id)


def _describe(verdict: Verdict) -> str:
    if verdict.status is VerdictStatus.MISMATCH:
        where = "; ".join(f"group {g.group_id} blocks {list(g.differing)}" for g in verdict.groups if g.differing)
        return f"checksum mismatch in {where}"
    return f"checksums unverified ({verdict.reason})"
