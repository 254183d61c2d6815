"""One request in an engine, and what the engine answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from engine.blocks import NULL_BLOCK
from engine.checksum.verdict import NO_LOAD, Verdict
from engine.errors import RequestError
from engine.tokenizer import VOCAB_SIZE


class Status(StrEnum):
    WAITING = "waiting"
    WAITING_FOR_REMOTE_KVS = "waiting_for_remote_kvs"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"

    @property
    def normal(self) -> bool:
        return self in (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(slots=True, eq=False)
class Request:
    """A request and its progress. `num_computed_tokens` runs ahead of the outputs that have arrived.

    `epoch` is unique in an engine and changes with every restart (preemption, recompute): output of another epoch,
    also of an earlier request with the same id, is dropped on arrival.
    `tables` holds a block table for each KV cache group, none while the request has no blocks.
    `num_placeholders` counts tokens that scheduled steps will sample and whose output has not arrived.
    `kv_checksum` is what its client asks of its checksums; None: nothing, the engine decides.
    """

    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int
    kv_transfer_params: Mapping[str, Any] | None = None
    kv_checksum: bool | None = None
    status: Status = Status.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_placeholders: int = 0
    epoch: int = 0
    load_started: bool = False
    recomputed: bool = False
    verdict: Verdict = NO_LOAD
    finish_reason: FinishReason | None = None
    error: str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def block_ids(self) -> list[int]:
        """The block table of the first group."""
        return self.tables[0] if self.tables else []

    @property
    def held_block_ids(self) -> list[int]:
        """Every block that the request holds, of all groups."""
        return [block_id for table in self.tables for block_id in table if block_id != NULL_BLOCK]

    @property
    def num_tokens(self) -> int:
        """Prompt and known output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def all_token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.output_token_ids

    @property
    def num_to_compute(self) -> int:
        """Tokens that could be scheduled now; none once enough outputs are on their way."""
        if len(self.output_token_ids) + self.num_placeholders >= self.max_tokens:
            return 0
        return self.num_tokens + self.num_placeholders - self.num_computed_tokens

    def param(self, name: str) -> Any:
        return None if self.kv_transfer_params is None else self.kv_transfer_params.get(name)

    @property
    def switches_checksum_off(self) -> bool:
        """Its KV is neither summed nor compared, whatever the engine does with others'."""
        return self.kv_checksum is False

    @property
    def wants_remote_prefill(self) -> bool:
        """D: a load is wanted and none was tried; KV is never transferred again (POL-4)."""
        return bool(self.param("do_remote_prefill")) and not self.load_started

    @property
    def wants_remote_decode(self) -> bool:
        """P: the KV of this request will be read by a consumer."""
        return bool(self.param("do_remote_decode"))


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answer to a finished request. `verdict` is D's of its load."""

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    error: str | None
    kv_transfer_params: Mapping[str, Any] | None
    verdict: Verdict
    recomputed: bool

    @classmethod
    def of(cls, request: Request, params: Mapping[str, Any] | None = None) -> RequestOutput:
        """The answer to a request that has ended."""
        if request.finish_reason is None:
            raise ValueError(f"request {request.request_id} has not ended")
        return cls(
            request_id=request.request_id,
            token_ids=tuple(request.output_token_ids),
            finish_reason=request.finish_reason,
            error=request.error,
            kv_transfer_params=params,
            verdict=request.verdict,
            recomputed=request.recomputed,
        )


def check_request(request: Request, context_limit: int) -> None:
    """Refuse what can never run on an engine whose requests hold at most `context_limit` tokens.

    Raises:
        RequestError: what is wrong with it.
    """
    where = f"request {request.request_id}"
    prompt, max_tokens, params = request.prompt_token_ids, request.max_tokens, request.kv_transfer_params
    if not prompt or type(max_tokens) is not int or max_tokens < 1:
        raise RequestError(f"{where}: needs a prompt of one token or more and max_tokens of 1 or more")
    if not all(type(token) is int and 0 <= token < VOCAB_SIZE for token in prompt):
        raise RequestError(f"{where}: token ids are integers from 0 to {VOCAB_SIZE - 1}")
    needed = len(prompt) + max_tokens
    if needed > context_limit:
        raise RequestError(f"{where}: prompt and output are {needed} tokens, max_model_len is {context_limit}")
    if params is not None and not isinstance(params, Mapping):
        raise RequestError(f"{where}: kv_transfer_params is a {type(params).__name__}: pass on what the producer sent")
