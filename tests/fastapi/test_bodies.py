"""Faults F67 and F68: bodies that are too large, too slow or malformed; `read_body`, `read_array`.

On raw sockets to servers, then of every kind.
"""

import asyncio
import socket
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Annotated, Any

import numpy as np
import pytest
from apps.bodies import MAX_BYTES, SHAPE
from fastapi import Depends, FastAPI
from fastapi.testclient import TestClient
from fastapi_versions import needs_body_limit
from models.large import Digests, digest
from raw_http import chunk, connect, head
from sender_harness import opened, slabs_of
from servers import Gate, Server, ask_until, gate, get, post, serve
from starlette.requests import Request
from starlette.types import Message
from waits import LIMIT

from fast_batcher import ConfigurationError
from fast_batcher.fastapi import (
    BodyError,
    LimitBody,
    install_exception_handlers,
    read_array,
    read_body,
)

__all__ = ["gate", "serve"]

ARRAY = np.arange(60_000, dtype=np.float32).reshape(SHAPE)


def start(app: str) -> Iterator[str]:
    server = Server(app, "--no-access-log")  # this process does not read it meanwhile
    yield server.url()
    server.close()


# --- limits of a whole app ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def limited() -> Iterator[str]:
    """The URL of an app whose bodies have 100,000 bytes and one second."""
    yield from start("apps.limited:app")


def begin(client: socket.socket, line: str) -> None:
    client.sendall(head("/length", "Content-Type: application/json", line))


def status_of(client: socket.socket) -> int:
    return int(client.recv(1000).split()[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "pieces", "status"),
    [
        pytest.param(f"Content-Length: {2**31}", [], 413, marks=needs_body_limit),
        pytest.param(
            "Transfer-Encoding: chunked", [chunk(b"x" * 10_000)] * 11, 413, marks=needs_body_limit
        ),
        ("Content-Length: 1000", [b"{"], 408),
    ],
    ids=["announces 2 GB", "without a length", "byte by byte"],
)
def test_body_is_rejected_at_first_excess(
    limited: str, line: str, pieces: list[bytes], status: int
) -> None:
    """Fault F67."""
    with connect(limited) as client:
        begin(client, line)
        for piece in pieces:
            client.sendall(piece)
        assert status_of(client) == status


BODIES: dict[str, tuple[bytes, dict[str, str], set[int]]] = {
    "deep": (b"[" * 90_000, {}, {400, 422}),
    "NaN": (b'{"text": NaN}', {}, {422}),
    "Infinity": (b'{"text": Infinity}', {}, {422}),
    "duplicate keys": (b'{"text": 5, "text": "last"}', {}, {200}),
    # JSON has such texts, and so has Python; UTF-8 does not.
    "lone surrogate": (b'{"text": "\\ud800"}', {}, {200}),
    "lone surrogate elsewhere": (b'{"\\ud800": 1}', {}, {422}),
    "not UTF-8": (b'{"text": "\xff"}', {}, {400, 422}),
    "gzip bomb": (bytes.fromhex("1f8b08") + bytes(1000), {"Content-Encoding": "gzip"}, {400, 422}),
    "wrong content type": (b'{"text": "x"}', {"Content-Type": "text/plain"}, {415, 422}),
    "no JSON": (b"text", {}, {400, 422}),
    "empty": (b"", {}, {400, 422}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BODIES)
def test_malformed_body_is_a_client_error(limited: str, name: str) -> None:
    """Fault F67."""
    body, headers, statuses = BODIES[name]
    sent = {"Content-Type": "application/json", **headers}
    response = post(f"{limited}/length", content=body, headers=sent)
    assert response.status_code in statuses, response.text
    assert post(f"{limited}/length", json={"text": "fine"}).json() == len("fine")


@pytest.mark.slow
def test_thousand_slow_clients_block_no_other(limited: str) -> None:
    """Fault F68."""
    clients = [connect(limited) for _ in range(1000)]
    try:
        for client in clients:
            begin(client, "Content-Length: 1000")
        # One socket for each of us and the server; others are served meanwhile.
        started = monotonic()
        fine = post(f"{limited}/length", json={"text": "fine"})
        assert fine.json() == len("fine")
        assert monotonic() - started < LIMIT
        assert status_of(clients[-1]) == 408
    finally:
        for client in clients:
            client.close()


@needs_body_limit
def test_body_limits_leave_body_unchanged() -> None:
    app = FastAPI(max_body_size=100)
    app.add_middleware(LimitBody)

    @app.post("/length")
    async def length(request: Request) -> int:
        return len(await request.body())

    client = TestClient(app)
    for size in (0, 99, 100):
        assert client.post("/length", content=b"x" * size).json() == size
        assert client.post("/length", content=iter([b"x"] * size)).json() == size
    for too_large in (b"x" * 101, iter([b"x"] * 101)):
        assert client.post("/length", content=too_large).status_code == 413


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan")])
def test_a_limit_of_no_time_is_refused(timeout: float) -> None:
    with pytest.raises(ConfigurationError, match=f"timeout={timeout}"):
        LimitBody(FastAPI(), timeout=timeout)


# --- endpoints that read their bodies themselves --------------------------------------------------


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The URL of an app that reads bytes and arrays."""
    yield from start("apps.bodies:app")


def answer_of(client: socket.socket) -> tuple[int, str]:
    """Status, and all the rest until the server closes or has sent the body."""
    text = client.recv(10_000).decode()
    # Head and body may be two segments.
    while "\r\n\r\n" not in text or text.endswith("\r\n\r\n"):
        more = client.recv(10_000).decode()
        assert more, text
        text += more
    return int(text.split()[1]), text


def next_refused(url: str) -> int:
    return int(get(f"{url}/refused").json())


def assert_serves(url: str) -> None:
    assert post(f"{url}/bytes", content=b"fine").json() == 4


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/bytes", "/array"])
def test_too_large_content_length_is_rejected_unread(url: str, path: str) -> None:
    with connect(url) as client:
        client.sendall(head(path, f"Content-Length: {2**40}", "Expect: 100-continue"))
        status, text = answer_of(client)
    assert (status, next_refused(url)) == (413, 413)
    assert '"code":"request_too_large"' in text
    assert "connection: close" in text.lower()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "most", "wanted"), [("/bytes", MAX_BYTES, 413), ("/array", ARRAY.nbytes, 422)]
)
def test_body_of_unknown_length_is_limited(url: str, path: str, most: int, wanted: int) -> None:
    with connect(url) as client:
        client.sendall(head(path, "Transfer-Encoding: chunked"))
        for _ in range(10):
            client.sendall(chunk(bytes(most // 10)))
        # It has no end: who waits for that does not answer. And nothing is sent beyond: who closes
        # a connection with something unread resets it.
        client.sendall(chunk(b"x"))
        status, text = answer_of(client)
    assert (status, next_refused(url)) == (wanted, wanted)
    assert "connection: close" in text.lower()


@pytest.mark.slow
@pytest.mark.parametrize(
    "length", ["-1", "1e3", "abc", "0x10", "9" * 30, "9" * 5000, "1, 2", "\xb2"]
)
def test_absurd_content_length_is_a_client_error(url: str, length: str) -> None:
    with connect(url) as client:
        client.sendall(f"POST /bytes HTTP/1.1\r\nHost: test\r\nContent-Length: {length}".encode())
        client.sendall(b"\r\n\r\n")
        assert answer_of(client)[0] in (400, 413, 431)
    assert_serves(url)


@pytest.mark.slow
def test_length_error_names_both_lengths(url: str) -> None:
    with connect(url) as client:
        client.sendall(head("/array", "Content-Length: 239999"))
        status, text = answer_of(client)
    assert status == 422
    assert "dtype float32 has 240000 bytes, the body 239999" in text
    assert '"code":"wrong_length"' in text
    assert "connection: close" in text.lower()
    with connect(url) as client:
        client.sendall(head("/array", "Transfer-Encoding: chunked"))
        client.sendall(chunk(bytes(1000)) + chunk(bytes(234)) + b"0\r\n\r\n")
        status, text = answer_of(client)
        assert status == 422
        assert "240000 bytes, the body 1234" in text
        # It has been read to its end, so the connection can go on.
        client.sendall(head("/bytes", "Content-Length: 4") + b"fine")
        assert answer_of(client)[0] == 200
    assert (next_refused(url), next_refused(url)) == (422, 422)


@pytest.mark.slow
def test_body_is_read_before_disconnect_is_awaited(url: str, gate: Gate) -> None:
    port = str(gate.port).encode()
    with connect(url) as client:
        client.sendall(head("/pass", f"Content-Length: {len(port)}"))
        # One piece after the other: who waits for the disconnect alone would swallow them.
        for digit in port:
            client.sendall(bytes([digit]))
        gate.wait_for_visitor()
    ask_until(url, running=0, cancelled=1)
    gate.let_on()
    assert post(f"{url}/pass", content=b"0").status_code == 200


@pytest.mark.slow
def test_body_errors_are_not_in_server_log(serve: Callable[..., Server]) -> None:
    server = serve("apps.bodies:app", "--no-access-log")
    url = server.url()
    with connect(url) as client:
        client.sendall(head("/bytes", "Content-Length: 1000") + b"x")
    assert next_refused(url) == 499
    post(f"{url}/array", content=b"short")
    server.process.terminate()
    server.wait_for_exit()
    assert "Traceback" not in server.output
    assert "ERROR" not in server.output


# --- what is read, and no more --------------------------------------------------------------------


class Sent:
    """A request whose body is handed over in these pieces, and how many were asked for."""

    def __init__(self, *pieces: bytes, length: str | None = None) -> None:
        self.asked = 0
        self._pieces = list(pieces)
        lines = [] if length is None else [(b"content-length", length.encode("latin-1"))]
        self.request = Request({"type": "http", "headers": lines}, self._receive)

    async def _receive(self) -> Message:
        self.asked += 1
        if not self._pieces:
            return {"type": "http.disconnect"}
        piece = self._pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(self._pieces)}


def read_as_bytes(sent: Sent, max_bytes: int) -> bytes:
    return asyncio.run(read_body(sent.request, max_bytes=max_bytes))


def read_as_array(sent: Sent, shape: Any, dtype: Any, **options: Any) -> Any:
    return asyncio.run(read_array(sent.request, shape, dtype, **options))


def test_bytes_beyond_limit_are_not_read() -> None:
    sent = Sent(*[bytes(10)] * 100)
    with pytest.raises(BodyError, match="larger than 25 bytes") as caught:
        read_as_bytes(sent, 25)
    assert (caught.value.status_code, sent.asked) == (413, 3)
    sent = Sent(*[bytes(10)] * 100)
    with pytest.raises(BodyError, match="has 24 bytes, the body more"):
        read_as_array(sent, (3,), "f8")
    assert sent.asked == 3


@pytest.mark.parametrize("dtype", ["uint8", "float16", ">f4", "complex128", "bool", "M8[s]", "S3"])
@pytest.mark.parametrize("shape", [(), (5,), (2, 0, 3), (2, 3, 4)])
def test_arrays_of_every_kind_arrive_unchanged(shape: tuple[int, ...], dtype: str) -> None:
    count = int(np.prod(shape, dtype=int))
    data = bytes(one % 2 for one in range(count * np.dtype(dtype).itemsize))
    found = read_as_array(Sent(data[:7], data[7:]), shape, dtype)
    assert (found.shape, found.dtype, found.tobytes()) == (shape, np.dtype(dtype), data)
    assert found.flags.writeable


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_body_arrives_where_the_workers_see_it() -> None:
    data = ARRAY.tobytes()
    async with opened(Digests) as batcher:
        memory = slabs_of(batcher)
        for shape in (SHAPE, -1, (2, -1)):
            sent = Sent(data[:70_000], data[70_000:], length=str(len(data)))
            array = await read_array(sent.request, shape, "<f4", into=batcher)
            assert 0 <= memory.offset_of(array.ctypes.data) < memory.size
            assert array.tobytes() == data
            assert await batcher.process_batched(array) == digest(array)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *[
            ((2, -2), "f4"),
            ((-1, -1), "f4"),
            ((2,), object),
            ((2,), "S0"),
            ((2,), "f4,O"),
            ((0, 10**30), "f4"),
            ("2", "f4"),
            (b"12", "f4"),
            ((2.0,), "f4"),
            (None, "f4"),
            (((2,), 3), "f4"),
        ],
        ((1,) * 65, "u1"),
        # NumPy has six types of errors for what is no dtype.
        *[(2, dtype) for dtype in ("f3", ",", "\ud800", "(9999999999,)f4", 1.5, [("a",)])],
        (2, {"names": ["a"], "formats": ["f4"], "itemsize": 10**30}),
    ],
)
def test_invalid_shape_or_dtype_is_rejected(shape: Any, dtype: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"read_array: shape=.* dtype=.*; give sizes of 0"):
        read_as_array(Sent(b""), shape, dtype)


@pytest.mark.parametrize(
    ("shape", "length", "status"),
    [
        ((31,), None, 413),
        ((2**62, 2**62), None, 413),
        ((10**4000, 10**4000), None, 413),
        ((24,), "23", 422),
        ((24,), "30", 422),
        ((24,), "31", 413),
        *[(-1, None, 411), ((5, -1), "24", 422), ((0, -1), "0", 422), (-1, "31", 413)],
    ],
)
def test_sizes_are_compared_before_there_is_an_array(
    shape: Any, length: str | None, status: int
) -> None:
    sent = Sent(bytes(24), length=length)
    with pytest.raises(BodyError) as caught:
        read_as_array(sent, shape, "u1", max_bytes=30)
    assert (caught.value.status_code, sent.asked) == (status, 0)


# --- the answers ----------------------------------------------------------------------------------


def make_client(app: FastAPI) -> TestClient:
    async def read(request: Request) -> bytes:
        return await read_body(request, max_bytes=100)

    @app.post("/length")
    async def length(body: Annotated[bytes, Depends(read)]) -> int:
        return len(body)

    return TestClient(app)


def test_a_refusal_has_the_body_of_all_errors() -> None:
    app = FastAPI()
    install_exception_handlers(app)
    client = make_client(app)
    for size in (0, 99, 100):
        assert client.post("/length", content=bytes(size)).json() == size
    response = client.post("/length", content=bytes(101))
    assert response.status_code == 413
    assert response.headers["Connection"] == "close"
    body = response.json()
    assert len(body.pop("error_id")) == 16
    assert body == {"detail": "the body is larger than 100 bytes", "code": "request_too_large"}


def test_rejection_without_handlers_is_an_http_exception() -> None:
    app = FastAPI()
    response = make_client(app).post("/length", content=bytes(101))
    assert response.status_code == 413
    assert response.json() == {"detail": "the body is larger than 100 bytes"}
    app = FastAPI()

    @app.exception_handler(413)
    async def own(_: Request, error: Exception) -> Any:
        raise RuntimeError(f"mine: {error}")

    install_exception_handlers(app)
    with pytest.raises(RuntimeError, match="mine"):
        make_client(app).post("/length", content=bytes(101))
