"""Lean routes beside FastAPI's own: each request gets the same answer, and leaves the same behind.

The plain app and its lean twins are called over ASGI. To run the file with another FastAPI, make an
environment with that version (the oldest supported one is in `pyproject.toml`), pydantic, httpx2,
anyio, hypothesis and pytest, and run in the checkout, without the project's settings:

    PYTHONPATH=. /path/to/python -m pytest -c /dev/null --rootdir . --noconftest tests/test_lean.py
"""

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import pytest
from fastapi import (
    APIRouter,
    BackgroundTasks,
    Body,
    Cookie,
    Depends,
    FastAPI,
    Header,
    HTTPException,
    Query,
    Request,
    Response,
    routing,
)
from fastapi.exceptions import RequestValidationError, ResponseValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from fastapi.routing import APIRoute
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_serializer
from starlette.background import BackgroundTask
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Host, Match, Mount

from fast_batcher.errors import ConfigurationError
from fast_batcher.fastapi import LeanRoute, cancel_on_disconnect, lean

JSON = {"content-type": "application/json"}
# FastAPI's own request handling leaves this behind in the scope.
BY_FASTAPI = "fastapi_inner_astack"


class Item(BaseModel):
    text: str = Field(max_length=1000)
    number: float = 0.5


class Answer(BaseModel):
    text: str
    more: int | None = None


RIGHT = Answer(text="right")


class Aliased(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    inner: int = Field(alias="outer", ge=0)
    rest: list[float] = []


class Strange(BaseModel):
    word: str

    @field_validator("word")
    @classmethod
    def refuse(cls, word: str) -> str:
        if word == "value":
            raise ValueError("no such word")
        if word == "runtime":
            raise RuntimeError("the validator is broken")
        return word

    @model_serializer
    def write(self) -> dict[str, str]:
        if self.word == "unwritable":
            raise RuntimeError("the serializer is broken")
        return {"word": self.word}


class Own(Exception):
    """For an exception handler of the app's own."""


@dataclass
class Outcome:
    """What a client and a server see of one request."""

    messages: list[Any]
    error: str
    calls: list[Any]
    selected: tuple[Any, ...]
    by_fastapi: bool = field(compare=False)

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])


@dataclass
class Call:
    """One request: what a server would tell the app of it."""

    path: str
    body: bytes | list[Any] = b""
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=lambda: JSON)
    root_path: str = ""
    # Whether it is so ordinary that the lean route serves it.
    is_lean: bool = False

    def __repr__(self) -> str:
        return f"{self.method} {self.path} {self.body!r:.40} {self.headers}"


def ask(app: Any, call: Call, calls: list[Any] | None = None) -> Outcome:
    """Send one request and collect all that comes of it."""
    return asyncio.run(ask_here(app, call, calls))


async def ask_here(app: Any, call: Call, calls: list[Any] | None = None) -> Outcome:
    """Ask from a coroutine."""
    pieces = call.body if isinstance(call.body, list) else [call.body]
    incoming = [
        piece
        if isinstance(piece, Exception | dict)
        else {"type": "http.request", "body": piece, "more_body": index + 1 < len(pieces)}
        for index, piece in enumerate(pieces)
    ]
    messages: list[Any] = []

    async def receive() -> Any:
        message = incoming.pop(0) if incoming else {"type": "http.disconnect"}
        if isinstance(message, Exception):
            raise message
        return message

    async def send(message: Any) -> None:
        messages.append(message)

    headers = [
        (name.encode("latin-1"), text.encode("latin-1")) for name, text in call.headers.items()
    ]
    path, _, query = call.path.partition("?")
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": call.root_path,
        "headers": [(b"host", b"test"), *headers],
        "client": ("127.0.0.1", 1),
        "server": ("test", 80),
    }
    if calls is not None:
        calls.clear()
    error = ""
    try:
        await app(scope, receive, send)
    except Exception as raised:  # noqa: BLE001  it is what the server would log
        error = f"{type(raised)} {raised} {raised.__cause__!r} {raised.__context__!r}"
    selected = (
        getattr(scope.get("route"), "path", None),
        getattr(scope.get("endpoint"), "__name__", None),
        scope.get("path_params"),
        "router" in scope,
        sorted(scope.get("fastapi", {})),
    )
    return Outcome(messages, error, list(calls or []), selected, BY_FASTAPI in scope)


Twins = dict[str, tuple[Any, list[Any]]]


def make_twins(build: Callable[[FastAPI, APIRouter, list[Any]], Any], **options: Any) -> Twins:
    """Make one app three times: plain, with `lean(app)`, and with lean routes.

    Args:
        build: Gets an app, an empty router and a list for what the endpoints have seen; it may
            return another app to be asked.
        options: Of the app.
    """
    twins: Twins = {}
    for name in ("plain", "lean", "routes"):
        kind = LeanRoute if name == "routes" else APIRoute
        app, calls = FastAPI(**options), []  # type: ignore[var-annotated]
        app.router.route_class = kind
        outer = build(app, APIRouter(route_class=kind), calls)
        if name == "lean":
            lean(app)
        twins[name] = (outer or app, calls)
    return twins


def compare(twins: Twins, call: Call) -> Outcome:
    """Ask all twins, each twice, after a first request: that of a path takes FastAPI's way."""
    expected, *others = ask_all(twins, call)
    for outcome in others:
        assert outcome.by_fastapi == (expected.by_fastapi and not call.is_lean)
    return expected


def ask_all(twins: Twins, call: Call) -> list[Outcome]:
    """Ask all twins, and compare all that can be seen from outside."""
    expected = ask(twins["plain"][0], call, twins["plain"][1])
    outcomes = [expected]
    for name in ("lean", "routes"):
        app, calls = twins[name]
        ask(app, replace(call, body=b'{"text": "right"}'))
        for _ in range(2):
            outcomes.append(ask(app, call, calls))
            assert outcomes[-1] == expected, name
    return outcomes


def build_all(app: FastAPI, router: APIRouter, calls: list[Any]) -> None:  # noqa: C901  a list
    """One endpoint of each kind that the table of calls asks for."""

    @app.exception_handler(Own)
    async def answer_own(request: Request, error: Own) -> Response:
        body = await request.body()
        return JSONResponse({"own": str(error), "body": body.decode("latin-1")}, 418)

    @app.post("/echo")
    async def echo(item: Item) -> Answer:
        calls.append(item)
        return Answer(text=item.text)

    @app.post("/any")
    async def take_any(value: Annotated[Any, Body()]) -> Any:
        calls.append(repr(value))
        return value

    @app.post("/list")
    async def take_list(values: list[float]) -> list[float]:
        return values

    @app.post("/aliased", status_code=201, response_model_by_alias=False)
    async def alias(item: Aliased) -> Aliased:
        return item

    @app.post("/unset", response_model_exclude_unset=True)
    async def unset(item: Item) -> Answer:
        return Answer(text=item.text)

    @app.post("/none", response_model_exclude_none=True, response_model_exclude={"more"})
    async def none(item: Item) -> Answer:
        return Answer(text=item.text)

    @app.post("/include", response_model=Answer, response_model_include={"text"})
    async def include(item: Item) -> Any:
        return {"text": item.text, "secret": 1}

    @app.post("/filter")
    async def filter_out(item: Item) -> Answer:
        class More(Answer):
            secret: str = "secret"

        return More(text=item.text)

    @app.put("/methods")
    @app.patch("/methods")
    @app.head("/methods")
    async def methods(item: Item) -> Answer:
        return Answer(text=item.text)

    @app.post("/strange")
    async def strange(item: Strange) -> Strange:
        return item

    @app.post("/raises")
    async def fail(item: Item) -> Answer:
        calls.append(item.text)
        if item.text == "right":
            return RIGHT
        raise {
            "http": HTTPException(402, "pay", {"x-price": "5"}),
            "own": Own("mine"),
            "validation": RequestValidationError([{"loc": ("here",)}], body={"a": 1}),
            "response": ResponseValidationError([{"loc": ("there",)}]),
        }.get(item.text, ValueError("broken"))

    @app.post("/wrong")
    async def wrong(item: Item) -> Answer:
        return RIGHT if item.text == "right" else {"more": "x"}  # type: ignore[return-value]

    @app.post("/response")
    async def respond(item: Item) -> Answer:
        done = BackgroundTask(calls.append, "background")
        responses = {
            "text": PlainTextResponse("hello", 203, {"x-own": "1"}, background=done),
            "empty": Response(status_code=204),
            "stream": StreamingResponse(iter([b"a", b"b"]), media_type="text/csv"),
        }
        return responses.get(item.text, RIGHT)  # type: ignore[return-value]

    # What is FastAPI's turn.
    @app.post("/sync")
    def sync(item: Item) -> Answer:
        return Answer(text=item.text)

    @app.post("/untyped")
    async def untyped(item: Item):  # type: ignore[no-untyped-def]  # noqa: ANN202
        return {"text": item.text}

    @app.post("/two")
    async def two(item: Item, other: Answer) -> Answer:
        return other

    @app.post("/embedded")
    async def embedded(item: Annotated[Item, Body(embed=True)]) -> Answer:
        return Answer(text=item.text)

    @app.post("/optional")
    async def optional(item: Item | None = None) -> Answer:
        return Answer(text=item.text if item else "none")

    @app.post("/path/{number}")
    async def path(number: int, item: Item) -> Answer:
        return Answer(text=item.text, more=number)

    @app.post("/undeclared/{number}")
    async def undeclared(item: Item) -> Answer:
        return Answer(text=item.text)

    @app.post("/query")
    async def query(item: Item, q: Annotated[int, Query()] = 1) -> Answer:
        return Answer(text=item.text, more=q)

    @app.post("/header")
    async def header(item: Item, x_number: Annotated[int, Header()] = 1) -> Answer:
        return Answer(text=item.text, more=x_number)

    @app.post("/cookie")
    async def cookie(item: Item, c: Annotated[int, Cookie()] = 1) -> Answer:
        return Answer(text=item.text, more=c)

    @app.post("/request")
    async def request(item: Item, request: Request) -> Answer:
        return Answer(text=request.url.path)

    @app.post("/background")
    async def background(item: Item, tasks: BackgroundTasks) -> Answer:
        tasks.add_task(calls.append, "background")
        return Answer(text=item.text)

    @app.post("/headers")
    async def headers(item: Item, response: Response) -> Answer:
        response.headers["x-own"] = "1"
        response.status_code = 202
        return Answer(text=item.text)

    @app.post("/depends")
    async def depends(item: Item, host: Annotated[str, Depends(get_host)]) -> Answer:
        return Answer(text=host)

    @app.post("/class", response_class=JSONResponse)
    async def with_class(item: Item) -> Answer:
        return Answer(text=item.text)

    @app.post("/no-model", response_model=None)
    async def no_model(item: Item) -> Answer:
        return Answer(text=item.text)

    @app.post("/small", max_body_size=20)
    async def small(item: Item) -> Answer:
        return Answer(text=item.text)

    @app.get("/get")
    async def get() -> Answer:
        return Answer(text="got")

    @router.post("/echo")
    async def included(item: Item) -> Answer:
        return Answer(text=item.text)

    app.include_router(router, prefix="/v1", tags=["v1"])
    app.include_router(router, prefix="/guarded", dependencies=[Depends(guard)])
    app.include_router(router, prefix="/classed", default_response_class=JSONResponse)
    app.include_router(router, prefix="/cancelled", dependencies=[cancel_on_disconnect])


async def get_host(request: Request) -> str:
    return request.headers["host"]


async def guard(authorization: Annotated[str, Header()] = "") -> None:
    if authorization != "secret":
        raise HTTPException(401, "who are you?")


@pytest.fixture(scope="module")
def twins() -> Twins:
    return make_twins(build_all)


OK = b'{"text": "hello"}'
UTF16 = OK.decode().encode("utf-16")


def typed(content_type: str) -> dict[str, str]:
    return {"content-type": content_type}


def lean_calls() -> Iterator[Call]:
    yield Call("/echo", OK)
    yield Call("/echo", OK, headers={"content-type": "application/json; charset=utf-8"})
    yield Call("/echo", OK, headers={"accept": "text/html", **JSON, "cookie": "c=1"})
    yield Call("/echo", [OK[:3], OK[3:9], b"", OK[9:], b""])
    yield Call("/echo?q=1", OK)
    yield Call("/echo", OK, root_path="/behind/a/proxy")
    yield Call("/echo", OK.replace(b"hello", "höllö\u2028".encode()))
    yield Call("/echo", b'{"text": "\\ud83d\\ude00", "text": "last", "unknown": 1}')
    yield Call("/echo", b' \n\t{"text": "a"}\r\n')
    yield Call("/echo", b'{"text": "a", "number": "1.5"}')
    for value in (b"0", b"-0", b"-0.0", b"1e5", b"1E400", b"NaN", b"-Infinity", b"[]", b'""'):
        yield Call("/any", value)
    yield Call("/any", b"123456789012345678901234567890")
    yield Call("/any", b"0.1234567890123456789e-300")
    yield Call("/any", b"false")
    yield Call("/any", b'{"b": 1, "a": [true, null, {"": ""}], "b": 2}')
    yield Call("/list", b"[1, 2.5, 1e300]")
    yield Call("/list", b"[NaN]")
    yield Call("/aliased", b'{"outer": 3, "rest": [1]}')
    yield Call("/aliased", b'{"inner": 3}')
    for path in ("/unset", "/none", "/include", "/filter", "/optional", "/v1/echo"):
        yield Call(path, OK)
    for method in ("PUT", "PATCH", "HEAD"):
        yield Call("/methods", OK, method)
    yield Call("/cancelled/echo", OK)
    yield Call("/strange", b'{"word": "fine"}')
    yield Call("/strange", b'{"word": "unwritable"}')
    for text in (b"http", b"own", b"validation", b"response", b"any"):
        yield Call("/raises", b'{"text": "%s"}' % text)
    yield Call("/wrong", OK)
    yield Call("/wrong", OK, root_path="/behind")
    for text in (b"text", b"empty", b"stream", b"unknown"):
        yield Call("/response", b'{"text": "%s"}' % text)


def fastapi_calls() -> Iterator[Call]:
    for body in (
        *(b"", b"null", b"{}", b"[]", b"1", b"{", b'{"text": 1}', b'{"text": "a"} x', b'"text"'),
        *(b"{'text': 'a'}", b'{"text": "a",}', b'{"text": "a\x01"}', b'{"text": "\xff"}'),
        *(b'{"text": "\\ud800"}', b'{"text": "\xed\xa0\x80"}', b"\xef\xbb\xbf" + OK, UTF16),
        *(b"[" * 300 + b"]" * 300, b"[" * 100_000, b'{"text": "%s"}' % (b"a" * 2000)),
    ):
        yield Call("/echo", body)
    for body in (b"9" * 5000, b"01", b"1.", b"+1", b"Inf", b"nan", b"\x00", b"[1,]", b"null"):
        yield Call("/any", body)
    yield Call("/any", b"[" * 300 + b"]" * 300)
    for content_type in (
        *("", "text/plain", "application/jsonp", "application/x-www-form-urlencoded"),
        *("Application/JSON", "application/problem+json", " application/json", "application/ json"),
        *("application/json ;a=b", "application/json, text/plain", "json", "\xff", "text/json"),
    ):
        yield Call("/echo", OK, headers=typed(content_type))
    yield Call("/echo", OK, headers={})
    yield Call("/echo", b"", headers={})
    yield Call("/echo", [OK[:5], {"type": "http.disconnect"}])
    yield Call("/echo", [{"type": "http.disconnect"}])
    yield Call("/echo", [OK[:5], HTTPException(413, "too much")])
    yield Call("/echo", [OSError("gone")])
    for method in ("GET", "HEAD", "OPTIONS", "PUT", "DELETE", "post"):
        yield Call("/echo", OK, method)
    for path in ("/echo/", "/ech", "//echo", "/Echo", "/v1", "/v1/echo/"):
        yield Call(path, OK)
    yield Call("/aliased", b'{"outer": -1, "other": 3}')
    for word in (b"value", b"runtime"):
        yield Call("/strange", b'{"word": "%s"}' % word)
    for path in (
        *("/sync", "/untyped", "/two", "/embedded", "/path/3", "/path/x"),
        *("/undeclared/1", "/query?q=2", "/query?q=x", "/header", "/cookie", "/request"),
        *("/background", "/headers", "/depends", "/class", "/no-model", "/small"),
        *("/guarded/echo", "/classed/echo"),
    ):
        yield Call(path, OK)
    yield Call("/small", b'{"text": "more than 20 bytes"}')
    yield Call("/two", b'{"item": {"text": "a"}, "other": {"text": "b"}}')
    yield Call("/optional", b"")
    yield Call("/guarded/echo", OK, headers={**JSON, "authorization": "secret"})
    yield Call("/get", method="GET", headers={})
    yield Call("/openapi.json", method="GET", headers={})
    yield Call("/docs", method="GET", headers={})


@pytest.mark.parametrize("call", [*lean_calls()], ids=repr)
def test_an_ordinary_request_gets_the_answer_of_fastapi(twins: Twins, call: Call) -> None:
    call.is_lean = True
    compare(twins, call)


@pytest.mark.parametrize("call", [*fastapi_calls()], ids=repr)
def test_any_other_request_is_served_by_fastapi(twins: Twins, call: Call) -> None:
    compare(twins, call)


# Bodies and types beyond the table.

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
BODIES = (
    st.binary()
    | JSON_VALUES.map(lambda value: json.dumps(value).encode())
    | st.text().map(
        lambda text: json.dumps({"text": text}, ensure_ascii=False).encode(errors="surrogatepass")
    )
    | st.text('0123456789+-.eEINnafity []{},:"\\u', max_size=30).map(str.encode)
)
TYPES = st.sampled_from(["application/json"]) | st.text(
    st.characters(max_codepoint=255, exclude_categories=["Cc"])
).flatmap(lambda text: st.sampled_from([text, f"application/json;{text}", f"application/{text}"]))


@given(path=st.sampled_from(["/any", "/echo", "/list"]), body=BODIES, content_type=TYPES)
@settings(max_examples=200, deadline=None)
def test_whatever_the_body_the_answer_is_that_of_fastapi(
    path: str, body: bytes, content_type: str
) -> None:
    call = Call(path, body, headers=typed(content_type))
    ask_all(FUZZED, call)


FUZZED = make_twins(build_all)


# Guards, which no short way may pass by.


def add_echo(router: FastAPI | APIRouter, path: str = "/echo", **options: Any) -> None:
    @router.post(path, **options)
    async def echo(item: Item) -> Answer:
        return Answer(text=item.text)


GUARDS = [Depends(guard)]


def on_the_route(app: FastAPI, router: APIRouter, _: Any) -> None:
    add_echo(app, dependencies=GUARDS)


def on_the_router(app: FastAPI, _: APIRouter, __: Any) -> None:
    guarded = APIRouter(route_class=app.router.route_class, dependencies=GUARDS)
    add_echo(guarded)
    app.include_router(guarded)


def on_the_inclusion(app: FastAPI, router: APIRouter, _: Any) -> None:
    add_echo(router)
    app.include_router(router, dependencies=GUARDS)


def on_an_outer_inclusion(app: FastAPI, router: APIRouter, _: Any) -> None:
    add_echo(router)
    middle = APIRouter()
    middle.include_router(router)
    app.include_router(middle, dependencies=GUARDS)


def on_the_middle_router(app: FastAPI, router: APIRouter, _: Any) -> None:
    add_echo(router)
    middle = APIRouter(dependencies=GUARDS)
    middle.include_router(router)
    app.include_router(middle)


def on_one_inclusion_of_two(app: FastAPI, router: APIRouter, _: Any) -> None:
    add_echo(router)
    app.include_router(router, prefix="/free")
    app.include_router(router, dependencies=GUARDS)


def on_a_mounted_app(app: FastAPI, router: APIRouter, _: Any) -> None:
    inner = FastAPI(dependencies=GUARDS)
    add_echo(inner)
    app.mount("", inner)


def in_a_middleware(app: FastAPI, router: APIRouter, _: Any) -> None:
    add_middleware(app)
    add_echo(app)


def in_a_middleware_of_a_mount(app: FastAPI, router: APIRouter, _: Any) -> None:
    inner = FastAPI()
    inner.router.route_class = app.router.route_class
    add_middleware(inner)
    add_echo(inner)
    app.mount("", inner)


def protect(app: Any) -> Any:
    async def protected(scope: Any, receive: Any, send: Any) -> None:
        is_allowed = (b"authorization", b"secret") in scope["headers"]
        await (app if is_allowed else Response(status_code=401))(scope, receive, send)

    return protected


def on_a_mounted_router(app: FastAPI, router: APIRouter, _: Any) -> None:
    add_echo(router)
    app.router.routes.append(Mount("", app=protect(router)))


def on_a_mount_of_a_route_of_the_app(app: FastAPI, router: APIRouter, _: Any) -> None:
    add_echo(app)
    mounted = APIRouter(routes=[app.routes[-1]])
    app.router.routes.insert(0, Mount("", app=protect(mounted)))


def in_a_router_of_the_app(app: FastAPI, router: APIRouter, _: Any) -> None:
    class Guarded(APIRouter):
        async def handle(self, scope: Any, receive: Any, send: Any) -> None:
            if (b"authorization", b"secret") not in scope["headers"]:
                raise HTTPException(401)
            await super().handle(scope, receive, send)

    guarded = Guarded(route_class=app.router.route_class)
    add_echo(guarded)
    app.include_router(guarded)


def in_a_route_class_of_the_app(app: FastAPI, router: APIRouter, _: Any) -> None:
    class Guarded(app.router.route_class):  # type: ignore[name-defined, misc]
        async def handle(self, scope: Any, receive: Any, send: Any) -> None:
            if (b"authorization", b"secret") not in scope["headers"]:
                raise HTTPException(401)
            await super().handle(scope, receive, send)

    app.router.route_class = Guarded
    add_echo(app)


def add_middleware(app: FastAPI) -> None:
    @app.middleware("http")
    async def protect(request: Request, call_next: Any) -> Any:
        if request.headers.get("authorization") != "secret":
            return Response(status_code=401)
        return await call_next(request)


@pytest.mark.parametrize(
    "build",
    [
        on_the_route,
        on_the_router,
        on_the_inclusion,
        on_an_outer_inclusion,
        on_the_middle_router,
        on_one_inclusion_of_two,
        on_a_mounted_app,
        in_a_middleware,
        in_a_router_of_the_app,
        in_a_route_class_of_the_app,
        in_a_middleware_of_a_mount,
        on_a_mounted_router,
        on_a_mount_of_a_route_of_the_app,
    ],
)
def test_a_guard_is_never_passed_by(build: Any) -> None:
    twins = make_twins(build)
    allowed = Call("/echo", OK, headers={**JSON, "authorization": "secret"})
    for app, _ in twins.values():
        ask(app, Call("/free/echo", OK))
        for _ in range(3):
            assert ask(app, allowed).status == 200
            assert ask(app, Call("/echo", OK)).status == 401


def test_a_guard_of_the_app_is_never_passed_by() -> None:
    twins = make_twins(lambda app, *_: add_echo(app), dependencies=GUARDS)
    assert compare(twins, Call("/echo", OK)).status == 401


def test_a_route_that_is_put_before_another_takes_its_requests() -> None:
    def insert(app: FastAPI) -> None:
        add_echo(app, dependencies=GUARDS)
        app.router.routes.insert(0, app.router.routes.pop())

    twins = make_twins(lambda app, *_: add_echo(app))
    assert compare(twins, Call("/echo", OK, is_lean=True)).status == 200
    for app, _ in twins.values():
        insert(app)
    assert compare(twins, Call("/echo", OK)).status == 401


def test_a_route_that_an_included_router_gets_later_takes_its_requests() -> None:
    routers: list[APIRouter] = []

    def build(app: FastAPI, router: APIRouter, _: Any) -> None:
        routers.append(router)
        app.include_router(router)
        add_echo(app)

    twins = make_twins(build)
    assert compare(twins, Call("/echo", OK, is_lean=True)).status == 200
    for router in routers:
        add_echo(router, dependencies=GUARDS)
    assert compare(twins, Call("/echo", OK)).status == 401


def test_a_path_is_not_learned_from_a_request_during_which_the_routes_change() -> None:
    app = FastAPI()

    @app.post("/echo")
    async def echo(item: Item) -> Answer:
        add_echo(app, dependencies=GUARDS)
        app.router.routes.insert(0, app.router.routes.pop())
        await ask_here(app, Call("/other", OK))  # the first to meet the new routes
        return RIGHT

    lean(app)
    assert ask(app, Call("/echo", OK)).status == 200
    assert ask(app, Call("/echo", OK)).status == 401


def test_an_endpoint_that_gets_a_dependency_later_is_served_with_it() -> None:
    twins = make_twins(lambda app, *_: add_echo(app))
    assert compare(twins, Call("/echo", OK, is_lean=True)).status == 200
    for app, _ in twins.values():
        guarded: Any = FastAPI()
        add_echo(guarded, dependencies=GUARDS)
        app.routes[-1].dependant.dependencies += guarded.routes[-1].dependant.dependencies
    assert compare(twins, Call("/echo", OK)).status == 401


# What else an app may be.


def ask_echo(
    build: Callable[..., Any], *, is_lean: bool, path: str = "/echo", **options: Any
) -> Outcome:
    return compare(make_twins(build, **options), Call(path, OK, is_lean=is_lean))


def test_a_limit_on_the_bodies_of_an_app_holds() -> None:
    def build(app: FastAPI, router: APIRouter, _: Any) -> None:
        add_echo(app)
        add_echo(router, "/included")
        add_echo(router, "/smaller", max_body_size=10)
        app.include_router(router)

    twins = make_twins(build, max_body_size=20)
    for path in ("/echo", "/included"):
        assert compare(twins, Call(path, OK, is_lean=True)).status == 200
        refused = Call(path, [OK, b" " * 20])
        assert {outcome.status for outcome in ask_all(twins, refused)} == {413}
    assert compare(twins, Call("/smaller", OK)).status == 413


def test_cors_and_other_middlewares_see_every_request() -> None:
    def build(app: FastAPI, router: APIRouter, _: Any) -> None:
        app.add_middleware(BaseHTTPMiddleware, dispatch=mark)
        app.add_middleware(CORSMiddleware, allow_origins=["https://a"], allow_methods=["POST"])
        add_echo(app)

    async def mark(request: Request, call_next: Any) -> Any:
        response = await call_next(request)
        response.headers["x-route"] = request.scope["route"].path
        return response

    twins = make_twins(build)
    headers = {**JSON, "origin": "https://a"}
    outcome = compare(twins, Call("/echo", OK, headers=headers, is_lean=True))
    assert (b"access-control-allow-origin", b"https://a") in outcome.messages[0]["headers"]
    assert (b"x-route", b"/echo") in outcome.messages[0]["headers"]
    # A preflight request reaches no route, and no middleware further in.
    headers["access-control-request-method"] = "POST"
    preflight = Call("/echo", method="OPTIONS", headers=headers)
    for app, _ in twins.values():
        assert ask(app, preflight).status == 200


@pytest.mark.parametrize("path", ["/sub/echo", "/tenant/echo"])
def test_a_mounted_app_may_be_lean_too(path: str) -> None:
    def build(app: FastAPI, router: APIRouter, _: Any) -> Any:
        add_echo(app)
        outer = FastAPI()
        outer.mount("/sub" if path == "/sub/echo" else "/{name}", app)
        lean(outer)
        return outer

    ask_echo(build, path=path, is_lean=True)


def test_a_route_after_one_that_depends_on_a_header_is_left_to_fastapi() -> None:
    def build(app: FastAPI, router: APIRouter, _: Any) -> None:
        app.router.routes.append(Host("other", app=PlainTextResponse("other")))
        add_echo(app)

    ask_echo(build, is_lean=False)


def test_a_route_after_one_of_an_unknown_kind_is_left_to_fastapi() -> None:
    class ByHeader(APIRoute):
        def matches(self, scope: Any) -> Any:
            by_header = any(name == b"x-other" for name, _ in scope["headers"])
            return super().matches(scope) if by_header else (Match.NONE, {})

    def build(app: FastAPI, router: APIRouter, _: Any) -> None:
        app.router.routes.append(ByHeader("/echo", guard, methods=["POST"]))
        add_echo(app)

    ask_echo(build, is_lean=False)


def test_a_route_class_of_the_app_is_left_to_fastapi() -> None:
    class Timed(LeanRoute):
        def get_route_handler(self) -> Any:
            handler = super().get_route_handler()

            async def handle(request: Request) -> Response:
                response = await handler(request)
                response.headers["x-timed"] = "yes"
                return response

            return handle

    def build(app: FastAPI, router: APIRouter, _: Any) -> None:
        app.router.route_class = Timed
        add_echo(app)

    outcome = ask_echo(build, is_lean=False)
    assert (b"x-timed", b"yes") in outcome.messages[0]["headers"]


def test_an_override_of_a_dependency_changes_nothing_for_endpoints_without() -> None:
    def build(app: FastAPI, router: APIRouter, _: Any) -> None:
        add_echo(app)
        add_echo(router, dependencies=GUARDS)
        app.include_router(router, prefix="/v1")
        app.dependency_overrides[guard] = lambda: None

    twins = make_twins(build)
    assert compare(twins, Call("/echo", OK, is_lean=True)).status == 200
    assert compare(twins, Call("/v1/echo", OK)).status == 200


def test_an_override_of_the_disconnect_holds_in_its_place() -> None:
    def build(app: FastAPI, _router: APIRouter, _calls: Any) -> None:
        add_echo(app, dependencies=[cancel_on_disconnect])
        app.dependency_overrides[cancel_on_disconnect.dependency] = refuse

    async def refuse() -> None:
        raise HTTPException(418, "no")

    assert compare(make_twins(build), Call("/echo", OK)).status == 418


def test_content_without_a_type_is_judged_by_fastapi() -> None:
    for is_strict in (False, True):
        twins = make_twins(lambda app, *_: add_echo(app), strict_content_type=is_strict)
        assert compare(twins, Call("/echo", OK, headers={})).status == (422 if is_strict else 200)


def test_a_default_response_class_is_left_to_fastapi() -> None:
    ask_echo(lambda app, *_: add_echo(app), is_lean=False, default_response_class=JSONResponse)


@pytest.mark.parametrize(
    "name",
    ["get_request_handler", "run_endpoint_function", "serialize_response", "solve_dependencies"],
)
def test_a_program_that_observes_fastapi_sees_every_request(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(routing, name)
    monkeypatch.setattr(routing, name, lambda **options: original(**options))
    ask_echo(lambda app, *_: add_echo(app), is_lean=False)


def test_a_request_that_is_traced_is_served_by_fastapi() -> None:
    """FastAPI traces its own steps: with a tracer it is its turn."""
    pytest.importorskip("fastapi.telemetry")

    class Recording:
        started: list[str]

        def __init__(self) -> None:
            self.started = []

    def traced(app: Any) -> Any:
        async def outer(scope: Any, receive: Any, send: Any) -> None:
            scope["fastapi.telemetry"] = Recording()  # as FastAPI's telemetry does, if it is on
            await app(scope, receive, send)

        return outer

    def build(app: FastAPI, router: APIRouter, _: Any) -> Any:
        add_echo(app)
        return traced(app)

    ask_echo(build, is_lean=False)


def test_a_request_that_telemetry_excludes_stays_lean() -> None:
    def build(app: FastAPI, router: APIRouter, _: Any) -> Any:
        async def outer(scope: Any, receive: Any, send: Any) -> None:
            scope["fastapi.telemetry"] = None
            await app(scope, receive, send)

        add_echo(app)
        return outer

    ask_echo(build, is_lean=True)


def test_the_documentation_of_an_app_is_the_same() -> None:
    twins = make_twins(build_all)
    documents = [app.openapi() for app, _ in twins.values()]
    assert documents[0] == documents[1] == documents[2]


def test_lean_twice_is_as_once() -> None:
    app = FastAPI()
    add_echo(app)
    lean(app)
    once = app.router.middleware_stack
    lean(app)
    assert app.router.middleware_stack is once


def test_what_is_around_the_router_of_an_app_is_not_passed_by() -> None:
    app = FastAPI()
    add_echo(app)
    inner = app.router.middleware_stack

    async def around(scope: Any, receive: Any, send: Any) -> None:
        await inner(scope, receive, send)

    app.router.middleware_stack = around
    with pytest.raises(ConfigurationError, match=r"call lean\(app\) before"):
        lean(app)


def test_an_app_in_the_place_of_that_of_a_route_may_be_any_object() -> None:
    class Replaced:
        __slots__ = ()
        __hash__ = None  # type: ignore[assignment]

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await PlainTextResponse("replaced")(scope, receive, send)

    def build(app: FastAPI, router: APIRouter, _: Any) -> None:
        add_echo(app)
        route: Any = app.routes[-1]
        route.app = Replaced()

    for outcome in ask_all(make_twins(build), Call("/echo", OK)):
        assert outcome.messages[1]["body"] == b"replaced"


def test_clients_cannot_fill_the_memory_with_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy may let them choose the root path."""
    app = FastAPI()
    add_echo(app)
    lean(app)
    monkeypatch.setattr("fast_batcher.fastapi.lean_route.MAX_LEARNED_PATHS", 2)
    outcomes = [
        ask(app, Call("/echo", OK, root_path=root_path))
        for root_path in ("/a", "/b", "/c", "/a", "/b", "/c")
    ]
    assert [outcome.by_fastapi for outcome in outcomes] == [True] * 3 + [False, False, True]


def test_a_cancelled_request_ends_as_one() -> None:
    """A server that shuts down cancels; no handler may answer in its place."""
    for kind in (APIRoute, LeanRoute):
        app = FastAPI()
        app.router.route_class = kind

        @app.post("/echo")
        async def echo(item: Item) -> Answer:
            raise asyncio.CancelledError

        with pytest.raises(asyncio.CancelledError):
            ask(app, Call("/echo", OK))
