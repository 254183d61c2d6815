"""A request in the engine as its server sees it: chunks from the engine's thread, and the answers made of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from engine.errors import KVChaosError
from engine.loop import EngineLoop, EngineStoppedError, TokenChunk
from engine.request import FinishReason, Request, RequestOutput
from engine.server.incoming import error_body
from engine.server.metrics import EngineMetrics
from engine.tokenizer import decode


class TokenStream:
    """One request's chunks, handed over from the engine's thread to the event loop."""

    def __init__(self, loop: EngineLoop, metrics: EngineMetrics, request: Request) -> None:
        self._loop = loop
        self._metrics = metrics
        self._request = request
        self._events = asyncio.get_running_loop()
        self._chunks: asyncio.Queue[TokenChunk | KVChaosError] = asyncio.Queue()
        self._arrived = time.perf_counter()
        self._submitted = False
        self._finished = False

    async def first(self) -> TokenChunk:
        """Submit the request and wait for its first chunk.

        Raises:
            RequestError: the engine refuses it.
            EngineStoppedError: there is no engine any more.
        """
        self._submitted = True
        self._loop.submit(self._request, self._put, self._put)
        first = await self.next()
        if first.token_ids:
            self._metrics.first_token(time.perf_counter() - self._arrived)
        return first

    async def next(self) -> TokenChunk:
        """The next chunk. Raises EngineStoppedError if the engine has crashed."""
        chunk = await self._chunks.get()
        if isinstance(chunk, KVChaosError):
            self._finished = True
            raise chunk
        self._finished = chunk.output is not None or chunk.crashed
        if chunk.crashed:
            raise EngineStoppedError("it has crashed")
        return chunk

    async def rest(self, chunk: TokenChunk) -> tuple[list[int], RequestOutput]:
        """All tokens from this chunk on, and what became of the request."""
        tokens = list(chunk.token_ids)
        while chunk.output is None:
            chunk = await self.next()
            tokens += chunk.token_ids
        return tokens, chunk.output

    def cancel(self) -> None:
        """Nobody wants the rest."""
        if self._submitted and not self._finished:
            self._loop.abort(self._request)

    def _put(self, item: TokenChunk | KVChaosError) -> None:
        # The event loop is closed when the server is stopped with requests in flight: nobody waits any more.
        with contextlib.suppress(RuntimeError):
            self._events.call_soon_threadsafe(self._chunks.put_nowait, item)


class EventStream(StreamingResponse):
    """The chunks of a request as server-sent events. Ends the request when the client leaves, however early."""

    def __init__(self, stream: TokenStream, first: TokenChunk, body: dict[str, Any]) -> None:
        """`body` is what every event says of the completion."""
        super().__init__(_events(stream, first, body), media_type="text/event-stream")
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._stream.cancel()


async def _events(stream: TokenStream, chunk: TokenChunk, body: dict[str, Any]) -> AsyncIterator[str]:
    try:
        while True:
            yield event(_chunk_body(body, chunk))
            if chunk.output is not None:
                break
            chunk = await stream.next()
    except EngineStoppedError as error:
        yield event(error_body(f"no engine: {error}", "server_error"))
        return
    yield "data: [DONE]\n\n"


def event(body: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(body)}\n\n"


def _chunk_body(body: dict[str, Any], chunk: TokenChunk) -> dict[str, Any]:
    output = chunk.output
    if output is None:
        return body | _choices(chunk.token_ids, None)
    last = body | _choices(chunk.token_ids, str(output.finish_reason)) | load_of(output)
    last |= {"kv_transfer_params": output.kv_transfer_params}
    return last if output.finish_reason.normal else last | failure_of(output)


def completion(body: dict[str, Any], prompt_tokens: int, tokens: list[int], output: RequestOutput) -> dict[str, Any]:
    """The answer that is not streamed."""
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": len(tokens)}
    usage["total_tokens"] = prompt_tokens + len(tokens)
    whole = body | _choices(tuple(tokens), str(output.finish_reason)) | load_of(output)
    return whole | {"kv_transfer_params": output.kv_transfer_params, "usage": usage}


def completion_head(request_id: str, model: str) -> dict[str, Any]:
    """What all answers to one request begin with."""
    return {"id": f"cmpl-{request_id}", "object": "text_completion", "created": int(time.time()), "model": model}


def _choices(tokens: tuple[int, ...], finish: str | None) -> dict[str, Any]:
    choice = {"index": 0, "text": decode(list(tokens)), "token_ids": list(tokens), "finish_reason": finish}
    return {"choices": [choice]}


def failure_of(output: RequestOutput) -> dict[str, Any]:
    """Why a request did not end as its client wanted."""
    kind = "kv_load_error" if output.finish_reason is FinishReason.ERROR else "server_error"
    return error_body(output.error or "failed", kind)


def load_of(output: RequestOutput) -> dict[str, Any]:
    """What became of the request's remote load."""
    verdict = output.verdict
    reason = None if verdict.reason is None else str(verdict.reason)
    return {"kv_load": {"verdict": str(verdict.status), "reason": reason, "recomputed": output.recomputed}}
