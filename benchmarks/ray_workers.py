"""What does a worker on a Ray cluster cost, and how does it compare with Ray Serve?

One app process and one worker: of this process, of a host (`shared=True`), an actor of a Ray
cluster, and a replica of Ray Serve with `@serve.batch`, called through a handle. The cluster is a
single node of this machine, started for each measurement. CPU time is that of all processes, the
cluster's own among them.
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import harness
from benchmarks.cpu import descendants, process_cpu, read_ticks, stolen_percent
from benchmarks.load_test import find_versions
from benchmarks.report import Columns, Compared, Measurement, Table, Verdict
from benchmarks.scenarios import Figures, Load
from benchmarks.setup_peers import python_of
from benchmarks.shared_model import Client, run_all

OURS = Path(sys.executable)
SERVE = python_of("ray_serve")
LOCAL, SHARED, RAY = "local", "shared host", "Ray through the host"
BATCH, THROUGHPUT = "Ray Serve", "Ray Serve, throughput settings"


class System(NamedTuple):
    """A system."""

    # For `benchmarks.ray_client`.
    kind: str
    python: Path = OURS
    needs_cluster: bool = False
    # Variables of the cluster and of the app.
    environment: tuple[tuple[str, str], ...] = ()


SYSTEMS = {
    LOCAL: System("local"),
    SHARED: System("shared"),
    RAY: System("ray", needs_cluster=True),
    BATCH: System("serve", SERVE, needs_cluster=True),
    THROUGHPUT: System("serve", SERVE, True, (("RAY_SERVE_THROUGHPUT_OPTIMIZED", "1"),)),
}
LOOP = "asyncio"
CPU, RATE, P50 = "all_cpu_us", "requests_per_second", "p50_ms"


def _over(figure: str, system: str) -> Compared:
    return Compared(figure, system)


COLUMNS: Columns = {
    "requests/s": RATE,
    "over local": _over(RATE, LOCAL),
    "over Serve": _over(RATE, THROUGHPUT),
    "all CPU us/request": CPU,
}
LONE: Columns = {"p50 ms": P50, "over Serve": _over(P50, BATCH)}
PARTS: dict[str, tuple[Load, Columns]] = {
    "no-op": (Load("NoOp", 32, 64, 0), COLUMNS),
    "model": (Load("Linear5ms", 32, 128, 0), COLUMNS),
    "lone": (Load("NoOp", 32, 1, 0), LONE),
    "arrays": (Load("ArrayLabel", 32, 64, 0), COLUMNS),
}
# A load, a figure of Ray through the host over another system's, and its bar.
BARS: tuple[tuple[str, str, str, dict[str, float]], ...] = (
    ("no-op", RATE, BATCH, {"at_least": 20}),
    ("no-op", RATE, THROUGHPUT, {"at_least": 20}),
    ("model", RATE, LOCAL, {"at_least": 0.9}),
    ("model", RATE, BATCH, {"at_least": 3}),
    ("lone", P50, BATCH, {"at_most": 0.33}),
)


@contextmanager
def cluster(system: System) -> Iterator[str]:
    """Start a cluster of one node if the system needs one; its address, "" without one."""
    if not system.needs_cluster:
        yield ""
        return
    with (
        tempfile.TemporaryDirectory(
            dir="/tmp", prefix="r", ignore_cleanup_errors=True
        ) as directory,
        _node(system, directory) as address,
    ):
        yield address


@contextmanager
def _node(system: System, directory: str) -> Iterator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    node = subprocess.Popen(
        [
            *(str(system.python), "-m", "ray.scripts.scripts", "start", "--head", "--block"),
            *("--port", str(port), "--node-ip-address", "127.0.0.1", "--num-cpus", "8"),
            *("--include-dashboard", "false", "--disable-usage-stats"),
            *("--object-store-memory", str(10**9)),
        ],
        cwd=harness.ROOT,
        # Ray notes its last cluster in that directory, for all programs that look there.
        env=_environment(system) | {"RAY_TMPDIR": directory},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert node.stdout is not None
    try:
        while "Ray runtime started" not in (line := node.stdout.readline()):
            if not line:
                raise RuntimeError("the cluster has not started")
        yield f"127.0.0.1:{port}"
    finally:
        node.terminate()
        node.communicate()


def _environment(system: System) -> dict[str, str]:
    own = {"PYTHONPATH": str(harness.ROOT), "RAY_AUTH_MODE": "disabled"}
    return os.environ | own | dict(system.environment)


def measure(name: str, load: Load, seconds: float) -> Figures:
    """Measure once."""
    system = SYSTEMS[name]
    with cluster(system) as address:
        job = {"kind": system.kind, "address": address, "load": asdict(load)}
        program = "benchmarks.ray_client"
        client = Client(job, program, system.python, _environment(system))
        try:
            while client.read() != "ready\n":
                pass
            run_all([client], seconds / 4)
            before = _read_cpu()
            (answer,) = run_all([client], seconds)
            used = sum(cpu - before.get(pid, 0.0) for pid, cpu in _read_cpu().items())
        finally:
            client.close()
    if load.callers == 1:
        return {P50: answer[P50]}
    return {RATE: answer[RATE], CPU: used / answer["requests"] * 1e6}


def _read_cpu() -> dict[int, float]:
    """Read the CPU seconds of all processes that this one has started."""
    return {pid: process_cpu(pid) for pid in descendants(os.getpid())}


def measure_all(tables: Sequence[Table], arguments: Any) -> list[Measurement]:
    """Measure everything, with progress on stderr; the systems take turns."""
    found: list[Measurement] = []
    versions = find_versions()
    for table in tables:
        for repetition in range(arguments.repetitions):
            for system in table.systems:
                print(f"{table.title}: {system}", file=sys.stderr)
                figures, error, stolen = {}, None, None
                if SYSTEMS[system].python.exists():
                    ticks, begin = read_ticks(), time.monotonic()
                    figures = measure(system, table.load, arguments.seconds)
                    stolen = stolen_percent(ticks, read_ticks())
                    arguments.host.was_calm(stolen, time.monotonic() - begin)
                else:
                    error = "ray[serve] is not installed, see `make bench-setup`"
                found.append(
                    Measurement(
                        *(system, table.name, LOOP, table.load.callers, repetition, figures),
                        *(versions, error, stolen),
                    )
                )
    return found


def main() -> int:
    """Measure, print, store."""
    arguments = harness.parse_arguments(
        "ray_workers",
        __doc__ or "",
        systems=tuple(SYSTEMS),
        loops=(),
        parts=tuple(PARTS),
        seconds=5.0,
        quick_seconds=3.0,
        repetitions=3,
        quick_repetitions=1,
    )
    tables = []
    for part in arguments.parts:
        load, columns = PARTS[part]
        chosen = tuple(name for name in SYSTEMS if name in arguments.systems)
        load = replace(load, seconds=arguments.seconds)
        tables.append(Table(part, part, load, chosen, columns))
    measurements = measure_all(tables, arguments)
    by_name = {table.name: table for table in tables}
    verdicts = [
        Verdict(
            f"{part}: {figure} of {RAY} over {other}",
            by_name[part].spread(measurements, RAY, LOOP, _over(figure, other)),
            **bar,
        )
        for part, figure, other, bar in BARS
        if part in by_name
    ]
    return harness.finish(
        arguments, measurements, harness.text_of(tables, measurements, [LOOP]), verdicts
    )


if __name__ == "__main__":
    sys.exit(main())
