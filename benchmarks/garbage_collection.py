"""Which threshold of the garbage collector suits a server of many waiting requests?

Measures the tail of the latency of an echo over HTTP, and the memory that a server takes at most
when its app leaves 2 MB in a reference cycle at each request, and when clients go away.
"""

import socket
import sys
import time
from pathlib import Path

from benchmarks import harness, http
from benchmarks.load.measurement import Target
from benchmarks.load_test import find_versions
from benchmarks.report import Columns, Measurement, Table
from benchmarks.scenarios import Figures, Load

# The collector left alone, and thresholds of the youngest generation with live objects frozen.
VARIANTS = ("untuned", "700", "2000", "5000", "10000", "20000")
BODY_BYTES = 2_000_000
# Clients that leave, one after the other; twice as many requests leave a cycle.
REQUESTS = 200
# Seconds that a client waits before it leaves: `cancel_on_disconnect` watches requests from 50 ms.
STAY = 0.1
ECHO = {"CPU us/request": http.CPU, "requests/s": http.RATE, "p50 ms": http.P50, "p99 ms": http.P99}
BEFORE, CYCLES, LEFT = "before_mb", "cycles_mb", "left_mb"
MEMORY: Columns = {"memory MB": BEFORE, "peak with leavers": LEFT, "peak with cycles": CYCLES}


def plan(variants: list[str], seconds: float) -> list[Table]:
    """List the loads, in the order in which each server gets them."""
    tables = []
    for connections in (32, 256, 0):
        load = Load("Linear5ms", http.JOBS["echo"].max_batch_size, connections, seconds)
        title = f"echo, {connections} connections" if connections else "memory"
        columns = ECHO if connections else MEMORY
        tables.append(Table(title, "echo", load, tuple(variants), columns, title))
    return tables


def measure_memory(target: Target) -> Figures:
    """Measure the peak memory of an API process so far, in MB, after each kind of request."""
    figures = {BEFORE: _read_peak(target)}
    body = b'{"text": "%s"}' % (b"x" * BODY_BYTES)
    for _ in range(REQUESTS):
        _send_and_leave(target, body)
    time.sleep(STAY)
    figures[LEFT] = _read_peak(target)
    for _ in range(2 * REQUESTS):
        target.ask("POST", "/cycle", body, "application/json")
    figures[CYCLES] = _read_peak(target)
    return figures


def _read_peak(target: Target) -> float:
    assert target.server is not None
    text = Path(f"/proc/{target.server.process.pid}/status").read_text()
    return int(text.partition("VmHWM:")[2].split()[0]) / 1024


def _send_and_leave(target: Target, body: bytes) -> None:
    head = "POST /wait HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection((target.host, target.port)) as client:
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        time.sleep(STAY)


def main() -> int:
    """Measure, print, store."""
    arguments = harness.parse_arguments(
        "garbage_collection",
        __doc__ or "",
        systems=VARIANTS,
        seconds=4.0,
        quick_seconds=1.0,
        loops=(),
        repetitions=3,
        quick_repetitions=1,
    )
    tables = plan(arguments.systems, arguments.seconds)
    found: list[Measurement] = []
    for repetition in range(arguments.repetitions):
        turns = arguments.systems[:: -1 if repetition % 2 else 1]
        for variant in turns:
            system = http.System("http_servers.ours_cycles", variant)
            job = http.JOBS["echo"]
            with http.running(system, job, system.body) as (target, _):
                for table in tables:
                    if table.columns is MEMORY:
                        figures = measure_memory(target)
                    else:
                        figures = http.measure(target, table, repetition, job, system.body)
                    callers = table.load.callers
                    one = Measurement(
                        variant, table.name, http.HTTP, callers, repetition, figures, {}
                    )
                    found.append(one)
                    print(f"{table.title}: {variant}: {figures}", file=sys.stderr)
    harness.store(
        arguments.json,
        "garbage_collection",
        arguments.machine | arguments.host.describe(),
        {"seconds": arguments.seconds, "repetitions": arguments.repetitions, "seed": harness.SEED},
        found,
        f"median (range) of {arguments.repetitions} repetitions, {arguments.seconds:g} s each",
        harness.text_of(tables, found, [http.HTTP]),
        [],
        find_versions(),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
