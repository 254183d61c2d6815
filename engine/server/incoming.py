"""What every server does with a request, whatever it asks for: read it, and notice when its client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response

from engine.errors import KVChaosError, RequestError
from engine.loop import EngineStoppedError
from engine.server.schema import MAX_BODY_BYTES

REQUEST_ID_HEADER = "x-request-id"
_MAX_ID_LENGTH = 128
_BODY_TIMEOUT_S = 30.0
T = TypeVar("T")


class BodyTooLargeError(RequestError):
    """The body is longer than any request that can be served."""


class BodyTooSlowError(RequestError):
    """The body did not arrive in time."""


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


async def read_body(http: HTTPRequest) -> bytes:
    """The request's body. Raises RequestError when it is too large, without reading it whole, or too slow."""
    length = http.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length[:20]) > MAX_BODY_BYTES:
        raise _too_large()
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            async for part in http.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise _too_large()
    except TimeoutError:
        raise BodyTooSlowError(f"body: not here after {_BODY_TIMEOUT_S:.0f} s") from None
    return bytes(body)


def _too_large() -> BodyTooLargeError:
    return BodyTooLargeError(f"body: longer than {MAX_BODY_BYTES} bytes: send less")


def request_id_of(http: HTTPRequest) -> str:
    """The id that the client chose, or a fresh one. Raises RequestError for one that cannot be used."""
    chosen = http.headers.get(REQUEST_ID_HEADER)
    if chosen is None:
        return uuid.uuid4().hex
    if not 1 <= len(chosen) <= _MAX_ID_LENGTH or not chosen.isascii() or not chosen.isprintable():
        raise RequestError(f"{REQUEST_ID_HEADER}: use 1 to {_MAX_ID_LENGTH} printable ASCII characters")
    return chosen


async def unless_gone(http: HTTPRequest, work: Coroutine[Any, Any, T]) -> T:
    """Do this while the client waits. The request's body has been read.

    Raises:
        ClientGoneError: it has left, and the work has been cancelled.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_until_gone(http))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        for task in (working, leaving):
            task.cancel()
        # What the work holds (a request in the engine, a connection) is given up before anything else happens.
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({working, leaving})


async def _until_gone(http: HTTPRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def error_body(message: str, kind: str) -> dict[str, Any]:
    """An error as OpenAI's clients expect it."""
    return {"error": {"message": message, "type": kind}}


def refusal(error: KVChaosError) -> JSONResponse:
    """What a client is told whose request is not served."""
    if isinstance(error, EngineStoppedError):
        return JSONResponse(error_body(f"no engine: {error}", "server_error"), 503)
    statuses: dict[type[KVChaosError], int] = {BodyTooLargeError: 413, BodyTooSlowError: 408}
    return JSONResponse(error_body(str(error), "invalid_request_error"), statuses.get(type(error), 400))


def nobody() -> Response:
    """For a client that has gone: it goes nowhere, and says so to whoever reads the log."""
    return Response(status_code=499)


async def http_error(_: HTTPRequest, error: Exception) -> Response:
    """No such path, another method, or a bug of ours, as JSON."""
    if isinstance(error, HTTPException):
        return JSONResponse(error_body(error.detail, "invalid_request_error"), error.status_code, error.headers)
    return JSONResponse(error_body("internal error", "server_error"), 500)


EXCEPTION_HANDLERS = {HTTPException: http_error, Exception: http_error}
