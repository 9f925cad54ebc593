"""What a FastAPI app needs around a batcher. Runs in the API process, on its event loop.

Lifespans that combine, a dependency, one table from errors to HTTP statuses, the same statuses for
OpenAPI, bodies that are read with a limit, and the two health routes. This is the only module that
knows FastAPI or an HTTP status; nothing inside the library imports it.
"""

import asyncio
import inspect
import json
import logging
import math
import re
import secrets
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

try:
    from fastapi import APIRouter, Depends, FastAPI, Header
except ModuleNotFoundError as error:
    if error.name != "fastapi":
        raise
    raise ModuleNotFoundError(
        "fast_batcher.fastapi needs FastAPI: pip install 'fast_batcher[fastapi]'", name="fastapi"
    ) from error
from fastapi.exception_handlers import (
    http_exception_handler,
    request_validation_exception_handler,
)
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Lifespan, Message, Receive, Scope, Send, StatefulLifespan
from starlette.websockets import WebSocket, WebSocketState

from fast_batcher import errors
from fast_batcher._shared_memory.layouts import to_shape
from fast_batcher.batcher import DynBatcher
from fast_batcher.settings import MAX_SECONDS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import DTypeLike, NDArray

AppT = TypeVar("AppT")
InputT = TypeVar("InputT")
OutputT = TypeVar("OutputT")

logger = logging.getLogger(__name__)

# Seconds a client is asked to wait where the error knows nothing better: the header holds whole
# seconds, and a second is longer than most batches take. Source: RFC 9110, section 10.2.3.
RETRY_AFTER = 1
# Random bytes of an error id. 64 bits: no two alike among the billions a log may hold.
ERROR_ID_BYTES = 8
# What a WebSocket is closed with. Source: the IANA registry of close codes; 1011 (internal error)
# stands for every other status, 1013 asks the client to come back, 1009 is "message too big".
CLOSE_CODES = {413: 1009, 429: 1013, 503: 1013, 504: 1013}
CLOSE_CODE = 1011
# By this header a client says how many seconds it will wait. No standard names one.
TIMEOUT_HEADER = "X-Request-Timeout"
# A number as a client writes it: no sign, no space, nothing that only Python reads as a number.
_SECONDS = re.compile(r"[0-9]{1,20}(\.[0-9]{0,20})?(e-?[0-9]{1,3})?", re.ASCII | re.IGNORECASE)
# The status of a request whose client has gone, for logs and metrics: nobody is there to read it.
# Source: nginx, which logs the same.
CLIENT_CLOSED_REQUEST = 499
# Seconds that a batcher may be broken until its pod is better started afresh. Twice the default
# restart_window: the batcher itself tries again after one, and its model has another to load.
BROKEN_TIMEOUT = 120.0
# A length of more digits than this is too long for anybody, whatever it is.
MOST_LENGTH_DIGITS = 18


# A body larger than this is refused: room for a dozen photographs. Source: the limits of the fault
# catalogue.
MAX_BODY_BYTES = 16 * 2**20
# A body that takes longer to arrive than this is refused: 16 MiB over a line of 5 Mbit/s.
BODY_TIMEOUT = 30.0


class _Answer(NamedTuple):
    """What a client is told about an error: `detail` where the error's own text must not leave."""

    status: int
    code: str
    detail: str | None = None


# The one table. The most derived class with a row counts.
ANSWERS: dict[type[errors.BatcherError], _Answer] = {
    errors.BatcherError: _Answer(500, "internal_error", "internal error"),
    errors.ConfigurationError: _Answer(500, "configuration_error", "internal error"),
    errors.BatcherClosedError: _Answer(503, "closed"),
    errors.NotReadyError: _Answer(503, "not_ready"),
    errors.QueueFullError: _Answer(503, "queue_full"),
    errors.DeadlineExceededError: _Answer(504, "deadline_exceeded"),
    errors.RequestTooLargeError: _Answer(413, "request_too_large"),
    errors.UnsendableValueError: _Answer(500, "unsendable_value", "internal error"),
    errors.InferenceError: _Answer(500, "inference_failed", "the model failed"),
    errors.OutputMismatchError: _Answer(500, "output_mismatch", "the model failed"),
    errors.CollationError: _Answer(500, "collation_failed", "the input does not fit the model"),
    errors.WorkerError: _Answer(503, "worker_failed"),
    # Its message carries the traceback of the model's constructor.
    errors.WorkerStartupError: _Answer(503, "worker_startup_failed", "the model did not load"),
    errors.WorkerLostError: _Answer(503, "worker_lost"),
    errors.PoisonRequestError: _Answer(500, "poison_request", "the model failed"),
    errors.TransportError: _Answer(503, "transport_failed"),
}

# The statuses that `error_responses` can document.
DESCRIPTIONS = {
    413: "The request is too large for the model's queue.",
    429: "The queue is full; try again after `Retry-After` seconds.",
    500: "The model failed on this request; the error id leads to the server's log.",
    503: "The model cannot take the request now; try again after `Retry-After` seconds.",
    504: "The model did not answer before the request's deadline.",
}


class ErrorBody(BaseModel):
    """The JSON body of every error answer."""

    detail: str = Field(description="What went wrong, for a person.")
    code: str = Field(description="What went wrong, for a program.", examples=["queue_full"])
    error_id: str = Field(description="Names this very failure in the server's log.")
    retry_after: float | None = Field(
        None, description="Seconds until another try makes sense, where that is known."
    )


def combine_lifespans(*lifespans: Lifespan[AppT]) -> StatefulLifespan[AppT]:
    """Make one lifespan of several: entered in order, left in reverse.

    If one fails to start, those before it are left again and the error stops the server. The dicts
    they yield are merged; a later one wins where two use the same key.
    """

    @asynccontextmanager
    async def combined(app: AppT) -> AsyncIterator[Any]:
        state: dict[str, Any] | None = None
        async with AsyncExitStack() as stack:
            for lifespan in lifespans:
                part: Mapping[str, Any] | None = await stack.enter_async_context(lifespan(app))
                if part is not None:
                    state = {**(state or {}), **part}
            # None if nobody has state: Starlette refuses even {} on a server without state.
            yield state

    return combined


def dependency(
    batcher: DynBatcher[InputT, OutputT],
) -> Callable[[], Awaitable[DynBatcher[InputT, OutputT]]]:
    """Make the callable for `Depends`; keep it in a name, for `app.dependency_overrides`.

    It takes no parameters, so OpenAPI shows none, and it serves WebSocket endpoints as well.
    """

    # A coroutine function: FastAPI sends a plain function to a thread at every request.
    async def get_batcher() -> DynBatcher[InputT, OutputT]:
        return batcher

    return get_batcher


def request_timeout(
    batcher: DynBatcher[Any, Any], *, header: str = TIMEOUT_HEADER
) -> Callable[..., Awaitable[float | None]]:
    """Make a dependency that lets a client shorten its deadline by a header.

    `timeout: Annotated[float | None, Depends(request_timeout(batcher))]`, to be handed to
    `process_batched` and its like. A call that cannot be answered in that time is refused at once.

    Args:
        batcher: Whose `timeout` the header can only shorten: without the header, or with a longer
            time, the dependency's value is None, which stands for that default.
        header: Its name. Its value are seconds: a decimal number above 0, at most a year; anything
            else is answered with 400.
    """
    if not re.fullmatch(r"[A-Za-z0-9-]+", header):
        raise errors.ConfigurationError(
            f"header={header!r}: letters, digits and hyphens, for example {TIMEOUT_HEADER!r}"
        )
    description = "Seconds that the client will wait; it can shorten the server's own limit."

    async def get_timeout(
        value: Annotated[str | None, Header(alias=header, description=description)] = None,
    ) -> float | None:
        if value is None:
            return None
        seconds = float(value) if _SECONDS.fullmatch(value) else 0.0
        if not 0 < seconds <= MAX_SECONDS:
            text = f"{header}: {value!r:.100}: give seconds as a decimal number above 0"
            raise HTTPException(400, text)
        limit = batcher.timeout
        return None if limit is not None and seconds >= limit else seconds

    return get_timeout


async def _cancel_on_disconnect(connection: HTTPConnection) -> AsyncIterator[None]:
    if isinstance(connection, Request):
        async with _cancelling_on_disconnect(connection):
            yield
    else:  # the endpoint of a WebSocket learns of the disconnect itself, where it receives
        yield


@asynccontextmanager
async def _cancelling_on_disconnect(request: Request) -> AsyncIterator[None]:
    endpoint = asyncio.current_task()
    assert endpoint is not None, "FastAPI runs it in the task of the request"
    has_gone = False
    refusal: HTTPException | None = None

    async def watch() -> None:
        nonlocal has_gone, refusal
        try:
            # `request.is_disconnected()` would never say so behind a BaseHTTPMiddleware.
            while (await request.receive())["type"] != "http.disconnect":
                pass  # the rest of a body that nobody has read
        except HTTPException as error:  # of a middleware: a body that is too large, for one
            refusal = error
        has_gone = True
        endpoint.cancel()

    watcher = asyncio.create_task(watch())
    try:
        try:
            yield
        finally:
            watcher.cancel()
            if has_gone:
                # A cancellation that the endpoint has not come to raise is raised here, and not in
                # the middle of the response.
                await asyncio.sleep(0)
    except asyncio.CancelledError:
        if not has_gone:
            raise
        endpoint.uncancel()
        if refusal is not None:
            raise refusal from None
        raise _client_has_gone() from None


cancel_on_disconnect = Depends(_cancel_on_disconnect, scope="function")
"""For `@app.post(..., dependencies=[cancel_on_disconnect])`, or those of an app or router: an
`async def` endpoint is cancelled when its client goes away, which FastAPI does not do by itself.

What it waits for in a batcher is then forgotten if it is queued, and dropped if it runs; others of
the batch are not affected. Logs and metrics see status 499. Not for endpoints that read
`request.stream()` themselves; where a dependency reads the body, it has to come first:
`dependencies=[Depends(read), cancel_on_disconnect]`. A WebSocket is left alone: its endpoint learns
of the disconnect by `WebSocketDisconnect`, where it receives.
"""


def install_exception_handlers(
    app: FastAPI, *, queue_full_status: Literal[503, 429] = 503, debug: bool = False
) -> None:
    """Answer every `BatcherError` of the app's endpoints with a status and an `ErrorBody`.

    An `HTTPException` that the model raised keeps its status, detail and headers. The app's own
    handler is used where it has one for what the model raised or for an error of the library.
    A WebSocket that is not accepted yet gets the same answer; an open one is closed with 1013 (try
    again), 1009 (too big) or 1011, and the error's code and id as the reason. Inputs that JSON
    cannot carry back (NaN, half a surrogate pair) are a 422 like others, and not FastAPI's 500.

    Args:
        app: The app, before it has started.
        queue_full_status: 503, or 429 as some clients expect it.
        debug: Put the traceback of a 500 into the body; never in production.
    """
    if queue_full_status not in (503, 429):
        raise errors.ConfigurationError(f"queue_full_status={queue_full_status!r}: 503 or 429")
    if app.middleware_stack is not None:
        raise errors.ConfigurationError(
            "install_exception_handlers(app) must be called before the app starts, where the app "
            "is made, not in its lifespan or an endpoint"
        )

    async def answer(connection: HTTPConnection, error: Exception) -> Any:
        assert isinstance(error, errors.BatcherError)  # it is installed for this class alone
        own = _find_own_handler(app, error)
        if own is not None:
            if inspect.iscoroutinefunction(own):
                return await own(connection, error)
            return await run_in_threadpool(own, connection, error)
        response, reason = _make_response(error, queue_full_status, debug=debug)
        if isinstance(connection, WebSocket):
            return await _end_websocket(connection, response, reason)
        return response

    app.add_exception_handler(errors.BatcherError, answer)
    app.add_exception_handler(BodyError, _answer_body_error)
    if app.exception_handlers.get(RequestValidationError) is request_validation_exception_handler:
        app.add_exception_handler(RequestValidationError, _answer_invalid)


class LimitBody:
    """Refuses bodies that are too large or too slow: `app.add_middleware(LimitBody)`.

    A body whose announced length is too large is refused before any of it is read; one without an
    announced length as soon as it is too large; one that does not arrive in time with 408. Nothing
    is buffered here.

    Args:
        app: What Starlette passes.
        max_bytes: Longest body, else 413.
        timeout: Seconds from the first look at a body to its end, else 408.
    """

    def __init__(
        self, app: ASGIApp, *, max_bytes: int = MAX_BODY_BYTES, timeout: float = BODY_TIMEOUT
    ) -> None:
        if max_bytes < 1:
            raise errors.ConfigurationError(f"LimitBody: max_bytes={max_bytes!r}: 1 or more")
        if not timeout > 0:
            raise errors.ConfigurationError(f"LimitBody: timeout={timeout!r}: more than 0 seconds")
        self._app = app
        self._max_bytes = max_bytes
        self._timeout = timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = _announced_length(Headers(scope=scope))
        if announced is not None and announced > self._max_bytes:
            await self._too_large(scope, receive, send)
            return
        deadline: float | None = None
        size = 0
        is_whole = False

        async def receive_limited() -> Message:
            nonlocal deadline, size, is_whole
            if is_whole:  # what follows is the disconnect, for which there is no limit
                return await receive()
            loop = asyncio.get_running_loop()
            deadline = deadline or loop.time() + self._timeout
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                text = f"the body did not arrive within {self._timeout:g} seconds"
                raise HTTPException(408, text, {"Connection": "close"}) from None
            size += len(message.get("body", b""))
            is_whole = not message.get("more_body", False)
            if size > self._max_bytes:
                raise HTTPException(413, self._too_large_text, {"Connection": "close"})
            return message

        await self._app(scope, receive_limited, send)

    @property
    def _too_large_text(self) -> str:
        return f"the body is larger than {self._max_bytes} bytes"

    async def _too_large(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The server would read the rest of the body to find the next request.
        headers = {"Connection": "close"}
        response = JSONResponse({"detail": self._too_large_text}, 413, headers)
        await response(scope, receive, send)


class BodyError(HTTPException):
    """A body that `read_body` or `read_array` refuses.

    `install_exception_handlers` answers it with an `ErrorBody`; without that, FastAPI answers with
    its status and detail alone.
    """

    def __init__(self, status: int, code: str, detail: str, *, is_read: bool = False) -> None:
        # The server would read the rest of the body to find the next request.
        super().__init__(status, detail, None if is_read else {"Connection": "close"})
        # `request_too_large`, or `wrong_length`.
        self.code = code


async def read_body(request: Request, *, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """Read a body of at most so many bytes, and never more of it than that.

    For a dependency of an endpoint that takes bytes as they are: an encoded image, a sound. How
    long it may take is for `LimitBody` to say, which bounds every body of an app.

    Args:
        request: Whose body nobody has begun to read.
        max_bytes: Longest body.

    Raises:
        BodyError: 413 if it is longer. One that announces its length is refused before any of it is
            read, another one as soon as it is too long.
        HTTPException: 499, which nobody reads, if the client went away before the end.
    """
    pieces: list[bytes] = []
    await _receive(request, max_bytes, pieces.append)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


async def read_array(
    request: Request,
    shape: Sequence[int],
    dtype: "DTypeLike",
    *,
    max_bytes: int = MAX_BODY_BYTES,
    empty: "Callable[[tuple[int, ...], np.dtype[Any]], NDArray[Any]] | None" = None,
) -> "NDArray[Any]":
    """Read a body that is the bytes of one array: each piece goes where it belongs as it arrives.

    Any bytes of the right number are an array, so NaN and infinity are the model's business.

    Args:
        request: Whose body nobody has begun to read.
        shape: Of the array, which is in C order.
        dtype: Of its numbers; `"<f4"` says their byte order too, `"float32"` means the server's.
        max_bytes: Longest body, for where the client chooses the shape.
        empty: Makes the array to be filled, from shape and dtype; by default `numpy.empty`. With
            `batcher.empty` it reaches the worker without another copy.

    Raises:
        BodyError: 413 if the array or the body has more than `max_bytes`; 422 if the body has
            another number of bytes than the array. What announces its length is refused before any
            of it is read and before the array is made.
        HTTPException: 499, which nobody reads, if the client went away before the end.
        ConfigurationError: There is no such array, or `empty` has made another one, or one that is
            not contiguous and writable.
    """
    import numpy as np  # an extra, and endpoints without arrays do not load it

    kind, sizes = np.dtype(dtype), to_shape(shape)
    if kind.hasobject or not kind.itemsize or min(sizes, default=0) < 0:
        raise errors.ConfigurationError(
            f"read_array: shape={sizes!r:.100}, dtype={dtype!r:.100}: sizes from 0 up, and numbers "
            "of a fixed size"
        )
    expected = math.prod(sizes) * kind.itemsize
    what = f"an array of shape {sizes} and dtype {kind}"
    if expected > max_bytes:
        text = f"{what} has {expected} bytes, and a body may have {max_bytes}"
        raise BodyError(413, "request_too_large", text)
    announced = _check_announced_length(request, max_bytes)
    if announced is not None and announced != expected:
        raise BodyError(422, "wrong_length", f"{what} has {expected} bytes, the body {announced}")
    array = _make_array(empty or np.empty, sizes, kind)
    left = array.reshape(-1).view(np.uint8).data

    def put(piece: bytes) -> None:
        nonlocal left
        if len(piece) > len(left):
            text = f"{what} has {expected} bytes, the body more"
            raise BodyError(422, "wrong_length", text)
        left[: len(piece)] = piece
        left = left[len(piece) :]

    await _receive(request, max_bytes, put)
    if left:
        text = f"{what} has {expected} bytes, the body {expected - len(left)}"
        raise BodyError(422, "wrong_length", text, is_read=True)
    return array


def _make_array(
    empty: "Callable[[tuple[int, ...], np.dtype[Any]], NDArray[Any]]",
    shape: tuple[int, ...],
    dtype: "np.dtype[Any]",
) -> "NDArray[Any]":
    try:
        array = empty(shape, dtype)
    except ValueError as error:
        text = f"read_array: shape={shape!r:.100}: {error}"
        raise errors.ConfigurationError(text) from error
    if array.shape != shape or array.dtype != dtype or not array.flags.carray:
        raise errors.ConfigurationError(
            f"read_array: empty={empty!r:.100} has not made a contiguous, writable array of shape "
            f"{shape} and dtype {dtype}"
        )
    return array


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Describe the error answers to OpenAPI: `responses=error_responses()` on a route or app.

    Args:
        statuses: Exactly those to show, out of 413, 429, 500, 503, 504; without any, 503 and 504.
    """
    unknown = [status for status in statuses if status not in DESCRIPTIONS]
    if unknown:
        known = ", ".join(map(str, DESCRIPTIONS))
        raise errors.ConfigurationError(
            f"error_responses: no error has status {unknown[0]!r}: choose from {known}"
        )
    return {status: _describe(status) for status in statuses or (503, 504)}


def health_router(
    *batchers: DynBatcher[Any, Any],
    prefix: str = "",
    include_in_schema: bool = False,
    broken_timeout: float | None = BROKEN_TIMEOUT,
) -> APIRouter:
    """Make the routes for a supervisor's probes, `/livez` and `/readyz`.

    `/livez` answers 200 while the event loop runs and no batcher is broken for good. `/readyz`
    answers 200 while every batcher is ready. Else they answer 503. Each 503, and `/readyz` always,
    has the state of each batcher in its body. Both are answered without the model.

    Args:
        batchers: Those that must be ready.
        prefix: Of the paths.
        include_in_schema: Whether OpenAPI shows the routes.
        broken_timeout: Seconds that a batcher may be broken without a break until `/livez` answers
            503, so that the supervisor restarts the server; None for never. They count from a start
            that failed, which is not tried again by itself, or from the moment at which the workers
            had spent their restarts. Then a worker is tried again every `restart_window` seconds:
            give more than that, and than the model takes to load.
    """
    if not batchers:
        raise errors.ConfigurationError("health_router: give the batchers that must be ready")
    if broken_timeout is not None and not broken_timeout >= 0:
        raise errors.ConfigurationError(
            f"health_router: broken_timeout={broken_timeout!r}: give 0 or more seconds, or None"
        )
    router = APIRouter(prefix=prefix, include_in_schema=include_in_schema, tags=["health"])

    headers = {"Cache-Control": "no-store"}

    @router.get("/livez")
    async def livez() -> JSONResponse:
        if all(_may_recover(batcher, broken_timeout) for batcher in batchers):
            return JSONResponse({"status": "alive"}, headers=headers)
        reports = [_report(batcher) for batcher in batchers]
        return JSONResponse({"status": "broken", "batchers": reports}, 503, headers)

    @router.get("/readyz")
    async def readyz() -> JSONResponse:
        ready = all(batcher.is_ready for batcher in batchers)
        content = {
            "status": "ready" if ready else "not ready",
            "batchers": [_report(batcher) for batcher in batchers],
        }
        if ready:
            return JSONResponse(content, headers=headers)
        return JSONResponse(content, 503, {**headers, "Retry-After": str(RETRY_AFTER)})

    return router


def _announced_length(headers: Headers) -> int | None:
    """Bytes; None if it says nothing that can be read. What comes is counted all the same."""
    digits = headers.get("content-length", "")
    if not (digits.isascii() and digits.isdigit()):
        return None
    return int(digits) if len(digits) <= MOST_LENGTH_DIGITS else sys.maxsize


def _check_announced_length(request: Request, max_bytes: int) -> int | None:
    """The same, if it is not too much."""
    announced = _announced_length(request.headers)
    if announced is not None and announced > max_bytes:
        raise _too_large(max_bytes)
    return announced


def _too_large(max_bytes: int) -> BodyError:
    return BodyError(413, "request_too_large", f"the body is larger than {max_bytes} bytes")


async def _receive(request: Request, max_bytes: int, put: Callable[[bytes], object]) -> None:
    """Put a body away piece by piece."""
    _check_announced_length(request, max_bytes)
    size = 0
    try:
        async with aclosing(request.stream()) as pieces:
            async for piece in pieces:
                size += len(piece)
                if size > max_bytes:
                    raise _too_large(max_bytes)
                if piece:  # the last one is empty
                    put(piece)
    except ClientDisconnect:
        raise _client_has_gone() from None


def _client_has_gone() -> HTTPException:
    return HTTPException(CLIENT_CLOSED_REQUEST, "the client has disconnected")


async def _answer_body_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, BodyError)  # it is installed for this class alone
    error_id = secrets.token_hex(ERROR_ID_BYTES)
    logger.debug("%s, error id %s: %s", error.code, error_id, error.detail)
    body = {"detail": error.detail, "code": error.code, "error_id": error_id}
    return JSONResponse(body, error.status_code, error.headers)


async def _answer_invalid(request: Request, error: Exception) -> Response:
    """FastAPI's own answer, without the inputs where they cannot be shown."""
    assert isinstance(error, RequestValidationError)  # it is installed for this class alone
    try:
        return await request_validation_exception_handler(request, error)
    except (ValueError, RecursionError):
        shown = [{key: one[key] for key in ("type", "loc", "msg")} for one in error.errors()]
        body = json.dumps({"detail": shown})  # escapes what UTF-8 has no bytes for
        return Response(body, 422, media_type="application/json")


def _find_own_handler(app: FastAPI, error: errors.BatcherError) -> Any:
    """The app's handler for the class that the model raised: without us, it would get the error.

    FastAPI's default for HTTPException is no choice of the app's, and leaves out code and id.
    """
    if type(error) in ANSWERS or not isinstance(error, errors.InferenceError):
        return None
    for kind in type(error).__mro__:
        own = app.exception_handlers.get(kind)
        if own and not issubclass(kind, errors.BatcherError) and kind is not Exception:
            return None if own is http_exception_handler else own
    return None


def _find_answer(error: errors.BatcherError, queue_full_status: int) -> _Answer:
    kind = next(kind for kind in type(error).__mro__ if kind in ANSWERS)
    answer = ANSWERS[kind]
    if kind is errors.QueueFullError:
        return answer._replace(status=queue_full_status)
    if isinstance(error, errors.DeadlineExceededError) and error.retry_after is not None:
        return answer._replace(status=503, code="deadline_unreachable")  # refused, not passed
    return answer


def _make_response(
    error: errors.BatcherError, queue_full_status: int, *, debug: bool
) -> tuple[Response, str]:
    """Log an error; return its answer and, for a WebSocket, its code and id in one line."""
    status, code, detail = _find_answer(error, queue_full_status)
    headers: Mapping[str, str] | None = None
    if isinstance(error, HTTPException):
        status, detail, headers = error.status_code, error.detail, error.headers
    elif status == 500 and debug:
        detail = "".join(traceback.format_exception(error))
    error_id = secrets.token_hex(ERROR_ID_BYTES)
    if status == 500:
        logger.error("%s, error id %s", code, error_id, exc_info=error)
    else:  # normal under load, and as many as there are requests
        logger.debug("%s, error id %s: %s", code, error_id, error)
    text = str(error) if detail is None else detail
    body: dict[str, Any] = {"detail": text, "code": code, "error_id": error_id}
    # Not of what the model raised: that is the user's, and whatever it is.
    is_ours = not isinstance(error, errors.InferenceError)
    retry_after = getattr(error, "retry_after", None) if is_ours else None
    if retry_after is not None:
        body["retry_after"] = retry_after
    response = JSONResponse(body, status, headers)
    if status in (503, 429):
        seconds = math.ceil(retry_after or 0)
        response.headers.setdefault("Retry-After", str(max(RETRY_AFTER, seconds)))
    return response, f"{code} {error_id}"


async def _end_websocket(websocket: WebSocket, response: Response, reason: str) -> None:
    if WebSocketState.DISCONNECTED in (websocket.client_state, websocket.application_state):
        return
    accepted = websocket.application_state is WebSocketState.CONNECTED
    if not accepted and "websocket.http.response" in websocket.scope.get("extensions", {}):
        await websocket.send_denial_response(response)
    else:  # before accept, a server without the extension answers 403 to a close
        await websocket.close(CLOSE_CODES.get(response.status_code, CLOSE_CODE), reason)


def _describe(status: int) -> dict[str, Any]:
    answer: dict[str, Any] = {"model": ErrorBody, "description": DESCRIPTIONS[status]}
    if status in (503, 429):
        schema = {"type": "integer", "minimum": RETRY_AFTER}
        text = "Seconds until another try makes sense."
        answer["headers"] = {"Retry-After": {"description": text, "schema": schema}}
    return answer


def _may_recover(batcher: DynBatcher[Any, Any], broken_timeout: float | None) -> bool:
    seconds = batcher._broken_seconds  # noqa: SLF001  the probe is its only user
    return seconds is None or broken_timeout is None or seconds < broken_timeout


def _report(batcher: DynBatcher[Any, Any]) -> dict[str, Any]:
    stats, failure = batcher.stats, batcher.start_error
    return {
        "name": batcher.name,
        "state": stats.state,
        "workers_ready": stats.workers_ready,
        "num_workers": stats.num_workers,
        "waiting": stats.waiting,
        # Not what a model's constructor has raised, which may hold secrets.
        "start_error": failure and (_find_answer(failure, 503).detail or str(failure)),
    }
