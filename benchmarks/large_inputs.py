"""What do many large inputs at once cost each process, from one API process and from several?

The callers of one, two or four API processes fill arrays of `allocate_input`, 602 KB each. CPU time
and page faults are those of all API processes, of the host, and of the worker, for each request.
"""

import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks import harness
from benchmarks.cpu import descendants, process_cpu
from benchmarks.report import Columns, Table, Verdict
from benchmarks.scenarios import Figures, Load
from benchmarks.shared_model import Client, measure_all, run_all

# Number of API processes, and whether they share a worker.
SYSTEMS = {
    "1 process": (1, False),
    "2 processes, shared": (2, True),
    "4 processes, shared": (4, True),
}
CALLERS = (16, 64, 256)
LOOP = "asyncio"
ROLES = ("API", "host", "worker")
COLUMNS: Columns = {
    "requests/s": "requests_per_second",
    "ordinary arrays %": "ordinary_percent",
    "copied to stack %": "stacked_percent",
    **{f"{role} CPU us": f"{role}_cpu_us" for role in ROLES},
    **{f"{role} faults": f"{role}_faults" for role in ROLES},
}
# The share of arrays that are ordinary memory, and are copied twice, in percent; page faults of all
# processes for a request, which has 147 pages.
MOST_ORDINARY, MOST_FAULTS = 1.0, 1.0


@contextmanager
def opened(system: str, callers: int) -> Iterator[list[Client]]:
    """Start the API processes, and wait until their batchers are open."""
    count, is_shared = SYSTEMS[system]
    job = {"shared": is_shared, "callers": callers // count}
    with ExitStack() as stack:
        clients = []
        for _ in range(count):
            clients.append(Client(job, "benchmarks.large_inputs_client"))
            stack.callback(clients[-1].close)
        for client in clients:
            client.read()
        yield clients


def measure(system: str, load: Load, seconds: float) -> Figures:
    """Measure once, after a round that fills the memory."""
    with opened(system, load.callers) as clients:
        run_all(clients, seconds / 2)
        roles = find_roles([client.process.pid for client in clients])
        before = read_figures(roles)
        answers = run_all(clients, seconds)
        used = read_figures(roles)
    used.subtract(before)
    total = {name: sum(answer[name] for answer in answers) for name in answers[0]}
    requests = total["requests"]
    return {
        "requests_per_second": total["requests_per_second"],
        "ordinary_percent": 100 * total["ordinary"] / requests,
        "stacked_percent": 100 * total["stacked"] / requests,
        **{name: value / requests for name, value in used.items()},
        "faults": sum(used[f"{role}_faults"] for role in ROLES) / requests,
    }


def find_roles(api_pids: Sequence[int]) -> dict[int, str]:
    """Return the role of each process."""
    others = {pid: "worker" for pid in descendants(os.getpid()) if pid not in api_pids}
    for pid in others:
        if b"fast_batcher._host" in Path(f"/proc/{pid}/cmdline").read_bytes():
            others[pid] = "host"
    return others | dict.fromkeys(api_pids, "API")


def read_figures(roles: dict[int, str]) -> Counter[str]:
    """Read microseconds of CPU time, and page faults, by role."""
    figures: Counter[str] = Counter()
    for pid, role in roles.items():
        figures[f"{role}_cpu_us"] += round(process_cpu(pid) * 1e6)
        # The tenth field of the line, which begins with the program's name in parentheses.
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        figures[f"{role}_faults"] += int(after_name[7])
    return figures


def main() -> int:
    """Measure, print, store."""
    arguments = harness.parse_arguments(
        "large_inputs",
        __doc__ or "",
        systems=tuple(SYSTEMS),
        loops=(),
        callers=CALLERS,
        seconds=8.0,
        quick_seconds=2.0,
        quick_repetitions=1,
    )
    tables = [
        Table(
            f"{callers} in flight",
            f"{callers} in flight",
            Load("DeviceCopy", 64, callers, arguments.seconds),
            arguments.systems,
            COLUMNS,
        )
        for callers in arguments.callers
    ]
    measurements = measure_all(tables, arguments, measure)
    verdicts = [
        Verdict(
            f"{table.title}, {system}: {figure}",
            table.spread(measurements, system, LOOP, figure),
            at_most=bar,
        )
        for table in tables
        for system in table.systems
        for figure, bar in (("ordinary_percent", MOST_ORDINARY), ("faults", MOST_FAULTS))
    ]
    return harness.finish(
        arguments, measurements, harness.text_of(tables, measurements, [LOOP]), verdicts
    )


if __name__ == "__main__":
    sys.exit(main())
