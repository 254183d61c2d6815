"""An engine's Prometheus metrics, read from the engine when they are asked for or told of a finished request."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from engine.core import EngineCore
from engine.request import RequestOutput

_TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class EngineMetrics:
    """One registry an engine. docs/alerts.md has rules on top of these names."""

    def __init__(self, engine: Callable[[], EngineCore]) -> None:
        """`engine` gives the engine as it is now."""
        self.registry = CollectorRegistry()
        self._loads = Counter(
            "kvchaos_loads", "Remote KV loads by verdict and reason.", ["verdict", "reason"], registry=self.registry
        )
        self._compared = Counter(
            "kvchaos_positions_compared", "Block positions whose checksums were compared.", registry=self.registry
        )
        self._not_compared = Counter(
            "kvchaos_positions_not_compared", "Loaded block positions that were not compared.", registry=self.registry
        )
        self._requests = Counter(
            "kvchaos_requests", "Finished requests by reason.", ["finish_reason"], registry=self.registry
        )
        self._recomputes = Counter(
            "kvchaos_recomputes", "Requests whose load failed and that were computed here.", registry=self.registry
        )
        self._ttft = Histogram(
            "kvchaos_ttft_seconds",
            "From the arrival of a request to its first token.",
            registry=self.registry,
            buckets=_TTFT_BUCKETS,
        )
        free = Gauge("kvchaos_free_blocks", "Blocks in the pool that nobody holds.", registry=self.registry)
        free.set_function(lambda: engine().scheduler.kv.pool.num_free)
        leases = Gauge("kvchaos_leases", "Requests whose blocks are held for a consumer.", registry=self.registry)
        leases.set_function(lambda: _leases(engine()))

    def first_token(self, seconds: float) -> None:
        """A request's first token came `seconds` after it arrived."""
        self._ttft.observe(seconds)

    def finished(self, output: RequestOutput) -> None:
        """Count a finished request and its load."""
        self._requests.labels(str(output.finish_reason)).inc()
        verdict = output.verdict
        self._loads.labels(str(verdict.status), str(verdict.reason or "")).inc()
        self._compared.inc(sum(len(group.compared) for group in verdict.groups))
        self._not_compared.inc(sum(len(group.not_compared) for group in verdict.groups))
        if output.recomputed:
            self._recomputes.inc()

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)


def _leases(engine: EngineCore) -> int:
    return 0 if engine.connector is None else engine.connector.num_leases
