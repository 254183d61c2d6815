"""The only way in for a fault or an oracle: named moments in the life of a request, no-ops when nobody listens.

A handler is called with the event and may return a decision: nothing (look), `Change` (another event goes on in
its place), `Drop` (it does not happen), `Hold` (it happens when the condition comes true). Which decisions a seam
takes is part of its contract (`SEAMS`, frozen by a test). KV bytes are changed through the event's `memory`.

Handlers of one seam run in the order of their stage: BEFORE (oracles that must see what was there before a fault),
FAULT, AFTER (oracles that must see what the fault left).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from engine.cache import KVMemory
from engine.checksum.payload import Payload
from engine.checksum.records import GroupBlocks, WorkerRecord
from engine.checksum.verdict import UnverifiedReason, Verdict
from engine.decisions import CHANGE as CHANGE
from engine.decisions import DROP as DROP
from engine.decisions import HOLD as HOLD
from engine.decisions import Change as Change
from engine.decisions import Decision as Decision
from engine.decisions import Drop as Drop
from engine.decisions import Handler as Handler
from engine.decisions import Hold as Hold
from engine.decisions import Stage as Stage

Groups = Mapping[int, GroupBlocks]


@dataclass(frozen=True, slots=True)
class KVFinal:
    """P: the forward that finishes a prompt has written its KV on every rank; nothing is summed yet."""

    engine: str
    request_id: str
    groups: Groups
    memory: KVMemory


@dataclass(frozen=True, slots=True)
class SpeculatorWrote:
    """P's worker: the speculator has written KV past a prompt that is finished; nothing is summed yet.

    `token_ids` are the sampled token and what was guessed after it, computed at `first_position` onwards.
    """

    engine: str
    request_id: str
    groups: Groups
    memory: KVMemory
    first_position: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlocksToChecksum:
    """P's scheduler names the blocks to checksum, to its workers."""

    engine: str
    request_id: str
    groups: Groups


@dataclass(frozen=True, slots=True)
class RecordLeaves:
    """A worker's record leaves it (P: after a prefill; D: after a load)."""

    engine: str
    record: WorkerRecord


@dataclass(frozen=True, slots=True)
class RecordArrives:
    """A worker's record reaches the aggregator."""

    engine: str
    record: WorkerRecord


@dataclass(frozen=True, slots=True)
class Checksummed:
    """P's ranks have read the blocks to checksum them; later changes of them are not in the sums."""

    engine: str
    request_id: str
    groups: Groups
    memory: KVMemory


@dataclass(frozen=True, slots=True)
class ParamsLeave:
    """P's answer leaves with these kv_transfer_params."""

    engine: str
    request_id: str
    params: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ParamsPass:
    """The proxy forwards kv_transfer_params from P to D."""

    request_id: str
    params: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PayloadDecoded:
    """D's scheduler has decoded the expected checksums, or knows why it has none."""

    engine: str
    request_id: str
    payload: Payload | UnverifiedReason


@dataclass(frozen=True, slots=True)
class LoadScheduled:
    """D's scheduler has allocated the blocks that a load will write; nothing is posted yet."""

    engine: str
    request_id: str
    groups: Groups
    memory: KVMemory


@dataclass(frozen=True, slots=True)
class LoadFinished:
    """D's first rank was told that a load is finished; all of it has landed, and no rank has summed it yet."""

    engine: str
    request_id: str
    groups: Groups
    memory: KVMemory


@dataclass(frozen=True, slots=True)
class Verified:
    """D's scheduler has judged a load; the request has not run yet."""

    engine: str
    request_id: str
    verdict: Verdict
    groups: Groups
    memory: KVMemory


@dataclass(frozen=True, slots=True)
class FirstUse:
    """D is about to read loaded blocks in a forward for the first time."""

    engine: str
    request_id: str
    groups: Groups
    memory: KVMemory


@dataclass(frozen=True, slots=True)
class RecomputeStart:
    """D's scheduler gives up a load and computes the whole prompt itself."""

    engine: str
    request_id: str


@dataclass(frozen=True, slots=True)
class CopyOp:
    """One copy operation: `num_slots` slots of one (layer, K|V, head) from a block of P to a block of D.

    `layer` and `part` count the caches of `group` and the parts of a token in them. Where ranks hold replicas of the
    head, it goes from one of P's to one of D's.
    """

    index: int
    position: int
    layer: int
    part: int
    head: int
    source_block: int
    source_slot: int
    target_block: int
    target_slot: int
    num_slots: int
    source_replica: int = 0
    target_replica: int = 0
    group: int = 0


@dataclass(frozen=True, slots=True)
class OpPosted:
    """A copy operation is next on the wire. Dropped: its bytes never arrive, and it counts as done."""

    engine: str
    request_id: str
    op: CopyOp
    num_ops: int
    source: KVMemory
    target: KVMemory


@dataclass(frozen=True, slots=True)
class OpLanded:
    """The bytes of a copy operation are in D's memory."""

    engine: str
    request_id: str
    op: CopyOp
    num_ops: int
    source: KVMemory
    target: KVMemory


@dataclass(frozen=True, slots=True)
class Completion:
    """All operations of a load are done: told to D's ranks, or (`to_producer`) to P's, which then frees."""

    engine: str
    request_id: str
    to_producer: bool


@dataclass(frozen=True, slots=True)
class CarrierPass:
    """The encoded checksums of a load travel from P to D with the connector's own messages. None: there are none."""

    engine: str
    request_id: str
    checksums: str | None


@dataclass(frozen=True, slots=True)
class BlocksAllocated:
    engine: str
    request_id: str
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlocksFreed:
    """A reference to each of these blocks is given back to the pool."""

    engine: str
    request_id: str
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Preempted:
    engine: str
    request_id: str


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """A request reached a terminal state (`finish_reason`)."""

    engine: str
    request_id: str
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Forward:
    """The ranks compute these tokens of a request: they read the positions before them and write theirs.

    `tables` are the request's block tables, by KV cache group: position p is in slot `p % block_size` of the block
    `p // block_size` of its table. `block_ids` is that of the first group.
    """

    engine: str
    request_id: str
    first_position: int
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    tables: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class StepStart:
    """A scheduled step is next to be executed by the ranks."""

    engine: str
    step_id: int


@dataclass(frozen=True, slots=True)
class StepEnd:
    """The workers have executed a step."""

    engine: str
    step_id: int


@dataclass(frozen=True, slots=True)
class OutputFinalised:
    """A step's output is about to reach the scheduler."""

    engine: str
    step_id: int


Event = (
    SpeculatorWrote | KVFinal | BlocksToChecksum | RecordLeaves | RecordArrives | Checksummed | ParamsLeave | ParamsPass
    | PayloadDecoded | LoadScheduled | LoadFinished | Verified | FirstUse | RecomputeStart | OpPosted | OpLanded
    | Completion | CarrierPass | Forward | BlocksAllocated | BlocksFreed | Preempted | RequestEnded | StepStart
    | StepEnd | OutputFinalised
)  # fmt: skip
E = TypeVar("E", bound=Event)


# Seam name -> (event type, decisions it takes beside looking). KV bytes may be changed wherever there is a memory.
SEAMS: dict[str, tuple[type[Any], frozenset[str]]] = {
    "producer.speculator_wrote": (SpeculatorWrote, frozenset()),
    "producer.kv_final": (KVFinal, frozenset()),
    "producer.blocks_to_checksum": (BlocksToChecksum, frozenset({CHANGE, DROP})),
    "producer.checksummed": (Checksummed, frozenset()),
    "producer.params_leave": (ParamsLeave, frozenset({CHANGE})),
    "proxy.params_pass": (ParamsPass, frozenset({CHANGE, HOLD})),
    "consumer.payload_decoded": (PayloadDecoded, frozenset({CHANGE})),
    "consumer.load_scheduled": (LoadScheduled, frozenset()),
    "consumer.load_finished": (LoadFinished, frozenset()),
    "consumer.verified": (Verified, frozenset()),
    "consumer.first_use": (FirstUse, frozenset()),
    "consumer.recompute_start": (RecomputeStart, frozenset()),
    "transfer.op_posted": (OpPosted, frozenset({CHANGE, DROP, HOLD})),
    "transfer.op_landed": (OpLanded, frozenset()),
    "transfer.completion": (Completion, frozenset({DROP, HOLD})),
    "transfer.carrier_pass": (CarrierPass, frozenset({CHANGE})),
    "worker.forward": (Forward, frozenset()),
    "worker.record_leaves": (RecordLeaves, frozenset({CHANGE, DROP})),
    "worker.record_arrives": (RecordArrives, frozenset({CHANGE, DROP})),
    "blocks.allocated": (BlocksAllocated, frozenset()),
    "blocks.freed": (BlocksFreed, frozenset()),
    "request.preempted": (Preempted, frozenset()),
    "request.ended": (RequestEnded, frozenset()),
    "step.start": (StepStart, frozenset({HOLD})),
    "step.end": (StepEnd, frozenset()),
    "step.output_finalised": (OutputFinalised, frozenset({HOLD})),
}
NAMES: dict[type[Any], str] = {event: name for name, (event, _) in SEAMS.items()}


@dataclass(frozen=True, slots=True)
class Outcome(Generic[E]):
    """What the handlers of a seam decided: the event to go on with, or that it is dropped or held."""

    event: E
    dropped: bool = False
    holds: tuple[Hold, ...] = ()


class Seams:
    """The handlers of one run, shared by both engines, the transport and the proxy."""

    def __init__(self) -> None:
        self._handlers: dict[str, list[tuple[Stage, Handler]]] = {}

    def on(self, seam: str, handler: Handler, stage: Stage = Stage.FAULT) -> None:
        """Register a handler. Raises ValueError for a seam that does not exist."""
        if seam not in SEAMS:
            raise ValueError(f"there is no seam {seam!r}")
        handlers = self._handlers.setdefault(seam, [])
        handlers.append((stage, handler))
        handlers.sort(key=lambda entry: entry[0])

    @property
    def names(self) -> list[str]:
        """The seams that somebody listens to."""
        return sorted(self._handlers)

    def listened(self, seam: str) -> bool:
        """Whether anybody listens: where building the event itself would cost something."""
        return seam in self._handlers

    def emit(self, event: E) -> Outcome[E]:
        """Call the handlers in order. A decision that the seam does not take is an error of the handler."""
        name = NAMES[type(event)]
        holds: list[Hold] = []
        for _, handler in self._handlers.get(name, ()):
            decision = handler(event)
            if decision is None:
                continue
            kind = type(decision).__name__.lower()
            if kind not in SEAMS[name][1]:
                raise TypeError(f"seam {name} does not take a {kind}")
            if isinstance(decision, Drop):
                return Outcome(event, dropped=True)
            if isinstance(decision, Hold):
                holds.append(decision)
            elif type(decision.event) is type(event):
                event = decision.event
            else:
                raise TypeError(f"seam {name} takes no {type(decision.event).__name__}")
        return Outcome(event, holds=tuple(holds))
