"""LitServe, over HTTP: batches whose answers are streamed."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.scenarios import Load, Process
from benchmarks.stream_loads import Streams, counted

DISTRIBUTIONS = ["litserve"]
HOST = "127.0.0.1"
SERVER = "benchmarks.http_servers.litserve_streams"
# Seconds from one attempt to connect to the next while the server starts.
RETRY_INTERVAL = 0.1


async def _begin(port: int, length: int) -> AsyncIterator[bytes]:
    reader, writer = await asyncio.open_connection(HOST, port)
    body = f'{{"length": {length}}}'
    head = f"POST /predict HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"LitServe answered {status.decode().strip()}")
    while await reader.readline() != b"\r\n":
        pass
    return _read(reader, writer, length)


async def _read(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, length: int
) -> AsyncIterator[bytes]:
    """Yield chunks; each ends with a line feed, and the body's own parts may have several."""
    left = length
    while left:
        part = await reader.readexactly(int(await reader.readline(), 16) + 2)
        for chunk in part[:-2].split(b"\n")[: min(left, part.count(b"\n") - 1)]:
            left -= 1
            yield chunk
    writer.close()


@asynccontextmanager
async def opened(load: Load) -> AsyncIterator[Process]:
    """Start the server."""
    with socket.create_server((HOST, 0)) as found:
        port: int = found.getsockname()[1]
    with counted() as (path, count):
        command = [sys.executable, "-m", SERVER, str(port), load.model, path]
        process = await asyncio.create_subprocess_exec(
            *command, str(load.max_batch_size), stdout=asyncio.subprocess.DEVNULL
        )
        while process.returncode is None:
            try:
                _, writer = await asyncio.open_connection(HOST, port)
            except OSError:
                await asyncio.sleep(RETRY_INTERVAL)
            else:
                writer.close()
                break

        async def begin(length: int) -> AsyncIterator[Any]:
            return await _begin(port, length)

        yield Streams(begin, count)
        process.terminate()
        await process.wait()
