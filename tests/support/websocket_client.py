"""A client of WebSockets that waits, for tests with a real server."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

from waits import LIMIT
from wsproto import ConnectionType, WSConnection
from wsproto.connection import ConnectionState
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Event,
    Request,
    TextMessage,
)


class WebSocketClient:
    """A WebSocket: see `open_websocket`."""

    def __init__(self, connection: socket.socket, host: str, path: str) -> None:
        self._socket = connection
        self._protocol = WSConnection(ConnectionType.CLIENT)
        self._send(Request(host=host, target=path))
        assert isinstance(self._receive(), AcceptConnection)

    def send(self, message: bytes | str) -> None:
        if isinstance(message, bytes):
            self._send(BytesMessage(message))
        else:
            self._send(TextMessage(message))

    def receive(self) -> str | tuple[int, str]:
        """Wait for a text, or for the code and the reason with which the server closes."""
        event = self._receive()
        if isinstance(event, CloseConnection):
            with suppress(ConnectionError):  # a server that ends does not wait
                self._send(event.response())
            return event.code, event.reason or ""
        assert isinstance(event, TextMessage), event
        return event.data

    def close(self) -> None:
        """Leave, and wait until the server has closed the connection."""
        with suppress(ConnectionError):
            if self._protocol.state is ConnectionState.OPEN:
                self._send(CloseConnection(1000))
            while self._socket.recv(2**16):
                pass

    def _send(self, event: Event) -> None:
        self._socket.sendall(self._protocol.send(event))

    def _receive(self) -> Event:
        while (event := next(self._protocol.events(), None)) is None:
            data = self._socket.recv(2**16)
            assert data, "the server has left without a close"
            self._protocol.receive_data(data)
        return event


@contextmanager
def open_websocket(url: str, path: str) -> Iterator[WebSocketClient]:
    """Open a WebSocket to a server of this machine; on the way out the client leaves."""
    address = urlsplit(url)
    assert address.port is not None
    with socket.create_connection(("127.0.0.1", address.port), timeout=LIMIT) as connection:
        client = WebSocketClient(connection, address.netloc, path)
        yield client
        client.close()
