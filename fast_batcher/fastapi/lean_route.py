"""Ordinary endpoints at nearly the price of bare ASGI. Runs in the API process, on its event loop.

    LeanRoute       serves the ordinary requests of one route itself
    lean            the same for all routes of an app, past FastAPI's router as well
    _LeanEndpoint   reads an ordinary request, calls the endpoint, sends the answer

FastAPI's own code handles all that is not ordinary, with the messages of the body replayed to it:
it writes each validation error, runs dependencies, and sees each request of an endpoint for which
more is declared than one body and a return type. When in doubt, it is FastAPI's turn.
"""

import dataclasses
import inspect
import os
from collections import deque
from collections.abc import MutableMapping
from functools import partial
from operator import is_
from pathlib import Path
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import fastapi
import starlette
from fastapi import FastAPI, params, routing
from fastapi.datastructures import DefaultPlaceholder
from fastapi.exceptions import EndpointContext, ResponseValidationError
from fastapi.routing import APIRoute, APIRouter, APIWebSocketRoute
from pydantic_core import from_json
from starlette.middleware.body_limit import MAX_BODY_SIZE_SCOPE_KEY
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route, WebSocketRoute, request_response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fast_batcher.errors import ConfigurationError

# What FastAPI may know of an ordinary endpoint; every other field of its `Dependant` is empty.
ORDINARY_FIELDS = {"body_params", "call", "path", "scope", "use_cache"}
# A client may choose the root path where a proxy passes it on: this many paths are enough.
MAX_LEARNED_PATHS = 1024
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

# The methods by which FastAPI's routers find a route; a router of the app's own may do more there.
WALK = ("app", "handle", "matches")


class _Body:
    """The body of one request: read once, and replayed to FastAPI where it needs it."""

    __slots__ = ("_error", "_messages", "_receive")

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._messages: deque[Message] = deque()
        # What `receive` raised, for example a limit on the body.
        self._error: Exception | None = None

    async def read(self) -> bytes:
        """Receive the body; return it, or no bytes if it did not arrive whole."""
        message: Message = {"type": "http.request", "more_body": True}
        try:
            while message.get("more_body"):
                message = await self._receive()
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
        return await self._receive()


class _LeanEndpoint:
    """An endpoint that takes one body and gives one JSON document.

    Args:
        route: An `APIRoute`, or what FastAPI made of one where its router is included.
    """

    def __init__(self, route: Any) -> None:
        dependant = route.dependant
        self._dependencies: list[Any] = dependant.dependencies
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

    async def read(self, scope: Scope, body: _Body) -> Any:
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

    async def answer(self, value: Any, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the endpoint and send what comes of it, as FastAPI does.

        Args:
            value: What `read` returned.
            scope: Of the request.
            receive: The body once more, for an exception handler that reads it.
            send: As in ASGI.
        """
        outcome: Any
        try:
            outcome = await self._run(value, scope)
        except Exception as error:  # noqa: BLE001  the exception handlers get it
            outcome = error
        if type(outcome) is not bytes:
            await request_response(partial(_finish, outcome))(scope, receive, send)
            return
        length = str(len(outcome)).encode()
        headers = [(b"content-length", length), (b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": self._status, "headers": headers})
        await send({"type": "http.response.body", "body": outcome})

    async def _run(self, value: Any, scope: Scope) -> Response | bytes:
        result = await self._call(**{self._body.name: value})
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
                    and not self._dependencies
                    and scope.get("fastapi.telemetry") is None
                    and self._max_body_size in (None, scope.get(MAX_BODY_SIZE_SCOPE_KEY))
                )
        return False


class LeanRoute(APIRoute):
    """A route whose ordinary requests take a short way: `APIRouter(route_class=LeanRoute)`.

    Answers, errors, exception handlers and OpenAPI are FastAPI's. The short way is for an
    `async def` endpoint with one JSON body, a return type, and no other parameter or dependency.
    """

    def __init__(self, path: str, endpoint: Any, **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        # By FastAPI's app for this route, of which each inclusion of the router has its own.
        self._known: _Known = WeakKeyDictionary()

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request of this route."""
        app = scope.get("app")
        endpoint = _find_endpoint(scope, app.router, self._known) if app is not None else None
        body = _Body(receive)
        value = await endpoint.read(scope, body) if endpoint is not None else None
        if endpoint is None or value is None:
            await super().handle(scope, body.replay, send)
        else:
            await endpoint.answer(value, scope, body.replay, send)


def lean(app: FastAPI) -> None:
    """Let the ordinary requests of an app take a short way, whatever routes it has or will have.

    Each first request of a path takes FastAPI's way. Middlewares see all requests, as before. See
    `LeanRoute` for which endpoints gain; all others stay as they are.

    Raises:
        ConfigurationError: Another program has put something around the app's router.
    """
    router = app.router
    if isinstance(router.middleware_stack, _ShortWay):
        return
    if getattr(_without_body_limits(router.middleware_stack), "__self__", None) is not router:
        raise ConfigurationError(
            f"lean(app): app.router.middleware_stack={router.middleware_stack!r:.100}: call "
            "lean(app) before it is replaced, so that requests pass it first"
        )
    router.middleware_stack = _ShortWay(router)


class _ShortWay:
    """Takes ordinary requests past FastAPI's router, by paths that it has learned from it."""

    def __init__(self, router: APIRouter) -> None:
        self._router = router
        self._app = router.middleware_stack
        # By method, path and root path: the endpoint, and what the router puts into the scope.
        self._learned: dict[tuple[str, str, str], tuple[_LeanEndpoint, Scope]] = {}
        self._known: _Known = WeakKeyDictionary()
        # The routes with which these were learned, of the router and of each that it includes.
        self._routes: list[tuple[APIRouter, list[BaseRoute]]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or what else the app is called for."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if not self._has_learned_these_routes():
            self._learned.clear()
            self._known.clear()
            self._routes = _list_routes(self._router)
        path = (scope["method"], scope["path"], scope.get("root_path", ""))
        if path not in self._learned:
            await self._learn(path, scope, receive, send)
            return
        endpoint, selected = self._learned[path]
        body = _Body(receive)
        value = await endpoint.read(scope, body)
        if value is not None or body.has_failed:
            self._select(scope, selected)
        if value is None:
            await self._app(scope, body.replay, send)
            return
        await endpoint.answer(value, scope, body.replay, send)

    async def _learn(
        self, path: tuple[str, str, str], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Let FastAPI serve a request, and remember which endpoint its path has led to."""
        routes = self._routes
        await self._app(scope, receive, send)
        endpoint = _find_endpoint(scope, self._router, self._known)
        if endpoint is None or len(self._learned) >= MAX_LEARNED_PATHS:
            return
        if self._routes is routes:  # they have not changed since FastAPI selected the endpoint
            selected = {"endpoint": scope["endpoint"], "route": scope["route"]}
            if "fastapi" in scope:
                selected["fastapi"] = dict(scope["fastapi"])
            self._learned[path] = endpoint, selected

    def _select(self, scope: Scope, selected: Scope) -> None:
        """Put into the scope what FastAPI's router does; middlewares and handlers read it."""
        scope.setdefault("router", self._router)
        scope["endpoint"] = selected["endpoint"]
        scope["route"] = selected["route"]
        scope["path_params"] = dict(scope.get("path_params", {}))
        if "fastapi" in selected:
            scope.setdefault("fastapi", {}).update(selected["fastapi"])

    def _has_learned_these_routes(self) -> bool:
        # By identity: routes of one path are equal, and one of them may have a guard.
        return bool(self._routes) and all(
            len(router.routes) == len(routes) and all(map(is_, router.routes, routes))
            for router, routes in self._routes
        )


_Known = MutableMapping[ASGIApp, _LeanEndpoint | None]


def _find_endpoint(scope: Scope, router: APIRouter, known: _Known) -> _LeanEndpoint | None:
    """Return the endpoint that FastAPI's router has selected, None if it is not ordinary."""
    route = scope.get("route")
    # Where a router is included, FastAPI keeps beside its route what the inclusion adds to it.
    included = scope.get("fastapi", {}).get("effective_route_context")
    if included is not None and included.original_route is route:
        route = included
    app = getattr(route, "app", None)
    if app is None:
        return None
    if app not in known:
        is_ordinary = _is_selected_by_path(route, router) and _is_ordinary(route)
        known[app] = _LeanEndpoint(route) if is_ordinary else None
    return known[app]


def _is_selected_by_path(route: Any, router: APIRouter) -> bool:
    """Say whether a route is the router's own, and its path and method always lead to it."""
    known = (APIRoute, Route, Mount, APIWebSocketRoute, WebSocketRoute)
    by_path = {kind.matches for kind in known}
    for some_router, _ in _list_routes(router):
        if any(_get_function(some_router, name) is not getattr(APIRouter, name) for name in WALK):
            return False
    for context in routing.iter_route_contexts(router.routes):
        # A route of which it is not known what it depends on, as `Host` does on a header.
        if _get_function(context.original_route, "matches") not in by_path:
            return False
        if getattr(context, "app", None) is route.app:
            return not route.param_convertors
    return False  # a guard of an inclusion may be unknown, or a middleware of a mount passed by


def _is_ordinary(route: Any) -> bool:
    """Say whether nothing is declared for a route that `_LeanEndpoint` does not do."""
    original = getattr(route, "original_route", route)
    return (
        _get_function(original, "handle") in (APIRoute.handle, LeanRoute.handle)
        and _get_function(original, "get_route_handler") is APIRoute.get_route_handler
        and _is_original(_without_body_limits(route.app))
        and all(_is_original(getattr(owner, name, None)) for owner, name in REPLACEABLE)
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
    if not is_alone or len(dependant.body_params) != 1:
        return False
    [body] = dependant.body_params
    # Another field stands for a body whose parameters are keys of it.
    return route.body_field is body and type(body.field_info) is params.Body


def _without_body_limits(app: Any) -> Any:
    while type(app).__module__ in BODY_LIMITS:
        app = app.app
    return app


def _get_function(route: Any, name: str) -> Any:
    return getattr(getattr(route, name), "__func__", None)


def _is_original(function: Any) -> bool:
    return type(function) is FunctionType and function.__code__.co_filename.startswith(SOURCES)


def _list_routes(router: APIRouter) -> list[tuple[APIRouter, list[BaseRoute]]]:
    found = [(router, list(router.routes))]
    for route in router.routes:
        included = getattr(route, "original_router", None)
        if isinstance(included, APIRouter):
            found += _list_routes(included)
    return found


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
