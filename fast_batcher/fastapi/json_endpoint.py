"""JSON endpoints without FastAPI's request handling. Runs in the API process, on its event loop.

FastAPI spends most of a small request's CPU time on dependencies, parameters and response models.
`JsonEndpoint` omits them: it is an ASGI application on an ordinary route, to which every
middleware, body limit and exception handler of the app applies.
"""

import inspect
import json
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, get_args, get_origin

from fastapi import APIRouter, params
from fastapi.exceptions import RequestValidationError
from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from fast_batcher.errors import ConfigurationError
from fast_batcher.fastapi.bodies import client_has_gone
from fast_batcher.fastapi.disconnects import EndedByDisconnect


class JsonEndpoint:
    """ASGI application that answers one JSON body with another.

    Add it with `app.router.add_route("/predict", JsonEndpoint(predict), methods=["POST"])`, where
    `predict` is `async def predict(body: In) -> Out`. Pydantic validates the body as the
    parameter's type and serializes the result as the return type. An invalid body raises
    `RequestValidationError`; the app's exception handlers handle this and every other exception.

    It runs no dependencies and is not in OpenAPI. So that no security dependency is skipped, a
    request fails with a `ConfigurationError` if the app has `dependencies=`, or if the route is not
    one of the app's own: the dependencies of an included router are not visible here.

    Args:
        predict: A coroutine function of one parameter, the body, with annotations of its parameter
            and its result.
        cancel_on_disconnect: Cancel `predict` when its client disconnects; logs and metrics then
            see status 499.

    Raises:
        ConfigurationError: `predict` has other parameters, no annotations, or annotations that
            Pydantic cannot validate; or FastAPI is older than 0.137 and does not keep included
            routers apart from the app.
    """

    def __init__(
        self, predict: Callable[[Any], Awaitable[Any]], *, cancel_on_disconnect: bool = False
    ) -> None:
        if _router_copies_included_routes():
            raise ConfigurationError(
                "JsonEndpoint needs FastAPI 0.137 or newer: older versions drop the dependencies "
                "of an included router for this route; upgrade, or use @app.post"
            )
        self._predict = predict
        body, result = _read_annotations(predict)
        # The methods of a `TypeAdapter` pass a dozen arguments on to these.
        self._read = _make_adapter(predict, body).validator.validate_json
        self._write = _make_adapter(predict, result).serializer.to_json
        self._ends_by_disconnect = cancel_on_disconnect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        self._refuse_dependencies(scope)
        content = await _read_json(scope, receive)
        try:
            body = self._read(content)
        except ValidationError as error:
            raise _make_request_error(error, content) from None
        if self._ends_by_disconnect:
            async with EndedByDisconnect(receive):
                result = await self._predict(body)
        else:
            result = await self._predict(body)
        # A result of another type is an error: it may hold fields that the return type omits.
        content = self._write(result, by_alias=True, warnings="error")
        headers = [
            (b"content-length", str(len(content)).encode()),
            (b"content-type", b"application/json"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    def _refuse_dependencies(self, scope: Scope) -> None:
        """Check that no dependency is declared for the route of a request."""
        router = scope["app"].router
        own = (
            route for route in router.routes if isinstance(route, Route) and route.endpoint is self
        )
        is_own = any(route.matches(scope)[0] is Match.FULL for route in own)
        has_dependencies = bool(getattr(router, "dependencies", ()))
        if is_own and not has_dependencies:
            return
        mount = _find_mount(scope)
        name = _name(self._predict)
        if has_dependencies:
            app = f"the app mounted at {mount!r}" if is_own and mount else "the app"
            raise ConfigurationError(
                f"JsonEndpoint({name}) runs no dependencies, and {app} has dependencies=: declare "
                "them on the routers that need them, or use @app.post"
            )
        place = f"the mount at {mount!r}" if mount else "an included router or a mount"
        raise ConfigurationError(
            f"JsonEndpoint({name}) runs no dependencies, so it serves only a route of the app "
            f"itself, not of {place}: app.router.add_route(path, endpoint)"
        )


def _find_mount(scope: Scope) -> str:
    """Return the path at which an app or a router is mounted that has the route; "" without."""
    root: str = scope.get("root_path", "")
    # Starlette sets it when a mount is entered: the root path of the app, as a proxy may give it.
    before: str = scope.get("app_root_path", root)
    return root.removeprefix(before)


async def _read_json(scope: Scope, receive: Receive) -> bytes:
    kind = b""
    for name, value in scope["headers"]:
        if name == b"content-type":
            kind = value
            break
    if kind != b"application/json" and not _is_json(kind.decode("latin-1")):
        raise HTTPException(415, "the body must be JSON: send Content-Type: application/json")
    parts: list[bytes] = []
    has_more = True
    while has_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise client_has_gone()
        parts.append(message.get("body", b""))
        has_more = message.get("more_body", False)
    return b"".join(parts)


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (
        kind.startswith("application/") and kind.endswith("+json")
    )


def _make_request_error(error: ValidationError, content: bytes) -> RequestValidationError:
    """Describe an invalid body as FastAPI does: its errors are below "body"."""
    details = error.errors(include_url=False)
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        body = content.decode(errors="replace")
        for detail in details:
            detail["input"] = {}  # otherwise the whole body
    found = [{**detail, "loc": ("body", *detail["loc"])} for detail in details]
    return RequestValidationError(found, body=body)


def _read_annotations(predict: Callable[[Any], Awaitable[Any]]) -> tuple[Any, Any]:
    """Return the types of the body and of the result of an endpoint."""
    shape = "async def predict(body: In) -> Out"
    if not inspect.iscoroutinefunction(predict):
        raise ConfigurationError(f"JsonEndpoint({_name(predict)}): write {shape}")
    try:
        signature = inspect.signature(predict, eval_str=True)
    except NameError as error:
        raise ConfigurationError(
            f"JsonEndpoint({_name(predict)}): {error}: its annotations must be names of its module"
        ) from error
    found = list(signature.parameters.values())
    if (
        len(found) != 1
        or found[0].kind not in _BY_POSITION
        or found[0].default is not found[0].empty
    ):
        raise ConfigurationError(
            f"JsonEndpoint({_name(predict)}): parameters {signature}: it takes the body alone, "
            f"without a default, and runs no dependencies: write {shape}, or use @app.post"
        )
    annotations = found[0].annotation, signature.return_annotation
    if signature.empty in annotations:
        raise ConfigurationError(
            f"JsonEndpoint({_name(predict)}): annotate the body and the result: write {shape}"
        )
    for annotation in annotations:
        if get_origin(annotation) is Annotated and any(
            isinstance(marker, params.Depends | params.Param | params.Body)
            for marker in get_args(annotation)[1:]
        ):
            raise ConfigurationError(
                f"JsonEndpoint({_name(predict)}): {annotation}: JsonEndpoint does not support "
                "FastAPI's Depends, Query, Header or Body: use @app.post"
            )
    return annotations


def _make_adapter(predict: object, annotation: Any) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(annotation)
    except PydanticUserError as error:
        raise ConfigurationError(
            f"JsonEndpoint({_name(predict)}): {annotation!r:.100}: not a type of JSON values: "
            f"{error}"
        ) from error


def _name(function: object) -> str:
    return getattr(function, "__qualname__", repr(function))


def _router_copies_included_routes() -> bool:
    """Return whether this FastAPI copies the routes of included routers to the app."""
    inner, outer = APIRouter(), APIRouter()
    inner.routes.append(Route("/", _router_copies_included_routes))
    outer.include_router(inner)
    return any(isinstance(route, Route) for route in outer.routes)


_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
