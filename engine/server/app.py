"""An engine as an OpenAI-compatible server: `/v1/completions` with streaming, `/health`, `/metrics`.

`kv_transfer_params` come in with a request and go out with its answer. `kv_load` in the answer says what became of the
remote load: its verdict and reason, and whether the prompt was computed here after all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from engine.errors import KVChaosError
from engine.loop import EngineLoop
from engine.request import FinishReason, Request, RequestOutput
from engine.server.incoming import (
    EXCEPTION_HANDLERS,
    ClientGoneError,
    error_body,
    nobody,
    read_body,
    refusal,
    request_id_of,
    unless_gone,
)
from engine.server.metrics import EngineMetrics
from engine.server.schema import CompletionRequest, load_json, parse_completion
from engine.server.stream import EventStream, TokenStream, completion, completion_head, failure_of, load_of

DESCRIBE_PATH = "/kv_transfer/agent"


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
            ],
            exception_handlers=EXCEPTION_HANDLERS,
        )

    async def _completions(self, http: HTTPRequest) -> Response:
        try:
            asked = parse_completion(load_json(await read_body(http)))
            request = Request(
                request_id_of(http), asked.token_ids, asked.max_tokens, asked.kv_transfer_params, asked.kv_checksum
            )
            return await self._serve(http, asked, request)
        except (ClientGoneError, ClientDisconnect):
            return nobody()
        except KVChaosError as error:
            return refusal(error)

    async def _serve(self, http: HTTPRequest, asked: CompletionRequest, request: Request) -> Response:
        stream = TokenStream(self._loop, self._metrics, request)
        head = completion_head(request.request_id, asked.model)
        handed_over = False
        try:
            first = await unless_gone(http, stream.first())
            if first.output is not None and not first.output.finish_reason.normal:
                return _failure(first.output)
            if asked.stream:
                handed_over = True
                return EventStream(stream, first, head)
            tokens, output = await unless_gone(http, stream.rest(first))
        finally:
            if not handed_over:
                stream.cancel()
        if not output.finish_reason.normal:
            return _failure(output)
        return JSONResponse(completion(head, len(asked.token_ids), tokens, output))

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


def _failure(output: RequestOutput) -> JSONResponse:
    """A request that ended otherwise than its client wanted: the server is stopping, or its KV was not usable."""
    status = 503 if output.finish_reason is FinishReason.ABORT else 500
    return JSONResponse(failure_of(output) | load_of(output), status)
