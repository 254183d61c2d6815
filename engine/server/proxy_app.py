"""The P/D proxy as a server: a prompt goes to P for its prefill, then to D with the parameters that P answered.

Keys of the client's request and of `kv_transfer_params` that the proxy does not know are forwarded as they are (WIR-3).
An engine that fails before the first token gives the client a real error status.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from engine.errors import RequestError
from engine.seams import ParamsPass, Seams
from engine.server.app import REQUEST_ID_HEADER, read_body, request_id_of
from engine.server.schema import error_body, parse_completion

_POLL_S = 0.005
_TIMEOUT = httpx.Timeout(300.0, connect=5.0)


class ProxyServer:
    """Routes between one producer and one consumer. `between` is called often, in the event loop's thread."""

    def __init__(self, producer_url: str, consumer_url: str, seams: Seams, between: Callable[[], None]) -> None:
        self._producer = producer_url.rstrip("/")
        self._consumer = consumer_url.rstrip("/")
        self._seams = seams
        self._between = between
        self._client = httpx.AsyncClient(timeout=_TIMEOUT, trust_env=False)
        self.app = Starlette(
            routes=[
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/health", self._health, methods=["GET"]),
            ],
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        polling = asyncio.create_task(self._poll())
        yield
        polling.cancel()
        await self._client.aclose()

    async def _poll(self) -> None:
        while True:
            self._between()
            await asyncio.sleep(_POLL_S)

    async def _completions(self, http: HTTPRequest) -> Response:
        try:
            raw = await read_body(http)
            parse_completion(raw)
            request_id = request_id_of(http)
        except RequestError as error:
            return JSONResponse(error_body(str(error), "invalid_request_error"), 400)
        body: dict[str, Any] = json.loads(raw)
        headers = {REQUEST_ID_HEADER: request_id}
        prefill = body | {"max_tokens": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
        try:
            answer = await self._client.post(f"{self._producer}/v1/completions", json=prefill, headers=headers)
        except httpx.HTTPError as error:
            return _unreachable("producer", error)
        if answer.status_code != 200:
            return _passed_on(answer)
        params = await self._pass_on(request_id, answer.json().get("kv_transfer_params") or {})
        return await self._decode(body | {"kv_transfer_params": dict(params)}, headers)

    async def _pass_on(self, request_id: str, params: dict[str, Any]) -> dict[str, Any]:
        """What goes on to D. Held parameters are offered at the seam again once they are released."""
        while True:
            outcome = self._seams.emit(ParamsPass(request_id, params))
            if not outcome.holds:
                return dict(outcome.event.params)
            while not all(hold.until() for hold in outcome.holds):
                await asyncio.sleep(_POLL_S)

    async def _decode(self, body: dict[str, Any], headers: dict[str, str]) -> Response:
        request = self._client.build_request("POST", f"{self._consumer}/v1/completions", json=body, headers=headers)
        try:
            answer = await self._client.send(request, stream=True)
        except httpx.HTTPError as error:
            return _unreachable("consumer", error)
        if answer.status_code != 200 or not body.get("stream"):
            await answer.aread()
            return _passed_on(answer)
        return StreamingResponse(_relay(answer), media_type="text/event-stream")

    async def _health(self, _: HTTPRequest) -> Response:
        return JSONResponse({"status": "ok"})


async def _relay(answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for part in answer.aiter_raw():
            yield part
    except httpx.HTTPError as error:
        message = f"the consumer broke off ({type(error).__name__})"
        yield f"data: {json.dumps(error_body(message, 'server_error'))}\n\n".encode()
    finally:
        await answer.aclose()


def _passed_on(answer: httpx.Response) -> Response:
    return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))


def _unreachable(side: str, error: httpx.HTTPError) -> Response:
    return JSONResponse(error_body(f"the {side} cannot be reached ({type(error).__name__})", "server_error"), 502)
