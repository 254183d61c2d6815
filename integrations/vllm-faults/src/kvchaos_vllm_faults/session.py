"""The faults that are armed in this process, and who is told of the moments of every transfer.

There is one session a process (`SESSION`): vLLM makes the connector of the scheduler and that of the worker by itself,
and both must find it. Until something is armed or listens, every method returns at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvchaos_vllm_faults import token
from kvchaos_vllm_faults.blocks import (
    CHECKSUMMED,
    KV_FINAL,
    READ_DONE,
    Blocks,
)
from kvchaos_vllm_faults.evidence import Evidence, digest
from kvchaos_vllm_faults.faults import Fault, Order, make
from kvchaos_vllm_faults.faults.base import Read
from kvchaos_vllm_faults.faults.early_reuse import EarlyReuse
from kvchaos_vllm_faults.memory import EngineMemory

logger = logging.getLogger(__name__)
Listener = Callable[[str, str, Blocks, EngineMemory], None]
_LISTENER_FIRST = (KV_FINAL, CHECKSUMMED)
"""Moments at which what is there before a fault counts. At all others it is what the fault left."""


class Session:
    """Of one process.

    Attributes:
        memory: the KV caches, once the worker has them.
        listener: told of every moment of every request that has a name.
        wait: called where a request waits for the other side; returns when it may go on.
        name_of: the name under which a request was made, from vLLM's id of it; None for one of no interest.
        block_ids: the blocks that vLLM's scheduler has given to a request.
        finishing: requests, with their prompts' lengths, whose last prompt token the current step computes.
        loads: what is being loaded, by vLLM's id of the request.
    """

    def __init__(self) -> None:
        self.memory: EngineMemory | None = None
        self.listener: Listener | None = None
        self.wait: Callable[[str, str], None] = lambda request, why: None
        self.name_of: Callable[[str], str | None] = lambda request_id: request_id
        self.block_ids: Callable[[str], Sequence[int]] = lambda request_id: ()
        self.finishing: list[tuple[str, int]] = []
        self.loads: dict[str, Blocks] = {}
        self.evidence: list[Evidence] = []
        self._faults: list[Fault] = []
        self._final: dict[str, Blocks] = {}

    @property
    def idle(self) -> bool:
        """Whether nothing is armed and nobody listens."""
        return self.listener is None and not self._faults

    def arm(self, order: Order, said_token: str) -> None:
        """Arm a fault.

        Raises:
            ArmError: the token is not that of the environment.
            OrderError: no fault can follow the order.
        """
        token.check(said_token)
        self._faults.append(make(order, self.evidence.append))
        logger.warning("a fault is armed in this process: %s on %s at %s", order.kind, order.request, order.at)

    def disarm(self) -> list[tuple[str, str, int]]:
        """Forget all faults and requests. Returns kind, request and number of pieces of evidence of each fault."""
        done = [(fault.kind, fault.order.request, fault.num_evidence) for fault in self._faults]
        self._faults, self._final, self.finishing, self.loads = [], {}, [], {}
        self.evidence.clear()  # in place: faults add to it
        return done

    def take_evidence(self) -> list[Evidence]:
        """What faults have proved since the last call."""
        found, self.evidence[:] = list(self.evidence), []
        return found

    def kv(self, moment: str, request_id: str, blocks: Blocks) -> None:
        """KV of a request has come to a moment."""
        request = None if self.idle else self.name_of(request_id)
        if request is None or self.memory is None:
            return
        if moment == KV_FINAL:
            self._final[request] = blocks
        if moment in _LISTENER_FIRST:
            self._tell(moment, request, blocks)
        for fault in self._of(request):
            fault.on_kv(moment, blocks, self.memory)
            if moment == READ_DONE and isinstance(fault, EarlyReuse) and fault.holds_when_read:
                self.wait(request, f"{fault.kind}: P's blocks have not been reused")
        if moment not in _LISTENER_FIRST:
            self._tell(moment, request, blocks)

    def params(self, request: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """The parameters of a request arrive on D. Returns those that go on."""
        for fault in self._of(request):
            params = fault.on_params(params, 0 if self.memory is None else self.memory.num_blocks)
        return params

    def reads(self, request_id: str, read: Read) -> Sequence[Read]:
        """The reads that are made instead of this one. Each with `hold` waits first (`waited`)."""
        request = None if self.idle else self.name_of(request_id)
        reads: list[Read] = [read]
        for fault in self._of(request):
            reads = [made for one in reads for made in fault.on_read(one)]
        return reads

    def waited(self, request_id: str) -> None:
        """Wait until the other side has done what a read is held for."""
        self.wait(self.name_of(request_id) or request_id, "early_reuse: P's blocks have not been reused")

    def final_blocks(self, request: str) -> Blocks | None:
        """The blocks of a request on P, as they were when its KV was final."""
        return self._final.get(request)

    def digests(self, blocks: Blocks) -> dict[int, str]:
        """Of whole blocks, all slots, by block position. Needs a memory."""
        if self.memory is None:
            raise RuntimeError("this process has no KV cache yet")
        kv = self.memory.read(blocks.block_ids)
        return {position: digest(kv[:, :, index]) for index, position in enumerate(blocks.positions)}

    def reused(self, request: str, competitor: str, before: Mapping[int, str]) -> None:
        """P's blocks of a request were given to a competitor, which has finished."""
        blocks = self._final[request]
        after = self.digests(blocks)
        for fault in self._of(request):
            fault.on_reuse(competitor, before, after, blocks)

    def _of(self, request: str | None) -> list[Fault]:
        return [fault for fault in self._faults if fault.order.request == request]

    def _tell(self, moment: str, request: str, blocks: Blocks) -> None:
        if self.listener is not None and self.memory is not None:
            self.listener(moment, request, blocks, self.memory)


SESSION = Session()
