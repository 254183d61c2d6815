"""vLLM's NIXL pull connector, with KV checksums: P sums what it has computed, D checks what it has loaded.

Where things happen in vLLM 0.32, and why there:

- P. The workers sum a prompt's blocks in `wait_for_save` of the step that finishes it: its KV is final, and nothing has
  written behind it. Their sums come back with `build_connector_worker_meta`. The request may have ended in that very
  step, and vLLM calls `request_finished_all_groups` *before* `update_connector_output`: the dict of parameters that
  was answered with is kept and filled in there; it is serialised later.
- D. What P sent is decoded in `update_state_after_alloc`, before anything is transferred. The workers sum a load's
  blocks in `get_transfer_results` of the step in which they report it finished: no forward has written them since.
- The verdict. Each worker holds a part of the heads or layers, so only the scheduler can add the parts up. It judges
  in `update_connector_output`, which vLLM calls when *every* worker has reported the load, and before it looks at
  `finished_recving`. Only what it finds there can be scheduled or enter the prefix cache, and until then the blocks
  belong to the waiting request alone. So a load that must not be used is taken out of `finished_recving` there and
  then: it stays unfinished, and nothing in vLLM can use it. Its failure cannot be reported in the same call, for vLLM
  has dealt with `failed_recving` earlier in the step. Hence the next step's metadata orders the workers to report the
  load as failed, and vLLM fails or recomputes the request as it does for any load that a connector reports as failed.
  A load that verifies costs no step more. There is no moment at which an unverified block can be used (POL-5).

A subclass may wrap `_fetch_results`, which is what the loads' results are before anything of ours looks at the blocks.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request
from vllm.version import __version__ as vllm_version

from kvchaos_vllm.caches import Ranks, group_shapes, summed_groups
from kvchaos_vllm.errors import StartupError
from kvchaos_vllm.log import get_logger
from kvchaos_vllm.metadata import ChecksumMetadata, ChecksumWorkerMetadata
from kvchaos_vllm.metrics import ChecksumPromMetrics, ChecksumStats
from kvchaos_vllm.orders import Orders
from kvchaos_vllm.records import WorldShape
from kvchaos_vllm.scheduler import SchedulerChecksums
from kvchaos_vllm.settings import ChecksumPolicy
from kvchaos_vllm.startup import usable_policy, warn_of_version
from kvchaos_vllm.worker import WorkerChecksums

logger = get_logger(__name__)


class ChecksumNixlConnector(NixlPullConnector):
    """The NIXL pull connector with KV checksums, as `kv_connector_extra_config` says (`settings.py`).

    `checksums` is the scheduler's or the worker's half; None where checksums are off, and then this is NIXL's own.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        policy = usable_policy(vllm_config)
        super().__init__(vllm_config, role, kv_cache_config)
        self.policy = policy
        self.checksums: SchedulerChecksums | WorkerChecksums | None = None
        if policy.enabled and role == KVConnectorRole.SCHEDULER:
            warn_of_version(vllm_version)
            self.checksums = _scheduler_checksums(vllm_config, kv_cache_config, policy)

    # ---- the scheduler's side

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """As NIXL's; notes how much of the request is in the local prefix cache."""
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if isinstance(self.checksums, SchedulerChecksums) and found[0]:
            self.checksums.matched(request.request_id, num_computed_tokens)
        return found

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """As NIXL's; what P sent is decoded first, for NIXL then forgets that the request was to be loaded."""
        if isinstance(self.checksums, SchedulerChecksums):
            self.checksums.allocated(request, blocks.get_block_ids(), num_external_tokens)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """As NIXL's, with orders to the workers."""
        metadata = super().build_connector_meta(scheduler_output)
        if not isinstance(self.checksums, SchedulerChecksums):
            return metadata
        group_ids = self.kv_cache_config.transfer_group_ids
        loaded = {
            request_id: dict(zip(group_ids, meta.local_block_ids, strict=False))
            for request_id, meta in metadata.reqs_to_recv.items()
        }
        return ChecksumMetadata.of(metadata, self.checksums.orders(scheduler_output, loaded))

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """As NIXL's; the checksums go into the parameters."""
        return self._with_checksums(request, super().request_finished(request, block_ids))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As NIXL's; the checksums go into the parameters."""
        return self._with_checksums(request, super().request_finished_all_groups(request, block_ids))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """As NIXL's; then the loads that finished with this step are judged."""
        super().update_connector_output(connector_output)
        if isinstance(self.checksums, SchedulerChecksums):
            metadata = connector_output.kv_connector_worker_meta
            answer = metadata.answer if isinstance(metadata, ChecksumWorkerMetadata) else None
            self.checksums.received(connector_output, answer)

    # ---- the worker's side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """As NIXL's; finds out how to read the caches."""
        super().register_kv_caches(kv_caches)
        if self.policy.enabled:
            self.checksums = self._worker_checksums(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """As NIXL's; notes what to sum when the loads have finished."""
        if isinstance(self.checksums, WorkerChecksums):
            self.checksums.expect(self._orders())
        super().start_load_kv(forward_context, **kwargs)

    def wait_for_save(self) -> None:
        """As NIXL's; then the prompts that this step has finished are summed."""
        super().wait_for_save()
        if isinstance(self.checksums, WorkerChecksums):
            self.checksums.sum_sends(self._orders())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """What has finished on this worker: it is summed, and loads that were judged as bad are reported as failed."""
        results = self._fetch_results(finished_req_ids)
        if isinstance(self.checksums, WorkerChecksums):
            self.checksums.sum_loads(results.finished_recving, results.failed_recving)
            failed = self._orders().failed
            results.finished_recving |= failed
            results.failed_recving |= failed
        return results

    def _fetch_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """NIXL's own results, before their blocks are looked at."""
        return super().get_transfer_results(finished_req_ids)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What this worker has summed since the last step."""
        answer = self.checksums.take_answer() if isinstance(self.checksums, WorkerChecksums) else None
        return None if answer is None else ChecksumWorkerMetadata(answer)

    # ---- metrics

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """A worker's as NIXL's; the scheduler's are the verdicts since the last call."""
        if isinstance(self.checksums, SchedulerChecksums):
            counts = self.checksums.consumer.take_counts()
            return ChecksumStats.of_counts(counts) if counts else None
        stats: KVConnectorStats | None = super().get_kv_connector_stats()
        if stats is None or self.checksums is None:
            return stats
        return ChecksumStats().aggregate(stats)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Statistics from what crossed a process boundary."""
        return ChecksumStats() if data is None else ChecksumStats(data=data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """NIXL's metrics and ours."""
        return ChecksumPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---- parts

    def _orders(self) -> Orders:
        """The scheduler's orders of this step."""
        metadata = self._connector_metadata
        return metadata.kv_checksum_orders if isinstance(metadata, ChecksumMetadata) else Orders(0)

    def _with_checksums(
        self, request: Request, answer: tuple[bool, dict[str, Any] | None]
    ) -> tuple[bool, dict[str, Any] | None]:
        if isinstance(self.checksums, SchedulerChecksums):
            self.checksums.finished(request.request_id, answer[1])
        return answer

    def _worker_checksums(self, kv_caches: dict[str, torch.Tensor]) -> WorkerChecksums:
        tp, pp = get_tp_group(), get_pp_group()
        ranks = Ranks(
            tp.rank_in_group,
            tp.world_size,
            pp.rank_in_group,
            self._vllm_config.model_config.get_total_num_kv_heads(),
        )
        layers = get_layers_from_vllm_config(self._vllm_config, AttentionLayerBase)
        groups = summed_groups(self.kv_cache_config, kv_caches, layers, ranks)
        return WorkerChecksums(groups, ranks.tp_rank, ranks.pp_rank)


def _scheduler_checksums(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, policy: ChecksumPolicy
) -> SchedulerChecksums | None:
    """The scheduler's half; None, with a warning, where no group can be checksummed.

    Raises:
        StartupError: so it is, and a load that cannot be verified fails.
    """
    parallel = vllm_config.parallel_config
    windows = {
        group_id: spec.sliding_window
        for group_id, group in enumerate(kv_cache_config.kv_cache_groups)
        if isinstance(spec := group.kv_cache_spec, SlidingWindowSpec)
    }
    shapes = group_shapes(kv_cache_config, windows)
    if not shapes:
        if policy.fail_closed:
            raise StartupError(
                "fail-closed KV checksums, but no KV cache group of this model can be checksummed (see above): every "
                "load would fail; use kv_checksum_mode log or off"
            )
        logger.warning("KV checksums are disabled: no KV cache group of this model can be checksummed")
        return None
    world = WorldShape(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
    logger.info(
        "KV checksums are on, fail-%s (a load that fails: %s); KV cache groups %s of %d",
        "closed" if policy.fail_closed else "open",
        vllm_config.kv_transfer_config.kv_load_failure_policy,
        [shape.group_id for shape in shapes],
        len(kv_cache_config.kv_cache_groups),
    )
    return SchedulerChecksums(policy, world, shapes, vllm_config.model_config.max_model_len)
