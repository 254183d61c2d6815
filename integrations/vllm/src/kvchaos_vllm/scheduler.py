"""The scheduler's half of the protection: what it hears from vLLM's scheduler, and the orders it gives the workers.

Objects of vLLM (requests, block tables, a step's output) are read by the few attributes named here, so that this needs
no vLLM. `connector.py` says why a load is judged where it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvchaos_vllm.blocks import GroupShape, blocks_of
from kvchaos_vllm.consumer import CHECKSUMS_PARAM, ConsumerChecksums
from kvchaos_vllm.log import get_logger
from kvchaos_vllm.orders import Answer, Orders
from kvchaos_vllm.producer import ProducerChecksums
from kvchaos_vllm.records import GroupBlocks, WorldShape
from kvchaos_vllm.settings import ChecksumPolicy
from kvchaos_vllm.verdict import NotCheckedReason, not_checked

logger = get_logger(__name__)
SWITCH_PARAM = "kv_checksum"


class SchedulerChecksums:
    """All that one engine's scheduler knows of checksums.

    Args:
        groups: the KV cache groups that can be checksummed.
    """

    def __init__(
        self, policy: ChecksumPolicy, world: WorldShape, groups: Sequence[GroupShape], max_model_len: int
    ) -> None:
        self._policy = policy
        self._groups = groups
        self.producer = ProducerChecksums(world)
        self.consumer = ConsumerChecksums(world, max_model_len, [group.block_size for group in groups])
        self._step_id = 0
        self._sends = SendTables(groups)
        self._num_local: dict[str, int] = {}
        self._new_loads: dict[str, NewLoad] = {}
        self._broken_loads: set[str] = set()
        self._to_fail: set[str] = set()
        self._told_to_fail: set[str] = set()
        self._unfilled: dict[str, dict[str, Any]] = {}

    # ---- what vLLM's scheduler tells of requests

    def matched(self, request_id: str, num_local_tokens: int) -> None:
        """The request's first tokens are in the local prefix cache: no load writes them."""
        self._num_local[request_id] = num_local_tokens

    def allocated(self, request: Any, tables: Sequence[Sequence[int]], num_external_tokens: int) -> None:
        """A request got its blocks; called before the connector forgets that it was to load them (CON-1).

        Args:
            request: has `request_id`, `num_prompt_tokens`, `kv_transfer_params`.
            tables: its block ids, a list for each KV cache group by id.
            num_external_tokens: how many tokens are loaded into them.
        """
        params = request.kv_transfer_params or {}
        num_local = self._num_local.pop(request.request_id, 0)
        wanted = self._is_wanted(request.request_id, params)
        if params.get("do_remote_decode") and wanted:
            self._sends.follow(request)
        if not num_external_tokens:
            return
        if not wanted:
            self.consumer.tell(request.request_id, not_checked(NotCheckedReason.OFF))
        elif not params.get("do_remote_prefill"):
            # P loads what D has decoded (bidirectional): nobody summed that (CAR-4).
            self.consumer.tell(request.request_id, not_checked(NotCheckedReason.NO_CARRIER))
        else:
            self.consumer.start(request.request_id, params.get(CHECKSUMS_PARAM), request.num_prompt_tokens)
            load = NewLoad([list(ids) for ids in tables], num_local, num_local + num_external_tokens)
            self._new_loads[request.request_id] = load

    def finished(self, request_id: str, params: dict[str, Any] | None) -> None:
        """A request ended. `params` are what the connector answers with; filled in now or with this step's output."""
        self._num_local.pop(request_id, None)
        followed = self._sends.forget(request_id)
        self._new_loads.pop(request_id, None)
        self.consumer.end(request_id)
        if params is None or not params.get("do_remote_prefill"):
            self.producer.drop(request_id)
        elif self.producer.is_complete(request_id):
            self._fill(request_id, params)
        elif self.producer.is_pending(request_id):
            self._unfilled[request_id] = params
        elif followed:
            logger.warning("request %s: no KV checksums are sent, its prompt was never summed", request_id)

    # ---- each step

    def orders(self, scheduler_output: Any, loaded: Mapping[str, Mapping[int, Sequence[int]]]) -> Orders:
        """What the workers have to do in the step that was just scheduled.

        Args:
            scheduler_output: vLLM's, with the requests' new blocks and their numbers of tokens.
            loaded: of each load that starts the block ids that the connector is about to load, by group.
        """
        self._step_id += 1
        sends = self._sends.finishing(scheduler_output)
        for request_id, groups in sends.items():
            self.producer.register(request_id, self._step_id, groups)
        loads = {}
        for request_id, load in self._new_loads.items():
            groups, others = load.blocks(self._groups, loaded.get(request_id, {}))
            self.consumer.begin(request_id, self._step_id, groups, others)
            loads[request_id] = groups
        self._new_loads.clear()
        failed, self._to_fail = frozenset(self._to_fail), set()
        self._told_to_fail |= failed
        return Orders(self._step_id, sends, loads, failed)

    def received(self, output: Any, answer: Answer | None) -> None:
        """A step's output has arrived: fill in what P sends, judge what D has loaded.

        Args:
            output: vLLM's KVConnectorOutput of all workers. A load that must not be used is taken out of its
                `finished_recving`, so that it stays unfinished until the workers report it as failed.
        """
        if answer is not None:
            self.producer.add(answer.sends())
            self.consumer.add(answer.loads())
        # Nothing of these can come any more: their prompt's last step is the one that ended them, or one before it.
        for request_id, params in self._unfilled.items():
            self._fill(request_id, params)
        self._unfilled.clear()
        if output.invalid_block_ids:
            self._broken_loads.update(self.consumer.pending_with(output.invalid_block_ids))
        failed = set(output.failed_recving or ()) | self._broken_loads
        finished = set(output.finished_recving or ())
        withheld = {request_id for request_id in finished if not self._may_use(request_id, request_id in failed)}
        if withheld:
            output.finished_recving = (finished - withheld) or None
        self._broken_loads -= finished

    def _may_use(self, request_id: str, load_failed: bool) -> bool:
        """Judge a load that every worker has finished; False: its end is kept back, and its failure ordered."""
        if request_id in self._told_to_fail:
            self._told_to_fail.discard(request_id)
        elif load_failed:
            self.consumer.drop(request_id, NotCheckedReason.LOAD_FAILED)
        elif self.consumer.has_ended(request_id):
            self.consumer.drop(request_id, NotCheckedReason.REQUEST_ENDED)
        elif self.consumer.is_pending(request_id):
            verdict = self.consumer.judge(request_id)
            if self._policy.fail_closed and not verdict.acceptable:
                self._to_fail.add(request_id)
                return False
        return True

    # ---- parts

    def _is_wanted(self, request_id: str, params: Mapping[str, Any]) -> bool:
        """Whether a request has checksums: always, unless requests may switch them off (POL-6)."""
        if params.get(SWITCH_PARAM) is not False:
            return True
        if not self._policy.switchable:
            logger.warning(
                "request %s: kv_checksum is false, but requests may not switch checksums off here: it has them",
                request_id,
            )
        return not self._policy.switchable

    def _fill(self, request_id: str, params: dict[str, Any]) -> None:
        text = self.producer.take(request_id)
        if text is not None:
            params[CHECKSUMS_PARAM] = text


@dataclass(frozen=True)
class NewLoad:
    """A load that the next step starts: tokens `[first_token, num_tokens)` of a request with these block tables."""

    tables: Sequence[Sequence[int]]
    first_token: int
    num_tokens: int

    def blocks(
        self, shapes: Iterable[GroupShape], loaded: Mapping[int, Sequence[int]]
    ) -> tuple[dict[int, GroupBlocks], set[int]]:
        """The blocks that are loaded of each group, and the groups of which they are not those that the request needs.

        The connector goes by which blocks the prefix cache does not hold, which may be more than the tokens say: a
        group can have lost blocks that another still has. Less, or others, are not what the request needs (BLK-5).
        """
        groups, others = {}, set()
        for shape in shapes:
            needed = blocks_of(shape, self.tables[shape.group_id], self.first_token, self.num_tokens)
            if needed is None:
                continue
            ids = tuple(loaded.get(shape.group_id, ()))
            stop = needed.positions.stop
            table = tuple(self.tables[shape.group_id][:stop])
            if len(ids) < len(needed.block_ids) or table[-len(ids) :] != ids:
                others.add(shape.group_id)
                groups[shape.group_id] = needed
            else:
                groups[shape.group_id] = replace(needed, start=stop - len(ids), block_ids=ids)
        return groups, others


class SendTables:
    """The block tables of requests whose KV is to be sent, as the steps' outputs tell of them (PRO-1)."""

    def __init__(self, groups: Sequence[GroupShape]) -> None:
        self._groups = groups
        self._requests: dict[str, Any] = {}
        self._tables: dict[str, list[list[int]]] = {}

    def follow(self, request: Any) -> None:
        """Its prompt is computed here, to be sent."""
        self._requests[request.request_id] = request

    def forget(self, request_id: str) -> bool:
        """The request ended; gives whether it was followed."""
        self._tables.pop(request_id, None)
        return self._requests.pop(request_id, None) is not None

    def finishing(self, scheduler_output: Any) -> dict[str, dict[int, GroupBlocks]]:
        """The requests whose prompts this step finishes, with the blocks of each group to checksum (BLK-1)."""
        found = {}
        for request_id, num_computed in self._update(scheduler_output):
            num_prompt = self._requests[request_id].num_prompt_tokens
            num_scheduled = scheduler_output.num_scheduled_tokens.get(request_id, 0)
            if num_computed < num_prompt <= num_computed + num_scheduled:
                tables = self._tables[request_id]
                blocks = (blocks_of(shape, tables[shape.group_id], 0, num_prompt) for shape in self._groups)
                found[request_id] = {group.group_id: group for group in blocks if group is not None}
        return found

    def _update(self, scheduler_output: Any) -> list[tuple[str, int]]:
        """Take over this step's new blocks; gives the followed requests in it and how many tokens were computed."""
        scheduled = []
        for new in scheduler_output.scheduled_new_reqs:
            if new.req_id in self._requests:
                self._tables[new.req_id] = [list(ids) for ids in new.block_ids]
                scheduled.append((new.req_id, new.num_computed_tokens))
        cached = scheduler_output.scheduled_cached_reqs
        columns = cached.req_ids, cached.new_block_ids, cached.num_computed_tokens
        for request_id, new_ids, num_computed in zip(*columns, strict=True):
            if request_id not in self._requests:
                continue
            if request_id in cached.resumed_req_ids:
                self._tables[request_id] = [list(ids) for ids in new_ids]
            elif new_ids is not None:
                for table, ids in zip(self._tables[request_id], new_ids, strict=True):
                    table.extend(ids)
            scheduled.append((request_id, num_computed))
        return scheduled
