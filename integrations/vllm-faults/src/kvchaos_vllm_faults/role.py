"""One vLLM engine in this process, and the commands that kvchaos gives it."""

from __future__ import annotations

import argparse
import base64
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import vllm
from kvchaos_vllm import observer
from kvchaos_vllm.settings import ChecksumMode
from kvchaos_vllm.verdict import Verdict
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.platforms import current_platform

from kvchaos_vllm_faults import tiny_model
from kvchaos_vllm_faults.blocks import LOAD_FAILED, LOAD_SCHEDULED, PARAMS_PASS, READ_DONE, RECOMPUTE, VERIFIED, Blocks
from kvchaos_vllm_faults.evidence import digest
from kvchaos_vllm_faults.faults import Order
from kvchaos_vllm_faults.memory import EngineMemory
from kvchaos_vllm_faults.protocol import Channel, CommandError
from kvchaos_vllm_faults.session import SESSION

logger = logging.getLogger(__name__)
_REQUEST_S = 60.0
_POLL_S = 0.001
_WITHOUT_KV = (LOAD_SCHEDULED, LOAD_FAILED, READ_DONE, RECOMPUTE)


class RoleEngine:
    """The engine of one role. Requests have names; vLLM makes its own ids of them."""

    def __init__(self, options: argparse.Namespace, channel: Channel) -> None:
        self._channel = channel
        self._model = options.model or tiny_model.cached(options.cache.expanduser())
        self._llm = LLM(**_engine_arguments(options, self._model))
        self._engine = self._llm.llm_engine
        self._core = self._engine.engine_core.engine_core
        self._scheduler = self._core.scheduler
        self._names: dict[str, str] = {}
        self._followed: set[str] = set()
        SESSION.name_of = self._name_of
        SESSION.wait = channel.wait
        SESSION.block_ids = lambda request_id: self._scheduler.kv_cache_manager.get_block_ids(request_id)[0]
        SESSION.listener = self._moment
        observer.subscribe(self._verdict)
        self.commands: Mapping[str, Callable[..., Any]] = {
            "about": self.about,
            "policy": self.set_policy,
            "generate": self.generate,
            "arm": self.arm,
            "disarm": self.disarm,
            "reuse": self.reuse,
            "compete": self.compete,
            "digests": self.digests,
            "state": self.state,
            "tick": self.tick,
            "end_leases": self.end_leases,
            "reset": self.reset,
        }

    def about(self) -> dict[str, Any]:
        """What this engine is: no path, no address."""
        memory = self._memory
        return {
            "vllm": vllm.__version__,
            "nixl": version("nixl"),
            "device": current_platform.device_type,
            "model": json.loads((self._model / "config.json").read_text()).get("model_type"),
            "dtype": str(memory.dtype),
            "block_size": memory.block_size,
            "num_blocks": memory.num_blocks,
            "num_layers": memory.num_layers,
            "num_heads": memory.num_heads,
            "bytes_per_token": memory.bytes_per_token,
        }

    @property
    def _memory(self) -> EngineMemory:
        if SESSION.memory is None:
            raise CommandError("the engine has no KV cache: its connector was not asked for")
        return SESSION.memory

    # ---- commands

    def generate(self, requests: list[dict[str, Any]], patience_s: float = _REQUEST_S) -> list[dict[str, Any]]:
        """Run requests to their end, all at once, greedily.

        Args:
            requests: each with `name`, `prompt` (token ids), `max_tokens` and `params` (kv_transfer_params, or None for
                a request without P/D, of which nothing is told). With `follow` false nothing is told of any.
            patience_s: after how long a request that has not ended is aborted.

        Returns:
            per request its name, tokens, log probabilities, finish reason (None: it had not ended, and was
            aborted), error, and the kv_transfer_params of its answer.
        """
        return self._run(requests, patience_s)

    def set_policy(self, mode: ChecksumMode, load_failure: str) -> None:
        """What a failed check, and a failed load, does from now on. Nothing may be running."""
        if self._engine.has_unfinished_requests():
            raise CommandError("requests are running: the policy cannot change now")
        for connector in (self._scheduler.connector, self._worker_connector):
            connector.set_policy(mode)
        self._scheduler.recompute_kv_load_failures = load_failure == "recompute"

    def arm(self, token: str, order: dict[str, Any]) -> None:
        """Arm a fault (`Order`). Raises ArmError or OrderError."""
        held = {int(position): digest for position, digest in order.pop("held", {}).items()}
        SESSION.arm(Order(held=held, **order), token)

    def disarm(self) -> None:
        """No fault any more, and nothing known of earlier requests."""
        SESSION.disarm()

    def reuse(self, request: str, competitor: str) -> None:
        """P: end the lease of a request's blocks, and let a prefill have them that wants all free blocks."""
        blocks = SESSION.final_blocks(request)
        if blocks is None:
            raise CommandError(f"the KV of {request} was never final here")
        before = SESSION.digests(blocks)
        self.end_leases([request])
        self.compete(competitor)
        SESSION.reused(request, competitor, before)
        self._tell_evidence()
        told = {"event": "producer.reused", "request": request, "competitor": competitor, **blocks.to_plain()}
        self._channel.send(told | _with_kv(blocks, self._memory))

    def compete(self, name: str = "competitor") -> None:
        """A prefill that wants all free blocks."""
        free = self._pool.get_num_free_blocks()
        length = min(free * self._memory.block_size, self._llm.llm_engine.model_config.max_model_len) - 1
        prompt = [(7 * n + 3) % 251 for n in range(length)]
        self._run([{"name": name, "prompt": prompt, "max_tokens": 1, "params": None}], _REQUEST_S)

    def digests(self, block_ids: list[int]) -> list[list[list[str]]]:
        """What these blocks hold now, all slots: a digest per block, layer and head, in this order."""
        kv = self._memory.read(block_ids)
        layers, heads, count = kv.shape[:3]
        return [[[digest(kv[a, h, n]) for h in range(heads)] for a in range(layers)] for n in range(count)]

    def state(self) -> dict[str, int]:
        """Free blocks and all blocks, without the null block, and unfinished requests."""
        total = self._memory.num_blocks - 1
        unfinished = self._engine.get_num_unfinished_requests()
        return {"free": self._pool.get_num_free_blocks(), "total": total, "unfinished": unfinished}

    def tick(self) -> dict[str, int]:
        """A step in which nothing is computed: the engine hears what the other side has read."""
        self._step()
        return self.state()

    def end_leases(self, requests: list[str] | None = None) -> None:
        """P: let the leases of these requests' blocks end now, of all by default."""
        self._step()  # a lease begins with the step after the one that ended its request
        worker = self._worker_connector.connector_worker
        for request_id in list(worker._reqs_to_send):
            if requests is None or self._names.get(request_id) in requests:
                worker._reqs_to_send[request_id] = 0.0
        self._step()

    def reset(self) -> None:
        """Empty the prefix cache. Raises CommandError if blocks are in use."""
        self._names, self._followed = {}, set()
        if not self._engine.reset_prefix_cache():
            raise CommandError("the prefix cache cannot be emptied: blocks are in use")

    # ---- parts

    @property
    def _pool(self) -> Any:
        return self._scheduler.kv_cache_manager.block_pool

    @property
    def _worker_connector(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()

    def _run(self, requests: list[dict[str, Any]], patience_s: float) -> list[dict[str, Any]]:
        answers: dict[str, dict[str, Any]] = {}
        for request in requests:
            self._add(**request)
        deadline = time.monotonic() + patience_s
        while self._engine.has_unfinished_requests() and time.monotonic() < deadline:
            outputs = self._engine.step()
            answers |= {output.request_id: _answer(output) for output in outputs if output.finished}
            self._tell_evidence()
            if not outputs:
                time.sleep(_POLL_S)  # what is left waits for the other side's bytes
        late = [request["name"] for request in requests if request["name"] not in answers]
        if late:
            self._engine.abort_request(late)
        nothing: dict[str, Any] = {"tokens": [], "logprobs": [], "finish_reason": None, "error": None, "params": None}
        return [{"name": name} | answers.get(name, nothing) for name in (request["name"] for request in requests)]

    def _add(
        self, name: str, prompt: list[int], max_tokens: int, params: dict[str, Any] | None, follow: bool = True
    ) -> None:
        extra = None
        if params is not None:
            if follow:
                self._followed.add(name)
            if follow and params.get("do_remote_prefill"):
                params = dict(SESSION.params(name, params))
                self._tell_evidence()
                self._channel.send({"event": PARAMS_PASS, "request": name, "params": params})
            extra = {"kv_transfer_params": params}
        sampling = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=0, detokenize=False, extra_args=extra
        )
        self._engine.add_request(name, {"prompt_token_ids": prompt}, sampling)

    def _step(self) -> None:
        """One step of the engine, also where there is nothing to compute."""
        output = self._scheduler.schedule()
        result = self._core.model_executor.execute_model(output)
        if result is None:
            result = self._core.model_executor.sample_tokens(None)
        self._scheduler.update_from_output(output, result)

    def _name_of(self, request_id: str) -> str | None:
        """vLLM's id of a request is the name that it was made under, and a random end."""
        if request_id not in self._names:
            name = request_id if request_id in self._followed else request_id.rpartition("-")[0]
            if name not in self._followed:
                return None
            self._names[request_id] = name
        return self._names[request_id]

    def _moment(self, moment: str, request: str, blocks: Blocks, memory: EngineMemory) -> None:
        """Tell kvchaos. What a fault proved at this moment is told first where the fault acts before oracles look."""
        if moment == VERIFIED:
            self._tell_evidence()
            return
        told: dict[str, Any] = {"event": moment, "request": request, **blocks.to_plain()}
        if moment not in _WITHOUT_KV:
            told |= _with_kv(blocks, memory)
        self._tell_evidence()
        self._channel.send(told)

    def _tell_evidence(self) -> None:
        for evidence in SESSION.take_evidence():
            self._channel.send({"event": "evidence", **evidence.to_plain()})

    def _verdict(self, request_id: str, verdict: Verdict) -> None:
        name = self._name_of(request_id)
        if name is not None:
            groups = [asdict(group) for group in verdict.groups]
            told = {"status": str(verdict.status), "reason": verdict.reason, "groups": groups}
            self._channel.send({"event": VERIFIED, "request": name, "verdict": told})


def _with_kv(blocks: Blocks, memory: EngineMemory) -> dict[str, Any]:
    """The bytes of these blocks: uint8 [layers, heads, blocks * slots, bytes_per_token] in base64, and their shape."""
    return {
        "layers": memory.num_layers,
        "heads": memory.num_heads,
        "layer_numbers": memory.layer_numbers,
        "element_bytes": memory.dtype.itemsize,
        "kv": base64.b64encode(memory.read(blocks.block_ids).tobytes()).decode("ascii"),
    }


def _engine_arguments(options: argparse.Namespace, model: Path) -> dict[str, Any]:
    role = {"producer": "kv_producer", "consumer": "kv_consumer"}[options.role]
    transfer = KVTransferConfig(
        kv_connector="FaultyNixlConnector",
        kv_connector_module_path="kvchaos_vllm_faults.connector",
        kv_role=role,
        kv_buffer_device="cpu" if current_platform.is_cpu() else "cuda",
        kv_connector_extra_config={"kv_checksum_mode": "log"},
    )
    return {
        "model": str(model),
        "dtype": "float32" if options.model is None else "auto",
        "kv_transfer_config": transfer,
        "distributed_executor_backend": "uni",
        "enforce_eager": True,
        "async_scheduling": False,
        "enable_prefix_caching": True,
        "block_size": options.block_size,
        "num_gpu_blocks_override": options.num_blocks,
        "max_model_len": options.max_model_len,
        "max_num_batched_tokens": options.max_batched_tokens,
        "max_num_seqs": 8,
        "seed": 0,
        "disable_log_stats": True,
        **json.loads(options.engine_args),
    }


def _answer(output: Any) -> dict[str, Any]:
    (completion,) = output.outputs
    tokens = list(completion.token_ids)
    logprobs = [chosen[token].logprob for chosen, token in zip(completion.logprobs or [], tokens, strict=False)]
    reason = completion.finish_reason
    return {
        "tokens": tokens,
        "logprobs": logprobs,
        "finish_reason": reason,
        "error": f"vLLM ended it with {reason}" if reason not in ("length", "stop") else None,
        "params": output.kv_transfer_params,
    }
