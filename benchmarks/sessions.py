"""What does batching gain for sessions over WebSockets?

Starts examples/sessions twice under uvicorn, with batches and with one call for each frame. 200
connections send a frame of 20 ms when they have the answer to the previous one. The servers take
turns; the other one is idle meanwhile. At the end the model computes the frames of each connection
alone: the answers must be the same.
"""

import argparse
import signal
import sys
import time
from contextlib import ExitStack
from itertools import islice
from typing import Any

from benchmarks import harness, speakers
from benchmarks.cpu import read_ticks, stolen_percent
from benchmarks.load.server import HOST, Server, serve
from benchmarks.load_test import find_versions
from benchmarks.report import Columns, Compared, Measurement, Table, Verdict
from benchmarks.scenarios import Load
from benchmarks.speakers import Plan, draw_frames
from examples.sessions.app import MAX_BATCH_SIZE
from examples.sessions.detector import Detector
from fast_batcher._load.client import Target
from fast_batcher._load.measurement import Batches, read_batches

APP = "examples.sessions.app:app"
BATCHED, UNBATCHED = "batched", "one call per frame"
ENABLED = {BATCHED: "true", UNBATCHED: "false"}
CONNECTIONS = 200
WARM_UP_SECONDS = 1.0
# Seconds for the start of the clients and for their results. The limit only ends what hangs.
SPARE_TIME = 120.0
WEBSOCKETS = "WebSockets"

RATE, DIFFERENCE = "answers_per_second", "largest_difference"
GAIN = Compared(RATE, UNBATCHED)
COLUMNS: Columns = {
    "answers/s": RATE,
    "x one call": GAIN,
    "p50 ms": "p50_ms",
    "p99 ms": "p99_ms",
    "mean batch": "mean_batch_size",
    "API CPU us": "api_cpu_us",
    "worker CPU us": "workers_cpu_us",
    "client busy": "client_busy",
}
# Answers are probabilities: those of different speakers differ by hundredths, and those of the same
# frames in other batches by less than a millionth, as float32 sums do.
TOLERANCE = 1e-5
GAIN_BAR = 3.0


def plan(seconds: float) -> Table:
    """What to measure."""
    load = Load("Detector", MAX_BATCH_SIZE, CONNECTIONS, seconds)
    title = f"{CONNECTIONS} connections that send when they are answered"
    return Table(title, "sessions", load, (BATCHED, UNBATCHED), COLUMNS)


def measure(server: Server, load: Load) -> dict[str, Any]:
    """Put a server under the load; return figures and answers, or an error."""
    target = Target(HOST, server.port)
    before, cpu = _read(target), server.read_cpu()
    job = Plan(server.port, load.callers, WARM_UP_SECONDS, load.seconds)
    limit = WARM_UP_SECONDS + load.seconds + SPARE_TIME
    found = harness.in_fresh_process(None, speakers.command(job), {}, limit)
    after, cpu = _read(target), server.read_cpu().since(cpu)
    if "error" not in found:
        answers, batches = after.completed - before.completed, after.batches - before.batches
        found["figures"] |= {
            "mean_batch_size": answers / batches,
            "api_cpu_us": cpu.api / answers * 1e6,
            "workers_cpu_us": cpu.workers / answers * 1e6,
        }
    return found


def _read(target: Target) -> Batches:
    found = read_batches(target)
    assert found is not None  # the app has a status page
    return found


def find_differences(runs: list[list[list[float]]]) -> list[float]:
    """Find for each run the largest difference from what the model answers to one speaker alone.

    Args:
        runs: The answers of each speaker in each run. All runs send the same frames.
    """
    detector = Detector()
    largest = [0.0] * len(runs)
    for speaker, answered in enumerate(zip(*runs, strict=True)):
        state, frames = detector.begin(), draw_frames(speaker)
        most = max(map(len, answered))
        alone = [detector.infer([frame], [state])[0] for frame in islice(frames, most)]
        for run, answers in enumerate(answered):
            pairs = zip(answers, alone, strict=False)  # other runs have more answers
            largest[run] = max([largest[run], *(abs(answer - own) for answer, own in pairs)])
    return largest


def measure_all(table: Table, arguments: argparse.Namespace) -> list[Measurement]:
    """Measure both servers in turn, then compare their answers with those of the model."""
    measurements: list[Measurement] = []
    runs: list[list[list[float]]] = []
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(
                serve(APP, {"FAST_BATCHER_ENABLED": ENABLED[name], "UVICORN_WS": "wsproto"})
            )
            for name in table.systems
        }
        for repetition in range(arguments.repetitions):
            for name in reversed(table.systems) if repetition % 2 else table.systems:
                found = _measure_in_calm(servers[name], table.load, arguments.host)
                runs.append(found.pop("answers", [[]] * table.load.callers))
                callers = table.load.callers
                one = Measurement(name, table.name, WEBSOCKETS, callers, repetition, **found)
                measurements.append(one)
                print(f"[{len(measurements)}] {name}: {one.error or one.figures}", file=sys.stderr)
    for one, difference in zip(measurements, find_differences(runs), strict=True):
        if one.error is None:
            one.figures[DIFFERENCE] = difference
    return measurements


def _measure_in_calm(server: Server, load: Load, host: harness.Host) -> dict[str, Any]:
    """Measure; again if the host took too much of the time, while there is patience."""
    while True:
        begin, before = time.monotonic(), read_ticks()
        found = measure(server, load)
        stolen = stolen_percent(before, read_ticks())
        if host.was_calm(stolen, time.monotonic() - begin):
            return {"versions": {}, "stolen_percent": stolen, **found}


def verdicts(table: Table, measurements: list[Measurement]) -> list[Verdict]:
    """The bars."""
    gain = table.spread(measurements, BATCHED, WEBSOCKETS, GAIN)
    found = [
        Verdict(f"{GAIN_BAR:g} x the answers/s of one call per frame", gain, at_least=GAIN_BAR)
    ]
    for name in table.systems:
        difference = table.spread(measurements, name, WEBSOCKETS, DIFFERENCE)
        claim = f"{name}: largest difference from the answers of the model alone, {TOLERANCE:g}"
        found.append(Verdict(claim, difference, at_most=TOLERANCE))
    return found


def main() -> int:
    """Measure, print, store."""
    arguments = harness.parse_arguments(
        "sessions",
        __doc__ or "",
        systems=(BATCHED, UNBATCHED),
        loops=(),
        seconds=5.0,
        quick_seconds=1.0,
        repetitions=3,
        quick_repetitions=1,
    )
    # So that the servers are ended as on Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    table = plan(arguments.seconds)
    measurements = measure_all(table, arguments)
    found = verdicts(table, measurements)
    harness.store(
        arguments.json,
        "sessions",
        arguments.machine | arguments.host.describe(),
        {"seconds": arguments.seconds, "repetitions": arguments.repetitions},
        measurements,
        f"median (range) of {arguments.repetitions} repetitions, {arguments.seconds:g} s each",
        table.text(measurements, WEBSOCKETS),
        found,
        find_versions(),
    )
    return 1 if arguments.check and not all(verdict.holds for verdict in found) else 0


if __name__ == "__main__":
    sys.exit(main())
