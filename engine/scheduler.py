"""Continuous batching: chunked prefill, prefix cache, preemption, asynchronous remote loads, steps in flight.

The scheduler plans a step without waiting for the output of earlier ones. It counts what they will have computed
(`num_computed_tokens`) and sampled (`num_placeholders`), and drops what arrives for a request that has been
restarted since (`epoch`).

Somebody can always go on: whoever waits in line holds no blocks. The others run, load or are leased, and the oldest
that runs may take the blocks of all that run, while a load ends with the transport and a lease with time.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Mapping

from engine.checksum.consumer import ConsumerChecksums
from engine.checksum.hardened import to_sum
from engine.checksum.policy import ChecksumPolicy
from engine.checksum.producer import ProducerChecksums
from engine.checksum.records import GroupBlocks, WorldShape
from engine.checksum.times import StageTimes
from engine.checksum.when import only_filled
from engine.config import EngineConfig
from engine.connectors.base import SchedulerConnector, TransferResults
from engine.errors import RequestError
from engine.groups import kv_groups
from engine.kv_manager import KVManager
from engine.leases import Leases
from engine.loads import Load, Loads, why_unacceptable
from engine.request import FinishReason, Request, RequestOutput, Status, check_request
from engine.seams import BlocksToChecksum, Preempted, RecomputeStart, RequestEnded, Seams
from engine.step import ScheduledRequest, StepDraft, StepOutput, StepPlan
from engine.tokenizer import EOS


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
        groups = kv_groups(config.model)
        self.kv = KVManager(
            config.engine_id, config.num_blocks, config.block_size, config.prefix_caching, seams, groups
        )
        self.checksum_times = StageTimes()
        self.sends = ProducerChecksums(world, self.checksum_times, policy.version)
        self.checks = ConsumerChecksums(
            config.engine_id,
            world,
            config.context_limit,
            seams,
            self.checksum_times,
            version=policy.version,
            compare_block_sizes=config.checksum.compare_block_sizes,
        )
        self._loads = Loads(self.checks, policy.enabled)
        self._leases = Leases(config.engine_id, connector, self.sends, policy.enabled, self.kv, seams)
        self._requests: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._first_use: dict[str, Mapping[int, GroupBlocks]] = {}
        self._epochs = itertools.count(1)
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
        check_request(request, self._config.context_limit)
        self._policy.check_switch(request.kv_checksum)
        request_id = request.request_id
        if request_id in self._requests or request_id in self._loads or request_id in self._leases:
            raise RequestError(f"request {request_id}: the id is in use: wait for its end or take another id")
        if self._connector is not None:
            self._connector.check_params(request)
        request.epoch = next(self._epochs)
        self._requests[request_id] = request
        self._waiting.append(request)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT, why: str = "aborted") -> None:
        """End a request. Blocks that a load still writes are kept until it has finished."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, reason, why)
            # With no step in flight nobody will collect one, and nothing else may ever be scheduled.
            self.kv.release(self._collected_step)

    def take_finished(self) -> list[RequestOutput]:
        """Outputs of requests that ended since the last call."""
        finished, self._finished = self._finished, []
        return finished

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    @property
    def num_running(self) -> int:
        """Requests that a step can compute tokens for: they neither wait in line nor for a load."""
        return len(self._running)

    @property
    def num_loading(self) -> int:
        return len(self._loads)

    @property
    def has_work(self) -> bool:
        """Something may happen in a step: a request waits or runs, a load is polled, a lease may end."""
        return bool(self._requests or self._loads or self._leases)

    # ---- planning a step

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None if it would do nothing that a step in flight does not do."""
        self._leases.free_expired(self._last_step)
        self.kv.release(self._collected_step)
        draft = StepDraft(self._last_step + 1, self._config.max_batched_tokens)
        if not self._schedule_running(draft):
            self._schedule_waiting(draft)
        polls = (self._loads or self._leases) and self._last_step == self._collected_step
        told = self._connector is not None and self._connector.has_message
        if not (draft.requests or draft.loads or polls or told or self._ended):
            return None
        self._last_step = draft.step_id
        ended, self._ended = self._ended, []
        return draft.to_plan(ended, None if self._connector is None else self._connector.step_message())

    def _schedule_running(self, draft: StepDraft) -> bool:
        """Schedule running requests, oldest first. True if one had to be preempted or must wait for blocks."""
        for request in list(self._running):
            num_tokens = min(request.num_to_compute, draft.budget)
            if num_tokens == 0:
                continue
            self.kv.slide(request, self._last_step)
            if not self.kv.grow(request, request.num_computed_tokens + num_tokens):
                # Blocks behind the fence come back by themselves: wait for them before taking more away. So do all
                # other blocks if nobody else runs: whoever has them is loading or leased.
                if not self.kv.num_fenced and len(self._running) > 1:
                    self._preempt(self._running[-1])
                return True
            self._plan(request, num_tokens, draft)
        return False

    def _schedule_waiting(self, draft: StepDraft) -> None:
        while self._waiting and draft.budget and self._num_seated < self._config.max_num_seqs:
            request = self._waiting[0]
            if not self._admit(request, draft):
                return
            self._waiting.popleft()
            if request.status is Status.WAITING_FOR_REMOTE_KVS:
                continue
            self._run(request)
            self._plan(request, min(request.num_to_compute, draft.budget), draft)

    @property
    def _num_seated(self) -> int:
        """Requests that count against `max_num_seqs`: a load takes the seat of the request that it will run in."""
        return len(self._running) + self._loads.num_wanted

    def _admit(self, request: Request, draft: StepDraft) -> bool:
        """Give a request its first blocks, and start its load if it wants one. False: no room now."""
        prefix = self.kv.cached_prefix(request)
        local = prefix.num_tokens
        remote = 0
        if self._connector is not None and not request.load_started:
            remote = self._connector.matched_tokens(request, local)
        num_tokens = local + (remote or min(request.num_tokens - local, draft.budget))
        if not self.kv.admit(request, prefix, num_tokens, loading=bool(remote)):
            return False
        request.num_computed_tokens = local
        if remote and self._connector is not None:
            groups = self.kv.blocks(request, local, local + remote)
            self._loads.start(request, groups, self._connector, draft)
        return True

    def _run(self, request: Request) -> None:
        request.status = Status.RUNNING
        self._running.append(request)

    def _plan(self, request: Request, num_tokens: int, draft: StepDraft) -> None:
        first = request.num_computed_tokens
        request.num_computed_tokens += num_tokens
        sample = request.num_computed_tokens == request.num_tokens + request.num_placeholders
        draft.budget -= num_tokens
        if sample and self._config.speculator is not None:
            # Room for what is guessed, if there is any to spare: without it fewer tokens are guessed.
            self.kv.grow(request, request.num_computed_tokens + self._config.draft_tokens)
        draft.requests.append(
            ScheduledRequest(
                request_id=request.request_id,
                epoch=request.epoch,
                token_ids=tuple(request.all_token_ids[first : first + num_tokens]),
                first_position=first,
                num_tokens=num_tokens,
                tables=tuple(map(tuple, request.tables)),
                sample=sample,
                loaded=self._first_use.pop(request.request_id, None),
                history=tuple(request.all_token_ids) if sample and self._config.speculator is not None else (),
            )
        )
        request.num_placeholders += sample
        if self._policy.trigger == "on_write" and request.wants_remote_decode and self._is_summed(request):
            stop = min(first + num_tokens, request.num_prompt_tokens)
            groups = to_sum(self.kv.blocks(request, 0, stop), self._policy.version)
            draft.checksum_writes[request.request_id] = only_filled(groups, first, stop)
        if request.wants_remote_decode and first < request.num_prompt_tokens <= request.num_computed_tokens:
            self._prompt_done(request, draft)

    def _is_summed(self, request: Request) -> bool:
        """Whether this prompt's checksums go to a consumer."""
        if self._connector is None or not self._policy.enabled or request.switches_checksum_off:
            return False
        return self._connector.kv_checksum_carrier(request, receiving=False) is not None

    def _prompt_done(self, request: Request, draft: StepDraft) -> None:
        """The step that is being planned finishes a prompt that a consumer will read (PRO-1, PRO-4)."""
        groups = self.kv.blocks(request, 0, request.num_prompt_tokens)
        draft.kv_final[request.request_id] = groups
        if not self._is_summed(request):
            return
        summed = self.sends.register(request.request_id, draft.step_id, groups, request.prompt_token_ids)
        outcome = self._seams.emit(BlocksToChecksum(self._config.engine_id, request.request_id, summed))
        if not outcome.dropped:
            draft.checksum_sends[request.request_id] = outcome.event.groups

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._restart(request)
        self._seams.emit(Preempted(self._config.engine_id, request.request_id))

    def _restart(self, request: Request) -> None:
        """Take a request's blocks away and queue it first; what is in flight for it will be dropped."""
        self._free(request)
        request.num_computed_tokens = 0
        request.num_placeholders = 0
        request.epoch = next(self._epochs)
        request.status = Status.WAITING
        self._first_use.pop(request.request_id, None)
        self._waiting.appendleft(request)

    # ---- taking a step's output

    def update(self, plan: StepPlan, output: StepOutput) -> list[Load]:
        """Take the output of the oldest step in flight. Returns the loads that were judged."""
        self._collected_step = plan.step_id
        for request_id, records in output.records.items():
            self.sends.add(plan.step_id, request_id, records)
            self.checks.add(plan.step_id, request_id, records)
        for scheduled in plan.requests:
            self._take_tokens(scheduled, output)
        self._leases.free_sent(output.transfers.finished_sending, self._last_step)
        for request_id, text in sorted(output.transfers.checksums.items()):
            self.checks.bring(request_id, text)
        judged = self._take_loads(output.transfers)
        self.kv.release(self._collected_step)
        return judged

    def _take_tokens(self, scheduled: ScheduledRequest, output: StepOutput) -> None:
        request = self._requests.get(scheduled.request_id)
        if request is None or request.epoch != scheduled.epoch:
            return
        reason, more = None, 0
        if scheduled.sample:
            request.num_placeholders -= 1
            accepted = output.accepted.get(scheduled.request_id, ())
            reason = _append(request, [output.sampled[scheduled.request_id], *accepted])
            more = len(request.output_token_ids) + request.num_prompt_tokens - scheduled.end - 1
            request.num_computed_tokens += more
        self.kv.cache(request, scheduled.end + more)
        if reason is not None:
            self._finish(request, reason)

    def _take_loads(self, transfers: TransferResults) -> list[Load]:
        if self._connector is not None:
            for request_id in sorted(transfers.failed_receiving | transfers.finished_receiving):
                self._connector.load_ended(request_id)
        for load in self._loads.fail(transfers.failed_receiving):
            if load.abandoned:
                self._free(load.request)
            else:
                self._fail_load(load.request, "the connector reports a failed transfer")
        judged = []
        for load in self._loads.finish(transfers.finished_receiving):
            if load.abandoned:
                self._free(load.request)
            else:
                self._use(load)
                judged.append(load)
        return judged

    def _use(self, load: Load) -> None:
        """A load has been judged: its request runs, or fails if fail-closed says so (POL-2, POL-3)."""
        request = load.request
        if self._policy.fail_closed and not request.verdict.acceptable:
            self._fail_load(request, why_unacceptable(request.verdict))
            return
        # Where the whole prompt came, its last token is computed again, so that there is something to sample from.
        request.num_computed_tokens = min(load.num_tokens, request.num_prompt_tokens - 1)
        self.kv.cache(request, load.num_tokens)
        self._first_use[request.request_id] = load.groups
        # It holds blocks, so it runs at once: in line behind a request that waits for these blocks it would block both.
        self._run(request)

    def _fail_load(self, request: Request, why: str) -> None:
        """The one path of failed loads, checked or reported (POL-3)."""
        if self._policy.load_failure == "fail":
            self._finish(request, FinishReason.ERROR, f"KV load failed: {why}")
            return
        self._seams.emit(RecomputeStart(self._config.engine_id, request.request_id))
        request.recomputed = True
        self._restart(request)

    # ---- ending

    def _finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        request.finish_reason, request.error, request.status = reason, error, Status.FINISHED
        request_id = request.request_id
        if request in self._running:
            self._running.remove(request)
        if request in self._waiting:
            self._waiting.remove(request)
        del self._requests[request_id]
        self._first_use.pop(request_id, None)
        self._loads.abandon(request)
        params = self._leases.grant(request) if reason.normal else None
        self.sends.drop(request_id)
        if request_id not in self._loads:
            self._free(request)
        self._ended.append(request_id)
        self._seams.emit(RequestEnded(self._config.engine_id, request_id, reason))
        self._finished.append(RequestOutput.of(request, params))

    def _free(self, request: Request) -> None:
        self.kv.free(request.request_id, request.held_block_ids, self._last_step)
        request.tables = []


def _append(request: Request, tokens: Iterable[int]) -> FinishReason | None:
    """Take sampled tokens up to the one that ends the request; why it ends."""
    for token in tokens:
        request.output_token_ids.append(token)
        if token == EOS:
            return FinishReason.STOP
        if len(request.output_token_ids) >= request.max_tokens:
            return FinishReason.LENGTH
    return None
