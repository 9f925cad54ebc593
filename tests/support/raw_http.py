"""HTTP that no client would send: over a socket, written by hand."""

import socket
from urllib.parse import urlsplit

from waits import LIMIT


def connect(url: str) -> socket.socket:
    address = urlsplit(url)
    assert address.port is not None
    return socket.create_connection(("127.0.0.1", address.port), timeout=LIMIT)


def head(path: str, *lines: str) -> bytes:
    """Of a request that has a body."""
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: test", *lines, "", ""]).encode()


def chunk(data: bytes) -> bytes:
    """Of a body without a length."""
    return b"%x\r\n" % len(data) + data + b"\r\n"
