"""What a completion request may hold, checked before anything of it reaches an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError
from pydantic_core import from_json

from engine.errors import RequestError
from engine.numerics import MAX_CONTEXT
from engine.tokenizer import VOCAB_SIZE, encode

MAX_BODY_BYTES = 4 * 2**20


def _token_ids(prompt: Any) -> list[int]:
    """By hand: a validator of a list judges each of a million wrong items, and keeps an error for each."""
    if not isinstance(prompt, str | list):
        raise ValueError("use a string, or a list of token ids")
    if not prompt and isinstance(prompt, list):
        raise ValueError("use one token id or more")
    # A string has one token a byte, and one more.
    if len(prompt) > MAX_CONTEXT:
        raise ValueError(f"longer than {MAX_CONTEXT} tokens, the most that any engine takes")
    if isinstance(prompt, str):
        return encode(prompt)
    if not all(type(token) is int and 0 <= token < VOCAB_SIZE for token in prompt):
        raise ValueError(f"token ids are integers from 0 to {VOCAB_SIZE - 1}")
    return prompt


def _greedy(temperature: Any) -> Any:
    if isinstance(temperature, bool) or temperature != 0:
        raise ValueError("only 0 is served: this engine decodes greedily")
    return 0.0


class CompletionRequest(BaseModel):
    """The part of OpenAI's completion request that this engine serves; fields that it does not know are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    token_ids: Annotated[list[int], PlainValidator(_token_ids)] = Field(alias="prompt")
    # It comes back in every event of a stream.
    model: Annotated[str, Field(max_length=256)] = "kvchaos"
    max_tokens: Annotated[int, Field(ge=1, le=MAX_CONTEXT, strict=True)] = 16
    temperature: Annotated[float, BeforeValidator(_greedy)] = 0.0
    n: Annotated[int, Field(ge=1, le=1, strict=True)] = 1
    stream: Annotated[bool, Field(strict=True)] = False
    kv_transfer_params: dict[str, Any] | None = None
    # Ours: what the request asks of its KV checksums; None: nothing, the engine decides.
    kv_checksum: Annotated[bool, Field(strict=True)] | None = None


def load_json(raw: bytes) -> dict[str, Any]:
    """A request's body. Nesting is bounded, and NaN, infinities, lone surrogates and what is not UTF-8 are refused.

    Raises:
        RequestError: it is no JSON object.
    """
    try:
        body = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"body: not JSON ({error})") from None
    if not isinstance(body, dict):
        raise RequestError(f"body: a JSON object is needed, this is a {type(body).__name__}")
    return body


def parse_completion(body: Mapping[str, Any]) -> CompletionRequest:
    """Check what `load_json` gave.

    Raises:
        RequestError: it is no request that can be served; one line that says what and where.
    """
    try:
        return CompletionRequest.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"][:4]) or "body"
        raise RequestError(f"{where}: {first['msg'].removeprefix('Value error, ')}") from None
