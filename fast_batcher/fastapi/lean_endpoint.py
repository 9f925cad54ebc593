"""One ordinary endpoint, served without FastAPI's request handling. API process, its event loop.

    Body            the body of a request, which FastAPI can read again
    LeanEndpoint    reads an ordinary request, calls the endpoint, sends the answer
    is_ordinary     says for which routes it does all that FastAPI does

`lean_route.py` decides which requests come here.
"""

import dataclasses
import inspect
import os
from collections import deque
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import fastapi
import starlette
from fastapi import params, routing
from fastapi.datastructures import DefaultPlaceholder
from fastapi.exceptions import EndpointContext, ResponseValidationError
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.middleware.body_limit import MAX_BODY_SIZE_SCOPE_KEY
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, request_response
from starlette.types import Message, Receive, Scope, Send

from fast_batcher.fastapi.disconnects import EndedByDisconnect, end_by_disconnect

# What FastAPI may know of an ordinary endpoint; every other field of its `Dependant` is empty, and
# the only dependency is `cancel_on_disconnect`.
ORDINARY_FIELDS = {"body_params", "call", "dependencies", "path", "scope", "use_cache"}
# Where the functions of FastAPI and Starlette come from, if no other program has replaced them.
SOURCES = tuple(
    f"{Path(package).parent}{os.sep}" for package in (fastapi.__file__, starlette.__file__)
)
# What programs that observe an app put their own functions for; they shall see each request.
REPLACEABLE = (
    (APIRoute, "get_route_handler"),
    (APIRoute, "handle"),
    (Route, "handle"),
    (routing, "get_request_handler"),
    (routing, "run_endpoint_function"),
    (routing, "serialize_response"),
    (routing, "solve_dependencies"),
)
# Modules of the middlewares that limit the bodies of one route.
BODY_LIMITS = ("fastapi._body_limit", "starlette.middleware.body_limit")


class Body:
    """The body of one request: read once, and replayed to FastAPI where it needs it."""

    __slots__ = ("_error", "_messages", "receive")

    def __init__(self, receive: Receive) -> None:
        # Gives what follows the body, once that has been read.
        self.receive = receive
        self._messages: deque[Message] = deque()
        # What `receive` raised, for example a limit on the body.
        self._error: Exception | None = None

    async def read(self) -> bytes:
        """Receive the body; return it, or no bytes if it did not arrive whole."""
        message: Message = {"type": "http.request", "more_body": True}
        try:
            while message.get("more_body"):
                message = await self.receive()
                self._messages.append(message)
        except Exception as error:  # noqa: BLE001  FastAPI gets it
            self._error = error
            return b""
        if message["type"] != "http.request":
            return b""
        if len(self._messages) == 1:
            return message.get("body", b"")  # type: ignore[no-any-return]
        return b"".join(message.get("body", b"") for message in self._messages)

    @property
    def has_failed(self) -> bool:
        """Whether `receive` has raised; a limit of the app's router may raise once more."""
        return self._error is not None

    async def replay(self) -> Message:
        """Give the messages once more, then what follows them; FastAPI's `receive`."""
        if self._messages:
            return self._messages.popleft()
        if self._error is not None:
            raise self._error
        return await self.receive()


class LeanEndpoint:
    """An endpoint that takes one body and gives one JSON document.

    Args:
        route: An `APIRoute`, or what FastAPI made of one where its router is included.
    """

    def __init__(self, route: Any) -> None:
        dependant = route.dependant
        self._dependencies: list[Any] = dependant.dependencies
        self._ends_by_disconnect = bool(self._dependencies)
        self._methods: set[str] = route.methods
        self._max_body_size: int | None = route.max_body_size
        self._call = dependant.call
        self._body = dependant.body_params[0]
        self._status: int = route.status_code or 200
        self._path: str = dependant.path
        self._answer = route.response_field
        self._serialize = partial(
            route.response_field.serialize_json,
            include=route.response_model_include,
            exclude=route.response_model_exclude,
            by_alias=route.response_model_by_alias,
            exclude_unset=route.response_model_exclude_unset,
            exclude_defaults=route.response_model_exclude_defaults,
            exclude_none=route.response_model_exclude_none,
        )

    async def read(self, scope: Scope, body: Body) -> Any:
        """Return the endpoint's argument, None if it is FastAPI's turn."""
        if not self._is_ordinary_request(scope):
            return None
        content = await body.read()
        try:
            # Not `validate_json`, which takes other values than FastAPI does.
            value, errors = self._body.validate(from_json(content), {}, loc=("body",))
        except Exception:  # noqa: BLE001  FastAPI meets it again and answers it
            return None
        return None if errors else value

    async def answer(self, value: Any, scope: Scope, body: Body, send: Send) -> None:
        """Call the endpoint and send what comes of it, as FastAPI does.

        Args:
            value: What `read` returned.
            scope: Of the request.
            body: What was read; an exception handler may read it again.
            send: As in ASGI.
        """
        outcome: Any
        try:
            if self._ends_by_disconnect:
                async with EndedByDisconnect(body.receive):
                    result = await self._call(**{self._body.name: value})
            else:
                result = await self._call(**{self._body.name: value})
            outcome = self._to_answer(result, scope)
        except Exception as error:  # noqa: BLE001  the exception handlers get it
            outcome = error
        if type(outcome) is not bytes:
            await request_response(partial(_finish, outcome))(scope, body.replay, send)
            return
        length = str(len(outcome)).encode()
        headers = [(b"content-length", length), (b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": self._status, "headers": headers})
        await send({"type": "http.response.body", "body": outcome})

    def _to_answer(self, result: Any, scope: Scope) -> Response | bytes:
        if isinstance(result, Response):
            return result
        answer, errors = self._answer.validate(result, {}, loc=("response",))
        if errors:
            path = f"{scope['method']} {scope.get('root_path', '').rstrip('/')}{self._path}"
            context: EndpointContext = {**_describe_endpoint(self._call), "path": path}
            raise ResponseValidationError(errors, body=result, endpoint_ctx=context)
        content: bytes = self._serialize(answer)
        return content

    def _is_ordinary_request(self, scope: Scope) -> bool:
        for name, value in scope["headers"]:
            if name == b"content-type":
                is_json = value == b"application/json" or value.startswith(b"application/json;")
                return (
                    is_json
                    and scope["method"] in self._methods
                    and (not self._dependencies or self._has_only_known_dependencies(scope))
                    and scope.get("fastapi.telemetry") is None
                    and self._max_body_size in (None, scope.get(MAX_BODY_SIZE_SCOPE_KEY))
                )
        return False

    def _has_only_known_dependencies(self, scope: Scope) -> bool:
        return (
            self._ends_by_disconnect
            and _are_known(self._dependencies)
            and end_by_disconnect not in scope["app"].dependency_overrides
        )


def is_ordinary(route: Any) -> bool:
    """Say whether nothing is declared for a route that `LeanEndpoint` does not do."""
    original = getattr(route, "original_route", route)
    return (
        get_function(original, "get_route_handler") is APIRoute.get_route_handler
        and all(is_original(getattr(owner, name, None)) for owner, name in REPLACEABLE)
        and _takes_one_body(route)
        and inspect.iscoroutinefunction(route.dependant.call)
        and isinstance(route.response_class, DefaultPlaceholder)
        and route.response_field is not None
    )


def _takes_one_body(route: Any) -> bool:
    dependant = route.dependant
    is_alone = all(
        field.name in ORDINARY_FIELDS or not getattr(dependant, field.name)
        for field in dataclasses.fields(dependant)
    )
    if not (is_alone and _are_known(dependant.dependencies)) or len(dependant.body_params) != 1:
        return False
    [body] = dependant.body_params
    # Another field stands for a body whose parameters are keys of it.
    return route.body_field is body and type(body.field_info) is params.Body


def _are_known(dependencies: list[Any]) -> bool:
    """Say whether an endpoint depends on nothing but `cancel_on_disconnect`."""
    return all(one.call is end_by_disconnect for one in dependencies)


def without_body_limits(app: Any) -> Any:
    """Return what FastAPI has put a limit on bodies around."""
    while type(app).__module__ in BODY_LIMITS:
        app = app.app
    return app


def get_function(route: Any, name: str) -> Any:
    """Return what a method of a route or router runs; None if it is not a method of a class."""
    return getattr(getattr(route, name), "__func__", None)


def is_original(function: Any) -> bool:
    """Say whether a function is FastAPI's or Starlette's, and no other program's in its place."""
    return type(function) is FunctionType and function.__code__.co_filename.startswith(SOURCES)


def _describe_endpoint(call: Any) -> EndpointContext:
    """Say where an endpoint is written, as FastAPI's errors about its answers do."""
    try:
        file, line = inspect.getsourcefile(call), inspect.getsourcelines(call)[1]
    except (OSError, TypeError):
        return {}
    context: EndpointContext = {"line": line, "function": call.__name__}
    return context if file is None else {"file": file, **context}


async def _finish(outcome: Response | Exception, _: Request) -> Response:
    """Give what came of an endpoint to Starlette, which runs the exception handlers."""
    if isinstance(outcome, Exception):
        raise outcome
    return outcome
