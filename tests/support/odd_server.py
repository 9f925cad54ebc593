"""A server of answers that HTTP/1.1 allows and few servers send.

Prints its port. A request is answered as its path says; "/count" tells how many were.
"""

import asyncio
import sys
from contextlib import suppress

ANSWERS = {
    "/close": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok",
    "/old": b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
    # The end of the connection is the end of the body.
    "/without-length": b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nok",
    "/trailers": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"2\r\nok\r\n0\r\nX: 1\r\n\r\n",
    # A piece that ends like the last one.
    "/zero": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n0\r\n\r\n\r\n"
    b"1\r\nx\r\n0\r\n\r\n",
    "/early": b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
    b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    "/cut": b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok",
    "/nonsense": b"ok\r\n\r\n",
}
# After these the connection is closed.
LAST = ("/close", "/old", "/without-length", "/cut", "/nonsense")


class Server:
    """Answers each connection on its own."""

    def __init__(self) -> None:
        self.answered = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of a connection until one of both sides closes it."""
        # Nobody reads the log, so an error that is logged for each connection would fill the pipe.
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while await self._answer(reader, writer) not in LAST:
                pass
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        """Answer a request, byte by byte where that may matter; return its path."""
        head = await reader.readuntil(b"\r\n\r\n")
        path = head.split()[1].decode()
        if path in ANSWERS:
            self.answered += 1
            for at in range(len(ANSWERS[path])):
                writer.write(ANSWERS[path][at : at + 1])
                await writer.drain()
        else:
            text = str(self.answered).encode() if path == "/count" else b""
            status = b"200 OK" if path == "/count" else b"404 Not Found"
            length = str(len(text)).encode()
            writer.write(b"HTTP/1.1 %b\r\nContent-Length: %b\r\n\r\n%b" % (status, length, text))
        return path


async def main() -> None:
    """Serve for ever."""
    server = await asyncio.start_server(Server().serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    sys.stdout.write(f"running on http://127.0.0.1:{port}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
