"""Clients of `benchmarks.sessions`: WebSockets that send frames of audio, one after the other.

Runs in a process of its own, and prints JSON. Each connection sends its next frame when it has the
answer to the previous one. It has no library for WebSockets, whose CPU time would be larger than
the server's: it writes frames with a mask of zeros, and reads answers of less than 126 bytes.
"""

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from random import Random
from typing import Any, cast

import uvloop

HOST, PATH = "127.0.0.1", "/speech"
FRAME_BYTES = 640
# Different frames, from which each connection draws its own sequence.
FRAMES = [Random(number).randbytes(FRAME_BYTES) for number in range(256)]
HANDSHAKE = (
    f"GET {PATH} HTTP/1.1\r\nHost: {HOST}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
).encode()
# Source: RFC 6455, section 5.2. A last fragment, its kind in the low half of the byte.
TEXT, BINARY, CLOSE, PING, PONG = 0x81, 0x82, 0x88, 0x89, 0x8A
MASKED, LONG, NO_MASK = 0x80, 126, bytes(4)
# The head of each frame: kind, length and mask.
PREFIX = bytes([BINARY, MASKED | LONG]) + FRAME_BYTES.to_bytes(2) + NO_MASK


@dataclass
class Plan:
    """The work of the process."""

    port: int
    # The connections.
    speakers: int
    # Seconds of the same load before the measured part.
    warm_up: float
    seconds: float


def draw_frames(speaker: int) -> Iterator[bytes]:
    """Draw the frames of a connection; the same number draws the same frames."""
    random = Random(speaker)
    while True:
        yield FRAMES[random.randrange(len(FRAMES))]


class Speaker(asyncio.Protocol):
    """A connection: its answers, and when each frame was sent and answered."""

    def __init__(self, number: int) -> None:
        self.answers: list[float] = []
        self.moments: list[tuple[float, float]] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._frames = draw_frames(number)
        self._received = b""
        self._is_open = self._is_last = self._is_closing = False
        # Code and text of the server's close.
        self._reason = b""
        self._sent_at = 0.0

    def end(self) -> None:
        """Leave after the next answer."""
        self._is_last = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask for a WebSocket."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is a class of its own
        self._transport.write(HANDSHAKE)

    def data_received(self, data: bytes) -> None:
        """Read what has come, and send the next frame after an answer."""
        self._received += data
        if not self._is_open:
            head, found, rest = self._received.partition(b"\r\n\r\n")
            if not found:
                return
            if b" 101 " not in head:
                raise RuntimeError(f"no WebSocket: {head!r}")
            self._is_open, self._received = True, rest
            self._send()
        while len(self._received) >= 2 and len(self._received) >= 2 + self._received[1]:
            kind, end = self._received[0], 2 + self._received[1]
            content, self._received = self._received[2:end], self._received[end:]
            self._take(kind, content)

    def connection_lost(self, error: Exception | None) -> None:
        """Settle `ended`: an error if more answers were to come."""
        if self._is_closing:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error or RuntimeError(f"closed: {self._reason!r}"))

    def _send(self) -> None:
        self._sent_at = time.perf_counter()
        self._transport.write(PREFIX + next(self._frames))

    def _take(self, kind: int, content: bytes) -> None:
        if kind == TEXT:
            self.moments.append((self._sent_at, time.perf_counter()))
            self.answers.append(json.loads(content)["speech"])
            if not self._is_last:
                self._send()
                return
            self._is_closing = True
            self._transport.write(bytes([CLOSE, MASKED]) + NO_MASK)
        elif kind == PING:
            self._transport.write(bytes([PONG, MASKED | len(content)]) + NO_MASK + content)
        elif kind == CLOSE:
            self._reason = content
            self._transport.close()


async def speak(plan: Plan) -> dict[str, Any]:
    """Let all speak at once; return the figures, and the answers of each."""
    loop = asyncio.get_running_loop()
    opened = [
        await loop.create_connection(partial(Speaker, number), HOST, plan.port)
        for number in range(plan.speakers)
    ]
    speakers = [speaker for _, speaker in opened]
    await asyncio.sleep(plan.warm_up)
    begin, cpu = time.perf_counter(), time.process_time()
    await asyncio.sleep(plan.seconds)
    end, cpu = time.perf_counter(), time.process_time() - cpu
    for speaker in speakers:
        speaker.end()
    await asyncio.gather(*(speaker.ended for speaker in speakers))
    times = sorted(
        1e3 * (answered - sent)
        for speaker in speakers
        for sent, answered in speaker.moments
        if begin <= answered < end
    )
    figures = {
        "answers_per_second": len(times) / (end - begin),
        **{f"p{part}_ms": times[len(times) * part // 100] for part in (50, 99) if times},
        "client_busy": cpu / (end - begin),
    }
    return {"figures": figures, "answers": [speaker.answers for speaker in speakers]}


def command(plan: Plan) -> list[str]:
    """Make the arguments of Python that run this process."""
    return ["-m", "benchmarks.speakers", json.dumps(asdict(plan))]


def main() -> None:
    """Do what the first argument says as JSON."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(speak(Plan(**json.loads(sys.argv[1]))))))


if __name__ == "__main__":
    main()
