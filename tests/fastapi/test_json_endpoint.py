"""`JsonEndpoint`: its answers and errors are those of an ordinary endpoint, and it fails closed."""

import json
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import pytest
from fastapi import APIRouter, Body, Depends, FastAPI, HTTPException, Query, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.testclient import TestClient
from fastapi_versions import needs_included_routers
from pydantic import BaseModel, Field
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.routing import Mount, Route, Router

from fast_batcher import DynBatcher, InferenceModel
from fast_batcher.errors import ConfigurationError
from fast_batcher.fastapi import JsonEndpoint, install_exception_handlers

pytestmark = needs_included_routers


class Item(BaseModel):
    text: str = Field(max_length=20)
    number: float = 0.5


class Answer(BaseModel):
    text: str = Field(alias="words")


class Secret(Answer):
    key: str = "secret"


RIGHT = Item(text="a")


class OwnError(Exception):
    """For a handler of the app's own."""


async def predict(body: Item) -> Answer:
    if body.text == "http":
        raise HTTPException(418, "a teapot", {"X-Own": "1"})
    if body.text == "own":
        raise OwnError
    if body.text == "secret":
        return Secret(words=body.text)
    return Answer(words=f"{body.text} {body.number}")


async def wrong(body: Item) -> Answer:
    return {"words": "no model", "key": "secret"}  # type: ignore[return-value]


def make_app(add: Callable[[FastAPI, str, Any], None], **options: Any) -> FastAPI:
    app = FastAPI(**options)
    add(app, "/predict", predict)
    add(app, "/wrong", wrong)

    @app.exception_handler(OwnError)
    async def answer(request: Request, error: OwnError) -> JSONResponse:
        return JSONResponse({"own": request.url.path}, 409)

    return app


def add_json(app: FastAPI, path: str, function: Any) -> None:
    app.router.add_route(path, JsonEndpoint(function), methods=["POST"])  # type: ignore[arg-type]


def add_plain(app: FastAPI, path: str, function: Any) -> None:
    app.post(path)(function)


def send(app: FastAPI, content: bytes, path: str = "/predict", **headers: str) -> Any:
    headers = {"content-type": "application/json", **headers}
    return TestClient(app, raise_server_exceptions=False).post(
        path, content=content, headers=headers
    )


@pytest.mark.parametrize(
    "content",
    [
        b'{"text": "a"}',
        b' {"text": "\\u00e4", "number": 1e300, "more": [1]} ',
        b'{"text": "http"}',
        b'{"text": "own"}',
        b'{"text": "secret"}',
    ],
)
@pytest.mark.parametrize(
    "kind", ["application/json", "Application/JSON ; charset=utf-8", "application/x+json"]
)
def test_valid_body_gets_the_usual_answer(content: bytes, kind: str) -> None:
    by_json, by_fastapi = (
        send(make_app(add), content, **{"content-type": kind}) for add in (add_json, add_plain)
    )
    assert (by_json.status_code, by_json.json()) == (by_fastapi.status_code, by_fastapi.json())
    assert by_json.headers == by_fastapi.headers


@pytest.mark.parametrize(
    "content", [b'{"text": 5}', b'{"number": NaN, "text": "a"}', b'{"number": "x"}']
)
def test_invalid_body_gets_the_usual_error(content: bytes) -> None:
    by_json, by_fastapi = (send(make_app(add), content) for add in (add_json, add_plain))
    assert (by_json.status_code, by_json.json()) == (by_fastapi.status_code, by_fastapi.json())


@pytest.mark.parametrize("content", [b"[1]", b"null", b'"text"'])
def test_body_of_wrong_type_is_422(content: bytes) -> None:
    found = send(make_app(add_json), content)
    assert (found.status_code, found.json()["detail"][0]["loc"]) == (422, ["body"])


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 100_000, b'{"text": "\xff"}'])
def test_invalid_json_is_422_without_the_input(content: bytes) -> None:
    found = send(make_app(add_json), content)
    assert found.status_code == 422
    (one,) = found.json()["detail"]
    assert (one["type"], one["loc"], one["input"]) == ("json_invalid", ["body"], {})


@pytest.mark.parametrize("kind", ["text/plain", "", "application/x-www-form-urlencoded"])
def test_cross_site_body_is_rejected(kind: str) -> None:
    found = send(make_app(add_json), b'{"text": "a"}', **{"content-type": kind})
    assert (found.status_code, found.json()["detail"][:21]) == (415, "the body must be JSON")


def test_result_of_wrong_type_is_not_sent() -> None:
    found = send(make_app(add_json), b'{"text": "a"}', "/wrong")
    assert (found.status_code, found.text) == (500, "Internal Server Error")


def test_middlewares_and_body_limits_apply() -> None:
    app = make_app(add_json, max_body_size=30)

    async def guard(request: Request, call_next: Callable[[Request], Awaitable[Any]]) -> Any:
        if "x-key" not in request.headers:
            return PlainTextResponse("no key", 401)
        return await call_next(request)

    app.add_middleware(BaseHTTPMiddleware, dispatch=guard)
    assert send(app, b'{"text": "a"}').status_code == 401
    assert send(app, b'{"text": "a"}', **{"x-key": "1"}).status_code == 200
    long = json.dumps({"text": "a", "more": "a" * 30}).encode()
    assert send(app, long, **{"x-key": "1"}).status_code == 413


class Shouter(InferenceModel[str, str]):
    def infer(self, inputs: list[str]) -> list[str]:
        if "bad" in inputs:
            raise ValueError("bad")
        return [text.upper() for text in inputs]


@pytest.mark.slow
def test_an_error_of_the_model_gets_its_status() -> None:
    batcher = DynBatcher(Shouter)
    app = FastAPI(lifespan=batcher.lifespan)
    install_exception_handlers(app)

    async def shout(body: str) -> str:
        return await batcher.process_batched(body)

    app.router.routes.append(Route("/shout", JsonEndpoint(shout), methods=["POST"]))
    with TestClient(app) as client:
        assert client.post("/shout", json="a").json() == "A"
        failed = client.post("/shout", json="bad")
    assert (failed.status_code, failed.json()["code"]) == (500, "inference_failed")


# It fails closed.


def guard() -> None:
    raise HTTPException(401)


def guarded_app(app: FastAPI) -> None:
    app.router.dependencies.append(Depends(guard))
    add_json(app, "/predict", predict)


def guarded_inclusion(app: FastAPI) -> None:
    router = APIRouter()
    router.routes.append(Route("/predict", JsonEndpoint(predict), methods=["POST"]))
    app.include_router(router, dependencies=[Depends(guard)])


def guarded_router(app: FastAPI) -> None:
    outer, router = APIRouter(), APIRouter(dependencies=[Depends(guard)])
    router.routes.append(Route("/predict", JsonEndpoint(predict), methods=["POST"]))
    outer.include_router(router)
    app.include_router(outer)


def guarded_second_route(app: FastAPI) -> None:
    endpoint = JsonEndpoint(predict)
    app.router.routes.append(Route("/open", endpoint, methods=["POST"]))
    router = APIRouter(prefix="", dependencies=[Depends(guard)])
    router.routes.append(Route("/predict", endpoint, methods=["POST"]))
    app.include_router(router)


def plain_mount(app: FastAPI) -> None:
    route = Route("/predict", JsonEndpoint(predict), methods=["POST"])
    app.router.routes.append(Mount("", Router([route])))


@pytest.mark.parametrize(
    "build",
    [guarded_app, guarded_inclusion, guarded_router, guarded_second_route, plain_mount],
    ids=lambda build: build.__name__,
)
def test_endpoint_with_dependencies_is_rejected_with_remedy(
    build: Callable[[FastAPI], None],
) -> None:
    app = FastAPI()
    build(app)
    client = TestClient(app)
    for _ in range(2):
        with pytest.raises(
            ConfigurationError, match=r"runs no dependencies.*(use @app|app\.router)"
        ):
            client.post("/predict", json={"text": "a"})


def make_route() -> Route:
    return Route("/predict", JsonEndpoint(predict), methods=["POST"])


@pytest.mark.parametrize(
    ("guards_app", "mounted", "named"),
    [
        (False, lambda: guarded(FastAPI()), "the app mounted at '/v1' has dependencies="),
        (False, lambda: Router([make_route()]), "not of the mount at '/v1': app.router"),
        (True, lambda: Router([make_route()]), "and the app has dependencies="),
        (False, lambda: JsonEndpoint(predict), "not of the mount at '/v1': app.router"),
    ],
)
def test_the_error_names_the_mount(
    guards_app: bool, mounted: Callable[[], Any], named: str
) -> None:
    app = guarded(FastAPI()) if guards_app else FastAPI()
    app.mount("/v1", mounted())
    # What a proxy puts before the path is no mount.
    client = TestClient(app, root_path="/proxy")
    with pytest.raises(ConfigurationError, match=named):
        client.post("/proxy/v1/predict", json={"text": "a"})


def guarded(app: FastAPI) -> FastAPI:
    guarded_app(app)
    return app


def test_a_mounted_app_serves_its_own_routes() -> None:
    app, inner = FastAPI(), FastAPI()
    inner.router.routes.append(make_route())
    app.mount("/v1", inner)
    assert TestClient(app).post("/v1/predict", json={"text": "a"}).status_code == 200


async def two(body: Item, request: Request) -> Answer: ...  # type: ignore[empty-body]


async def default(body: Item = RIGHT) -> Answer: ...  # type: ignore[empty-body]


async def annotated(body: Annotated[Item, Depends(guard)]) -> Answer: ...  # type: ignore[empty-body]


async def query(body: Annotated[int, Query()]) -> Answer: ...  # type: ignore[empty-body]


async def embedded(body: Annotated[Item, Body(embed=True)]) -> Answer: ...  # type: ignore[empty-body]


async def nothing() -> Answer: ...  # type: ignore[empty-body]


async def whatever(*body: Item) -> Answer: ...  # type: ignore[empty-body]


async def request_alone(request: Request) -> Answer: ...  # type: ignore[empty-body]


async def no_result(body: Item): ...  # type: ignore[no-untyped-def]


async def no_body(body) -> Answer: ...  # type: ignore[no-untyped-def, empty-body]  # noqa: ANN001


async def response(body: Item) -> JSONResponse: ...  # type: ignore[empty-body]


async def unknown(body: "Nowhere") -> Answer: ...  # type: ignore[name-defined, empty-body]  # noqa: F821


def plain(body: Item) -> Answer: ...  # type: ignore[empty-body]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (two, "takes the body alone"),
        (default, "takes the body alone"),
        (nothing, "takes the body alone"),
        (whatever, "takes the body alone"),
        (annotated, "use @app.post"),
        (query, "use @app.post"),
        (embedded, "use @app.post"),
        (request_alone, "not a type of JSON values"),
        (response, "not a type of JSON values"),
        (no_result, "annotate the body and the result"),
        (no_body, "annotate the body and the result"),
        (unknown, "must be names of its module"),
        (plain, "write async def"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_unsupported_parameters_are_rejected_at_construction(function: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        JsonEndpoint(function)
