"""Sends requests and notes when their answers come. Runs in a process of its own, on its loop.

Reads a `Plan` as a line of JSON, says "ready", waits for a line, measures, writes a `Record` as a
line of JSON. In a closed loop every connection asks again as soon as it is answered. In an open
loop requests arrive at random moments that do not depend on the answers, as those of independent
users do, and each is timed from its scheduled arrival: a request that had to wait for the client or
for a connection has waited.

A general HTTP client costs up to a millisecond of CPU per request, more than the server it
measures. This one understands what a server answers to a keep-alive request with a Content-Length.
"""

import asyncio
import json
import math
import random
import re
import sys
import time
from collections import Counter, deque
from dataclasses import asdict, dataclass, field
from typing import Any, cast

# How long answers are waited for after the last request: longer than a batcher's own time-out, so
# that what is lost is the server's loss.
ANSWER_LIMIT = 40.0
STATUS = re.compile(rb"HTTP/1\.1 (\d{3})")
LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class Plan:
    """What one client process does."""

    host: str
    port: int
    path: str
    # Sent in a random order, again and again; latin-1, which stands for any bytes.
    bodies: list[str]
    content_type: str
    # Open at the same time: exactly so many in a closed loop, at most so many in an open one.
    connections: int
    # Requests per second that arrive; None for a closed loop.
    rate: float | None
    # Measured, after a time under the same load that is not.
    seconds: float
    warm_up: float
    seed: int


@dataclass
class Record:
    """What came of it. Latencies are seconds, in the order of the answers."""

    # Good answers to requests of the measured time.
    latencies: list[float] = field(default_factory=list)
    # Good answers per second in the measured time.
    rate: float = 0.0
    # Requests of the measured time, however they ended.
    requests: int = 0
    # Requests without a good answer, warm-up included, by what came instead.
    lost: dict[str, int] = field(default_factory=dict)
    # All good answers, warm-up included, and the CPU seconds that this process took for them.
    answers: int = 0
    cpu: float = 0.0
    elapsed: float = 0.0
    # From the scheduled arrival until the request was sent, in an open loop.
    lags: list[float] = field(default_factory=list)


class Connection(asyncio.Protocol):
    """One connection with at most one request under way.

    Args:
        client: Told of answers and of the connection's end.
    """

    def __init__(self, client: "Client") -> None:
        self._client = client
        self._transport: asyncio.Transport | None = None
        self._received = b""
        # When the request under way was to be sent; None while there is none.
        self.due: float | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ready for a request."""
        # uvloop's is one in all but its bases.
        self._transport = cast("asyncio.Transport", transport)
        self._client.connected(self)

    def send(self, request: bytes, due: float) -> None:
        """Send a request that was due at a moment."""
        assert self._transport is not None
        self.due = due
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Wait until the answer is complete."""
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        if not separator:
            return
        status, length = STATUS.match(head), LENGTH.search(head)
        if status is None or length is None:
            self._client.failed("an answer without status or Content-Length")
            return
        if len(body) < int(length[1]):
            return
        self._received = b""
        due, self.due = self.due, None
        assert due is not None, "a server speaks when it is spoken to"
        self._client.answered(self, due, int(status[1]))

    def connection_lost(self, exc: Exception | None) -> None:
        """The request under way, if any, is lost."""
        self._client.disconnected(self)

    def close(self) -> None:
        """Close it; a request under way counts as not answered."""
        assert self._transport is not None
        self._transport.abort()


class Client:
    """All connections of this process.

    Args:
        plan: What to do.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._random = random.Random(plan.seed)
        self._requests = [
            f"POST {plan.path} HTTP/1.1\r\nHost: {plan.host}:{plan.port}\r\n"
            f"Content-Type: {plan.content_type}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}".encode("latin-1")
            for body in plan.bodies
        ]
        self._next_requests = deque[bytes]()
        self._loop = asyncio.get_running_loop()
        # What a connection raises would be lost in the loop.
        self._loop.set_exception_handler(self._note_mistake)
        self.record = Record()
        self._lost: Counter[str] = Counter()

        # Open connections without a request, the last one used on top.
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self._connecting: set[asyncio.Task[object]] = set()
        # Moments at which requests arrived that have no connection yet, in an open loop.
        self._waiting: deque[float] = deque()
        # Moments at which requests will arrive, in an open loop.
        self._arrivals: deque[float] = deque()

        self._is_over = False
        # Until the start nothing begins, and nothing is over.
        self._measured_from, self._measured_until = math.inf, -math.inf
        # Of each connection, in a closed loop: its first and last answer in the measured time and
        # how many there were.
        self._answered_at: dict[Connection, tuple[float, float, int]] = {}
        # The end: nothing is waited for any more, or an error that ends all.
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
            # Of a failure too: what its end closes is not opened again.
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
        try:
            limit = plan.warm_up + plan.seconds + ANSWER_LIMIT
            await asyncio.wait_for(self._over, limit)
        except TimeoutError:
            self._lost["no answer"] += len(self._waiting) + len(self._open) - len(self._idle)
        record.lost = dict(self._lost)
        record.elapsed = time.perf_counter() - start
        record.cpu = time.process_time() - cpu
        record.rate = self._measure_rate()
        return record

    # What connections tell.

    def connected(self, connection: Connection) -> None:
        """A connection is open."""
        self._open.add(connection)
        if self._waiting:
            self._send(connection, self._waiting.popleft())
        elif self._asks_on(now := time.perf_counter()):
            self._send(connection, now)
        else:
            self._idle.append(connection)

    def answered(self, connection: Connection, due: float, status: int) -> None:
        """A complete answer has come."""
        now = time.perf_counter()
        if 200 <= status < 300:
            self._note_answer(connection, due, now)
        else:
            self._lost[f"status {status}"] += 1
        if self._waiting:
            self._send(connection, self._waiting.popleft())
        elif self._asks_on(now):
            self._send(connection, now)
        else:
            self._idle.append(connection)
            self._finish_if_done()

    def disconnected(self, connection: Connection) -> None:
        """A connection has ended."""
        if self._is_over:
            return
        self._open.discard(connection)
        if connection.due is None:
            self._idle.remove(connection)
        else:
            self._lost["connection closed"] += 1
        if self._waiting or self._asks_on(time.perf_counter()):
            self._connect()
        self._finish_if_done()

    def failed(self, text: str) -> None:
        """The server is none that can be measured."""
        if not self._over.done():
            self._over.set_exception(RuntimeError(text))

    def _note_mistake(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.failed(f"{context['message']}: {context.get('exception')!r}")

    def _asks_on(self, now: float) -> bool:
        """Whether a free connection is to ask again by itself."""
        return self._plan.rate is None and now < self._measured_until

    # What they are told.

    def _connect(self) -> None:
        """Open one more connection."""
        task = self._loop.create_task(
            self._loop.create_connection(lambda: Connection(self), self._plan.host, self._plan.port)
        )
        self._connecting.add(task)
        task.add_done_callback(self._connect_done)

    def _connect_done(self, task: asyncio.Task[object]) -> None:
        self._connecting.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.failed(f"no connection to {self._plan.host}:{self._plan.port}: {error!r}")
        self._finish_if_done()

    def _arrive(self) -> None:
        """Send what is due and come back for the next."""
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

    def _note_answer(self, connection: Connection, due: float, now: float) -> None:
        self.record.answers += 1
        if self._is_measured(due):
            self.record.latencies.append(now - due)
        if self._is_measured(now):
            first, _, count = self._answered_at.get(connection, (now, now, 0))
            self._answered_at[connection] = (first, now, count + 1)

    def _measure_rate(self) -> float:
        """In a closed loop from each connection's first to its last answer, and summed.

        So the figure has no share of start and end, and no rounding to whole batches. Connections
        that were not answered twice say nothing; then, and in an open loop, answers are counted.
        """
        spans = [span for span in self._answered_at.values() if span[2] > 1]
        if self._plan.rate is None and len(spans) == self._plan.connections:
            return sum((count - 1) / (last - first) for first, last, count in spans)
        return sum(count for _, _, count in self._answered_at.values()) / self._plan.seconds

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
    """Moments of a Poisson process: the times between them are exponentially distributed."""
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


async def _measure(plan: Plan) -> Record:
    client = Client(plan)
    await client.connect()
    print("ready", flush=True)
    # Reading blocks the loop, which has nothing to do yet: all processes shall start together.
    sys.stdin.readline()
    return await client.run()


def main() -> None:
    """Do what the first line of the input says."""
    plan = Plan(**json.loads(sys.stdin.readline()))
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        record = runner.run(_measure(plan))
    print(json.dumps(asdict(record)))


if __name__ == "__main__":
    main()
