"""Measurement of a server: starts the clients, waits, and combines their records.

Runs in the command's process, which sleeps meanwhile.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from typing import IO, NamedTuple

from fast_batcher._load import client as client_process
from fast_batcher._load.client import ANSWER_LIMIT, Plan, Record, Target
from fast_batcher.stats import number

# Seconds for the start of the clients and for their results. The limit only ends what hangs.
SPARE_TIME = 300.0
# Seconds for the last words of a client that has failed.
COMPLAINT_LIMIT = 2.0
# Seconds for the status page, which answers in milliseconds. Another server may not answer at all.
PAGE_LIMIT = 2.0


class LoadError(RuntimeError):
    """A load that cannot be measured; the text says why, and what to do."""


class Batches(NamedTuple):
    """The counts of all batchers of an app."""

    completed: int
    batches: int
    # The largest `max_batch_size`.
    limit: int
    # Id of the process that has answered: without `shared`, others have counts of their own.
    process: int


def read_batches(target: Target) -> Batches | None:
    """Read the counts from the data of the status page, None without such a page."""
    try:
        status, body = target.ask("GET", "/batchers.json", limit=PAGE_LIMIT)
        page = json.loads(body) if status == 200 else {}
        found = page.get("batchers", [])
        return Batches(
            sum(one["totals"]["completed"] for one in found),
            sum(one["totals"]["batches"] for one in found),
            max(one["max_batch_size"] for one in found),
            page["pid"],
        )
    except (OSError, ValueError, LookupError, TypeError):
        return None  # a page of another kind, or none


@dataclass(frozen=True)
class Case:
    """A path of the server and a load."""

    name: str
    path: str
    # Connections: in a closed loop exactly this many, in an open loop at most.
    clients: int
    # Arrivals per second in an open loop, and their share of the path's best rate.
    rate: float | None = None
    share: float | None = None
    # The limit that the app was started with; None for the app's own.
    max_batch_size: int | None = None

    @property
    def load(self) -> str:
        """Name the load."""
        if self.rate is None:
            return f"{self.clients} client{'s' if self.clients != 1 else ''}"
        return f"{number(self.rate)}/s" + (f" ({self.share:.0%})" if self.share else "")


@dataclass(frozen=True)
class LoadSettings:
    """The settings that all measurements of a run share."""

    bodies: list[bytes]
    content_type: str
    # Length of the measured part, and of the warm-up under the same load.
    seconds: float
    warm_up: float
    # A good answer that comes later than this, in seconds, is counted as late.
    late: float
    client_processes: int
    seed: int
    method: str = "POST"
    # See `Plan`.
    give_up: float | None = None
    reconnect: bool = False


@dataclass(frozen=True)
class LoadMeasurement:
    """The figures of one repetition of a case."""

    case: Case
    repetition: int
    figures: dict[str, float]
    # Failures by kind, with their counts.
    lost: dict[str, int] = field(default_factory=dict)
    # Status and body of the first answer that was an error; empty without one.
    first_error: str = ""


def measure_case(
    target: Target,
    case: Case,
    repetition: int,
    settings: LoadSettings,
    watch: AbstractContextManager[object] | None = None,
) -> LoadMeasurement:
    """Put the target under a load.

    Args:
        target: The server.
        case: The load.
        repetition: Part of the seed.
        settings: Of the requests and of the time.
        watch: Entered while the clients run.

    Raises:
        LoadError: A client failed, or could not connect.
        OSError: The server cannot be reached.
    """
    plans = make_plans(target, case, repetition, settings)
    before = read_batches(target)
    with watch or nullcontext():
        records = run_clients(plans)
    figures = summarise(records, settings)
    after = None if before is None else read_batches(target)
    if before is not None and after is not None and after.batches > before.batches:
        completed = after.completed - before.completed
        # The steps of a stream count as batches.
        if after.process == before.process and "first_p50_ms" not in figures:
            figures["mean_batch"] = completed / (after.batches - before.batches)
        figures["max_batch_size"] = after.limit
    lost: Counter[str] = Counter()
    for record in records:
        lost.update(record.lost)
    first_error = next((record.first_error for record in records if record.first_error), "")
    return LoadMeasurement(case, repetition, figures, dict(lost), first_error)


def make_plans(target: Target, case: Case, repetition: int, settings: LoadSettings) -> list[Plan]:
    """Divide a load among the client processes; there are never more of them than clients."""
    processes = min(settings.client_processes, case.clients)
    whole = Plan(
        target={one.name: getattr(target, one.name) for one in fields(Target)},
        method=settings.method,
        path=case.path,
        bodies=[body.decode("latin-1") for body in settings.bodies],
        content_type=settings.content_type,
        connections=0,
        # Poisson processes side by side are one of the summed rate.
        rate=None if case.rate is None else case.rate / processes,
        seconds=settings.seconds,
        warm_up=settings.warm_up,
        seed=0,
        give_up=settings.give_up,
        reconnect=settings.reconnect,
    )
    return [
        replace(
            whole,
            connections=case.clients // processes + (index < case.clients % processes),
            seed=settings.seed + 1000 * repetition + index,
        )
        for index in range(processes)
    ]


def run_clients(plans: list[Plan]) -> list[Record]:
    """Run a client process for each plan, all at once, and end them all.

    Raises:
        LoadError: A client failed; the text has its last line. Or no temporary folder can be used.
    """
    clients: list[subprocess.Popen[str]] = []
    with ExitStack() as files:
        # Files: on one virtual machine, pipes have lost parts of records above 64 KiB.
        try:
            outputs = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in plans]
        except OSError as error:
            raise LoadError(f"the results need a temporary folder: {error}") from None
        try:
            for plan, output in zip(plans, outputs, strict=True):
                clients.append(_start_client(plan, output))
            for client in clients:
                assert client.stderr is not None
                if client.stderr.readline() != "ready\n":
                    raise _complaint(client)
            for client in clients:  # all are ready, so they start within microseconds
                assert client.stdin is not None
                client.stdin.write("go\n")
                client.stdin.flush()
            limit = max(plan.warm_up + plan.seconds for plan in plans) + ANSWER_LIMIT + SPARE_TIME
            return [_wait(*pair, limit) for pair in zip(clients, outputs, strict=True)]
        finally:
            for client in clients:
                client.kill()
                client.communicate()


def _start_client(plan: Plan, output: IO[str]) -> subprocess.Popen[str]:
    client = subprocess.Popen(
        # The client is named by its file: a module of the same name in the working directory is not
        # found.
        [sys.executable, "-P", client_process.__file__],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert client.stdin is not None
    client.stdin.write(json.dumps(asdict(plan)) + "\n")
    client.stdin.flush()
    return client


def _wait(client: subprocess.Popen[str], output: IO[str], limit: float) -> Record:
    try:
        # Its stdin stays open: the client ends when that does.
        client.wait(limit)
    except subprocess.TimeoutExpired:
        raise _complaint(client) from None
    if client.returncode != 0:
        raise _complaint(client)
    output.seek(0)
    return Record(**json.load(output))


def _complaint(client: subprocess.Popen[str]) -> LoadError:
    try:  # it may still write why
        _, text = client.communicate(timeout=COMPLAINT_LIMIT)
    except subprocess.TimeoutExpired:
        client.kill()
        _, text = client.communicate()
    last_line = text.strip().splitlines()[-1:] or ["it said nothing in time"]
    return LoadError(f"the client failed: {last_line[0].removeprefix('RuntimeError: ')}")


def summarise(records: list[Record], settings: LoadSettings) -> dict[str, float]:
    """Combine the records of all client processes; latencies and lags in milliseconds."""
    latencies = [latency for record in records for latency in record.latencies]
    answers = sum(record.answers for record in records)
    figures = {
        # The warm-up included.
        "answers": float(answers),
        "requests_per_second": sum(record.rate for record in records),
        "requests": float(sum(record.requests for record in records)),
        "lost": float(sum(sum(record.lost.values()) for record in records)),
        "late": float(sum(latency > settings.late for latency in latencies)),
        "longest_gap": max(record.longest_gap for record in records),
        # The share of the busiest process: at 1 it cannot send more.
        "client_busy": max(record.cpu / record.elapsed for record in records),
    }
    if answers:
        figures["client_cpu_us"] = sum(record.cpu for record in records) / answers * 1e6
    lists = {"": "latencies", "lag_": "lags", "first_": "first_parts", "gap_": "gaps"}
    for prefix, name in lists.items():
        values: list[float] = [one for record in records for one in getattr(record, name)]
        if len(values) > 1:
            cuts = statistics.quantiles(values, n=100, method="inclusive")
            figures |= {f"{prefix}p{at}_ms": cuts[at - 1] * 1e3 for at in (50, 95, 99)}
    return figures
