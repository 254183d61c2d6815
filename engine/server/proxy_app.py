"""The P/D proxy as a server: a prompt goes to P for its prefill, then to D with the parameters that P answered.

Keys of the client's request and of `kv_transfer_params` that the proxy does not know are forwarded as they are (WIR-3).
An engine that fails before the first token gives the client a real error status; a stream that breaks later ends with
an error event.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import httpx
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from engine.checksum.consumer import CHECKSUMS_PARAM
from engine.errors import KVChaosError, RequestError
from engine.loop import STOPPING, EngineStoppedError
from engine.seams import ParamsPass, Seams
from engine.server.incoming import (
    EXCEPTION_HANDLERS,
    REQUEST_ID_HEADER,
    ClientGoneError,
    error_body,
    nobody,
    read_body,
    refusal,
    request_id_of,
    unless_gone,
)
from engine.server.schema import load_json, parse_completion
from engine.server.stream import event

# What only an engine may say; a client's own are dropped, or it could have another request's KV loaded.
OWN_PARAMS = frozenset(
    {"do_remote_prefill", "do_remote_decode", "remote_engine_id", "remote_request_id", "remote_block_ids"}
    | {CHECKSUMS_PARAM}
)
_POLL_S = 0.005
_TIMEOUT = httpx.Timeout(300.0, connect=5.0)
# Below the time after which an engine's server closes an idle connection: the proxy must be the one that does.
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=2.0)
T = TypeVar("T")


class UpstreamError(KVChaosError):
    """An engine behind the proxy cannot be reached, or answers with something else than an engine does."""


class ProxyServer:
    """Routes between one producer and one consumer. `between` is called often, in the event loop's thread."""

    def __init__(
        self,
        producer_url: str,
        consumer_url: str,
        seams: Seams,
        between: Callable[[], None],
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`transport` takes requests to the engines; None: HTTP."""
        self._producer = producer_url.rstrip("/")
        self._consumer = consumer_url.rstrip("/")
        self._seams = seams
        self._between = between
        self._stopping = asyncio.Event()
        self._client = httpx.AsyncClient(timeout=_TIMEOUT, limits=_LIMITS, trust_env=False, transport=transport)
        self.app = Starlette(
            routes=[
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/health", self._health, methods=["GET"]),
            ],
            lifespan=self._lifespan,
            exception_handlers=EXCEPTION_HANDLERS,
        )

    async def stop(self) -> None:
        """End what is under way, with an error."""
        self._stopping.set()

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
            body = load_json(await read_body(http))
            parse_completion(body)
            request_id = request_id_of(http)
            return await unless_gone(http, self._unless_stopping(self._route(body, request_id)))
        except (ClientGoneError, ClientDisconnect):
            return nobody()
        except UpstreamError as error:
            return JSONResponse(error_body(str(error), "server_error"), 502)
        except KVChaosError as error:
            return refusal(error)

    async def _route(self, body: dict[str, Any], request_id: str) -> Response:
        headers = {REQUEST_ID_HEADER: request_id, "content-type": "application/json", "accept-encoding": "identity"}
        given = {k: v for k, v in (body.get("kv_transfer_params") or {}).items() if k not in OWN_PARAMS}
        wanted = given | {"do_remote_decode": True, "do_remote_prefill": False}
        prefill = body | {"max_tokens": 1, "stream": False, "kv_transfer_params": wanted}
        answer = await self._send("producer", self._producer, prefill, headers)
        if answer.status_code != 200:
            return _passed_on(answer)
        params = await self._pass_on(request_id, _params(answer))
        return await self._decode(body | {"kv_transfer_params": given | params}, headers)

    async def _pass_on(self, request_id: str, params: dict[str, Any]) -> dict[str, Any]:
        """What goes on to D. Held parameters are offered at the seam again once they are released."""
        while True:
            outcome = self._seams.emit(ParamsPass(request_id, params))
            if not outcome.holds:
                return dict(outcome.event.params)
            while not all(hold.until() for hold in outcome.holds):
                await asyncio.sleep(_POLL_S)

    async def _decode(self, body: dict[str, Any], headers: dict[str, str]) -> Response:
        answer = await self._send("consumer", self._consumer, body, headers, stream=bool(body.get("stream")))
        if answer.status_code == 200 and body.get("stream"):
            return _Relay(answer, self._relay(answer))
        try:
            await answer.aread()
        except httpx.HTTPError as error:
            raise _unreachable("consumer", error) from None
        return _passed_on(answer)

    async def _send(
        self, side: str, url: str, body: dict[str, Any], headers: dict[str, str], stream: bool = False
    ) -> httpx.Response:
        try:
            content = json.dumps(body, allow_nan=False).encode()
        except ValueError as error:
            raise RequestError(f"body: {error}") from None
        try:
            request = self._client.build_request("POST", f"{url}/v1/completions", content=content, headers=headers)
            return await self._client.send(request, stream=stream)
        except httpx.HTTPError as error:
            raise _unreachable(side, error) from None

    async def _relay(self, answer: httpx.Response) -> AsyncIterator[bytes]:
        """Whole events only, so that an error can follow wherever the consumer broke off."""
        parts = answer.aiter_raw()
        begun = b""
        try:
            while True:
                part = await self._unless_stopping(_next(parts))
                if part is None:
                    break
                whole, found, begun = (begun + part).rpartition(b"\n\n")
                if found:
                    yield whole + found
            if begun:
                yield begun
        except httpx.HTTPError as error:
            yield event(error_body(f"the consumer broke off ({type(error).__name__})", "server_error")).encode()
        except EngineStoppedError as error:
            yield event(error_body(str(error), "server_error")).encode()

    async def _unless_stopping(self, work: Coroutine[Any, Any, T]) -> T:
        """Do this, unless the proxy stops: then it is cancelled, and EngineStoppedError raised."""
        working = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise EngineStoppedError(STOPPING)
        finally:
            stopping.cancel()
            working.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({working})

    async def _health(self, _: HTTPRequest) -> Response:
        return JSONResponse({"status": "ok"})


class _Relay(StreamingResponse):
    """The consumer's stream. Hangs up on it when the client leaves, however early: the consumer then aborts."""

    def __init__(self, answer: httpx.Response, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._answer.aclose()


async def _next(parts: AsyncIterator[bytes]) -> bytes | None:
    return await anext(parts, None)


def _params(answer: httpx.Response) -> dict[str, Any]:
    """What P tells the consumer of its prompt; nothing if P cannot be read from: then D computes the prompt.

    Raises:
        UpstreamError: it is no engine's answer.
    """
    try:
        params = load_json(answer.content).get("kv_transfer_params")
    except RequestError as error:
        raise UpstreamError(f"the producer's answer cannot be read: {error}") from None
    if not isinstance(params, dict | None):
        raise UpstreamError("the producer's kv_transfer_params cannot be read: no JSON object")
    return params or {}


def _passed_on(answer: httpx.Response) -> Response:
    return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))


def _unreachable(side: str, error: httpx.HTTPError) -> UpstreamError:
    return UpstreamError(f"the {side} cannot be reached ({type(error).__name__})")
