"""`fast_batcher.fastapi` in real apps: real workers, real servers, and every row of its table."""

import logging
import os
import re
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from time import monotonic
from typing import Annotated, Any

import httpx2
import pytest
from apps.models import BreaksOnLoad, Echo, Gated, Raises, TooDarkError
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, WebSocket
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.testclient import TestClient
from fastapi_versions import needs_included_routers
from models.stepped import Counter as Steps
from models.stepped import Plan
from programs import run_command
from servers import Gate, Server, ask_until, gate, post_and_stay, serve, thread, uvicorn_command
from starlette.testclient import WebSocketDenialResponse
from starlette.websockets import WebSocketDisconnect
from waits import LIMIT

from fast_batcher import DynBatcher, errors
from fast_batcher.fastapi import (
    ANSWERS,
    cancel_on_disconnect,
    combine_lifespans,
    dependency,
    error_responses,
    health_router,
    install_exception_handlers,
    request_timeout,
    status_router,
)
from fast_batcher.prometheus import instrument, metrics_router

__all__ = ["gate", "serve", "thread"]

ERROR_ID = re.compile(r"[0-9a-f]{16}")


def make_raising_app(error: Exception, **options: Any) -> FastAPI:
    app = FastAPI()
    install_exception_handlers(app, **options)

    @app.get("/")
    async def fail() -> None:
        raise error

    @app.websocket("/open")
    async def fail_open(websocket: WebSocket) -> None:
        await websocket.accept()
        raise error

    @app.websocket("/unaccepted")
    async def fail_before_accept() -> None:
        raise error

    @app.websocket("/closed")
    async def fail_after_close(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.close(3000, "done")
        raise error

    return app


def answer_to(error: Exception, **options: Any) -> httpx2.Response:
    response: httpx2.Response = TestClient(make_raising_app(error, **options)).get("/")
    return response


# --- the table -----------------------------------------------------------------------------------

# What is raised; status, code, Retry-After and detail of its answer.
_OURS, _MODELS = "internal error", "the model failed"
TABLE: list[tuple[errors.BatcherError, int, str, str | None, str]] = [
    (errors.BatcherError("canary"), 500, "internal_error", None, _OURS),
    (errors.ConfigurationError("canary"), 500, "configuration_error", None, _OURS),
    (errors.BatcherClosedError("it is over"), 503, "closed", "1", "it is over"),
    (errors.NotReadyError("starting"), 503, "not_ready", "1", "starting"),
    (errors.NotReadyError("s", retry_after=0.2), 503, "not_ready", "1", "s"),
    (errors.QueueFullError("full"), 503, "queue_full", "1", "full"),
    (errors.QueueFullError("full", retry_after=2.001), 503, "queue_full", "3", "full"),
    (errors.DeadlineExceededError("late"), 504, "deadline_exceeded", None, "late"),
    (errors.DeadlineExceededError("no", retry_after=4.0), 503, "deadline_unreachable", "4", "no"),
    (errors.DeadlineExceededError("no", retry_after=0.0), 503, "deadline_unreachable", "1", "no"),
    (errors.RequestTooLargeError("9 MiB"), 413, "request_too_large", None, "9 MiB"),
    (errors.UnsendableValueError("canary"), 500, "unsendable_value", None, _OURS),
    (errors.SlowReaderError("canary"), 500, "slow_reader", None, _OURS),
    (errors.InferenceError("canary"), 500, "inference_failed", None, _MODELS),
    (errors.OutputMismatchError("canary"), 500, "output_mismatch", None, _MODELS),
    (errors.InputError("too long"), 422, "invalid_input", None, "too long"),
    (errors.CollationError("c"), 500, "collation_failed", None, "the input does not fit the model"),
    (errors.WorkerError("hm"), 503, "worker_failed", "1", "hm"),
    (errors.WorkerStartupError("c"), 503, "worker_startup_failed", None, "the model did not load"),
    (errors.WorkerLostError("signal 9"), 503, "worker_lost", "1", "signal 9"),
    (errors.SessionLostError("it was idle"), 503, "session_lost", "1", "it was idle"),
    (errors.PoisonRequestError("canary"), 500, "poison_request", None, _MODELS),
    (errors.TransportError("garbage"), 503, "transport_failed", "1", "garbage"),
]


@pytest.mark.parametrize(
    ("error", "status", "code", "retry_after", "detail"), TABLE, ids=[row[2] for row in TABLE]
)
def test_each_error_has_its_answer(
    error: errors.BatcherError, status: int, code: str, retry_after: str | None, detail: str
) -> None:
    response = answer_to(error)
    assert response.status_code == status
    assert response.headers.get("Retry-After") == retry_after
    body = response.json()
    assert ERROR_ID.fullmatch(body.pop("error_id"))
    assert body.pop("retry_after", None) == getattr(error, "retry_after", None)
    assert body == {"detail": detail, "code": code}


def test_every_error_class_declares_its_answer() -> None:
    tree = {
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type)
        and issubclass(kind, errors.BatcherError)
        and not kind.__name__.startswith("_")
    }
    assert {kind for kind in tree if "_answer" in vars(kind)} == set(ANSWERS) == tree
    assert {type(row[0]) for row in TABLE} == tree


def test_queue_full_status_changes_only_queue_full_errors() -> None:
    """A class of the user has the answer of the most derived class with a row."""

    class CacheFullError(errors.QueueFullError):
        pass

    response = answer_to(CacheFullError("full", retry_after=7), queue_full_status=429)
    assert (response.status_code, response.headers["Retry-After"]) == (429, "7")
    assert response.json()["code"] == "queue_full"
    assert answer_to(errors.NotReadyError("starting"), queue_full_status=429).status_code == 503
    with pytest.raises(errors.ConfigurationError, match="queue_full_status=418: give 503 or 429"):
        install_exception_handlers(FastAPI(), queue_full_status=418)  # type: ignore[arg-type]


def test_installing_handlers_after_start_is_rejected() -> None:
    app = make_raising_app(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):  # which is not ours
        TestClient(app).get("/")
    with pytest.raises(errors.ConfigurationError, match="before the app starts"):
        install_exception_handlers(app)


# --- a client's own deadline ----------------------------------------------------------------------


def make_timeout_app(timeout: float | None = 30.0, **options: Any) -> TestClient:
    """An app that answers with the timeout that a call would have."""
    batcher: DynBatcher[Any, Any] = DynBatcher(Echo, timeout=timeout)
    app = FastAPI()
    get_timeout = request_timeout(batcher, **options)

    @app.get("/")
    async def show(timeout: Annotated[float | None, Depends(get_timeout)]) -> float | None:
        return timeout

    return TestClient(app)


@pytest.mark.parametrize(
    ("value", "timeout"),
    [("0.25", 0.25), ("2", 2.0), ("1e-3", 0.001), ("30", None), ("29.999", 29.999), ("31", None)],
)
def test_header_can_only_shorten_a_deadline(value: str, timeout: float | None) -> None:
    headers = {"X-Request-Timeout": value}
    response = make_timeout_app().get("/", headers=headers)
    assert (response.status_code, response.json()) == (200, timeout)
    # Without the header the default holds; where there is none, the header sets one.
    assert make_timeout_app().get("/").json() is None
    assert make_timeout_app(timeout=None).get("/", headers=headers).json() == float(value)


def test_the_header_may_have_another_name() -> None:
    client = make_timeout_app(header="Patience")
    assert client.get("/", headers={"patience": "0.5"}).json() == 0.5
    assert "Patience" in client.get("/openapi.json").text
    with pytest.raises(errors.ConfigurationError, match="header='a b': give letters"):
        make_timeout_app(header="a b")


@pytest.mark.parametrize(
    "value",
    [
        *("NaN", "nan", "-1", "-0.0", "0", "0.0", "1e300", "1e-400", "inf", "-inf", "Infinity"),
        *("", " ", "1_000", "0x10", "1,5", "+1", "9" * 20, "1" * 5000, "5s", "true", "soon"),
    ],
)
def test_an_absurd_deadline_is_a_400(value: str) -> None:
    """Fault F64."""
    response = make_timeout_app().get("/", headers={"X-Request-Timeout": value})
    assert response.status_code == 400
    assert response.json()["detail"].startswith("X-Request-Timeout: ")
    assert len(response.json()["detail"]) < 200


# --- what is logged, what is told -----------------------------------------------------------------


def failed_inference() -> errors.InferenceError:
    return errors.from_model(ValueError("canary"), "ValueError: canary", "in infer: canary")


def test_server_error_is_logged_with_its_id(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    response = answer_to(failed_inference())
    (record,) = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert (record.name, record.levelname) == ("fast_batcher.fastapi", "ERROR")
    assert response.json()["error_id"] in record.getMessage()
    assert "in infer: canary" in caplog.text
    assert response.status_code == 500
    assert "canary" not in response.text
    assert "canary" not in str(response.headers)
    # `debug=True` shows it in the body, and changes no other answer.
    detail = answer_to(failed_inference(), debug=True).json()["detail"]
    assert "ValueError: canary" in detail
    assert "in infer: canary" in detail
    assert answer_to(errors.QueueFullError("full"), debug=True).json()["detail"] == "full"


# --- what the model itself raised -----------------------------------------------------------------


@pytest.fixture(scope="module")
def raising_client() -> Iterator[TestClient]:
    """An app whose model raises what it is asked for, and which has handlers of its own."""
    batcher = DynBatcher(Raises)
    app = FastAPI(lifespan=batcher.lifespan)
    install_exception_handlers(app)

    @app.exception_handler(TooDarkError)
    def explain(_: Request, error: Exception) -> JSONResponse:
        # In a thread, as Starlette does with a plain function.
        return JSONResponse({"lux": str(error), "thread": threading.get_ident()}, 418)

    @app.exception_handler(errors.BatcherClosedError)
    async def say_goodbye(_: Request, __: Exception) -> JSONResponse:
        return JSONResponse("bye", 410)

    @app.get("/infer/{what}")
    async def infer(what: str) -> str:
        return await batcher.process_batched(what)

    @app.get("/closed")
    async def closed() -> None:
        raise errors.BatcherClosedError

    @app.get("/thread")
    async def thread() -> int:
        return threading.get_ident()

    with TestClient(app) as client:
        yield client


def test_model_errors_are_500_except_http_exceptions(raising_client: TestClient) -> None:
    response = raising_client.get("/infer/value")
    assert (response.status_code, response.json()["code"]) == (500, "inference_failed")
    assert "canary" not in response.text
    response = raising_client.get("/infer/http")
    assert (response.status_code, response.headers["X-Model"]) == (422, "tiny")
    assert response.json()["detail"] == {"field": "text"}
    assert response.json()["code"] == "inference_failed"
    # A 503 of the model says when to come back.
    response = raising_client.get("/infer/http positional")
    assert (response.status_code, response.headers["Retry-After"]) == (503, "1")
    assert response.json()["detail"] == "the cache is cold"
    # A header that the model has set is not replaced.
    original = HTTPException(429, "over your quota", {"retry-after": "60"})
    response = answer_to(errors.from_model(original, "", ""))
    assert response.headers.get_list("Retry-After") == ["60"]


def test_the_apps_own_handlers_are_used(raising_client: TestClient) -> None:
    response = raising_client.get("/infer/dark")
    assert (response.status_code, response.json()["lux"]) == (418, "lux below 3")
    assert response.json()["thread"] != raising_client.get("/thread").json()
    # For an error of ours too.
    response = raising_client.get("/closed")
    assert (response.status_code, response.json()) == (410, "bye")


@pytest.mark.parametrize(
    ("handled", "error", "status"),
    [
        (ValueError, errors.from_model(ValueError("x"), "", ""), 418),
        (LookupError, errors.from_model(KeyError("x"), "", ""), 418),
        (HTTPException, errors.from_model(HTTPException(404, "x"), "", ""), 418),
        # These are not the model's words: the base classes are there for `except`.
        (ValueError, errors.ConfigurationError("x"), 500),
        (TimeoutError, errors.DeadlineExceededError("x"), 504),
        (IndexError, errors.OutputMismatchError("x"), 500),
        (Exception, errors.from_model(ValueError("x"), "", ""), 500),
    ],
)
def test_app_handlers_apply_only_to_model_errors(
    handled: type[Exception], error: Exception, status: int
) -> None:
    app = make_raising_app(error)

    @app.exception_handler(handled)
    async def explain(_: Request, __: Exception) -> JSONResponse:
        return JSONResponse("mine", 418)

    assert TestClient(app).get("/").status_code == status


# --- WebSockets -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "close_code", "code"),
    [
        (errors.QueueFullError("full"), 1013, "queue_full"),
        (errors.SessionLostError("idle"), 1013, "session_lost"),
        (errors.DeadlineExceededError("late"), 1013, "deadline_exceeded"),
        (errors.RequestTooLargeError("9 MiB"), 1009, "request_too_large"),
        (errors.InferenceError("canary"), 1011, "inference_failed"),
    ],
)
def test_open_websocket_is_closed_with_code_and_reason(
    error: Exception, close_code: int, code: str
) -> None:
    with TestClient(make_raising_app(error)).websocket_connect("/open") as session:
        with pytest.raises(WebSocketDisconnect) as closed:
            session.receive_text()
        assert closed.value.code == close_code
        word, _, error_id = closed.value.reason.partition(" ")
        assert word == code
        assert ERROR_ID.fullmatch(error_id)


def test_unaccepted_websocket_gets_the_http_answer() -> None:
    app = make_raising_app(errors.NotReadyError("starting"))
    client = TestClient(app)
    with pytest.raises(WebSocketDenialResponse) as denied, client.websocket_connect("/unaccepted"):
        pass
    assert denied.value.status_code == 503
    assert denied.value.headers["Retry-After"] == "1"
    assert denied.value.json()["code"] == "not_ready"

    async def without_extensions(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "extensions": {}}, receive, send)

    # A server that cannot send one closes the WebSocket.
    client = TestClient(without_extensions)
    with pytest.raises(WebSocketDisconnect) as closed, client.websocket_connect("/unaccepted"):
        pass
    assert closed.value.code == 1013


def test_error_after_websocket_close_changes_nothing() -> None:
    client = TestClient(make_raising_app(errors.InferenceError("x")))
    with client.websocket_connect("/closed") as session:
        with pytest.raises(WebSocketDisconnect) as closed:
            session.receive_text()
        assert (closed.value.code, closed.value.reason) == (3000, "done")


def test_error_after_its_client_has_left_changes_nothing() -> None:
    app = make_raising_app(errors.SessionLostError("x"))

    async def with_a_client_that_leaves(scope: Any, receive: Any, send: Any) -> None:
        async def pass_on(message: Any) -> None:
            if message["type"] == "websocket.close":
                raise OSError("no client")  # as servers do
            await send(message)

        await app(scope, receive, pass_on)

    # It would raise what the app raises.
    with TestClient(with_a_client_that_leaves).websocket_connect("/open"):
        pass


# --- lifespans ------------------------------------------------------------------------------------


class Diary:
    """Lifespans that write down when they are entered and left."""

    def __init__(self) -> None:
        self.entries: list[str] = []

    def lifespan(
        self, name: str, state: dict[str, Any] | None = None, failure: Exception | None = None
    ) -> Any:
        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, Any] | None]:
            assert isinstance(app, FastAPI)
            self.entries.append(f"enter {name}")
            if failure is not None:
                raise failure
            try:
                yield state
            finally:
                self.entries.append(f"leave {name}")

        return lifespan


def test_combined_lifespans_exit_in_reverse() -> None:
    diary = Diary()
    combined = combine_lifespans(
        diary.lifespan("a", {"db": 1, "who": "a"}),
        diary.lifespan("b"),
        diary.lifespan("c", {"who": "c"}),
    )
    app = FastAPI(lifespan=combined)

    @app.get("/")
    async def state(request: Request) -> dict[str, Any]:
        return {"db": request.state.db, "who": request.state.who}

    with TestClient(app) as client:
        assert diary.entries == ["enter a", "enter b", "enter c"]
        assert client.get("/").json() == {"db": 1, "who": "c"}
    assert diary.entries[3:] == ["leave c", "leave b", "leave a"]


@pytest.mark.slow
def test_failed_start_closes_earlier_batchers() -> None:
    """Fault F56."""
    good, bad = DynBatcher(Echo), DynBatcher(BreaksOnLoad)
    app = FastAPI(lifespan=combine_lifespans(good.lifespan, bad.lifespan))
    with pytest.raises(errors.WorkerStartupError, match="no weights at"), TestClient(app):
        pass
    assert good.state == "closed"


# --- the dependency -------------------------------------------------------------------------------


def make_echo_app(batcher: DynBatcher[str, str], **options: Any) -> tuple[FastAPI, Any]:
    get_echo = dependency(batcher)
    app = FastAPI(**options)
    install_exception_handlers(app)
    app.include_router(health_router(batcher))

    @app.get("/echo/{text}")
    async def echo(text: str, model: Annotated[DynBatcher[str, str], Depends(get_echo)]) -> str:
        return await model.process_batched(text)

    @app.websocket("/ws")
    async def chat(
        websocket: WebSocket, model: Annotated[DynBatcher[str, str], Depends(get_echo)]
    ) -> None:
        await websocket.accept()
        async for text in websocket.iter_text():
            await websocket.send_text(await model.process_batched(text))

    return app, get_echo


class Shouting:
    """Stands in for a batcher where a user's test overrides the dependency."""

    async def process_batched(self, text: str) -> str:
        return text.upper()


@pytest.mark.slow
def test_dependency_serves_routes_and_websockets() -> None:
    batcher = DynBatcher(Echo)
    app, _ = make_echo_app(batcher, lifespan=batcher.lifespan, dependencies=[cancel_on_disconnect])
    left = threading.Event()

    @app.websocket("/until-it-leaves")
    async def stay(websocket: WebSocket) -> None:
        await websocket.accept()
        with pytest.raises(WebSocketDisconnect):
            await websocket.receive_text()
        left.set()

    with TestClient(app) as client:
        with client.websocket_connect("/ws") as session:
            session.send_text("over a socket")
            assert session.receive_text() == "over a socket"
        with client.websocket_connect("/until-it-leaves"):
            pass
        assert left.wait(LIMIT)
        assert client.get("/echo/hello").json() == "hello"


def test_dependency_is_overridable_and_hidden_from_openapi() -> None:
    app, get_echo = make_echo_app(DynBatcher(Echo, auto_open=False))
    (path,) = app.openapi()["paths"].values()  # the health routes are hidden
    assert [parameter["name"] for parameter in path["get"]["parameters"]] == ["text"]
    assert "requestBody" not in path["get"]
    app.dependency_overrides[get_echo] = Shouting
    client = TestClient(app)
    assert client.get("/echo/hello").json() == "HELLO"
    with client.websocket_connect("/ws") as session:
        session.send_text("hi")
        assert session.receive_text() == "HI"


# --- without a lifespan ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.parametrize("auto_open", [True, False])
async def test_first_request_without_lifespan_opens_batcher(auto_open: bool) -> None:
    batcher = DynBatcher(Echo, auto_open=auto_open)
    transport = httpx2.ASGITransport(make_echo_app(batcher)[0])
    async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
        response = await client.get("/echo/hello")
    await batcher.aclose()
    if auto_open:
        assert response.json() == "hello"
        return
    assert response.status_code == 503
    assert response.json()["code"] == "not_ready"
    assert "lifespan" in response.json()["detail"]
    assert "with TestClient(app)" in response.json()["detail"]


# --- OpenAPI --------------------------------------------------------------------------------------


def documented(responses: Any) -> dict[str, Any]:
    app = FastAPI(responses=responses)

    @app.get("/")
    async def home() -> None: ...

    found: dict[str, Any] = app.openapi()
    return found


@pytest.mark.slow
def test_client_without_its_block_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Each request has an event loop of its own, and the model is loaded for each."""
    batcher = DynBatcher(Echo)
    app = FastAPI(lifespan=batcher.lifespan)

    @app.get("/")
    async def ask() -> str:
        return await batcher.process_batched("a")

    client = TestClient(app)
    for count in (0, 1, 1):
        assert client.get("/").json() == "a"
        warnings = [text for text in caplog.messages if "with TestClient(app)" in text]
        assert len(warnings) == count
    batcher.stop()


def test_openapi_shows_exactly_the_statuses_that_were_named() -> None:
    responses = documented(error_responses(429, 413, 500))["paths"]["/"]["get"]["responses"]
    assert set(responses) == {"200", "429", "413", "500"}
    assert [status for status in responses if "headers" in responses[status]] == ["429"]
    statuses = {row[1] for row in TABLE} | {429}
    assert set(error_responses(*statuses)) == statuses
    with pytest.raises(errors.ConfigurationError, match="502"):
        error_responses(503, 502)


# --- health ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_health_follows_state_of_batcher(gate: Gate, thread: ThreadPoolExecutor) -> None:
    batcher = DynBatcher(Gated, model_args=(gate.port,), name="embedder")
    app = FastAPI(lifespan=batcher.lifespan(wait_ready=False))
    install_exception_handlers(app)
    app.include_router(health_router(batcher, prefix="/health"))

    @app.get("/pass/{port}")
    async def pass_gate(port: int) -> int:
        return await batcher.process_batched(port)

    def probe(client: TestClient, status: int) -> Any:
        """The answer of `/readyz`; `/livez` is 200 whatever it says."""
        assert client.get("/health/livez").status_code == 200
        response = client.get("/health/readyz")
        assert response.status_code == status
        assert response.headers["Cache-Control"] == "no-store"
        assert response.headers.get("Retry-After") == ("1" if status == 503 else None)
        body = response.json()
        assert body["status"] == ("ready" if status == 200 else "not ready")
        (report,) = body["batchers"]
        return report

    with TestClient(app) as client:
        gate.wait_for_visitor()  # the model is loading
        assert probe(client, 503) == {
            "name": "embedder",
            "state": "opening",
            "workers_ready": 0,
            "num_workers": 1,
            "waiting": 0,
            "start_error": None,
        }
        gate.let_on()
        assert client.get("/pass/0").status_code == 200  # it waits for the worker
        assert probe(client, 200)["workers_ready"] == 1

        running = thread.submit(client.get, f"/pass/{gate.port}")
        gate.wait_for_visitor()  # a request is in the model
        assert client.portal is not None
        client.portal.call(batcher.begin_drain)
        assert probe(client, 503)["state"] == "draining"
        refused = client.get("/pass/0")
        assert (refused.status_code, refused.json()["code"]) == (503, "closed")
        gate.let_on()
        assert running.result(LIMIT).status_code == 200


def ask_until_status(client: TestClient, path: str, status: int) -> Any:
    """Ask for a probe's answer until it has this status; nothing tells when it has."""
    deadline = monotonic() + LIMIT
    while (response := client.get(path)).status_code != status:
        assert monotonic() < deadline, response.text
    return response.json()


@pytest.mark.slow
def test_probes_report_failed_load_in_one_line() -> None:
    good, bad = DynBatcher(Echo), DynBatcher(BreaksOnLoad)
    app = FastAPI(lifespan=combine_lifespans(good.lifespan, bad.lifespan(wait_ready=False)))
    install_exception_handlers(app)
    app.include_router(health_router(good, bad, broken_timeout=0.2))
    app.include_router(health_router(good, bad, prefix="/default"))
    app.include_router(health_router(good, bad, broken_timeout=None, prefix="/patient"))

    @app.get("/")
    async def ask() -> str:
        return await bad.process_batched("x")

    with TestClient(app) as client:
        response = client.get("/")
        assert response.status_code == 503
        assert "weights" not in response.text
        bodies = [ask_until_status(client, "/livez", 503), client.get("/readyz").json()]
        assert [body["status"] for body in bodies] == ["broken", "not ready"]
        for ours, theirs in (body["batchers"] for body in bodies):
            assert (ours["name"], ours["state"], ours["start_error"]) == ("Echo", "open", None)
            assert (theirs["name"], theirs["state"]) == ("BreaksOnLoad", "broken")
            # Not what the model's constructor has raised: a probe may be public.
            assert theirs["start_error"] == "the model did not load"
        # It does not load until the batcher is opened again.
        for path in ("/", "/readyz"):
            response = client.get(path)
            assert (response.status_code, response.headers.get("Retry-After")) == (503, None)
        for prefix in ("/default", "/patient"):
            assert client.get(f"{prefix}/livez").status_code == 200
            assert client.get(f"{prefix}/readyz").status_code == 503


@pytest.mark.slow
def test_livez_fails_and_recovers_with_the_batcher(gate: Gate) -> None:
    batcher = DynBatcher(
        Gated, model_args=(gate.port,), idempotent=False, max_restarts=0, restart_window=0.1
    )
    app = FastAPI(lifespan=batcher.lifespan(wait_ready=False))
    app.include_router(health_router(batcher, broken_timeout=0))

    @app.get("/pid")
    async def pid() -> int:
        return await batcher.process_batched(0)

    with TestClient(app) as client:
        gate.wait_for_visitor()  # it loads its model
        assert client.get("/livez").status_code == 200
        gate.let_on()
        os.kill(client.get("/pid").json(), signal.SIGKILL)
        gate.wait_for_visitor()  # the next try loads its model
        response = client.get("/livez")
        assert (response.status_code, response.json()["status"]) == (503, "broken")
        gate.let_on()
        assert ask_until_status(client, "/livez", 200) == {"status": "alive"}


def test_probe_without_a_lifespan_says_what_to_do() -> None:
    """The batcher opens with its first call, which no load balancer sends before it is ready."""
    app = FastAPI()
    app.include_router(health_router(DynBatcher(Echo)))
    client = TestClient(app)
    for ask in (client.get, client.head):
        response = ask("/readyz")
        assert (response.status_code, response.headers["Cache-Control"]) == (503, "no-store")
        assert ask("/livez").status_code == 200
    (report,) = client.get("/readyz").json()["batchers"]
    assert report["state"] == "new"
    assert "FastAPI(lifespan=batcher.lifespan)" in report["waits_for"]


def test_health_router_options_are_checked() -> None:
    app = FastAPI()
    app.include_router(health_router(DynBatcher(Echo), include_in_schema=True))
    assert set(app.openapi()["paths"]) == {"/livez", "/readyz"}
    with pytest.raises(errors.ConfigurationError, match="health_router"):
        health_router()
    for seconds in (-1, float("nan")):
        with pytest.raises(errors.ConfigurationError, match=f"broken_timeout={seconds}"):
            health_router(DynBatcher(Echo), broken_timeout=seconds)


def named_alike() -> list[DynBatcher[Any, Any]]:
    return [DynBatcher(Echo), DynBatcher(Echo, max_batch_size=8)]


# Calls with a mistake, and a part of the message.
MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "health of a list": (lambda: health_router([DynBatcher(Echo)]), "list"),  # type: ignore[arg-type]
    "health of a class": (lambda: health_router(Echo), "health_router"),  # type: ignore[arg-type]
    "status of a list": (lambda: status_router([DynBatcher(Echo)]), "list"),  # type: ignore[arg-type]
    "health of one name": (lambda: health_router(*named_alike()), 'name="..."'),
    "status of one name": (lambda: status_router(*named_alike()), "two batchers have the name"),
    "dependency of a class": (lambda: dependency(Echo), "dependency"),  # type: ignore[arg-type]
    "timeout of an app": (lambda: request_timeout(FastAPI()), "FastAPI"),  # type: ignore[arg-type]
    "lifespan of a batcher": (lambda: combine_lifespans(DynBatcher(Echo)), "batcher.lifespan"),  # type: ignore[arg-type]
    "lifespan of nothing": (lambda: combine_lifespans(None), "NoneType"),  # type: ignore[arg-type]
    "handlers of a router": (lambda: install_exception_handlers(APIRouter()), "APIRouter"),  # type: ignore[arg-type]
    "metrics of a batcher": (lambda: metrics_router(DynBatcher(Echo)), "instrument(batcher)"),  # type: ignore[arg-type]
    "metrics for an app": (lambda: instrument(FastAPI()), "instrument"),  # type: ignore[arg-type]
    "metrics in an app": (lambda: instrument(DynBatcher(Echo), FastAPI()), "registry="),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_helpers_check_their_arguments(mistake: str) -> None:
    """At the call, and not at the first request."""
    make, part = MISTAKES[mistake]
    with pytest.raises(errors.ConfigurationError, match=re.escape(part)):
        make()


def test_one_batcher_may_be_named_twice() -> None:
    batcher = DynBatcher(Echo)
    health_router(batcher, batcher)


def test_batcher_in_place_of_its_lifespan_is_named() -> None:
    app = FastAPI(lifespan=DynBatcher(Echo))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"lifespan=batcher\.lifespan"), TestClient(app):
        pass


def test_batcher_in_place_of_a_dependency_is_an_error_at_once() -> None:
    app, batcher = FastAPI(), DynBatcher(Echo)
    with pytest.raises(Exception, match="DynBatcher"):

        @app.get("/")
        async def endpoint(found: Annotated[Any, Depends(batcher)]) -> None: ...


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("/returned", r"an endpoint returns StreamingResponse\(stream\)"),
        ("/not-awaited", r"must be awaited: `await batcher\.stream\(value\)`"),
    ],
)
def test_stream_in_the_wrong_place_names_the_remedy(path: str, remedy: str) -> None:
    batcher = DynBatcher(Steps, workers="threads")
    app = FastAPI(lifespan=batcher.lifespan)

    @app.get("/returned", response_model=None)
    async def returned() -> Any:
        return await batcher.stream(Plan("p", 2))

    @app.get("/not-awaited")
    async def not_awaited() -> StreamingResponse:
        return StreamingResponse(batcher.stream(Plan("p", 2)))  # type: ignore[arg-type]

    with TestClient(app) as client, pytest.raises((TypeError, ValueError), match=remedy):
        client.get(path)


# --- uvicorn --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("app", "error", "cause"),
    [
        ("apps.bad_setting:app", "ConfigurationError", "max_queue_size=-3"),
        ("apps.bad_model:app", "WorkerStartupError", "no weights at /models/tiny.bin"),
    ],
)
def test_uvicorn_stops_with_a_readable_message(app: str, error: str, cause: str) -> None:
    ended = run_command(uvicorn_command(app))
    assert ended.returncode != 0
    assert "Application startup complete" not in ended.stderr
    lines = ended.stderr.splitlines()
    # The server shows the error of the lifespan, and nothing of ours shows it again.
    assert len([line for line in lines if f"{error}: " in line and cause in line]) == 1


@pytest.mark.slow
def test_uvicorn_logs_each_failure_once(serve: Callable[..., Server]) -> None:
    server = serve("apps.failing:app")
    url = server.url()
    with httpx2.Client(base_url=url, timeout=LIMIT) as client:
        assert client.get("/failing/nothing").json() == "nothing"
        raised = client.get("/failing/raise")
        assert client.get("/failing/die").status_code == 503
        assert client.get("/failing/nothing").json() == "nothing"
        assert client.get("/broken").status_code == 503
        assert client.get("/livez").status_code == 200  # for now: see `broken_timeout`
    server.process.send_signal(signal.SIGTERM)
    server.wait_for_exit()
    lines = server.output.splitlines()
    ours = [line for line in lines if re.match("failing|broken|inference_failed", line)]
    assert [re.sub(r"pid \d+", "pid N", line) for line in sorted(ours)] == [
        "broken: worker 0 could not load BreaksOnLoad: FileNotFoundError: no weights at "
        "/models/tiny.bin; calls fail until it is opened again",
        "failing: worker 0 (pid N) ended with exit code 3; another takes its place",
        f"inference_failed, error id {raised.json()['error_id']}",
    ]
    # Each traceback leads into the model.
    assert re.search(r'/apps/failing\.py", line \d+, in infer\n', server.output)
    assert re.search(r'/apps/models\.py", line \d+, in __init__\n', server.output)
    assert lines.count("FileNotFoundError: no weights at /models/tiny.bin") == 1
    # In the worker, and where the endpoint had awaited it.
    assert lines.count("ValueError: the words of the model") == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "app",
    [
        "disconnect:app",
        "disconnect:wrapped",
        pytest.param("json_disconnect:app", marks=needs_included_routers),
    ],
)
def test_requests_of_disconnected_clients_are_removed(
    serve: Callable[..., Server], gate: Gate, app: str
) -> None:
    """Faults F43 and F44."""
    server = serve(f"apps.{app}")
    url = server.url()
    running = post_and_stay(url, "/pass", gate.port)
    gate.wait_for_visitor()
    queued = post_and_stay(url, "/pass", 0)
    staying = post_and_stay(url, "/pass", 0)
    ask_until(url, waiting=2)
    queued.close()
    ask_until(url, waiting=1, running=1, cancelled=1)
    running.close()
    ask_until(url, waiting=1, running=0, cancelled=2)
    gate.let_on()
    assert staying.recv(1000).startswith(b"HTTP/1.1 200")
    # Answers that come in time are not disturbed, nor is what follows on the same connection.
    with httpx2.Client(timeout=LIMIT) as client:
        for _ in range(20):
            assert client.post(f"{url}/pass", json={"gate": 0}).status_code == 200
    staying.close()
    # The one that went away in the queue was never computed.
    assert ask_until(url, running=0)["batches"] == 22
    server.process.send_signal(signal.SIGTERM)
    server.wait_for_exit()
    assert "Traceback" not in server.output


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["fastapi", "pydantic"])
def test_without_fastapi_the_import_names_the_extra(missing: str) -> None:
    """None in `sys.modules` is for the import system what is not installed."""
    code = f"import sys; sys.modules[{missing!r}] = None; import fast_batcher.fastapi"
    ended = run_command([sys.executable, "-c", code])
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: ")
    # Where another module is missing, FastAPI's own words say so.
    assert ("pip install 'fast_batcher[fastapi]'" in last) == (missing == "fastapi")
    assert missing in last
