"""vLLM's NIXL pull connector with kvchaos' checksums, and with the moments at which faults act.

Without the token in the environment nothing can be armed, and every method does what the connector beneath it does.
Named in vLLM's KVTransferConfig: `kv_connector="FaultyNixlConnector"`, `kv_connector_module_path=
"kvchaos_vllm_faults.connector"`.

Scheduler and worker must share a process (`distributed_executor_backend="uni"`): the scheduler's half knows which
requests are finished and which blocks are loaded, the worker's half has the bytes.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

import torch
from kvchaos_vllm.connector import ChecksumNixlConnector, _scheduler_checksums
from kvchaos_vllm.settings import ChecksumMode, ChecksumSettings, resolve
from kvchaos_vllm.token_order import token_order
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from kvchaos_vllm_faults import token
from kvchaos_vllm_faults.blocks import (
    CHECKSUMMED,
    FIRST_USE,
    KV_FINAL,
    LOAD_FAILED,
    LOAD_FINISHED,
    LOAD_SCHEDULED,
    READ_DONE,
    RECOMPUTE,
    VERIFIED,
    Blocks,
)
from kvchaos_vllm_faults.faults.base import Read
from kvchaos_vllm_faults.memory import CacheShape, EngineMemory, LayoutError
from kvchaos_vllm_faults.session import SESSION

logger = logging.getLogger(__name__)
_POLL_S = 0.001


class FaultyNixlConnector(ChecksumNixlConnector):
    """Tells `SESSION` of every moment, and lets it change what is read."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        reason = token.why_not_armable()
        if reason is None:
            logger.warning("faults can be armed in this process: it must not serve real requests")
        else:
            logger.warning("no fault can be armed in this process: %s", reason)
        self._loads: dict[str, Blocks] = {}
        self._requests: dict[str, Any] = {}
        if role is KVConnectorRole.WORKER:
            worker = self.connector_worker
            self._post_read = worker._read_blocks
            worker._read_blocks = self._read_blocks

    def set_policy(self, mode: ChecksumMode) -> None:
        """Another `kv_checksum_mode`, as if the engine had been started with it. Nothing may be running."""
        policy = self.policy = resolve(ChecksumSettings(kv_checksum_mode=mode))
        if not policy.enabled:
            self.checksums = None
        elif self.role is KVConnectorRole.SCHEDULER:
            self.checksums = _scheduler_checksums(self._vllm_config, self.kv_cache_config, policy)
        else:
            self.checksums = self._worker_checksums(self._caches)

    # ---- the scheduler's half

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if not SESSION.idle:
            self._allocated(request, blocks, num_external_tokens)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata = super().build_connector_meta(scheduler_output)
        if not SESSION.idle:
            for request_id, count in scheduler_output.num_scheduled_tokens.items():
                self._scheduled(request_id, count)
        return metadata

    def _allocated(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """A request got its blocks: D will load some of them, or P will compute them for D."""
        params = request.kv_transfer_params or {}
        if params.get("do_remote_decode"):
            self._requests[request.request_id] = request
        if params.get("do_remote_prefill") and num_external_tokens:
            self._requests[request.request_id] = request
            size, num_tokens = self._block_size, request.num_prompt_tokens
            start = (num_tokens - num_external_tokens) // size
            (table,) = blocks.get_block_ids()
            loaded = Blocks(start, tuple(table[start : -(-num_tokens // size)]), size, num_tokens)
            self._loads[request.request_id] = loaded
            SESSION.loads[request.request_id] = loaded
            SESSION.kv(LOAD_SCHEDULED, request.request_id, loaded)

    def _scheduled(self, request_id: str, count: int) -> None:
        """A request computes so many tokens in the step that comes now."""
        request = self._requests.get(request_id)
        if request is None:
            return
        loaded = self._loads.pop(request_id, None)
        if loaded is not None:
            del self._requests[request_id]
            if request.num_computed_tokens <= loaded.first_token:
                SESSION.kv(RECOMPUTE, request_id, loaded)
            else:
                SESSION.kv(VERIFIED, request_id, loaded)
                SESSION.kv(FIRST_USE, request_id, loaded)
        elif request.num_computed_tokens + count >= request.num_prompt_tokens:
            del self._requests[request_id]
            SESSION.finishing.append((request_id, request.num_prompt_tokens))

    @property
    def _block_size(self) -> int:
        return int(self._vllm_config.cache_config.block_size)

    # ---- the worker's half

    def register_kv_caches(self, kv_caches: Any) -> None:
        super().register_kv_caches(kv_caches)
        self._caches = kv_caches
        (group,) = self._kv_cache_config.kv_cache_groups
        spec = group.kv_cache_spec
        shape = CacheShape(self._kv_cache_config.num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size)
        SESSION.memory = EngineMemory(kv_caches, shape, self._order(group.layer_names[0], kv_caches))

    def _order(self, name: str, kv_caches: Any) -> Any:
        """Where in a block the elements of a token lie: vLLM's CPU backend scatters them, and is asked. None: rows."""
        layer = get_layers_from_vllm_config(self._vllm_config, AttentionLayerBase)[name]
        if layer.get_attn_backend().__name__ != "CPUAttentionBackend":
            return None
        cache = kv_caches[name]
        slots = torch.arange(cache.shape[2], dtype=torch.int64)

        def write(key: torch.Tensor, value: torch.Tensor, scratch: torch.Tensor) -> None:
            layer.impl.do_kv_cache_update(layer, key, value, scratch, slots)

        order = token_order(write, cache.dtype, cache.shape[2], cache.shape[3] // 2)
        if order is None:
            raise LayoutError(f"{name}: its backend does not store each element of a token in a place of its own")
        return order

    def wait_for_save(self) -> None:
        finishing, SESSION.finishing = SESSION.finishing, []
        final = [(request_id, self._whole(request_id, num_tokens)) for request_id, num_tokens in finishing]
        for request_id, blocks in final:
            SESSION.kv(KV_FINAL, request_id, blocks)
        super().wait_for_save()
        for request_id, blocks in final:
            SESSION.kv(CHECKSUMMED, request_id, blocks)

    def _whole(self, request_id: str, num_tokens: int) -> Blocks:
        table = SESSION.block_ids(request_id)
        return Blocks(0, tuple(table[: -(-num_tokens // self._block_size)]), self._block_size, num_tokens)

    def _fetch_results(self, *arguments: Any, **named: Any) -> Any:
        results = super()._fetch_results(*arguments, **named)
        for request_id in sorted(results.finished_recving):
            loaded = SESSION.loads.pop(request_id, None)
            if loaded is not None and request_id in results.failed_recving:
                SESSION.kv(LOAD_FAILED, request_id, loaded)
            elif loaded is not None:
                SESSION.kv(READ_DONE, request_id, loaded)
                SESSION.kv(LOAD_FINISHED, request_id, loaded)
        return results

    def _read_blocks(self, *, read_spec: Any, request_id: str, remote_request_id: str, **rest: Any) -> bool:
        """Post the reads that the session makes of this one, in the place of vLLM's own method."""
        local = [int(b) for group in read_spec.local_block_ids for b in group]
        remote = [int(b) for group in read_spec.remote_block_ids for b in group]
        behind = len(remote) - len(local)
        if SESSION.idle or not local or behind < 0:
            return bool(
                self._post_read(read_spec=read_spec, request_id=request_id, remote_request_id=remote_request_id, **rest)
            )
        whole = Read(tuple(local), tuple(remote[behind:]), preceding=remote[behind - 1] if behind else None)
        for read in SESSION.reads(request_id, whole):
            if read.hold:
                SESSION.waited(request_id)
            if not self._post(read, read_spec, request_id, remote_request_id, rest):
                return False
        return True

    def _post(self, read: Read, spec: Any, request_id: str, remote_request_id: str, rest: dict[str, Any]) -> bool:
        """Post one read. One of which P is not told has ended when this returns."""
        worker = self.connector_worker
        # P must not free the blocks of a load that goes on: it is told of a request that it does not have.
        told = remote_request_id if read.tells else f"{remote_request_id}-part"
        spec = replace(spec, local_block_ids=[list(read.local)], remote_block_ids=[list(read.remote)])
        worker._recving_transfers.setdefault(request_id, [])
        posted = self._post_read(read_spec=spec, request_id=request_id, remote_request_id=told, **rest)
        while not read.tells and any(
            worker.nixl_wrapper.check_xfer_state(handle) == "PROC" for handle in worker._recving_transfers[request_id]
        ):
            time.sleep(_POLL_S)
        return bool(posted)
