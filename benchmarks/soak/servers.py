"""S9: what each server loses at SIGTERM under a keep-alive load. Client process.

A request counts as sent once it is written whole to an open connection. HTTP/1.1 has a race here: a
server may close an idle connection while the next request is on its way to it. Such a request
reaches no endpoint, and a client or a proxy may send it again. A request that an endpoint has begun
with must not be sent again, so its loss is the server's.
"""

import asyncio
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field

from waits import LIMIT

from benchmarks.soak.lives import ENVIRONMENT, free_port, until_ready
from benchmarks.soak.report import Findings

CONNECTIONS = 64
APP = "benchmarks.soak.app:app"
GUNICORN = ("gunicorn", "--log-level", "error", "--worker-class", "uvicorn_worker.UvicornWorker")
GRANIAN = ("granian", "--interface", "asgi", "--log-level", "error")
# Commands without the option that names the port, which comes last.
SERVERS = {
    "uvicorn": ("uvicorn", APP, "--log-level", "error", "--port"),
    "uvicorn, 2 workers": ("uvicorn", APP, "--log-level", "error", "--workers", "2", "--port"),
    "gunicorn": (*GUNICORN, APP, "--bind"),
    "gunicorn, 2 workers": (*GUNICORN, "--workers", "2", APP, "--bind"),
    "hypercorn": ("hypercorn", "--log-level", "error", APP, "--bind"),
    "granian": (*GRANIAN, APP, "--port"),
    "granian, 2 workers": (*GRANIAN, "--workers", "2", APP, "--port"),
}


@dataclass
class Load:
    """Connections that send one request after the other until the server refuses them."""

    port: int
    answered: int = 0
    # Requests that were sent whole and not answered whole: on a connection that had brought
    # answers before, and on a new one.
    lost_kept: set[str] = field(default_factory=set)
    lost_new: set[str] = field(default_factory=set)
    # What a client sees that is no loss, and statuses other than 200.
    seen: Counter[str] = field(default_factory=Counter)

    async def ask(self, client: str) -> None:
        """Be one client: a connection, and another when the server has closed it."""
        number = 0
        while True:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            except ConnectionRefusedError:
                return
            except OSError:
                self.seen["connections reset before a request"] += 1
                continue
            try:
                number = await self._converse(reader, writer, client, number)
            finally:
                writer.transport.abort()

    async def _converse(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, client: str, number: int
    ) -> int:
        """Use one connection until it is closed; return the number of the next request."""
        first = number
        while not reader.at_eof() and not writer.is_closing():
            name = f"{client}-{number}"
            number += 1
            body = f'{{"name": "{name}"}}'
            lines = ("POST / HTTP/1.1", "Host: a", "Content-Type: application/json")
            head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", body])
            writer.write(head.encode())
            try:
                answer = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(answer.partition(b"content-length:")[2].split()[0])
                await reader.readexactly(length)
            except (asyncio.IncompleteReadError, OSError):
                (self.lost_new if number == first + 1 else self.lost_kept).add(name)
                return number
            self.answered += 1
            if b" 200 " not in answer.partition(b"\r\n")[0]:
                self.seen[f"status {answer.split()[1].decode()}"] += 1
            if b"connection: close" in answer:
                return number
        self.seen["connections closed before a request"] += 1
        return number


async def s9(short: bool, seed: int) -> Findings:
    """Send SIGTERM to each server under load, and tell what it loses."""
    findings = Findings("S9 servers")
    rng = random.Random(seed)
    for name in ["uvicorn"] if short else SERVERS:
        answered, counts = 0, Counter[str]()
        for run in range(1 if short else 5):
            print(f"S9 servers: {name}, {run}", flush=True)
            load, begun = await _end_under_load(SERVERS[name], rng.uniform(1.0, 1.5))
            answered += load.answered
            counts["sent, begun by an endpoint, not answered"] += len(
                (load.lost_kept | load.lost_new) & begun
            )
            counts["sent on a kept connection, reached no endpoint"] += len(load.lost_kept - begun)
            counts["sent on a new connection, reached no endpoint"] += len(load.lost_new - begun)
            counts.update(load.seen)
        findings.tell(f"{name}: answered", answered)
        for what, count in counts.items():
            findings.tell(f"{name}: {what}", count)
    return findings


async def _end_under_load(command: tuple[str, ...], seconds: float) -> tuple[Load, set[str]]:
    """The load's findings, and the requests that an endpoint has begun with."""
    with tempfile.NamedTemporaryFile() as journal:
        load = Load(free_port())
        port = f"127.0.0.1:{load.port}" if command[-1] == "--bind" else str(load.port)
        server = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", *command, port),
            env={**ENVIRONMENT, "SOAK_JOURNAL": journal.name},
            start_new_session=True,
        )
        try:
            await until_ready(f"http://127.0.0.1:{load.port}")
            tasks = [asyncio.create_task(load.ask(str(one))) for one in range(CONNECTIONS)]
            await asyncio.sleep(seconds)
            server.send_signal(signal.SIGTERM)
            async with asyncio.timeout(LIMIT):
                await asyncio.gather(*tasks)
                await server.wait()
        finally:
            if server.returncode is None:
                os.killpg(server.pid, signal.SIGKILL)
                await server.wait()
        return load, set(journal.read().decode().split())
