"""An HTTP client that sends requests and times their answers. Runs in a separate process.

Reads a `Plan` as a line of JSON, writes "ready" to stderr, waits for a line, measures, and writes a
`Record` as a line of JSON. In a closed loop every connection asks again as soon as it is answered.
In an open loop requests arrive at random, like those of independent users, and each is timed from
its scheduled arrival: waiting for the client or for a connection counts.

A general HTTP client costs up to a millisecond of CPU per request, more than the server that it
measures; this one leaves the parsing to httptools. It imports nothing of the library, and ends with
the process that started it.
"""

import asyncio
import gc
import json
import math
import random
import ssl
import sys
import time
from collections import Counter, deque
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, cast

import httptools

if TYPE_CHECKING:
    from collections.abc import Callable

# How long answers are waited for after the last request, seconds: longer than a batcher's default
# time-out, so that a lost request is the server's loss.
ANSWER_LIMIT = 40.0
# Seconds from one look for requests that are given up to the next, and until a refused connection
# is tried again, seconds.
GIVE_UP_INTERVAL = 0.02
RETRY_INTERVAL = 0.02
# Headers that say where the body of an answer ends. Without them the connection's end is its end.
LENGTHS = (b"content-length", b"transfer-encoding")
# Characters that are kept of the first answer that is an error.
KEPT_CHARACTERS = 500


@dataclass(frozen=True)
class Target:
    """Address of the server under load."""

    host: str
    port: int
    # Whether the server speaks TLS, with a certificate that this machine trusts.
    is_encrypted: bool = field(default=False, kw_only=True)
    # A Unix socket to connect to, None for the host and port.
    socket_path: str | None = field(default=None, kw_only=True)
    # Sent with each request, as name and value; they replace the headers of the client.
    headers: tuple[tuple[str, str], ...] = field(default=(), kw_only=True)

    def open(self, make: "Callable[[], Connection]") -> "asyncio.Task[Any]":
        """Begin to open a connection; the task raises OSError if the server cannot be reached."""
        loop = asyncio.get_running_loop()
        context = make_context() if self.is_encrypted else None
        if self.socket_path is None:
            return loop.create_task(loop.create_connection(make, self.host, self.port, ssl=context))
        name = self.host if self.is_encrypted else None
        return loop.create_task(
            loop.create_unix_connection(make, self.socket_path, ssl=context, server_hostname=name)
        )

    def make_request(self, method: str, path: str, body: bytes, content_type: str) -> bytes:
        """Write a request; only one with a body has a type and a length."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        own = {"Host": f"{host}:{self.port}"}
        if body:
            own["Content-Type"] = content_type
        if body or method != "GET":
            own["Content-Length"] = str(len(body))
        given = {name.lower() for name, _ in self.headers}
        headers = [header for header in own.items() if header[0].lower() not in given]
        headers += self.headers
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers)]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body

    def ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        content_type: str = "",
        limit: float = ANSWER_LIMIT,
    ) -> tuple[int, bytes]:
        """Send one request; return the status and the body of its answer, within `limit` seconds.

        Raises:
            OSError: The server cannot be reached, or gives no complete answer.
        """
        request = self.make_request(method, path, body, content_type)
        return asyncio.run(_ask(self, request, limit))


@cache
def make_context() -> ssl.SSLContext:
    """Make the settings of TLS, which takes milliseconds, for all connections."""
    return ssl.create_default_context()


@dataclass(frozen=True)
class Plan:
    """The work of one client process."""

    # The fields of the `Target`.
    target: dict[str, Any]
    method: str
    path: str
    # Sent in random order, again and again; as latin-1, which maps any byte to one character.
    bodies: list[str]
    content_type: str
    # Open at the same time: exactly this many in a closed loop, at most in an open one.
    connections: int
    # Requests per second that arrive; None for a closed loop.
    rate: float | None
    # Length of the measured part, and of the warm-up under the same load.
    seconds: float
    warm_up: float
    seed: int
    # Seconds after which a request that was due is given up and its connection closed.
    give_up: float | None = None
    # Try again where a connection is refused; otherwise that ends the measurement.
    reconnect: bool = False


@dataclass
class Record:
    """The outcome. Latencies are seconds, in the order of the answers."""

    # Good answers to requests of the measured time.
    latencies: list[float] = field(default_factory=list)
    # Good answers per second in the measured time. In a closed loop each counts with the share of
    # its time that lies there, so nothing is rounded to whole batches or pauses.
    rate: float = 0.0
    # All requests of the measured time.
    requests: int = 0
    # Requests without a good answer, warm-up included, by outcome.
    lost: dict[str, int] = field(default_factory=dict)
    # All good answers, warm-up included, and the CPU seconds that this process took for them.
    answers: int = 0
    cpu: float = 0.0
    elapsed: float = 0.0
    # Seconds from the scheduled arrival until the request was sent, in an open loop.
    lags: list[float] = field(default_factory=list)
    # Seconds from a request's moment to the first part of its body, and from each part to the next,
    # for good answers of the measured time whose bodies came in several parts.
    first_parts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    # The longest time in the measured time without a good answer, seconds.
    longest_gap: float = 0.0
    # Status and body of the first answer that was an error; empty without one.
    first_error: str = ""


class ConnectionEvents(Protocol):
    """Events that a connection reports."""

    def connected(self, connection: "Connection", /) -> None:
        """Use a connection that has opened."""

    def answered(
        self, connection: "Connection", due: float, status: int, body: bytes, *, is_open: bool
    ) -> None:
        """Note a complete answer; a connection that is not open takes no further request."""

    def disconnected(self, connection: "Connection", reason: str, /) -> None:
        """Note the end of a connection, and the reason for which its request has no answer."""


class Connection(asyncio.Protocol):
    """A connection with at most one request in flight; its owner decides what it sends."""

    def __init__(self, owner: ConnectionEvents) -> None:
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        # Whether the head of an answer is complete, and those of `LENGTHS` that it has.
        self._has_head, self._lengths = False, set[bytes]()
        # Moments at which parts of the body came, if the answer does not state its length.
        self.part_moments: list[float] = []
        # The status of a complete answer, and whether the connection stays open; None without one.
        self._end: tuple[int, bool] | None = None
        # The scheduled moment of the request in flight; None without one.
        self.due: float | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Tell the owner that it is ready for a request."""
        # uvloop's transport has the methods, but not the base class.
        self._transport = cast("asyncio.Transport", transport)
        self._owner.connected(self)

    def send(self, request: bytes, due: float) -> None:
        """Send a request that was due at this moment."""
        assert self._transport is not None
        self.due = due
        self.part_moments = []
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Parse a part of an answer; tell the owner when it is complete."""
        parts = len(self._body)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._owner.disconnected(self, f"an answer that is not HTTP: {error!r}")
            self.close()
        else:
            if len(self._body) > parts and LENGTHS[0] not in self._lengths:
                self.part_moments.append(time.perf_counter())
            if self._end is not None:
                self._finish(*self._end)

    def on_header(self, name: bytes, _: bytes) -> None:
        """Note whether the answer says where its body ends."""
        self._lengths |= {name.lower()}.intersection(LENGTHS)

    def on_headers_complete(self) -> None:
        """Note that the head is complete."""
        self._has_head = True

    def on_body(self, body: bytes) -> None:
        """Keep a part of the body."""
        self._body.append(body)

    def on_message_complete(self) -> None:
        """Note that the answer is complete; one of status 1xx is followed by another."""
        status = self._parser.get_status_code()
        self._has_head = False
        if status >= 200:
            self._end = status, self._parser.should_keep_alive()

    def eof_received(self) -> None:
        """Take the end of the connection for the end of a body without a length."""
        if self._has_head and not self._lengths:
            self._finish(self._parser.get_status_code(), False)

    def _finish(self, status: int, is_open: bool) -> None:
        body, self._body, self._end = b"".join(self._body), [], None
        self._lengths = set()
        due, self.due = self.due, None
        if due is None:  # it ends an idle connection, as with 408
            self._owner.disconnected(self, "an answer without a request")
            self.close()
            return
        if not is_open:
            self.close()
        self._owner.answered(self, due, status, body, is_open=is_open)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the owner; a request in flight is lost."""
        self._owner.disconnected(self, "connection closed")

    def close(self) -> None:
        """Close it; a request in flight counts as not answered."""
        assert self._transport is not None
        self._transport.abort()


async def _ask(target: Target, request: bytes, limit: float) -> tuple[int, bytes]:
    question = _Question(request)
    await target.open(lambda: Connection(question))
    try:
        return await asyncio.wait_for(question.answer, limit)
    except TimeoutError:
        raise TimeoutError(f"no complete answer within {limit:g} s") from None


class _Question:
    """The owner of a connection for one request."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.answer: asyncio.Future[tuple[int, bytes]]
        self.answer = asyncio.get_running_loop().create_future()

    def connected(self, connection: Connection) -> None:
        connection.send(self._request, 0.0)

    def answered(
        self, connection: Connection, due: float, status: int, body: bytes, *, is_open: bool
    ) -> None:
        self.answer.set_result((status, body))
        connection.close()

    def disconnected(self, connection: Connection, reason: str) -> None:
        if not self.answer.done():
            self.answer.set_exception(ConnectionError(reason))


class Client:
    """Owns all connections of this process, and decides when each sends a request."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._random = random.Random(plan.seed)
        self._target = Target(**plan.target)
        self._requests = [
            self._target.make_request(
                plan.method, plan.path, body.encode("latin-1"), plan.content_type
            )
            for body in plan.bodies
        ]
        self._next_requests = deque[bytes]()
        self._loop = asyncio.get_running_loop()
        # The loop would only log what a connection raises.
        self._loop.set_exception_handler(self._note_mistake)
        self.record = Record()
        self._lost: Counter[str] = Counter()

        # Open connections without a request, the last used at the end.
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self._connecting: set[asyncio.Task[object]] = set()
        # Scheduled moments of requests that have no connection yet, in an open loop.
        self._waiting: deque[float] = deque()
        # Scheduled moments of the requests to come, in an open loop.
        self._arrivals: deque[float] = deque()

        self._is_over = False
        # Until the start nothing begins, and nothing is over.
        self._measured_from, self._measured_until = math.inf, -math.inf
        # Good answers of the measured time, or the shares of them.
        self._answered = 0.0
        # When the last good answer of the measured time came.
        self._last_answer = math.inf
        # Done when every request has ended, or with an error that ends the measurement.
        self._over: asyncio.Future[None] = self._loop.create_future()

    async def connect(self) -> None:
        """Open the connections that a closed loop keeps; an open loop opens them when needed."""
        if self._plan.rate is None:
            for _ in range(self._plan.connections):
                self._connect()
            await asyncio.gather(*self._connecting)

    async def run(self) -> Record:
        """Measure."""
        try:
            return await self._run()
        finally:
            # This comes after a failure, too.
            self._close()

    async def _run(self) -> Record:
        plan, record = self._plan, self.record
        start, cpu = time.perf_counter(), time.process_time()
        self._measured_from = start + plan.warm_up
        self._measured_until = self._measured_from + plan.seconds
        if plan.rate is None:
            for connection in self._take_idle():
                self._send(connection, start)
        else:
            self._arrivals = deque(draw_arrivals(plan, start, self._random))
            record.requests = sum(due >= self._measured_from for due in self._arrivals)
            self._arrive()
        self._last_answer = self._measured_from
        # Later than the last request if none is due in the measured time.
        self._loop.call_later(plan.warm_up + plan.seconds, self._finish_if_done)
        if plan.give_up is not None:
            self._give_up(plan.give_up)
        try:
            limit = plan.warm_up + plan.seconds + ANSWER_LIMIT
            await asyncio.wait_for(self._over, limit)
        except TimeoutError:
            self._lost["no answer"] += len(self._waiting) + len(self._open) - len(self._idle)
        record.lost = dict(self._lost)
        record.elapsed = time.perf_counter() - start
        record.cpu = time.process_time() - cpu
        record.rate = self._answered / plan.seconds
        self._note_gap(self._measured_until)
        return record

    def connected(self, connection: Connection) -> None:
        """Use a connection that has opened."""
        self._open.add(connection)
        if self._waiting:
            self._send(connection, self._waiting.popleft())
        elif self._asks_on(now := time.perf_counter()):
            self._send(connection, now)
        else:
            self._idle.append(connection)

    def answered(
        self, connection: Connection, due: float, status: int, body: bytes, *, is_open: bool
    ) -> None:
        """Note a complete answer, and use the connection again, or another one."""
        now = time.perf_counter()
        if 200 <= status < 300:
            self._note_answer(due, now, connection.part_moments)
        else:
            self._lost[f"status {status}"] += 1
            if not self.record.first_error:
                text = body[:KEPT_CHARACTERS].decode(errors="replace")
                self.record.first_error = f"{status} {text}"
        if not is_open:
            self._open.discard(connection)
            if self._asks_on(now):
                self._waiting.append(now)  # its wait for a connection counts
            if self._waiting:
                self._connect()
        elif self._waiting:
            self._send(connection, self._waiting.popleft())
        elif self._asks_on(now):
            self._send(connection, now)
        else:
            self._idle.append(connection)
        self._finish_if_done()

    def disconnected(self, connection: Connection, reason: str) -> None:
        """Note a connection that has ended, and replace it if needed."""
        if self._is_over or connection not in self._open:
            return
        self._open.discard(connection)
        if connection.due is None:
            self._idle.remove(connection)
        else:
            self._lost[reason] += 1
        if self._waiting or self._asks_on(time.perf_counter()):
            self._connect()
        self._finish_if_done()

    def failed(self, text: str) -> None:
        """End the measurement: this server cannot be measured."""
        if not self._over.done():
            self._over.set_exception(RuntimeError(text))

    def _note_mistake(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.failed(f"{context['message']}: {context.get('exception')!r}")

    def _asks_on(self, now: float) -> bool:
        """Whether a free connection asks again at once."""
        return self._plan.rate is None and now < self._measured_until

    def _connect(self) -> None:
        """Open one more connection."""
        task = self._target.open(lambda: Connection(self))
        self._connecting.add(task)
        task.add_done_callback(self._connect_done)

    def _connect_done(self, task: asyncio.Task[object]) -> None:
        self._connecting.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and self._plan.reconnect:
            self._lost["connection refused"] += 1
            self._loop.call_later(RETRY_INTERVAL, self._connect_again)
        elif error is not None:
            self.failed(f"no connection to {self._target.host}:{self._target.port}: {error!r}")
        self._finish_if_done()

    def _connect_again(self) -> None:
        if self._waiting or self._asks_on(time.perf_counter()):
            self._connect()
        self._finish_if_done()

    def _give_up(self, limit: float) -> None:
        """Give up what was due `limit` seconds ago, and look again soon."""
        latest = time.perf_counter() - limit
        while self._waiting and self._waiting[0] < latest:
            self._waiting.popleft()
            self._lost["given up"] += 1
        for connection in list(self._open):
            if connection.due is not None and connection.due < latest:
                self._lost["given up"] += 1
                # Not open any more, so its end is no loss of the server's.
                self._open.discard(connection)
                connection.close()
        self._loop.call_later(GIVE_UP_INTERVAL, self._give_up, limit)
        self._finish_if_done()

    def _arrive(self) -> None:
        """Send what is due, and schedule the next."""
        now = time.perf_counter()
        while self._arrivals and self._arrivals[0] <= now:
            due = self._arrivals.popleft()
            if self._idle:
                self._send(self._idle.pop(), due)
                continue
            self._waiting.append(due)
            if len(self._open) + len(self._connecting) < self._plan.connections:
                self._connect()
        if self._arrivals:
            self._loop.call_later(self._arrivals[0] - now, self._arrive)
        else:
            self._finish_if_done()

    def _send(self, connection: Connection, due: float) -> None:
        if not self._next_requests:
            self._next_requests.extend(self._random.sample(self._requests, len(self._requests)))
        if self._is_measured(due):
            if self._plan.rate is None:
                self.record.requests += 1
            else:
                self.record.lags.append(time.perf_counter() - due)
        connection.send(self._next_requests.popleft(), due)

    def _is_measured(self, moment: float) -> bool:
        return self._measured_from <= moment < self._measured_until

    def _take_idle(self) -> list[Connection]:
        idle, self._idle = self._idle, []
        return idle

    def _note_answer(self, due: float, now: float, part_moments: list[float]) -> None:
        self.record.answers += 1
        if self._is_measured(due):
            self.record.latencies.append(now - due)
            if len(part_moments) > 1:
                self.record.first_parts.append(part_moments[0] - due)
                self.record.gaps += [later - one for one, later in pairwise(part_moments)]
        if self._plan.rate is not None:
            # An answer that comes after a growing queue says nothing about this time.
            self._answered += self._is_measured(now)
        elif (inside := min(now, self._measured_until) - max(due, self._measured_from)) > 0:
            self._answered += inside / (now - due)
        if self._is_measured(now):
            self._note_gap(now)

    def _note_gap(self, now: float) -> None:
        self.record.longest_gap = max(self.record.longest_gap, now - self._last_answer)
        self._last_answer = now

    def _finish_if_done(self) -> None:
        is_more_to_come = (
            self._arrivals
            or self._waiting
            or self._connecting
            or time.perf_counter() < self._measured_from
            or self._asks_on(time.perf_counter())
        )
        if not is_more_to_come and len(self._idle) == len(self._open) and not self._over.done():
            self._over.set_result(None)

    def _close(self) -> None:
        self._is_over = True
        for task in self._connecting:
            task.cancel()
        for connection in self._open:
            connection.close()


def draw_arrivals(plan: Plan, start: float, source: random.Random) -> list[float]:
    """Draw the moments of a Poisson process."""
    assert plan.rate is not None
    arrivals = []
    moment = start + source.expovariate(plan.rate)
    while moment < start + plan.warm_up + plan.seconds:
        arrivals.append(moment)
        moment += source.expovariate(plan.rate)
    return arrivals


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


async def _run_plan(plan: Plan) -> Record:
    client = Client(plan)
    await client.connect()
    # A collection would pause this process, and look like a pause of the server.
    gc.disable()
    sys.stderr.write("ready\n")
    sys.stderr.flush()
    # All processes start together. Reading blocks the loop, which has nothing to do yet.
    sys.stdin.readline()
    # Nothing more is written: the end of stdin is the end of the process that started this one.
    ended = "the process that started the client has ended"
    asyncio.get_running_loop().add_reader(sys.stdin, client.failed, ended)
    return await client.run()


def run_client() -> None:
    """Read the plan, measure, write the record."""
    plan = Plan(**json.loads(sys.stdin.readline()))
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        record = runner.run(_run_plan(plan))
    sys.stdout.write(json.dumps(asdict(record)))


if __name__ == "__main__":
    run_client()
