"""What a fault is: an order to act on one request at one moment, and the evidence that it did.

A kind overrides the methods of the moments that it acts at. All are called in the engine's own process and thread.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from kvchaos_vllm_faults.blocks import Blocks
from kvchaos_vllm_faults.evidence import Evidence
from kvchaos_vllm_faults.memory import EngineMemory


class OrderError(ValueError):
    """An order that no fault can follow: the message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Order:
    """What was armed. `request` is the name that the request was made under.

    Attributes:
        kind: which fault.
        at: the moment in kvchaos' words, such as `before_verify`.
        params: what else the kind wants to know.
        seed: drives every choice that `params` leaves open.
        held: digest of what P held in each block position of the request when its KV was final.
        other: the parameters of another load, for a fault that acts between two.
    """

    kind: str
    request: str
    at: str
    params: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    held: Mapping[int, str] = field(default_factory=dict)
    other: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Read:
    """A read of a load: block by block, from P's block to D's. One with `hold` waits before it is posted.

    With `tells` P is told when it is done, and frees its blocks: the last of a load must, and no other may. Where D
    holds a prefix of the prompt already, `preceding` is P's last block before those that are read.
    """

    local: tuple[int, ...]
    remote: tuple[int, ...]
    hold: bool = False
    tells: bool = True
    preceding: int | None = None

    def part(self, start: int, stop: int) -> Read:
        return replace(self, local=self.local[start:stop], remote=self.remote[start:stop])


class Fault:
    """One armed fault. `record` is told of each piece of evidence."""

    kind: ClassVar[str]
    moments: ClassVar[Mapping[str, str]]
    """The moments that an order may name, and the seam of each."""

    def __init__(self, order: Order, record: Callable[[Evidence], None]) -> None:
        """Raises OrderError for an order that this kind cannot follow."""
        if order.at not in self.moments:
            raise OrderError(f"{self.kind} acts at {', '.join(self.moments)}, not at {order.at!r}")
        self.order = order
        self.rng = random.Random(order.seed)
        self.num_evidence = 0
        self._record = record

    @property
    def moment(self) -> str:
        """The seam of the order's moment."""
        return self.moments[self.order.at]

    def record(self, what: str, before: str | None = None, after: str | None = None, moment: str | None = None) -> None:
        """Evidence; `moment` where it is not the order's own."""
        self.num_evidence += 1
        self._record(Evidence(self.kind, moment or self.moment, self.order.request, what, before, after))

    def on_kv(self, moment: str, blocks: Blocks, memory: EngineMemory) -> None:
        """KV of the request was written, arrived, or is about to be read; its bytes may be changed."""

    def on_params(self, params: Mapping[str, Any], num_blocks: int) -> Mapping[str, Any]:
        """The request's parameters arrive on D, whose pool has so many blocks. Returns those that go on."""
        return params

    def on_read(self, read: Read) -> Sequence[Read]:
        """D is about to read the request's blocks. Returns the reads that are made instead, in order."""
        return (read,)

    def on_reuse(self, competitor: str, before: Mapping[int, str], after: Mapping[int, str], ids: Blocks) -> None:
        """P's blocks of the request after another prefill: their digests by position before it, and now."""
