"""Faults F67 and F68: bodies that are too large, too slow or malformed, on raw sockets."""

import socket
from collections.abc import Iterator
from time import monotonic
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from raw_http import chunk, connect, head
from starlette.requests import Request
from test_fastapi import LIMIT, Server

from fast_batcher import ConfigurationError
from fast_batcher.fastapi import LimitBody


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    # Nobody reads its log meanwhile.
    server = Server("apps.limited:app", "--no-access-log")
    yield server
    server.close()


@pytest.fixture(scope="module")
def url(server: Server) -> str:
    return str(server.wait_for(r"running on (http://[\d.:]+)")[1])


def begin(client: socket.socket, line: str) -> None:
    client.sendall(head("/length", "Content-Type: application/json", line))


def status_of(client: socket.socket) -> int:
    return int(client.recv(1000).split()[1])


@pytest.mark.slow
def test_a_body_that_announces_2_gb_is_refused_before_any_of_it_is_sent(url: str) -> None:
    """Fault F67."""
    with connect(url) as client:
        begin(client, f"Content-Length: {2**31}")
        assert status_of(client) == 413


@pytest.mark.slow
def test_a_body_without_a_length_is_refused_as_soon_as_it_is_too_large(url: str) -> None:
    """Fault F67."""
    with connect(url) as client:
        begin(client, "Transfer-Encoding: chunked")
        for _ in range(11):
            client.sendall(chunk(b"x" * 10_000))
        assert status_of(client) == 413


@pytest.mark.slow
def test_a_body_that_comes_byte_by_byte_is_refused(url: str) -> None:
    """Fault F67."""
    with connect(url) as client:
        begin(client, "Content-Length: 1000")
        client.sendall(b"{")
        assert status_of(client) == 408


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
def test_a_malformed_body_is_a_client_error_and_never_a_server_error(url: str, name: str) -> None:
    """Fault F67."""
    body, headers, statuses = BODIES[name]
    sent = {"Content-Type": "application/json", **headers}
    response = httpx2.post(f"{url}/length", content=body, headers=sent, timeout=LIMIT)
    assert response.status_code in statuses, response.text
    assert httpx2.post(f"{url}/length", json={"text": "fine"}).json() == len("fine")


@pytest.mark.slow
def test_a_thousand_slow_clients_do_not_keep_others_waiting(url: str) -> None:
    """Fault F68."""
    clients = [connect(url) for _ in range(1000)]
    try:
        for client in clients:
            begin(client, "Content-Length: 1000")
        # One socket for each of us and the server; others are served meanwhile.
        started = monotonic()
        assert httpx2.post(f"{url}/length", json={"text": "fine"}, timeout=LIMIT).json() == len(
            "fine"
        )
        assert monotonic() - started < LIMIT
        assert status_of(clients[-1]) == 408
    finally:
        for client in clients:
            client.close()


def make_client(**settings: Any) -> TestClient:
    app = FastAPI()
    app.add_middleware(LimitBody, **settings)

    @app.post("/length")
    async def length(request: Request) -> int:
        return len(await request.body())

    return TestClient(app)


@pytest.mark.parametrize("size", [0, 99, 100])
def test_a_body_within_the_limit_passes(size: int) -> None:
    assert make_client(max_bytes=100).post("/length", content=b"x" * size).json() == size


def test_a_body_one_byte_beyond_does_not() -> None:
    response = make_client(max_bytes=100).post("/length", content=b"x" * 101)
    assert response.status_code == 413
    assert response.json() == {"detail": "the body is larger than 100 bytes"}
    assert response.headers["Connection"] == "close"


def test_a_body_in_pieces_is_counted_whole() -> None:
    def pieces(count: int) -> Iterator[bytes]:
        for _ in range(count):
            yield b"x" * 10

    client = make_client(max_bytes=100)
    assert client.post("/length", content=pieces(10)).json() == 100
    assert client.post("/length", content=pieces(11)).status_code == 413


@pytest.mark.parametrize("settings", [{"max_bytes": 0}, {"timeout": 0}, {"timeout": -1.0}])
def test_a_limit_of_nothing_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(settings))):
        LimitBody(FastAPI(), **settings)
