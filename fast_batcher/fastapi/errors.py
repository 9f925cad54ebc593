"""Errors as HTTP and WebSocket answers: handlers, and the last answers.

API process, on its event loop. The class of an error declares its answer. The handlers log each
failure with the id that its answer carries, and note each answer, which the status page shows. An
error's text may hold input of a user, so that only its type is kept, and the id that leads to the
log.
"""

import inspect
import json
import logging
import math
import secrets
import traceback
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fastapi import FastAPI
from fastapi.exception_handlers import (
    http_exception_handler,
    request_validation_exception_handler,
)
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from fast_batcher import errors
from fast_batcher._process import monotonic
from fast_batcher._transport.pickling import one_line
from fast_batcher.errors import HttpAnswer
from fast_batcher.fastapi.bodies import BodyError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

# Groups of equal answers that are kept for each code. Many routes with one code (a full queue)
# must not hide another code.
KEPT_PER_CODE = 5


class RecentError(NamedTuple):
    """Equal error answers: of one status, code, class and route."""

    at: float
    """`time.monotonic` of the latest answer."""
    status: int
    """HTTP status of the answers."""
    code: str
    """The `code` of the answer's body."""
    error_id: str
    """The id of the latest answer."""
    kind: str
    """Name of the error's class; of the raised class if the model raised."""
    route: str
    """Path of the route, with the names of its parameters instead of their values."""
    answers: int
    """Answers since the start, or since the group was dropped for newer ones."""


class RecentErrors:
    """Error answers by code: how many there were, and the latest groups of them."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        # Groups, by code; the group of the latest answer comes last.
        self._latest: dict[str, dict[tuple[int, str, str], RecentError]] = {}

    def note(
        self, error: Exception, connection: HTTPConnection, status: int, code: str, error_id: str
    ) -> None:
        """Note an answer."""
        self.counts[code] += 1
        groups = self._latest.setdefault(code, {})
        route = getattr(connection.scope.get("route"), "path", "")
        kind = type(error).__name__
        before = groups.pop((status, kind, route), None)
        count = 1 if before is None else before.answers + 1
        found = RecentError(monotonic(), status, code, error_id, kind, route, count)
        groups[status, kind, route] = found
        if len(groups) > KEPT_PER_CODE:
            del groups[next(iter(groups))]

    def newest_first(self) -> list[RecentError]:
        """Return the latest groups of every code."""
        found = [group for groups in self._latest.values() for group in groups.values()]
        return sorted(found, reverse=True)


# Error answers of all apps of the process: an error does not know its app, and apps share batchers.
recent_errors: RecentErrors = RecentErrors()


# The logger's name is that of the public package, not of this module.
logger: logging.Logger = logging.getLogger("fast_batcher.fastapi")

# Seconds of `Retry-After` if the error has no estimate: the header holds whole seconds, and a
# second is longer than most batches take. Source: RFC 9110, section 10.2.3.
RETRY_AFTER = 1
# Random bytes of an error id. 64 bits: no collision among the billions that a log may hold.
ERROR_ID_BYTES = 8
# Close codes of WebSockets by HTTP status. Source: the IANA registry of close codes; 1013 is "try
# again later", 1009 "message too big", 1007 "invalid payload", and 1011 (internal error) stands for
# every other status.
CLOSE_CODES = {413: 1009, 422: 1007, 429: 1013, 503: 1013, 504: 1013}
CLOSE_CODE = 1011


# The answers that the classes declare; that of the most derived class counts.
ANSWERS: dict[type[errors.BatcherError], HttpAnswer] = {
    kind: errors.read_answer(kind) for kind in map(vars(errors).__getitem__, errors.__all__)
}

# The statuses that `error_responses` can document.
DESCRIPTIONS = {
    413: "The request is too large for the model's queue.",
    422: "The model refuses the input.",
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


def install_exception_handlers(
    app: FastAPI, *, queue_full_status: Literal[503, 429] = 503, debug: bool = False
) -> None:
    """Answer every `BatcherError` of the app's endpoints with a status and an `ErrorBody`.

    An `HTTPException` that the model raised keeps its status, detail and headers. If the app has a
    handler for the type that the model raised, or for an error of the library, it is used instead.
    A WebSocket that is not accepted yet gets the same answer; an open one is closed with 1013 (try
    again), 1009 (too big) or 1011, and the error's code and id as the reason. An invalid input that
    JSON cannot represent (NaN, a lone surrogate) is answered with 422, and not with FastAPI's 500.
    The body of a stream that fails after its first chunk is cut, and one line is logged.

    Args:
        app: The app, before it has started.
        queue_full_status: 503, or 429 as some clients expect it.
        debug: Put the traceback of a 500 into the body; never in production.
    """
    _check_app(app)
    if queue_full_status not in (503, 429):
        raise errors.ConfigurationError(f"queue_full_status={queue_full_status!r}: give 503 or 429")

    async def answer(connection: HTTPConnection, error: Exception) -> Any:
        assert isinstance(error, errors.BatcherError | BodyError)  # it is installed for these
        own = _find_own_handler(app, error)
        if own is not None:
            if inspect.iscoroutinefunction(own):
                return await own(connection, error)
            return await run_in_threadpool(own, connection, error)
        response, code, error_id = _make_response(error, queue_full_status, debug=debug)
        recent_errors.note(error, connection, response.status_code, code, error_id)
        if isinstance(connection, WebSocket):
            return await _end_websocket(connection, response, f"{code} {error_id}")
        return response

    app.add_middleware(_CutResponses)
    app.add_exception_handler(errors.BatcherError, answer)
    app.add_exception_handler(BodyError, answer)
    if app.exception_handlers.get(RequestValidationError) is request_validation_exception_handler:
        app.add_exception_handler(RequestValidationError, _answer_invalid)


def _check_app(app: object) -> None:
    """Raise unless this is an app that has not started."""
    if not isinstance(app, Starlette):
        raise errors.ConfigurationError(
            f"install_exception_handlers: {app!r:.100} is of type {type(app).__name__}: give the "
            "app; it has the handlers of its routers, too"
        )
    if app.middleware_stack is not None:
        raise errors.ConfigurationError(
            "install_exception_handlers(app) must be called before the app starts, where the app "
            "is made, not in its lifespan or an endpoint"
        )


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Describe the error answers to OpenAPI: `responses=error_responses()` on a route or app.

    Args:
        statuses: The statuses to describe, out of 413, 422, 429, 500, 503 and 504. Default 503
            and 504.
    """
    unknown = [status for status in statuses if status not in DESCRIPTIONS]
    if unknown:
        known = ", ".join(map(str, DESCRIPTIONS))
        raise errors.ConfigurationError(
            f"error_responses: no error has status {unknown[0]!r}: choose from {known}"
        )
    return {status: _describe(status) for status in statuses or (503, 504)}


class _CutResponses:
    """Middleware that cuts a body whose stream fails: the app returns without its end."""

    def __init__(self, app: "ASGIApp") -> None:
        self._app = app

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Call the app."""
        try:
            await self._app(scope, receive, send)
        except RuntimeError as error:
            cause = error.__cause__
            # Starlette raises it for an error that has a handler, which comes too late.
            if not isinstance(cause, errors.BatcherError) or "already started" not in str(error):
                raise
            route = getattr(scope.get("route"), "path", "")
            text = " ".join(one_line(cause).split())
            logger.log(logging.ERROR, "%s: an error has cut the body of a stream: %s", route, text)


async def _answer_invalid(request: Request, error: Exception) -> Response:
    """Return FastAPI's answer to invalid input, without the input if JSON cannot represent it."""
    assert isinstance(error, RequestValidationError)  # it is installed for this class alone
    try:
        return await request_validation_exception_handler(request, error)
    except (ValueError, RecursionError):
        shown = [{key: found[key] for key in ("type", "loc", "msg")} for found in error.errors()]
        # Lone surrogates are escaped.
        return Response(json.dumps({"detail": shown}), 422, media_type="application/json")


def _find_own_handler(app: FastAPI, error: errors.BatcherError | BodyError) -> Any:
    """Return the app's handler for the type that the model raised, or None.

    FastAPI's default handler of HTTPException does not count: it omits code and id.
    """
    if type(error) in ANSWERS or not isinstance(error, errors.InferenceError):
        return None
    for kind in type(error).__mro__:
        own = app.exception_handlers.get(kind)
        if own and not issubclass(kind, errors.BatcherError) and kind is not Exception:
            return None if own is http_exception_handler else own
    return None


def find_answer(error: errors.BatcherError | BodyError, queue_full_status: int) -> HttpAnswer:
    """Return the answer to an error: that of its most derived class in the table."""
    if isinstance(error, BodyError):
        return HttpAnswer(error.status_code, error.code, error.detail)
    kind = next(kind for kind in type(error).__mro__ if kind in ANSWERS)
    answer = ANSWERS[kind]
    if kind is errors.QueueFullError:
        return answer._replace(status=queue_full_status)
    if isinstance(error, errors.DeadlineExceededError) and error.retry_after is not None:
        return answer._replace(status=503, code="deadline_unreachable")  # rejected, not passed
    return answer


def public_text(error: errors.BatcherError) -> str:
    """Return the text of an error that clients may read.

    That of a model's constructor, for example, may hold secrets.
    """
    return find_answer(error, 503).detail or str(error)


def _make_response(
    error: errors.BatcherError | BodyError, queue_full_status: int, *, debug: bool
) -> tuple[Response, str, str]:
    """Log an error; return its answer, its code and its id."""
    status, code, detail, may_pass_later, _ = find_answer(error, queue_full_status)
    headers = error.headers if isinstance(error, HTTPException) else None
    if isinstance(error, HTTPException):
        status, detail = error.status_code, error.detail
    elif status == 500 and debug:
        detail = "".join(traceback.format_exception(error))
    error_id = secrets.token_hex(ERROR_ID_BYTES)
    if status == 500:
        logger.error("%s, error id %s", code, error_id, exc_info=error)
    else:  # normal under load, one for each rejected request
        logger.debug("%s, error id %s: %s", code, error_id, error)
    text = str(error) if detail is None else detail
    body: dict[str, Any] = {"detail": text, "code": code, "error_id": error_id}
    # A model's own error may have an attribute of this name with another meaning.
    is_ours = not isinstance(error, errors.InferenceError)
    retry_after = getattr(error, "retry_after", None) if is_ours else None
    if retry_after is not None:
        body["retry_after"] = retry_after
    response = JSONResponse(body, status, headers)
    if status in (503, 429) and may_pass_later:
        seconds = math.ceil(retry_after or 0)
        response.headers.setdefault("Retry-After", str(max(RETRY_AFTER, seconds)))
    return response, code, error_id


async def _end_websocket(websocket: WebSocket, response: Response, reason: str) -> None:
    if WebSocketState.DISCONNECTED in (websocket.client_state, websocket.application_state):
        return
    accepted = websocket.application_state is WebSocketState.CONNECTED
    if not accepted and "websocket.http.response" in websocket.scope.get("extensions", {}):
        await websocket.send_denial_response(response)
    else:  # before accept, a server without the extension answers 403 to a close
        with suppress(WebSocketDisconnect):  # the client has left during the call
            await websocket.close(CLOSE_CODES.get(response.status_code, CLOSE_CODE), reason)


def _describe(status: int) -> dict[str, Any]:
    answer: dict[str, Any] = {"model": ErrorBody, "description": DESCRIPTIONS[status]}
    if status in (503, 429):
        schema = {"type": "integer", "minimum": RETRY_AFTER}
        text = "Seconds until another try makes sense."
        answer["headers"] = {"Retry-After": {"description": text, "schema": schema}}
    return answer
