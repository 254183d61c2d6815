"""Small stand-ins for vLLM's objects: these tests need no vLLM. They run in kvchaos' own environment."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvchaos_vllm.blocks import GroupShape

ROOT = Path(__file__).parents[4]
GROUP = GroupShape(0, 4)


@dataclass
class Request:
    """What is read of vLLM's request."""

    request_id: str
    num_prompt_tokens: int
    kv_transfer_params: dict[str, Any] | None = None


@dataclass
class Step:
    """What is read of vLLM's SchedulerOutput."""

    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    scheduled_new_reqs: list[Any] = field(default_factory=list)
    scheduled_cached_reqs: Any = field(
        default_factory=lambda: SimpleNamespace(
            req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
        )
    )

    def new(self, request_id: str, block_ids: list[list[int]], computed: int, scheduled: int) -> Step:
        self.scheduled_new_reqs.append(
            SimpleNamespace(req_id=request_id, block_ids=block_ids, num_computed_tokens=computed)
        )
        self.num_scheduled_tokens[request_id] = scheduled
        return self

    def cached(
        self,
        request_id: str,
        new_ids: list[list[int]] | None,
        computed: int,
        scheduled: int,
        *,
        resumed: bool = False,
    ) -> Step:
        rows = self.scheduled_cached_reqs
        rows.req_ids.append(request_id)
        rows.new_block_ids.append(new_ids)
        rows.num_computed_tokens.append(computed)
        if resumed:
            rows.resumed_req_ids.add(request_id)
        self.num_scheduled_tokens[request_id] = scheduled
        return self


@dataclass
class Output:
    """What is read of vLLM's KVConnectorOutput."""

    finished_recving: set[str] | None = None
    failed_recving: set[str] = field(default_factory=set)
    invalid_block_ids: set[int] = field(default_factory=set)
