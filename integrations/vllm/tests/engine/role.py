"""One vLLM engine in a process of its own: commands come on stdin, one JSON a line, answers leave on a descriptor.

vLLM prints on stdout, so that is not where answers go. Started by `roles.py`, with the descriptor and the engine's
arguments on the command line.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from kvchaos_vllm import observer
from vllm import LLM, SamplingParams, TokensPrompt

PROGRESS_US = 1000


def pace_nixl() -> None:
    """Let NIXL's progress threads wait for events, at most so long: else each takes a core, and there are few here.

    NIXL's Python API fixes that delay at 0. Workers are forked, and so have it too.
    """
    from nixl._api import nixlBind

    class Paced(nixlBind.nixlAgentConfig):  # type: ignore[misc] # NIXL has no types
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, PROGRESS_US if name == "pthrDelay" else value)

    nixlBind.nixlAgentConfig = Paced


class Role:
    """The engine and what was observed of it."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.verdicts: list[dict[str, Any]] = []
        observer.subscribe(self._observe)
        self.llm = LLM(**arguments)

    def _observe(self, request_id: str, verdict: Any) -> None:
        groups = [{"group_id": g.group_id, "compared": g.compared, "differing": g.differing} for g in verdict.groups]
        told = {"request_id": request_id, "status": verdict.status, "reason": verdict.reason, "groups": groups}
        self.verdicts.append(told)

    def generate(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Run requests together. Each has `prompt` (token ids), `max_tokens`, and maybe `params` for the transfer."""
        prompts = [TokensPrompt(prompt_token_ids=request["prompt"]) for request in requests]
        sampling = [
            SamplingParams(
                temperature=0.0,
                max_tokens=request["max_tokens"],
                ignore_eos=True,
                detokenize=False,
                extra_args={"kv_transfer_params": request["params"]} if request.get("params") else None,
            )
            for request in requests
        ]
        outputs = self.llm.generate(prompts, sampling, use_tqdm=False)
        return [
            {
                "tokens": list(output.outputs[0].token_ids),
                "finish_reason": output.outputs[0].finish_reason,
                "params": output.kv_transfer_params,
                "num_cached_tokens": output.num_cached_tokens,
            }
            for output in outputs
        ]

    def take_verdicts(self) -> list[dict[str, Any]]:
        """What was observed since the last call."""
        taken, self.verdicts = self.verdicts, []
        return taken

    def reset_prefix_cache(self) -> bool:
        """Forget what the prefix cache holds; False: some blocks are still in use."""
        return bool(self.llm.reset_prefix_cache())

    def flip(self, layer: int, block: int, byte: int, mask: int) -> dict[str, int]:
        """Flip bits of one byte of a block in this engine's cache, and give the byte before and after."""
        runner = self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        flat = runner.kv_caches[layer][block].view(-1).view(torch.uint8)
        before = int(flat[byte])
        flat[byte] = before ^ mask
        return {"before": before, "after": int(flat[byte])}

    def metrics(self) -> list[dict[str, Any]]:
        """Our own Prometheus counters as this process has them."""
        from prometheus_client import REGISTRY

        return [
            {"name": sample.name, "labels": dict(sample.labels), "value": sample.value}
            for metric in REGISTRY.collect()
            if "kv_checksum" in metric.name
            for sample in metric.samples
        ]


def main() -> None:
    answers = os.fdopen(int(sys.argv[1]), "w")
    pace_nixl()
    try:
        role = Role(json.loads(sys.argv[2]))
    except Exception as error:
        print(json.dumps({"refused": f"{type(error).__name__}: {error}"}), file=answers, flush=True)
        raise
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        command, arguments = json.loads(line)
        result = getattr(role, command)(**arguments)
        print(json.dumps({"result": result}), file=answers, flush=True)
    # A process that made a NIXL agent may crash at interpreter exit.
    os._exit(0)


if __name__ == "__main__":
    main()
