"""An engine as an OpenAI-compatible server: `/v1/completions` with streaming, `/health`, `/metrics`.

`kv_transfer_params` come in with a request and go out with its answer. `kv_load` in the answer says what became of the
remote load: its verdict and reason, and whether the prompt was computed here after all.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from engine.errors import RequestError
from engine.loop import EngineLoop, TokenChunk
from engine.request import Request, RequestOutput
from engine.server.metrics import EngineMetrics
from engine.server.schema import MAX_BODY_BYTES, CompletionRequest, error_body, parse_completion
from engine.tokenizer import decode

REQUEST_ID_HEADER = "x-request-id"
DESCRIBE_PATH = "/kv_transfer/agent"
_MAX_ID_LENGTH = 128


class EngineServer:
    """The HTTP face of one engine loop."""

    def __init__(
        self,
        engine_id: str,
        loop: EngineLoop,
        metrics: EngineMetrics,
        describe: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        """`describe` gives what a peer needs to read this engine's KV; None: nobody can."""
        self._engine_id = engine_id
        self._describe = describe
        self._loop = loop
        self._metrics = metrics
        self.app = Starlette(
            routes=[
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/health", self._health, methods=["GET"]),
                Route("/metrics", self._metrics_page, methods=["GET"]),
                Route(DESCRIBE_PATH, self._describe_page, methods=["GET"]),
            ]
        )

    async def _completions(self, http: HTTPRequest) -> Response:
        try:
            asked = parse_completion(await read_body(http))
            request_id = request_id_of(http)
        except RequestError as error:
            return JSONResponse(error_body(str(error), "invalid_request_error"), 400)
        stream = _TokenStream(self._loop, self._metrics, request_id)
        try:
            first = await stream.start(asked)
        except RequestError as error:
            return JSONResponse(error_body(str(error), "invalid_request_error"), 400)
        if first.output is None and not first.token_ids:
            return JSONResponse(error_body("the engine has crashed", "server_error"), 503)
        if first.output is not None and not first.output.finish_reason.normal:
            return JSONResponse(
                error_body(first.output.error or "failed", "kv_load_error") | load_of(first.output), 500
            )
        if asked.stream:
            return StreamingResponse(_events(stream, first, asked, request_id), media_type="text/event-stream")
        return await self._whole(http, stream, first, asked, request_id)

    async def _whole(
        self, http: HTTPRequest, stream: _TokenStream, chunk: TokenChunk, asked: CompletionRequest, request_id: str
    ) -> Response:
        tokens = list(chunk.token_ids)
        gone = asyncio.ensure_future(_disconnected(http))
        try:
            while chunk.output is None:
                following = asyncio.ensure_future(stream.next())
                await asyncio.wait({following, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not following.done():
                    following.cancel()
                    stream.cancel()
                    return Response(status_code=499)
                chunk = following.result()
                tokens += chunk.token_ids
                if chunk.output is None and not chunk.token_ids:
                    return JSONResponse(error_body("the engine has crashed", "server_error"), 503)
        finally:
            gone.cancel()
        if not chunk.output.finish_reason.normal:
            return JSONResponse(error_body(chunk.output.error or "failed", "server_error"), 500)
        return JSONResponse(_completion(request_id, asked, tokens, chunk.output))

    async def _models(self, _: HTTPRequest) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "kvchaos", "object": "model"}]})

    async def _health(self, _: HTTPRequest) -> Response:
        if self._loop.alive:
            return JSONResponse({"status": "ok", "engine": self._engine_id})
        return JSONResponse({"status": "crashed", "error": self._loop.crashed}, 503)

    async def _describe_page(self, _: HTTPRequest) -> Response:
        if self._describe is None:
            return JSONResponse(
                error_body("this engine's KV cannot be read from outside", "invalid_request_error"), 404
            )
        return JSONResponse(self._describe())

    async def _metrics_page(self, _: HTTPRequest) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")


class _TokenStream:
    """One request's chunks, handed over from the engine's thread to the event loop."""

    def __init__(self, loop: EngineLoop, metrics: EngineMetrics, request_id: str) -> None:
        self._loop = loop
        self._metrics = metrics
        self._request_id = request_id
        self._events = asyncio.get_running_loop()
        self._chunks: asyncio.Queue[TokenChunk | RequestError] = asyncio.Queue()
        self._arrived = time.perf_counter()
        self._finished = False

    async def start(self, asked: CompletionRequest) -> TokenChunk:
        """Submit the request and wait for its first chunk. Raises RequestError if the engine refuses it."""
        request = Request(self._request_id, asked.token_ids, asked.max_tokens, asked.kv_transfer_params)
        self._loop.submit(request, self._put, self._put)
        first = await self._cancelling_next()
        if first.token_ids:
            self._metrics.first_token(time.perf_counter() - self._arrived)
        return first

    async def next(self) -> TokenChunk:
        """The next chunk."""
        chunk = await self._chunks.get()
        if isinstance(chunk, RequestError):
            raise chunk
        if chunk.output is not None:
            self._finished = True
            self._metrics.finished(chunk.output)
        return chunk

    def cancel(self) -> None:
        """The client has gone."""
        if not self._finished:
            self._loop.abort(self._request_id)

    async def _cancelling_next(self) -> TokenChunk:
        try:
            return await self.next()
        except asyncio.CancelledError:
            self.cancel()
            raise

    def _put(self, item: Any) -> None:
        # The event loop is closed when the server is stopped with requests in flight: nobody waits any more.
        with contextlib.suppress(RuntimeError):
            self._events.call_soon_threadsafe(self._chunks.put_nowait, item)


async def _disconnected(http: HTTPRequest) -> None:
    while not await http.is_disconnected():
        await asyncio.sleep(0.05)


async def _events(
    stream: _TokenStream, chunk: TokenChunk, asked: CompletionRequest, request_id: str
) -> AsyncIterator[str]:
    try:
        while True:
            yield _event(_chunk_body(request_id, asked, chunk))
            if chunk.output is not None:
                break
            chunk = await stream.next()
            if chunk.output is None and not chunk.token_ids:
                yield _event(error_body("the engine has crashed", "server_error"))
                return
        yield "data: [DONE]\n\n"
    finally:
        stream.cancel()


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


def _chunk_body(request_id: str, asked: CompletionRequest, chunk: TokenChunk) -> dict[str, Any]:
    finish = None if chunk.output is None else str(chunk.output.finish_reason)
    body = _body(request_id, asked, chunk.token_ids, finish)
    if chunk.output is not None:
        body |= load_of(chunk.output) | {"kv_transfer_params": chunk.output.kv_transfer_params}
        if not chunk.output.finish_reason.normal:
            body |= error_body(chunk.output.error or "failed", "server_error")
    return body


def _completion(request_id: str, asked: CompletionRequest, tokens: list[int], output: RequestOutput) -> dict[str, Any]:
    usage = {"prompt_tokens": len(asked.token_ids), "completion_tokens": len(tokens)}
    usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
    body = _body(request_id, asked, tuple(tokens), str(output.finish_reason))
    return body | load_of(output) | {"kv_transfer_params": output.kv_transfer_params, "usage": usage}


def _body(request_id: str, asked: CompletionRequest, tokens: tuple[int, ...], finish: str | None) -> dict[str, Any]:
    choice = {"index": 0, "text": decode(list(tokens)), "token_ids": list(tokens), "finish_reason": finish}
    return {
        "id": f"cmpl-{request_id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": asked.model,
        "choices": [choice],
    }


def load_of(output: RequestOutput) -> dict[str, Any]:
    """What became of the request's remote load."""
    verdict = output.verdict
    reason = None if verdict.reason is None else str(verdict.reason)
    return {"kv_load": {"verdict": str(verdict.status), "reason": reason, "recomputed": output.recomputed}}


async def read_body(http: HTTPRequest) -> bytes:
    """The request's body. Raises RequestError when it is too large, without reading it whole."""
    body = bytearray()
    async for part in http.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise RequestError(f"body: longer than {MAX_BODY_BYTES} bytes: send less")
    return bytes(body)


def request_id_of(http: HTTPRequest) -> str:
    """The id that the client chose, or a fresh one. Raises RequestError for one that cannot be used."""
    chosen = http.headers.get(REQUEST_ID_HEADER)
    if chosen is None:
        return uuid.uuid4().hex
    if not 1 <= len(chosen) <= _MAX_ID_LENGTH or not chosen.isascii() or not chosen.isprintable():
        raise RequestError(f"{REQUEST_ID_HEADER}: use 1 to {_MAX_ID_LENGTH} printable ASCII characters")
    return chosen
