"""The verdicts as vLLM's KV connector statistics and Prometheus counters, beside NIXL's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats, NixlPromMetrics

from kvchaos_vllm.verdict import NotCheckedReason, UnverifiedReason, VerdictStatus

KEY = "kv_checksum_loads"
NAME = "vllm:kv_checksum_loads"
LABELS = [
    *((str(status), "") for status in (VerdictStatus.VERIFIED, VerdictStatus.MISMATCH)),
    *((str(VerdictStatus.UNVERIFIED), str(reason)) for reason in UnverifiedReason),
    *((str(VerdictStatus.NOT_CHECKED), str(reason)) for reason in NotCheckedReason),
]


class ChecksumStats(NixlKVConnectorStats):
    """NIXL's statistics with ours: how many loads had which verdict, `status` or `status:reason`."""

    def reset(self) -> None:
        """Forget all."""
        super().reset()
        self.data[KEY] = {}

    @classmethod
    def of_counts(cls, counts: Mapping[tuple[VerdictStatus, str | None], int]) -> ChecksumStats:
        """Statistics of these numbers of loads by status and reason."""
        made = cls()
        made.data[KEY] = {str(s) if reason is None else f"{s}:{reason}": n for (s, reason), n in counts.items()}
        return made

    @property
    def loads(self) -> dict[str, int]:
        """Loads by verdict."""
        found: dict[str, int] = self.data.get(KEY, {})
        return found

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return not self.loads and super().is_empty()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add others to these, NIXL's plain ones among them."""
        theirs = dict(other.data)
        loads = Counter(self.loads) + Counter(theirs.pop(KEY, {}))
        self.data[KEY] = dict(loads)
        for name, values in theirs.items():
            self.data[name].extend(values)
        return self

    def reduce(self) -> dict[str, int | float]:
        """What vLLM logs every few seconds."""
        reduced: dict[str, int | float] = super().reduce()
        return reduced | {f"KV checksum {name}": count for name, count in sorted(self.loads.items())}


class ChecksumPromMetrics(NixlPromMetrics):
    """NIXL's metrics and a counter of loads by verdict and reason."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._loads = self._counter_cls(
            name=NAME,
            documentation="Number of KV loads by the verdict of their checksums, and its reason (empty: none).",
            labelnames=[*labelnames, "verdict", "reason"],
        )
        # All of them from the start: what begins at 1 has not increased, and nobody would be told of the first.
        for values in per_engine_labelvalues.values():
            for verdict, reason in LABELS:
                self._loads.labels(*values, verdict, reason)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what an engine reports."""
        data = dict(transfer_stats_data)
        loads = data.pop(KEY, {})
        super().observe(data, engine_idx)
        for name, count in loads.items():
            verdict, _, reason = name.partition(":")
            self._loads.labels(*self.per_engine_labelvalues[engine_idx], verdict, reason).inc(count)
