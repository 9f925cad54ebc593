"""What does one message there and back cost, over two pipes and over a socket pair?

Two processes that do nothing else. `lone`: after a pause, as for a lone request; `busy`: one after
the other. Python's own calls only, as `fast_batcher._transport.channel` uses them.
"""

import io
import json
import os
import socket
import sys
import time
from collections.abc import Callable

from benchmarks.harness import hardware
from benchmarks.report import Spread, table

REPETITIONS = 7
# A batch of 64 short strings takes about as much.
MESSAGE = bytes(1500)
LONE_MESSAGES = 200
PAUSE = 0.005
BUSY_MESSAGES = 3000

Read = Callable[[bytearray], int | None]
Write = Callable[[bytes], int | None]
Side = tuple[Read, Write]


def pipes() -> tuple[Side, Side]:
    """One pipe each way."""
    first, into_first = os.pipe()
    second, into_second = os.pipe()
    return _side(first, into_second), _side(second, into_first)


def _side(source: int, sink: int) -> Side:
    return io.FileIO(source).readinto, io.FileIO(sink, "w").write


def socket_pair() -> tuple[Side, Side]:
    """One socket each."""
    one, two = socket.socketpair()
    return (one.recv_into, one.send), (two.recv_into, two.send)


def measure(connect: Callable[[], tuple[Side, Side]]) -> tuple[float, float, float]:
    """Microseconds: median of lone messages, mean of busy ones, CPU of this side for each."""
    ours, theirs = connect()
    child = os.fork()
    if child == 0:
        _answer(*theirs)
    read, write = ours
    buffer = bytearray(65536)
    lone = []
    for _ in range(LONE_MESSAGES):
        time.sleep(PAUSE)
        start = time.perf_counter()
        write(MESSAGE)
        read(buffer)
        lone.append(time.perf_counter() - start)
    start, used = time.perf_counter(), time.process_time()
    for _ in range(BUSY_MESSAGES):
        write(MESSAGE)
        read(buffer)
    busy = (time.perf_counter() - start) / BUSY_MESSAGES
    used = (time.process_time() - used) / BUSY_MESSAGES
    write(b"the end")
    os.waitpid(child, 0)
    return sorted(lone)[len(lone) // 2] * 1e6, busy * 1e6, used * 1e6


def _answer(read: Read, write: Write) -> None:
    buffer = bytearray(65536)
    while read(buffer) == len(MESSAGE):
        write(MESSAGE)
    os._exit(0)


def main() -> int:
    """Take turns, print."""
    print(json.dumps(hardware()), sys.version)
    results: dict[str, list[tuple[float, float, float]]] = {"pipes": [], "socket pair": []}
    for repetition in range(REPETITIONS):
        turn = [("pipes", pipes), ("socket pair", socket_pair)]
        for name, connect in reversed(turn) if repetition % 2 else turn:
            results[name].append(measure(connect))
    columns = ["lone, us", "busy, us", "busy, CPU us of one side"]
    rows = [[name, *map(Spread.of, zip(*found, strict=True))] for name, found in results.items()]
    print(table(["", *columns], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
