"""What the engines themselves say that checksums cost, stage by stage, beside the difference that a study measures.

Read the counters of both engines before and after every slot of an arm, add up what each arm cost, and hand both sums
with the measured difference to `explain`. The stages are times of the engines' threads. What they leave out is what a
difference beyond their sum consists of: the payload's way through HTTP and JSON, waiting behind the checksums of other
requests, and a delay that was planted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import httpx
from prometheus_client.parser import text_string_to_metric_families

from engine.checksum.times import Stage
from harness.errors import RunError

PRODUCER, CONSUMER = "producer", "consumer"
_STAGES = {
    (PRODUCER, Stage.SUM): "producer: sum",
    (PRODUCER, Stage.COPY): "producer: copy to host",
    (PRODUCER, Stage.ENCODE): "producer: encode",
    (CONSUMER, Stage.DECODE): "consumer: decode",
    (CONSUMER, Stage.SUM): "consumer: sum",
    (CONSUMER, Stage.COPY): "consumer: copy to host",
    (CONSUMER, Stage.COMPARE): "consumer: compare",
}
STAGES = tuple(_STAGES.values())
_SECONDS, _BYTES, _RECORDS = "kvchaos_checksum_seconds", "kvchaos_checksum_payload_bytes", "kvchaos_checksum_records"


class DecompositionError(RunError):
    """An engine does not say what its checksums cost."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The counters of one engine at one moment: seconds by stage, characters of payload sent, records."""

    seconds: Mapping[str, float]
    payload_sent: float
    records: float


@dataclass(frozen=True, slots=True)
class Costs:
    """What checksums cost some requests in all: seconds by stage (`STAGES`), characters of payload, records summed."""

    requests: int = 0
    seconds: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    payload_bytes: float = 0.0
    summed: float = 0.0

    def __add__(self, other: Costs) -> Costs:
        return Costs(
            self.requests + other.requests,
            {stage: self.seconds[stage] + other.seconds[stage] for stage in STAGES},
            self.payload_bytes + other.payload_bytes,
            self.summed + other.summed,
        )

    @property
    def per_request(self) -> dict[str, float]:
        """Seconds a request, by stage; nothing without requests."""
        return {stage: s / self.requests for stage, s in self.seconds.items()} if self.requests else {}

    @property
    def payload_bytes_per_request(self) -> float:
        return self.payload_bytes / self.requests if self.requests else 0.0


@dataclass(frozen=True, slots=True)
class Explanation:
    """How far the stages explain a measured difference of two arms.

    Attributes:
        seconds: by stage, a request: arm B less arm A.
        payload_bytes: characters of text a request.
        low_s, high_s: the interval of the measured difference.
    """

    seconds: Mapping[str, float]
    payload_bytes: float
    low_s: float
    high_s: float

    @property
    def explained_s(self) -> float:
        """What the stages add up to."""
        return sum(self.seconds.values())

    @property
    def agrees(self) -> bool:
        """The sum lies within the interval: nothing else is needed to explain the difference."""
        return self.low_s <= self.explained_s <= self.high_s

    def sentence(self) -> str:
        """What this comes to, for a report."""
        said = f"The stages add up to {_ms(self.explained_s)} a request"
        measured = f"the measured difference, {_ms(self.low_s)} to {_ms(self.high_s)}"
        if self.agrees:
            return f"{said}, which lies within {measured}."
        if self.explained_s < self.low_s:
            return (
                f"{said}; {measured}, is larger by {_ms(self.low_s - self.explained_s)} at least: that is no stage's "
                "own time. Requests waited behind the checksums of others, or the payload's way through HTTP took it."
            )
        return (
            f"{said}; {measured}, is smaller by {_ms(self.explained_s - self.high_s)} at least: the engines hid that "
            "much of it behind other work."
        )


def read_metrics(text: str, where: str) -> Reading:
    """The counters in an engine's metrics page.

    Raises:
        DecompositionError: it is no page of an engine that counts what checksums cost.
    """
    seconds: dict[str, float] = {}
    sent = records = None
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == f"{_SECONDS}_total":
                    seconds[sample.labels["stage"]] = sample.value
                elif sample.name == f"{_BYTES}_total" and sample.labels["direction"] == "sent":
                    sent = sample.value
                elif sample.name == f"{_RECORDS}_total":
                    records = sample.value
    except (ValueError, KeyError) as error:
        raise DecompositionError(f"{where}: its metrics cannot be read ({error})") from None
    if sent is None or records is None or not seconds.keys() >= set(Stage):
        raise DecompositionError(f"{where}: no metrics of a kvchaos engine: leave the decomposition out")
    return Reading(seconds, sent, records)


async def read_engines(client: httpx.AsyncClient, urls: Mapping[str, str]) -> dict[str, Reading]:
    """The counters of both engines now. `urls` has those of `producer` and `consumer`.

    Raises:
        DecompositionError: one cannot be reached, or does not say.
    """

    async def read(url: str) -> Reading:
        where = f"{url.rstrip('/')}/metrics"
        try:
            answer = await client.get(where)
            answer.raise_for_status()
        except httpx.HTTPError as error:
            raise DecompositionError(f"{where}: cannot be read ({type(error).__name__})") from None
        return read_metrics(answer.text, where)

    sides = (PRODUCER, CONSUMER)
    return dict(zip(sides, await asyncio.gather(*(read(urls[side]) for side in sides)), strict=True))


def costs(before: Mapping[str, Reading], after: Mapping[str, Reading], requests: int) -> Costs:
    """What the requests between two readings cost. Nothing else may have used the engines meanwhile.

    Raises:
        DecompositionError: a counter fell: an engine was started again in between.
    """
    seconds = {
        name: after[side].seconds[stage] - before[side].seconds[stage] for (side, stage), name in _STAGES.items()
    }
    payload = after[PRODUCER].payload_sent - before[PRODUCER].payload_sent
    summed = sum(after[side].records - before[side].records for side in (PRODUCER, CONSUMER))
    if min(*seconds.values(), payload, summed) < 0:
        raise DecompositionError("an engine counts less than before: it was started again, so nothing can be added up")
    return Costs(requests, seconds, payload, summed)


def explain(off: Costs, on: Costs, low_s: float, high_s: float) -> Explanation:
    """Set what the stages cost arm B more than arm A against the interval of the measured difference (seconds).

    Raises:
        ValueError: an arm without requests.
    """
    if not off.requests or not on.requests:
        raise ValueError(f"{off.requests} requests without checksums and {on.requests} with them: both must be some")
    a, b = off.per_request, on.per_request
    more = {stage: b[stage] - a[stage] for stage in STAGES}
    return Explanation(more, on.payload_bytes_per_request - off.payload_bytes_per_request, low_s, high_s)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms"
