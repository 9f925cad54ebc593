"""An HTTP/1.1 client for measuring: one connection, one request at a time.

Runs in the demonstration's process, which shares the machine with the server. A general client
costs it about 1.0 ms of CPU per request here (httpx2 2.16, 32 connections, 8 KB answers), this one
0.1 ms, so on two cores the general one would take a fifth of a core from a model that answers 200
requests per second. It understands what uvicorn sends and no more: use a real client elsewhere.
"""

import asyncio
from types import TracebackType
from typing import Self


class Connection:
    """A keep-alive connection; an async context manager.

    Args:
        host: Where the server listens.
        port: Its port.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Nothing is on its way when the last answer was read, so there is nothing to wait for.
        self._writer.close()

    async def get(self, path: str) -> tuple[int, bytes]:
        """Return the status and the body of the answer."""
        return await self._sender(f"GET {path}", b"")

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Send a JSON body; return the status and the body of the answer."""
        return await self._sender(f"POST {path}", body)

    async def _sender(self, what: str, body: bytes) -> tuple[int, bytes]:
        """Send one request and read its answer.

        Raises:
            OSError: The connection is broken.
            EOFError: The server closed it in the middle.
        """
        head = (
            f"{what} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._writer.write(head.encode() + body)
        await self._writer.drain()
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(lines[0].split()[1])
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        return status, await self._reader.readexactly(int(headers["content-length"]))
