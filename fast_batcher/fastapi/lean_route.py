"""Ordinary endpoints at nearly the price of bare ASGI. Runs in the API process, on its event loop.

    LeanRoute    serves the ordinary requests of one route itself
    lean         the same for all routes of an app, past FastAPI's router as well

FastAPI's own code handles all that is not ordinary, with the messages of the body replayed to it:
it writes each validation error, runs dependencies, and sees each request of an endpoint for which
more is declared than one body and a return type. When in doubt, it is FastAPI's turn.
"""

from collections.abc import MutableMapping
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

from fastapi import FastAPI, routing
from fastapi.routing import APIRoute, APIRouter, APIWebSocketRoute
from starlette.routing import BaseRoute, Match, Mount, Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from fast_batcher.errors import ConfigurationError
from fast_batcher.fastapi.lean_endpoint import (
    Body,
    LeanEndpoint,
    get_function,
    is_ordinary,
    is_original,
    without_body_limits,
)

# A client may choose the root path where a proxy passes it on: this many paths are enough.
MAX_LEARNED_PATHS = 1024
# The methods by which FastAPI's routers find a route; a router of the app's own may do more there.
WALK = ("app", "handle", "matches")


class LeanRoute(APIRoute):
    """A route whose ordinary requests take a short way: `APIRouter(route_class=LeanRoute)`.

    Answers, errors, exception handlers and OpenAPI are FastAPI's. The short way is for an
    `async def` endpoint with one JSON body, a return type, and no other parameter; of dependencies
    only `cancel_on_disconnect`.
    """

    def __init__(self, path: str, endpoint: Any, **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        # By FastAPI's app for this route, of which each inclusion of the router has its own.
        self._known: _Known = WeakKeyDictionary()

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request of this route."""
        app = scope.get("app")
        endpoint = _find_endpoint(scope, app.router, self._known) if app is not None else None
        body = Body(receive)
        value = await endpoint.read(scope, body) if endpoint is not None else None
        if endpoint is None or value is None:
            await super().handle(scope, body.replay, send)
        else:
            await endpoint.answer(value, scope, body, send)


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
    if getattr(without_body_limits(router.middleware_stack), "__self__", None) is not router:
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
        self._learned: dict[tuple[str, str, str], tuple[LeanEndpoint, Scope]] = {}
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
        body = Body(receive)
        value = await endpoint.read(scope, body)
        if value is not None or body.has_failed:
            self._select(scope, selected)
        if value is None:
            await self._app(scope, body.replay, send)
            return
        await endpoint.answer(value, scope, body, send)

    async def _learn(
        self, path: tuple[str, str, str], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Let FastAPI serve a request, and remember which endpoint its path has led to."""
        routes = self._routes
        await self._app(scope, receive, send)
        endpoint = _find_endpoint(scope, self._router, self._known)
        if endpoint is None or len(self._learned) >= MAX_LEARNED_PATHS:
            return
        # Else they have changed since FastAPI selected the endpoint, or a mount has led to it.
        if self._routes is routes and self._leads_to(scope, *path):
            selected = {"endpoint": scope["endpoint"], "route": scope["route"]}
            if "fastapi" in scope:
                selected["fastapi"] = dict(scope["fastapi"])
            self._learned[path] = endpoint, selected

    def _leads_to(self, scope: Scope, method: str, path: str, root_path: str) -> bool:
        """Say whether the router itself, or one that it includes, finds the route of a scope."""
        probe = {"type": "http", "method": method, "path": path, "root_path": root_path}
        for route in self._router.routes:
            if route.matches(dict(probe))[0] is Match.FULL:
                return route is scope["route"] or hasattr(route, "original_router")
        return False

    def _select(self, scope: Scope, selected: Scope) -> None:
        """Put into the scope what FastAPI's router does; middlewares and handlers read it."""
        scope.setdefault("router", self._router)
        scope["endpoint"] = selected["endpoint"]
        scope["route"] = selected["route"]
        scope["path_params"] = dict(scope.get("path_params", {}))
        if "fastapi" in selected:
            scope.setdefault("fastapi", {}).update(selected["fastapi"])

    def _has_learned_these_routes(self) -> bool:
        for router, routes in self._routes:
            now = router.routes
            # By identity: routes of one path are equal, and one of them may have a guard.
            if len(now) != len(routes) or not all(map(is_, now, routes)):
                return False
        return bool(self._routes)


_Known = MutableMapping[ASGIApp, LeanEndpoint | None]


def _find_endpoint(scope: Scope, router: APIRouter, known: _Known) -> LeanEndpoint | None:
    """Return the endpoint that FastAPI's router has selected, None if it is not ordinary."""
    route = scope.get("route")
    # Where a router is included, FastAPI keeps beside its route what the inclusion adds to it.
    included = scope.get("fastapi", {}).get("effective_route_context")
    if included is not None and included.original_route is route:
        route = included
    app: Any = getattr(route, "app", None)
    if not is_original(without_body_limits(app)):
        return None
    if app not in known:
        is_served = _is_selected_by_path(route, router) and is_ordinary(route)
        known[app] = LeanEndpoint(route) if is_served else None
    return known[app]


def _is_selected_by_path(route: Any, router: APIRouter) -> bool:
    """Say whether a route is the router's own, and its path and method always lead to it."""
    known = (APIRoute, Route, Mount, APIWebSocketRoute, WebSocketRoute)
    by_path = {kind.matches for kind in known}
    for some_router, _ in _list_routes(router):
        if any(get_function(some_router, name) is not getattr(APIRouter, name) for name in WALK):
            return False
    for context in routing.iter_route_contexts(router.routes):
        # A route of which it is not known what it depends on, as `Host` does on a header.
        if get_function(context.original_route, "matches") not in by_path:
            return False
        if getattr(context, "app", None) is route.app:
            handle = get_function(context.original_route, "handle")
            return handle in (APIRoute.handle, LeanRoute.handle) and not route.param_convertors
    return False  # a guard of an inclusion may be unknown, or a middleware of a mount passed by


def _list_routes(router: APIRouter) -> list[tuple[APIRouter, list[BaseRoute]]]:
    found = [(router, list(router.routes))]
    for route in router.routes:
        included = getattr(route, "original_router", None)
        if isinstance(included, APIRouter):
            found += _list_routes(included)
    return found
