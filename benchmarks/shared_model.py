"""What does one model for several API processes (`shared=True`) cost, and what does it save?

Starts one, two or four API processes, which load one host process, beside a batcher with a worker
of its own. The callers are divided among the API processes. CPU time is that of all processes.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.cpu import TreeCpu, descendants, process_cpu, read_ticks, stolen_percent
from benchmarks.load_test import find_versions
from benchmarks.report import Columns, Compared, Measurement, Table, Verdict
from benchmarks.scenarios import Figures, Load

DIRECT, FOUR_COPIES = "direct", "direct, 4 processes"
ONE, TWO, FOUR = "shared, 1 process", "shared, 2 processes", "shared, 4 processes"
# Number of API processes, and whether they share.
SYSTEMS = {
    DIRECT: (1, False),
    FOUR_COPIES: (4, False),
    ONE: (1, True),
    TWO: (2, True),
    FOUR: (4, True),
}
LOOP = "asyncio"
ALL_CPU, API_CPU, RATE, P50, MEMORY = (
    *("all_cpu_us", "api_cpu_us", "requests_per_second", "p50_ms", "pss_mb"),
)


def _over(figure: str) -> Compared:
    return Compared(figure, DIRECT)


CPU: Columns = {
    "all CPU us/request": ALL_CPU,
    "over direct": _over(ALL_CPU),
    "API CPU us": API_CPU,
    "API over direct": _over(API_CPU),
    "requests/s": RATE,
}
# Loads, the systems that are measured under each, and the figures.
PARTS: dict[str, tuple[Load, tuple[str, ...], Columns]] = {
    "no-op": (Load("NoOp", 64, 64, 0), (DIRECT, ONE, TWO, FOUR), CPU),
    "lone": (
        Load("Flat5ms", 64, 1, 0),
        (DIRECT, ONE),
        {"p50 ms": P50, "over direct": _over(P50)},
    ),
    "saturation": (
        Load("Linear5ms", 64, 256, 0),
        (DIRECT, ONE, TWO, FOUR),
        {"requests/s": RATE, "over direct": _over(RATE)},
    ),
    "arrays": (Load("ArrayLabel", 32, 32, 0), (DIRECT, ONE, FOUR), CPU),
    "memory": (
        Load("MiniLM", 32, 16, 0),
        (DIRECT, FOUR_COPIES, FOUR),
        {"PSS of all processes, MB": MEMORY, "over direct": _over(MEMORY)},
    ),
}
# A load, a system, a figure over that of a batcher of its own, and its bar.
BARS: tuple[tuple[str, str, str, dict[str, float]], ...] = (
    ("no-op", ONE, ALL_CPU, {"at_most": 3.0}),
    ("no-op", FOUR, ALL_CPU, {"at_most": 6.0}),
    ("no-op", ONE, API_CPU, {"at_most": 1.75}),
    ("lone", ONE, P50, {"at_most": 1.04}),
    *(("saturation", system, RATE, {"at_least": 0.97}) for system in (ONE, TWO, FOUR)),
    ("arrays", ONE, ALL_CPU, {"at_most": 1.5}),
)


class Client:
    """An API process.

    Args:
        job: What it does.
        module: Its program.
        python: Its interpreter.
        environment: Variables besides ours.
    """

    def __init__(
        self,
        job: dict[str, Any],
        module: str = "benchmarks.shared_client",
        python: Path = Path(sys.executable),
        environment: dict[str, str] | None = None,
    ) -> None:
        self.process = subprocess.Popen(
            [str(python), "-m", module, json.dumps(job)],
            cwd=harness.ROOT,
            env=os.environ | (environment or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def read(self) -> str:
        """Wait for a line.

        Raises:
            RuntimeError: The process has ended.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"an API process ended with {self.process.wait()}")
        return line

    def run(self, seconds: float) -> None:
        """Start to send requests."""
        assert self.process.stdin is not None
        print(seconds, file=self.process.stdin, flush=True)

    def close(self) -> None:
        """Let it close its batcher and end."""
        self.process.communicate()


@contextmanager
def opened(system: str, load: Load) -> Iterator[list[Client]]:
    """Start the API processes, and wait until their batchers are open."""
    count, is_shared = SYSTEMS[system]
    job = {
        "shared": is_shared,
        "load": asdict(replace(load, callers=max(1, load.callers // count))),
    }
    with ExitStack() as stack:
        clients = []
        for _ in range(count):
            clients.append(Client(job))
            stack.callback(clients[-1].close)
        for client in clients:
            client.read()
        yield clients


def measure(system: str, load: Load, seconds: float) -> Figures:
    """Measure once."""
    with opened(system, load) as clients:
        run_all(clients, seconds / 4)
        api_pids = [client.process.pid for client in clients]
        before = _read_cpu(api_pids)
        answers = run_all(clients, seconds)
        used = _read_cpu(api_pids).since(before)
        memory = _read_pss()
    requests = sum(one["requests"] for one in answers)
    figures = {
        ALL_CPU: (used.api + used.workers) / requests * 1e6,
        API_CPU: used.api / requests * 1e6,
        MEMORY: memory,
    }
    if load.callers == 1:
        figures[P50] = answers[0][P50]
    else:
        figures[RATE] = sum(one[RATE] for one in answers)
    return figures


def run_all(clients: Sequence[Client], seconds: float) -> list[dict[str, Any]]:
    """Let all send requests at once; return what each says."""
    for client in clients:
        client.run(seconds)
    return [json.loads(client.read()) for client in clients]


def _read_cpu(api_pids: list[int]) -> TreeCpu:
    """Read the CPU seconds of the API processes, and of hosts and workers."""
    others = [pid for pid in descendants(os.getpid()) if pid not in api_pids]
    return TreeCpu(api=sum(map(process_cpu, api_pids)), workers=sum(map(process_cpu, others)))


def _read_pss() -> float:
    """Read the memory of all processes, shared pages divided among them, in MB."""
    total = 0
    for pid in descendants(os.getpid()):
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        total += int(text.partition("\nPss:")[2].split()[0])
    return total / 1024


def measure_all(
    tables: Sequence[Table], arguments: Any, measure: Callable[[str, Load, float], Figures]
) -> list[Measurement]:
    """Measure everything, with progress on stderr; the systems take turns."""
    found: list[Measurement] = []
    versions = find_versions()
    for table in tables:
        repetitions = 1 if table.name == "memory" else arguments.repetitions
        for repetition in range(repetitions):
            for system in table.systems:
                print(f"{table.title}: {system}", file=sys.stderr)
                while True:
                    ticks, begin = read_ticks(), time.monotonic()
                    figures = measure(system, table.load, arguments.seconds)
                    stolen = stolen_percent(ticks, read_ticks())
                    if arguments.host.was_calm(stolen, time.monotonic() - begin):
                        break
                found.append(
                    Measurement(
                        *(system, table.name, LOOP, table.load.callers, repetition, figures),
                        versions,
                        stolen_percent=stolen,
                    )
                )
    return found


def main() -> int:
    """Measure, print, store."""
    arguments = harness.parse_arguments(
        "shared_model",
        __doc__ or "",
        systems=tuple(SYSTEMS),
        loops=(),
        parts=tuple(PARTS),
        seconds=5.0,
        quick_seconds=2.0,
    )
    tables = []
    for part in arguments.parts:
        load, systems, columns = PARTS[part]
        load = replace(load, seconds=arguments.seconds)
        chosen = tuple(one for one in systems if one in arguments.systems)
        tables.append(Table(part, part, load, chosen, columns))
    measurements = measure_all(tables, arguments, measure)
    by_name = {table.name: table for table in tables}
    verdicts = [
        Verdict(
            f"{part}: {figure} of {system} over direct",
            by_name[part].spread(measurements, system, LOOP, _over(figure)),
            **bar,
        )
        for part, system, figure, bar in BARS
        if part in by_name
    ]
    return harness.finish(
        arguments, measurements, harness.text_of(tables, measurements, [LOOP]), verdicts
    )


if __name__ == "__main__":
    sys.exit(main())
