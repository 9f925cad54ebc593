"""Does the simulation say what real processes do?

The same arrivals, or clients with the same pauses, seed by seed: once through `DynBatcher` with a
worker that sleeps as long as the model would compute, and once through the simulator. It is given
the model's times and what was measured apart, in loads of another kind: what the way there and back
costs a batch at rest (`bursts`), and how late a request that is due comes in (`at once`). Nothing
is fitted to the runs that are compared. Mean latency and mean batch size are to agree within 10 %.
"""

import itertools
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random

from benchmarks.arrivals import due_times
from benchmarks.harness import SEED, Job, finish, hardware, measure_all, parse_arguments
from benchmarks.models import SIZED
from benchmarks.report import Measurement, Series, Verdict, table
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
# Of what is measured apart, the median: one hold-up of the machine is no property of the way.
APART = "p50_ms"
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


def burst_sizes(model: str) -> tuple[int, ...]:
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


def apart(model: str, loop: str, seconds: float) -> list[Job]:
    """What is measured apart, for one model on one event loop."""
    most = SIZED[model].max_batch_size
    jobs = [
        Job("ours greedy", "bursts", loop, Load(model, most, size, seconds), f"{model}, bursts")
        for size in burst_sizes(model)
    ]
    closed = Load(model, most, 1, seconds)
    opened = Load(model, most, 0, seconds, rate=LATENESS_RATE)
    return [
        *jobs,
        Job(AT_ONCE, "closed_loop", loop, closed, f"{model}, closed_loop"),
        Job(AT_ONCE, "open_loop", loop, opened, f"{model}, open_loop"),
    ]


def transport_of(measurements: Iterable[Measurement], model: str, loop: str) -> list[float] | None:
    """Seconds that a batch's way takes, by its size; None if a burst could not be measured."""
    runs = list(measurements)
    points = []
    for size in burst_sizes(model):
        found = Series.of(runs, "ours greedy", f"{model}, bursts", loop, size).spread(APART)
        if found is None:
            return None
        points.append((size, found.median / 1e3 - SIZED[model].seconds(size)))
    return interpolate(points, SIZED[model].max_batch_size)


def lateness_of(measurements: Iterable[Measurement], cell: Cell, loop: str) -> float | None:
    """Seconds from when a request is due until it is seen; None if that was not measured."""
    label = f"{cell.model}, {cell.scenario}"
    found = Series.of(measurements, AT_ONCE, label, loop, 1 if cell.clients else 0)
    spread = found.spread(APART)
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
        for model in dict.fromkeys(cell.model for cell in cells):
            for job in apart(model, loop, 0.0):
                size = job.load.callers
                series = Series.of(measurements, job.system, job.label, loop, size)
                ways.append([job.label, size, series.spread(APART), series.spread("batch_size")])
        rows: list[list[object]] = []
        for cell in cells:
            real, virtual = pair(measurements, cell, loop)
            spreads = [s.spread(f) for f in FIGURES.values() for s in (real, virtual)]
            ratios = [real.ratio(figure, virtual) for figure in FIGURES.values()]
            rows.append([cell.label, POLICIES[cell.system], *spreads, *ratios])
        ratio_names = [f"{title}, real over simulated" for title in FIGURES]
        parts += [
            f"Measured apart, {loop}\n{table(['load', 'requests', 'p50 ms', 'batch size'], ways)}",
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
        seconds=4.0,
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
            jobs = [job for model in SIZED for job in apart(model, loop, arguments.seconds)]
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
