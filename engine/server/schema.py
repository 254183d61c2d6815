"""What a completion request may hold, checked before anything of it reaches an engine."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine.errors import RequestError
from engine.tokenizer import VOCAB_SIZE, encode

MAX_BODY_BYTES = 4 * 2**20
TokenId = Annotated[int, Field(ge=0, lt=VOCAB_SIZE, strict=True)]


class CompletionRequest(BaseModel):
    """The part of OpenAI's completion request that this engine serves; fields that it does not know are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    prompt: str | Annotated[list[TokenId], Field(min_length=1)]
    model: str = "kvchaos"
    max_tokens: Annotated[int, Field(ge=1, le=8192, strict=True)] = 16
    temperature: Annotated[float, Field(ge=0, le=0)] = 0.0
    n: Annotated[int, Field(ge=1, le=1, strict=True)] = 1
    stream: Annotated[bool, Field(strict=True)] = False
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def token_ids(self) -> list[int]:
        return encode(self.prompt) if isinstance(self.prompt, str) else list(self.prompt)


def parse_completion(body: bytes) -> CompletionRequest:
    """Read a request body.

    Raises:
        RequestError: it is no request that can be served; one line that says what and where.
    """
    try:
        return CompletionRequest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"][:4]) or "body"
        raise RequestError(f"{where}: {first['msg']}") from None


def error_body(message: str, kind: str) -> dict[str, Any]:
    """An error as OpenAI's clients expect it."""
    return {"error": {"message": message, "type": kind}}
