"""What do users of each server measure over HTTP?

Starts each server in its own environment and loads it from another process. Scenarios: `echo` (a
model that takes no time), `model` (5 ms and 0.1 ms for each input), `bodies` (602 KB), `pictures`
(JPEG files, decoded in a stage before that model), `overload` (three times what the model can do,
from clients that give up), `kill` (SIGKILL of the model's process). The servers take turns within a
repetition.
"""

import argparse
import json
import math
import operator
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from http.client import HTTPException
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks import harness
from benchmarks.cpu import descendants, read_ticks, stolen_percent
from benchmarks.http_servers import Job
from benchmarks.load import tied
from benchmarks.load.measurement import Target
from benchmarks.load.measurement import measure as measure_load
from benchmarks.load.server import HOST, START_LIMIT, UVICORN_OPTIONS, start
from benchmarks.load_test import find_versions
from benchmarks.pictures import SIDE, make_jpeg
from benchmarks.report import Columns, Compared, Measurement, Table, Verdict
from benchmarks.scenarios import ARRAY_SHAPE, Figures, Load
from benchmarks.setup_peers import PEERS, python_of
from fast_batcher._load.measurement import Case, LoadSettings
from fast_batcher._load.report import Spread
from fast_batcher.stats import number

# What the tables show in place of an event loop.
HTTP = "over HTTP"
# Seconds for a server to end in order before it is killed.
STOP_LIMIT = 5.0
# From one try to reach a server that starts to the next, seconds.
POLL_INTERVAL = 0.01
# Connections at most in an open loop, and seconds after which its clients give up.
OPEN_CONNECTIONS, PATIENCE = 4096, 5.0
# Of the systems with several API processes.
API_PROCESSES = 4
# Times the capacity, seconds after which clients give up, and what a server has of them for its
# answer: the rest is for the way.
OVERLOAD, LESS_PATIENCE, LIMIT = 3.0, 1.0, 0.85
# Of the overload and the kill: unmeasured seconds; and from the client's start to the kill, with
# a second for that start.
SETTLING, KILLED_AT = 2.0, 3.5
# A server that is killed takes longer to be back than a load to be measured: if it is not back in
# time, the rest of the time is its longest without an answer.
KILL_SECONDS = 4.0


_UVICORN = ("uvicorn", "{module}:app", "--port", "{port}", *UVICORN_OPTIONS)
_HYPERCORN = ("hypercorn", "--bind", f"{HOST}:{{port}}", "{module}:app")
_GRANIAN = ("granian", "--interface", "asgi", "--host", HOST, "--port", "{port}", "{module}:app")


@dataclass(frozen=True)
class System:
    """One server with one choice of settings."""

    # Below `benchmarks`.
    server: str
    variant: str = ""
    # The peer's virtual environment under `.venv-peers`; None for the interpreter that runs us.
    environment: str | None = None
    command: tuple[str, ...] = _UVICORN
    body: bytes = b'{"text": "a short input"}'
    # Further variables of its environment.
    settings: tuple[tuple[str, str], ...] = ()

    @property
    def python(self) -> str:
        """The interpreter.

        Raises:
            RuntimeError: It is not installed.
        """
        python = python_of(self.environment) if self.environment else Path(sys.executable)
        if not python.exists():
            raise RuntimeError("not installed, see `make bench-setup`")
        return str(python)

    def variables(self, job: Job) -> dict[str, str]:
        """What the server's environment has besides ours."""
        return {
            "PYTHONPATH": str(harness.ROOT),
            "HTTP_JOB": json.dumps(asdict(replace(job, variant=self.variant))),
            "FLOOR_ANSWER_BYTES": str(len(self.body)),
            "RAY_USAGE_STATS_ENABLED": "0",
            "BENTOML_DO_NOT_TRACK": "True",
            **dict(self.settings),
        }

    def seconds_to_import(self, job: Job) -> float:
        """Measure what an interpreter takes to start and to import the server."""
        begin = time.perf_counter()
        command = [self.python, "-c", f"import benchmarks.{self.server}"]
        subprocess.run(command, env=os.environ | self.variables(job), check=True)
        return time.perf_counter() - begin


_PLAIN = ("{module}", "{port}")
_MOSEC = ("{module}", "--address", HOST, "--port", "{port}")
_BENTO = ("bentoml", "serve", "{module}:Echo", "--host", HOST, "--port", "{port}")
BARE, FASTAPI, IN_A_THREAD = "bare ASGI", "FastAPI", "FastAPI, a thread"
FUTURE, FUTURE_TUNED = "FastAPI, a future", "FastAPI, a future, tuned"
UNTUNED, OURS, IN_PROCESS = "ours untuned", "ours", "ours without HTTP"
BY_JSON = "ours by JsonEndpoint"
FASTAPI_QUIET, JSON_QUIET = "FastAPI, telemetry off", "ours by JsonEndpoint, telemetry off"
FAST_DYNAMIC_BATCHER, BATCHED = "fast_dynamic_batcher", "batched.aio"
FASTAPI_H11, FASTAPI_ASYNCIO = "FastAPI, uvicorn with h11", "FastAPI, uvicorn on asyncio"
FASTAPI_HYPERCORN, FASTAPI_GRANIAN = "FastAPI, Hypercorn", "FastAPI, Granian"
OURS_HYPERCORN, OURS_GRANIAN = "ours, Hypercorn", "ours, Granian"
LITSERVE, BENTOML, RAY = "LitServe", "BentoML", "Ray Serve"
LITSERVE_WINDOW, RAY_TUNED = "LitServe, a window of 10 ms", "Ray Serve, throughput settings"
OURS_SHARED, LITSERVE_4 = "ours, 4 processes", "LitServe, 4 API processes"
MOSEC, MOSEC_SHORT = "Mosec", "Mosec, short queue"
SYSTEMS = {
    BARE: System("load.floor"),
    FASTAPI: System("http_servers.fastapi_alone"),
    FASTAPI_QUIET: System("http_servers.fastapi_alone", "quiet"),
    FUTURE: System("http_servers.fastapi_alone", "future"),
    FUTURE_TUNED: System("http_servers.fastapi_alone", "tuned"),
    IN_A_THREAD: System("http_servers.fastapi_alone", "thread"),
    FASTAPI_H11: System("http_servers.fastapi_alone", command=(*_UVICORN, "--http", "h11")),
    FASTAPI_ASYNCIO: System("http_servers.fastapi_alone", command=(*_UVICORN, "--loop", "asyncio")),
    FASTAPI_HYPERCORN: System("http_servers.fastapi_alone", command=_HYPERCORN),
    FASTAPI_GRANIAN: System("http_servers.fastapi_alone", command=_GRANIAN),
    IN_PROCESS: System("no server"),
    UNTUNED: System("http_servers.ours", "untuned"),
    OURS: System("http_servers.ours"),
    OURS_HYPERCORN: System("http_servers.ours", command=_HYPERCORN),
    OURS_GRANIAN: System("http_servers.ours", command=_GRANIAN),
    BY_JSON: System("http_servers.ours", "json"),
    JSON_QUIET: System("http_servers.ours", "json, quiet"),
    FAST_DYNAMIC_BATCHER: System("http_servers.fast_dynamic_batcher", "", "fast_dynamic_batcher"),
    BATCHED: System("http_servers.batched_aio", "", "batched"),
    LITSERVE: System("http_servers.litserve", "", "litserve", _PLAIN),
    OURS_SHARED: System(
        "http_servers.ours", "shared", command=(*_UVICORN, "--workers", str(API_PROCESSES))
    ),
    LITSERVE_4: System("http_servers.litserve", str(API_PROCESSES), "litserve", _PLAIN),
    LITSERVE_WINDOW: System("http_servers.litserve", "window", "litserve", _PLAIN),
    BENTOML: System("http_servers.bento", "", "bentoml", _BENTO, b'{"text": ["a short input"]}'),
    MOSEC: System("http_servers.mosec", "", "mosec", _MOSEC),
    MOSEC_SHORT: System("http_servers.mosec", "short queue", "mosec", _MOSEC),
    RAY: System("http_servers.ray_serve", "", "ray_serve", _PLAIN),
    RAY_TUNED: System(
        *("http_servers.ray_serve", "", "ray_serve", _PLAIN),
        settings=(("RAY_SERVE_THROUGHPUT_OPTIMIZED", "1"),),
    ),
}
# The README's systems and loads: one run of about a quarter of an hour.
PUBLISHED = (
    *(BARE, FASTAPI, FASTAPI_QUIET, OURS, BY_JSON, JSON_QUIET, FAST_DYNAMIC_BATCHER),
    *(BATCHED, LITSERVE, BENTOML, MOSEC, RAY),
)
PUBLISHED_LOADS = (
    "start",
    "echo, 32 connections",
    "model, 128 connections",
    "model, Poisson at 70%",
    "bodies, 16 connections",
)
PUBLISHED_REPETITIONS = 3
SHARED = {OURS_SHARED, LITSERVE_4}
# What reads large bodies besides uvicorn, as it is installed with `uvicorn[standard]`.
OTHER_SERVERS = {FASTAPI_H11, FASTAPI_ASYNCIO, FASTAPI_HYPERCORN, FASTAPI_GRANIAN}
OTHER_SERVERS |= {OURS_HYPERCORN, OURS_GRANIAN}
ECHOES = set(SYSTEMS) - {IN_A_THREAD, IN_PROCESS, MOSEC_SHORT} - SHARED - OTHER_SERVERS
BATCHERS = ECHOES - {BARE, FASTAPI, FASTAPI_QUIET, FUTURE, FUTURE_TUNED}
IN_STAGES = {OURS, MOSEC}
READERS = {FASTAPI, IN_A_THREAD, OURS, OURS_SHARED, BATCHED, MOSEC} | OTHER_SERVERS
RESTARTED = {OURS, LITSERVE, BENTOML, MOSEC}

_MODEL = Job(seconds=0.005, seconds_per_input=0.0001)
JOBS = {
    "echo": Job(),
    "model": _MODEL,
    "bodies": Job(shape=ARRAY_SHAPE),
    # As in `benchmarks.stages`.
    "pictures": replace(_MODEL, max_batch_size=32, shape=(SIDE, SIDE, 3), is_picture=True),
    # A tenth as fast, so that three times what it can do is not more than HTTP can.
    "overload": replace(_MODEL, seconds=0.05, seconds_per_input=0.001, limit=LIMIT),
    "kill": _MODEL,
}
CPU, RATE, P50, P99 = "cpu_us", "requests_per_second", "p50_ms", "p99_ms"
# Of the server's first process alone: with several, that one only waits.
API_CPU = "api_cpu_us"
OF_CAPACITY, GAP, BEYOND = "percent_of_capacity", "longest_gap", "beyond_import_s"
OVER_P50, LOST = "p99_over_p50", "unanswered"
COLUMNS = {"CPU us/request": CPU, "requests/s": RATE, "p50 ms": P50, "p99 ms": P99, "lost": "lost"}
BODIES = {"API CPU us": API_CPU, **COLUMNS}
FULL = {"% of the capacity": OF_CAPACITY, **COLUMNS}
START = {"start-up s": "start_s", "idle, % of a core": "idle_percent", "memory MB": "memory_mb"}
KILL = {
    "longest s without a good answer": GAP,
    "beyond the import of the model": BEYOND,
    "requests without an answer": LOST,
    "errors": "errors",
}


def plan(systems: Collection[str], scenarios: Collection[str], seconds: float) -> list[Table]:
    """What to measure, in order; a table's `scenario` is the key of its job."""

    def make(scenario: str, among: set[str], columns: Columns, connections: int = 0) -> Table:
        load = Load("Linear5ms", JOBS[scenario].max_batch_size, connections, seconds)
        chosen = tuple(name for name in SYSTEMS if name in among and name in systems)
        name = f"{scenario}, {connections} connections" if connections else "start"
        return Table(name, scenario, load, chosen, columns, name)

    def make_open(scenario: str, among: set[str], share: float) -> Table:
        one, name = make(scenario, among, FULL), f"{scenario}, Poisson at {share:.0%}"
        rate = share * JOBS[scenario].capacity
        load = replace(one.load, rate=rate, callers=OPEN_CONNECTIONS)
        return replace(one, title=name, label=name, load=load, share=share)

    every = [
        make("echo", ECHOES, START),
        *(make("echo", ECHOES, COLUMNS, connections) for connections in (1, 32, 256)),
        make("echo", SHARED, COLUMNS, 64),
        make("model", BATCHERS, FULL, 128),
        *(make_open("model", {*BATCHERS, IN_PROCESS}, share) for share in (0.3, 0.7, 0.9)),
        *(make("bodies", READERS, BODIES, connections) for connections in (1, 16, 256)),
        make("pictures", IN_STAGES, COLUMNS, 192),
        make_open("overload", {*BATCHERS, MOSEC_SHORT}, OVERLOAD),
        make("kill", RESTARTED, KILL, 128),
    ]
    return [table for table in every if table.scenario in scenarios]


_FEW, _KILL = "echo, 32 connections", "kill, 128 connections"
_LARGE, _MANY_LARGE = "bodies, 16 connections", "bodies, 256 connections"
# A load, a system, what is judged of it, and its bar.
BARS: tuple[tuple[str, str, str | Compared, dict[str, float]], ...] = (
    (_FEW, BY_JSON, Compared(CPU, OURS), {"at_most": 0.6}),
    (_FEW, BY_JSON, Compared(CPU, FASTAPI), {"at_most": 1.0}),
    (_FEW, JSON_QUIET, Compared(CPU, BARE), {"at_most": 2.0}),
    (_FEW, OURS, Compared(CPU, FUTURE_TUNED), {"at_most": 1.15}),
    (_FEW, OURS, Compared(P99, UNTUNED), {"at_most": 0.35}),
    ("echo, 64 connections", OURS_SHARED, Compared(CPU, LITSERVE_4), {"at_most": 0.5}),
    ("echo, 256 connections", OURS, OVER_P50, {"at_most": 1.5}),
    ("model, 128 connections", OURS, OF_CAPACITY, {"at_least": 97.0}),
    ("model, Poisson at 70%", OURS, Compared(P99, IN_PROCESS), {"at_most": 1.3}),
    (_LARGE, OURS, Compared(CPU, FASTAPI, operator.sub), {"at_most": 220.0}),
    (_LARGE, OURS, Compared(API_CPU, FASTAPI), {"at_most": 1.25}),
    (_MANY_LARGE, OURS, Compared(API_CPU, FASTAPI), {"at_most": 1.25}),
    (_MANY_LARGE, OURS_SHARED, Compared(RATE, OURS), {"at_least": 1.0}),
    (_LARGE, OURS, Compared(CPU, MOSEC), {"at_most": 1.0}),
    (_LARGE, OURS, Compared(CPU, IN_A_THREAD), {"at_most": 1.0}),
    (_LARGE, OURS, Compared(RATE, MOSEC), {"at_least": 1.5}),
    ("overload, Poisson at 300%", OURS, OF_CAPACITY, {"at_least": 95.0}),
    (_KILL, OURS, BEYOND, {"at_most": 0.3}),
    (_KILL, OURS, LOST, {"at_most": 0.0}),
)


def verdicts(measurements: Sequence[Measurement], tables: Sequence[Table]) -> list[Verdict]:
    """The bars of these loads."""
    by_name, found = {table.name: table for table in tables}, []
    for load, system, column, bar in BARS:
        claim = f"{load}: {column} of {system}"
        if isinstance(column, Compared):
            word = "beyond" if column.combine is operator.sub else "over"
            claim = f"{load}: {column.figure} of {system} {word} that of {column.system}"
        if load in by_name:
            spread = by_name[load].spread(measurements, system, HTTP, column)
            found.append(Verdict(claim, spread, **bar))
    return found


@contextmanager
def running(system: System, job: Job, body: bytes) -> Iterator[tuple[Target, float]]:
    """Start a server, and end it with everything that it has started.

    Yields:
        Where it is, and the seconds until its first good answer.

    Raises:
        RuntimeError: It did not start.
    """
    with socket.create_server((HOST, 0)) as listener:
        port: int = listener.getsockname()[1]
    known = {"port": port, "module": f"benchmarks.{system.server}"}
    words = [word.format(**known) for word in system.command]
    begin = time.perf_counter()
    server = start(tied.command(*words, python=system.python), system.variables(job))
    try:
        target = Target(HOST, port, server)
        while not _answers(target, body):
            if server.process.poll() is not None or time.perf_counter() > begin + START_LIMIT:
                raise RuntimeError(f"the server did not start: {' '.join(server.log)[-500:]}")
            time.sleep(POLL_INTERVAL)
        yield target, time.perf_counter() - begin
    finally:
        server.end(STOP_LIMIT)


def _answers(target: Target, body: bytes) -> bool:
    try:
        return target.ask("POST", "/predict", body, "application/json")[0] == 200
    except (OSError, HTTPException):
        return False


def _make_body(system: System, job: Job) -> bytes:
    if job.is_picture:
        return make_jpeg()
    return bytes(4 * math.prod(job.shape)) if job.shape else system.body


def measure_start(target: Target, start_s: float, seconds: float) -> Figures:
    """Measure a server that has had one request."""
    assert target.server is not None
    pid = target.server.process.pid
    time.sleep(seconds / 2)  # what a start leaves to do
    before = target.server.read_cpu()
    time.sleep(seconds)
    used = target.server.read_cpu().since(before)
    memory = 0
    for one in (pid, *descendants(pid)):
        with suppress(OSError):  # it ended while we looked
            text = Path(f"/proc/{one}/smaps_rollup").read_text()
            memory += int(text.partition("\nPss:")[2].split()[0])
    idle = 100 * (used.api + used.workers) / seconds
    return {"start_s": start_s, "idle_percent": idle, "memory_mb": memory / 1024}


def measure(target: Target, table: Table, repetition: int, job: Job, body: bytes) -> Figures:
    """Put a server under one load; kill its model's process if the job has a file with its id."""
    load, is_special = table.load, bool(job.limit or job.pid_file)
    settings = LoadSettings(
        bodies=[body],
        content_type="application/octet-stream" if job.shape else "application/json",
        seconds=load.seconds * (KILL_SECONDS if job.pid_file else 1),
        warm_up=SETTLING if is_special else load.seconds / 4,
        late=PATIENCE,
        client_processes=1,
        seed=harness.SEED,
        give_up=LESS_PATIENCE if job.limit else (PATIENCE if table.share else None),
        reconnect=is_special,
    )
    if job.pid_file:
        # It may take the whole server with it, whose CPU time is then unknown.
        target = replace(target, server=None)
        threading.Timer(KILLED_AT, _kill, [Path(job.pid_file)]).start()
    case = Case(table.name, "/predict", load.callers, load.rate or None)
    found = measure_load(target, case, repetition, settings)
    figures = found.figures | {
        LOST: float(found.lost.get("connection closed", 0) + found.lost.get("no answer", 0)),
        "errors": float(sum(n for what, n in found.lost.items() if what.startswith("status"))),
    }
    if P50 in figures:
        figures[OVER_P50] = figures[P99] / figures[P50]
    if job.seconds:
        figures[OF_CAPACITY] = 100 * figures[RATE] / job.capacity
    if "api_cpu_ms" in figures:
        figures[API_CPU] = 1000 * figures["api_cpu_ms"]
        figures[CPU] = figures[API_CPU] + 1000 * figures["workers_cpu_ms"]
    return figures


def _kill(pid_file: Path) -> None:
    os.kill(int(pid_file.read_text()), signal.SIGKILL)


class Run:
    """All measurements of one run.

    Args:
        arguments: The command line's.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self.tables = plan(arguments.systems, arguments.parts, arguments.seconds)
        if arguments.published:
            self.tables = [one for one in self.tables if one.name in PUBLISHED_LOADS]
        self.measurements: list[Measurement] = []

    def measure_all(self) -> None:
        """Take turns within a repetition; every other repetition goes backwards."""
        for scenario in self._arguments.parts:
            tables = [table for table in self.tables if table.scenario == scenario]
            turns = [name for name in SYSTEMS if any(name in one.systems for one in tables)]
            for repetition in range(self._arguments.repetitions):
                for name in reversed(turns) if repetition % 2 else turns:
                    ahead = [one for one in tables if name in one.systems]
                    try:
                        self._measure(name, ahead, repetition)
                    except (RuntimeError, OSError, ValueError, HTTPException) as error:
                        for table in ahead:
                            self._add(name, table, repetition, {}, str(error))

    def _measure(self, name: str, ahead: list[Table], repetition: int) -> None:
        """Measure one server under each load, and take the loads that are done from the list."""
        if name == IN_PROCESS:
            while ahead:
                load = replace(ahead[0].load, seed=harness.SEED + repetition)
                outcome = harness.measure(load, "ours", "open_loop", "uvloop")
                found = outcome["figures"], outcome.get("error")
                self._add(name, ahead.pop(0), repetition, *found)
            return
        system, scenario = SYSTEMS[name], ahead[0].scenario
        with tempfile.TemporaryDirectory() as folder:
            job = replace(JOBS[scenario], pid_file=f"{folder}/pid" if scenario == "kill" else "")
            body = _make_body(system, job)
            with running(system, job, body) as (target, start_s):
                while ahead:
                    begin, before = time.monotonic(), read_ticks()
                    if ahead[0].columns is START:
                        figures = measure_start(target, start_s, ahead[0].load.seconds / 2)
                    else:
                        figures = measure(target, ahead[0], repetition, job, body)
                    stolen = stolen_percent(before, read_ticks())
                    if self._arguments.host.was_calm(stolen, time.monotonic() - begin):
                        if scenario == "kill":
                            figures[BEYOND] = figures[GAP] - system.seconds_to_import(job)
                        self._add(name, ahead.pop(0), repetition, figures)

    def _add(
        self, name: str, table: Table, repetition: int, figures: Figures, error: str | None = None
    ) -> None:
        callers = table.load.callers
        found = Measurement(name, table.name, HTTP, callers, repetition, figures, {}, error)
        self.measurements.append(found)
        total = sum(len(one.systems) for one in self.tables) * self._arguments.repetitions
        told = [
            f"{what} {number(figures[one])}"
            for what, one in table.columns.items()
            if one in figures
        ]
        done = f"[{len(self.measurements)}/{total}] {table.name}: {name}"
        print(f"{done}: {error or ', '.join(told)}", file=sys.stderr)

    def remark(self) -> str:
        """What the client itself costs, and how busy it was at most."""
        bare = [m.figures for m in self.measurements if m.system == BARE and CPU in m.figures]
        cost = Spread.of([figures["client_cpu_us"] for figures in bare])
        busy = max(m.figures.get("client_busy", 0.0) for m in self.measurements)
        return (
            f"The client takes {cost or '-'} us of CPU per request at the bare ASGI app, and was "
            f"busy for {busy:.0%} of the time at most."
        )

    def draw(self, path: Path) -> None:
        """Draw CPU time and tail latency of each system at 32 connections."""
        (table,) = (one for one in self.tables if one.name == _FEW)
        picture = Figure(figsize=(11, 4.5), layout="constrained")
        titles = {CPU: "CPU us per request, all processes", P99: "p99, ms"}
        for axes, (figure, title) in zip(picture.subplots(1, 2), titles.items(), strict=True):
            found = {
                name: spread.median
                for name in reversed(table.systems)
                if (spread := table.spread(self.measurements, name, HTTP, figure))
            }
            colours = ["C1" if name.startswith("ours") else "C0" for name in found]
            bars = axes.barh(list(found), list(found.values()), color=colours)
            axes.bar_label(bars, [number(value) for value in found.values()], padding=3)
            axes.set(xscale="log", xlabel=title)
            axes.margins(x=0.2)
        picture.suptitle(table.title)
        picture.savefig(path, dpi=110)


def main() -> int:
    """Measure, print, store."""
    arguments = harness.parse_arguments(
        "http",
        __doc__ or "",
        systems=tuple(SYSTEMS),
        seconds=4.0,
        quick_seconds=1.0,
        loops=(),
        parts=tuple(JOBS),
        quick_repetitions=1,
        flags={"published": "what the README shows, in a quarter of an hour"},
    )
    if arguments.published:
        arguments.systems = PUBLISHED
        arguments.parts = ("echo", "model", "bodies")
        arguments.repetitions = PUBLISHED_REPETITIONS
    # So that the servers are ended as on Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    run = Run(arguments)
    run.measure_all()
    found = verdicts(run.measurements, run.tables)
    tables = harness.text_of(run.tables, run.measurements, [HTTP])
    environments = {SYSTEMS[name].environment for name in arguments.systems if name in SYSTEMS}
    harness.store(
        arguments.json,
        "http",
        arguments.machine | arguments.host.describe(),
        {"seconds": arguments.seconds, "repetitions": arguments.repetitions, "seed": harness.SEED},
        run.measurements,
        f"median (range) of {arguments.repetitions} repetitions, {arguments.seconds:g} s each",
        f"{tables}\n\n{run.remark()}",
        found,
        find_versions() | {one: PEERS[one][0].split("==")[1] for one in environments if one},
    )
    if "echo" in arguments.parts and not ECHOES.isdisjoint(arguments.systems):
        run.draw(arguments.json.with_suffix(".png"))
    return 1 if arguments.check and not all(verdict.holds for verdict in found) else 0


if __name__ == "__main__":
    sys.exit(main())
