"""An engine's Prometheus metrics, read from the engine when they are asked for or told of a finished request."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from engine.checksum.times import Stage
from engine.checksum.verdict import NotCheckedReason, UnverifiedReason, VerdictStatus
from engine.core import EngineCore
from engine.request import RequestOutput

_LOADS = (
    (VerdictStatus.VERIFIED, ""),
    (VerdictStatus.MISMATCH, ""),
    *((VerdictStatus.UNVERIFIED, reason) for reason in UnverifiedReason),
    *((VerdictStatus.NOT_CHECKED, reason) for reason in NotCheckedReason),
)
_TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class EngineMetrics:
    """One registry an engine. docs/alerts.md has rules on top of these names.

    `finished` is called in the engine's thread, the other methods in the server's.
    """

    def __init__(self, engine: Callable[[], EngineCore], fault_control: bool = False) -> None:
        """`engine` gives the engine as it is now. `fault_control` says that faults can be injected into it."""
        self.registry = registry = CollectorRegistry()
        self._loads = Counter(
            "kvchaos_loads", "Remote KV loads by verdict and reason.", ["verdict", "reason"], registry=registry
        )
        self._failed_loads = Counter(
            "kvchaos_failed_loads", "Remote KV loads that the transport reports as failed.", registry=registry
        )
        self._compared = Counter(
            "kvchaos_positions_compared", "Block positions whose checksums were compared.", registry=registry
        )
        self._not_compared = Counter(
            "kvchaos_positions_not_compared", "Loaded block positions that were not compared.", registry=registry
        )
        self._requests = Counter(
            "kvchaos_requests", "Finished requests by reason.", ["finish_reason"], registry=registry
        )
        self._recomputes = Counter(
            "kvchaos_recomputes", "Requests whose load failed and that were computed here.", registry=registry
        )
        self._ttft = Histogram(
            "kvchaos_ttft_seconds",
            "From the arrival of a request to its first token.",
            registry=registry,
            buckets=_TTFT_BUCKETS,
        )
        # A series that begins with its first mismatch has no increase for a rule to see.
        for verdict, reason in _LOADS:
            self._loads.labels(verdict, reason)
        gauges: tuple[tuple[str, str, Callable[[], float]], ...] = (
            ("free_blocks", "Blocks in the pool that nobody holds.", lambda: engine().scheduler.kv.pool.num_free),
            ("blocks", "All blocks in the pool.", lambda: engine().scheduler.kv.pool.num_blocks - 1),
            ("leases", "Requests whose blocks are held for a consumer.", lambda: _leases(engine())),
            ("unfinished_requests", "Requests that wait, load or run.", lambda: engine().scheduler.num_unfinished),
            ("loads_in_flight", "Remote KV loads under way.", lambda: engine().scheduler.num_loading),
            ("fault_control", "1 where faults can be injected into this engine.", lambda: float(fault_control)),
        )
        for name, what, read in gauges:
            Gauge(f"kvchaos_{name}", what, registry=registry).set_function(read)
        registry.register(_ChecksumTimes(engine))

    def first_token(self, seconds: float) -> None:
        """A request's first token came `seconds` after it arrived."""
        self._ttft.observe(seconds)

    def finished(self, output: RequestOutput) -> None:
        """Count a finished request and its load, if it had one."""
        self._requests.labels(str(output.finish_reason)).inc()
        verdict = output.verdict
        if verdict.status is VerdictStatus.NO_LOAD:
            return
        self._loads.labels(str(verdict.status), str(verdict.reason or "")).inc()
        self._compared.inc(sum(len(group.compared) for group in verdict.groups))
        self._not_compared.inc(sum(len(group.not_compared) for group in verdict.groups))
        if verdict.reason == NotCheckedReason.LOAD_FAILED:
            self._failed_loads.inc()
        if output.recomputed:
            self._recomputes.inc()

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)


class _ChecksumTimes(Collector):
    """What the engine's workers and its scheduler say that checksums cost them."""

    def __init__(self, engine: Callable[[], EngineCore]) -> None:
        self._engine = engine

    def collect(self) -> Iterator[CounterMetricFamily]:
        workers, scheduler = self._engine().checksum_times, self._engine().scheduler.checksum_times
        yield CounterMetricFamily(
            "kvchaos_checksum_records",
            "Times that a worker summed the blocks of a request.",
            value=sum(t.records for t in workers),
        )
        seconds = CounterMetricFamily(
            "kvchaos_checksum_seconds", "Time of the engine's thread for checksums, by stage.", labels=["stage"]
        )
        summed = {Stage.SUM: sum(t.start_s for t in workers), Stage.COPY: sum(t.wait_s for t in workers)}
        for stage, value in (summed | scheduler.seconds).items():
            seconds.add_metric([stage], value)
        yield seconds
        tokens = CounterMetricFamily(
            "kvchaos_checksum_tokens", "Tokens that were summed, by where their sum came from.", labels=["source"]
        )
        tokens.add_metric(["read"], sum(t.tokens_read for t in workers))
        tokens.add_metric(["kept"], sum(t.tokens_kept for t in workers))
        yield tokens
        payload = CounterMetricFamily(
            "kvchaos_checksum_payload_bytes", "Text of checksums sent and received.", labels=["direction"]
        )
        payload.add_metric(["sent"], scheduler.payload_bytes_sent)
        payload.add_metric(["received"], scheduler.payload_bytes_received)
        yield payload


def _leases(engine: EngineCore) -> int:
    return 0 if engine.connector is None else engine.connector.num_leases
