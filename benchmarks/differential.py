"""Does the simulation say what real processes do?

The same arrivals, or clients with the same pauses, seed by seed: once through `DynBatcher` with a
worker that sleeps as long as the model would compute, and once through the simulator. It is given
the model's times and what was measured apart, in loads of another kind: what the way there and back
takes from the worker (full batches of three sizes, none ahead of another, for clients in a process
of their own as in what is compared), and how late a request that is due comes in (`at once`).
Nothing is fitted to the runs that are compared. Mean latency and mean batch size are to agree
within 10 %.
"""

import itertools
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random

from benchmarks.arrivals import due_times
from benchmarks.harness import SEED, Job, finish, hardware, measure_all, parse_arguments
from benchmarks.models import SIZED
from benchmarks.report import Measurement, Series, Verdict, number, table
from benchmarks.scenarios import WARM_UP_SECONDS, Figures, Load
from benchmarks.simulation.batchers import Ours
from benchmarks.simulation.engine import simulate
from benchmarks.simulation.loads import ClosedLoop, OpenLoop, short_pause
from benchmarks.simulation.loads import Load as SimulatedLoad
from benchmarks.simulation.models import Model, Worker

# By system, the policy that the simulator runs.
POLICIES = {"ours": "adaptive", "ours greedy": "greedy"}
AT_ONCE = "at once"
CLIENTS = (1, 8, 32, 64)
# Shares of the model's capacity, by its times.
LOADS = (0.3, 0.7, 0.9)
LARGEST_DIFFERENCE = 0.1
# A full batch is put behind one that runs, and its way takes place meanwhile. Others wait for a
# free worker, and nearly all batches that are compared are such.
NONE_AHEAD = "ours greedy, none ahead"
# So many callers for each place in a batch: the next batch is always full.
CROWD = 4
WAYS_HEADER = ("load", "requests/s", "batch size", "way ms", "late ms")
FIGURES = {"mean ms": "mean_ms", "batch size": "batch_size"}
# Requests/s at which requests find the event loop at rest.
LATENESS_RATE = 500.0


@dataclass(frozen=True)
class Cell:
    """One model under one load."""

    model: str
    system: str
    # Either of them.
    clients: int = 0
    share: float = 0.0

    @property
    def scenario(self) -> str:
        """The load's name in `benchmarks.measured_process`."""
        return "closed_loop" if self.clients else "open_loop"

    @property
    def label(self) -> str:
        """What the results call it."""
        load = f"{self.clients} clients" if self.clients else f"open loop at {self.share:.0%}"
        return f"{self.model}, {load}"

    def load(self, seconds: float) -> Load:
        """What is put on it."""
        model = SIZED[self.model]
        rate = self.share * model.capacity
        return Load(self.model, model.max_batch_size, self.clients, seconds, rate=rate)


CELLS = (
    *(Cell("Gpu", system, clients=clients) for clients in CLIENTS for system in POLICIES),
    *(Cell(model, "ours", share=share) for model in SIZED for share in LOADS),
)


def sizes_of(model: str) -> tuple[int, ...]:
    """The batches whose way is measured; between them it is interpolated."""
    most = SIZED[model].max_batch_size
    return (1, most // 4, most)


def interpolate(points: Sequence[tuple[int, float]], most: int) -> list[float]:
    """Values for all sizes from 0 to `most`, on lines between the points, which rise from 1."""
    values = [points[0][1]] * 2
    for (size, value), (next_size, next_value) in itertools.pairwise(points):
        slope = (next_value - value) / (next_size - size)
        values += [value + slope * step for step in range(1, next_size - size + 1)]
    assert len(values) == most + 1, "the last point is that of a full batch"
    return values


class WorkerBehindPipes(Worker):
    """A worker whose batches take the way there and back as well.

    Args:
        model: Of all batches.
        transport: Seconds of the way, by the size of the batch from 0 on.
    """

    def __init__(self, model: Model, transport: Sequence[float]) -> None:
        super().__init__(model)
        self._transport = transport

    def seconds(self, now: float, requests: Sequence[int]) -> float:
        """The model's time and the way."""
        return super().seconds(now, requests) + self._transport[len(requests)]


def simulated(cell: Cell, load: Load, transport: Sequence[float], lateness: float) -> Figures:
    """The figures of this load in virtual time.

    Args:
        cell: Its model and policy.
        load: With the seed of the real one.
        transport: Seconds, by the size of the batch.
        lateness: Seconds from when a request is due until it is seen.
    """
    model = SIZED[cell.model]
    seconds = WARM_UP_SECONDS + load.seconds
    arrivals: SimulatedLoad

    def late_pause(random: Random) -> float:
        return short_pause(random) + lateness

    if cell.clients:
        arrivals = ClosedLoop(cell.clients, late_pause, load.seed)
    else:
        arrivals = OpenLoop([due + lateness for due in due_times(load.rate, seconds, load.seed)])
    batcher = Ours(POLICIES[cell.system], model.max_batch_size)
    until = seconds if cell.clients else float("inf")
    record = simulate(batcher, arrivals, WorkerBehindPipes(model, transport), until)
    figures = record.figures(WARM_UP_SECONDS, seconds)
    return {
        "mean_ms": figures["mean_ms"] + 1e3 * lateness,
        "batch_size": figures["batch_size"],
    }


def transport_jobs(model: str, loop: str, seconds: float) -> list[Job]:
    """What is measured apart of one model's batches on one event loop."""
    return [
        Job(
            NONE_AHEAD,
            "closed_loop",
            loop,
            Load(model, size, CROWD * size, seconds),
            batches_label(model, size),
        )
        for size in sizes_of(model)
    ]


def batches_label(model: str, size: int) -> str:
    """What the results call batches that are always full."""
    return f"{model}, batches of {size}"


def lateness_jobs(loop: str, seconds: float) -> list[Job]:
    """The same of how late requests are seen; no model has a part in it."""
    closed = Load("Gpu", 1, 1, seconds)
    opened = Load("Gpu", 1, 0, seconds, rate=LATENESS_RATE)
    return [
        Job(AT_ONCE, "closed_loop", loop, closed),
        Job(AT_ONCE, "open_loop", loop, opened),
    ]


def apart(cells: Iterable[Cell], loop: str, seconds: float) -> list[Job]:
    """All that is measured apart for these cells."""
    models = dict.fromkeys(cell.model for cell in cells)
    ways = [job for model in models for job in transport_jobs(model, loop, seconds)]
    return [*ways, *lateness_jobs(loop, seconds)]


def transport_of(measurements: Iterable[Measurement], model: str, loop: str) -> list[float] | None:
    """Seconds that a batch's way takes, by its size; None if one was not measured."""
    runs = list(measurements)
    points = []
    for size in sizes_of(model):
        series = Series.of(runs, NONE_AHEAD, batches_label(model, size), loop, CROWD * size)
        found = series.spread("requests_per_second")
        if found is None:
            return None
        points.append((size, size / found.median - SIZED[model].seconds(size)))
    return interpolate(points, SIZED[model].max_batch_size)


def lateness_of(measurements: Iterable[Measurement], cell: Cell, loop: str) -> float | None:
    """Seconds from when a request is due until it is seen; None if that was not measured."""
    callers = 1 if cell.clients else 0
    spread = Series.of(measurements, AT_ONCE, cell.scenario, loop, callers).spread("p50_ms")
    # The median: one hold-up of the machine would be that of every request.
    return None if spread is None else spread.median / 1e3


def name_simulated(system: str) -> str:
    """What the results call the simulator's run of it."""
    return f"{system}, simulated"


def simulate_all(
    runs: list[Measurement], cells: Iterable[Cell], loop: str, repetition: int, seconds: float
) -> list[Measurement]:
    """All cells with what one repetition has measured apart."""
    found = []
    for cell in cells:
        transport, lateness = transport_of(runs, cell.model, loop), lateness_of(runs, cell, loop)
        if transport is not None and lateness is not None:
            load = replace(cell.load(seconds), seed=SEED + repetition)
            figures = simulated(cell, load, transport, lateness)
            name = name_simulated(cell.system)
            found.append(Measurement(name, cell.label, loop, cell.clients, repetition, figures, {}))
    return found


def pair(measurements: list[Measurement], cell: Cell, loop: str) -> tuple[Series, Series]:
    """The real one and the simulated one."""
    real, virtual = (
        Series.of(measurements, name, cell.label, loop, cell.clients)
        for name in (cell.system, name_simulated(cell.system))
    )
    return real, virtual


def text_of(measurements: list[Measurement], cells: Sequence[Cell], loops: Iterable[str]) -> str:
    """What was measured apart, and all cells."""
    names = [f"{what} {title}" for title in FIGURES for what in ("real", "simulated")]
    parts = []
    for loop in loops:
        ways: list[list[object]] = []
        for job in apart(cells, loop, 0.0):
            callers, size = job.load.callers, job.load.max_batch_size
            series = Series.of(measurements, job.system, job.label or job.scenario, loop, callers)
            rate, batch = series.spread("requests_per_second"), series.spread("batch_size")
            way, late = None, None
            if job.system == AT_ONCE:
                late = series.spread("p50_ms")
            elif rate is not None:
                way = number(1e3 * (size / rate.median - SIZED[job.load.model].seconds(size)))
            ways.append([f"{job.system}, {job.label or job.scenario}", rate, batch, way, late])
        rows: list[list[object]] = []
        for cell in cells:
            real, virtual = pair(measurements, cell, loop)
            spreads = [s.spread(f) for f in FIGURES.values() for s in (real, virtual)]
            ratios = [real.ratio(figure, virtual) for figure in FIGURES.values()]
            rows.append([cell.label, POLICIES[cell.system], *spreads, *ratios])
        ratio_names = [f"{title}, real over simulated" for title in FIGURES]
        parts += [
            f"Measured apart, {loop}\n{table(WAYS_HEADER, ways)}",
            f"{loop}\n{table(['load', 'policy', *names, *ratio_names], rows)}",
        ]
    return "\n\n".join(parts)


def verdicts(measurements: list[Measurement], cells: Iterable[Cell], loop: str) -> list[Verdict]:
    """Whether they agree."""
    found = []
    for cell in cells:
        real, virtual = pair(measurements, cell, loop)
        for title, figure in FIGURES.items():
            claim = f"{cell.label}, {POLICIES[cell.system]}, {loop}: {title}, real over simulated"
            found.append(
                Verdict(
                    claim,
                    real.ratio(figure, virtual),
                    at_least=1 - LARGEST_DIFFERENCE,
                    at_most=1 + LARGEST_DIFFERENCE,
                )
            )
    return found


def main() -> int:
    """Measure, simulate, print, store."""
    arguments = parse_arguments(
        "differential",
        __doc__ or "",
        systems=tuple(POLICIES),
        loops=("uvloop",),
        # With a hold, how 32 clients are grouped changes, and with it the mean of some seconds.
        seconds=12.0,
        quick_seconds=1.0,
        repetitions=3,
        quick_repetitions=1,
    )
    machine = hardware()
    cells = [cell for cell in CELLS if cell.system in arguments.systems]
    measurements: list[Measurement] = []
    for repetition in range(arguments.repetitions):
        for loop in arguments.loops:
            # Right before what it is for.
            jobs = apart(cells, loop, arguments.seconds)
            jobs += [
                Job(c.system, c.scenario, loop, c.load(arguments.seconds), c.label) for c in cells
            ]
            runs = measure_all(jobs, 1, first=repetition)
            measurements += runs
            measurements += simulate_all(runs, cells, loop, repetition, arguments.seconds)
    text = text_of(measurements, cells, arguments.loops)
    found = [v for loop in arguments.loops for v in verdicts(measurements, cells, loop)]
    return finish(arguments, machine, measurements, text, found)


if __name__ == "__main__":
    sys.exit(main())
