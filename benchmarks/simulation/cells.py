"""What is simulated: parts, their cells, and the systems in each. Runs in any process.

A cell is one model under one load. All systems of a cell meet the same arrivals, seed by seed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from benchmarks.simulation.batchers import Ours, Planned
from benchmarks.simulation.engine import Batcher, simulate
from benchmarks.simulation.loads import (
    ClosedLoop,
    Load,
    OpenLoop,
    bursty,
    log_normal_costs,
    poisson,
    short_pause,
    stall_moments,
)
from benchmarks.simulation.models import MODELS, Model, Worker
from benchmarks.simulation.optimum import most_in_time, optimum, ruled_sizes
from benchmarks.simulation.peers import Aimd, Batched, Bento, FastDynamicBatcher

# By seed: the first one's number; the others follow.
FIRST_SEED = 20
# What the open loop of each part is made of, in shares of the model's capacity.
LOADS = (0.05, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98)
OVERLOADS = (1.2, 2.0, 5.0)
CLIENTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
# Where the peers are shown besides greedy.
PEERS_CLIENTS = (1, 8, 16, 32, 64)
# A client's pause between an answer and its next request, seconds. The last one is about as long as
# the model.
PAUSES: dict[str, Callable[[Random], float]] = {
    "uniform 0.1 to 1.1 ms": short_pause,
    "exponential 0.6 ms": lambda random: random.expovariate(1 / 0.6e-3),
    "exponential 5 ms": lambda random: random.expovariate(1 / 5e-3),
}
# Of a run, not counted: queues and what is learned have settled by then.
WARM_UP = 0.2
# Bursts: the first batches load kernels, and about once a second something else holds up a batch.
# Assumed, not measured: the policy notes name a slow start and stragglers without figures.
BURST_SLOW_FIRST = (3, 10.0)
STALL_EVERY, STALL_FACTOR = 1.0, 5.0
# The slow start: as if the first three batches compiled the model.
SLOW_START = (3, 50.0)
SLOW_START_LOAD = 0.6
SLOW_START_SECONDS = 60.0
# Log-normal: with this deviation of the logarithm the longest of 32 is seven times the mean.
COST_SIGMA = 1.0
COST_LOADS = (0.1, 0.2, 0.3)

OURS, GREEDY, BENTO = "adaptive", "greedy", "BentoML"
# Ours where the user has not set `max_latency`.
NO_TARGET = "no target"
# Ours where the user has given a cost function and `max_batch_cost`.
WITH_COSTS = "with costs"
# The exact optimum; the best of all policies that send whatever waits or nothing; and a rule that
# sends less than what waits, if it knows t(n) and the load.
OPTIMUM, OPTIMUM_OF_ALL, RULE = "optimum", "optimum, sends all", "rule of sizes"
# More answers in time than any batcher can give: see `most_in_time`.
BOUND = "bound"


def make(name: str, model: Model, target: float | None) -> Batcher:
    """A system at rest.

    Args:
        name: One of `SYSTEMS`.
        model: Whose `max_batch_size` it gets; it learns the rest or does not care.
        target: Seconds within which an answer is worth something, None if any time will do.
    """
    size = model.max_batch_size
    # Clipper has no default; without a target its size is not to be what limits it.
    objective = target or 10 * model.seconds(size)
    makers: dict[str, Callable[[], Batcher]] = {
        OURS: partial(Ours, "adaptive", size, target=target),
        GREEDY: partial(Ours, "greedy", size, target=target),
        NO_TARGET: partial(Ours, "adaptive", size),
        "fixed 1 ms": partial(Ours, "fixed", size, max_delay=1e-3, target=target),
        "fixed 5 ms": partial(Ours, "fixed", size, max_delay=5e-3, target=target),
        "FDB 5 ms": partial(FastDynamicBatcher, size, 5e-3),
        "FDB 100 ms": partial(FastDynamicBatcher, size, 100e-3),
        "batched 5 ms": partial(Batched, size, 5e-3),
        BENTO: partial(Bento, size, target or 60.0),
        "AIMD": partial(Aimd, size, objective),
    }
    return makers[name]()


SYSTEMS = (
    *(OURS, GREEDY, "fixed 1 ms", "fixed 5 ms", "FDB 5 ms", "FDB 100 ms"),
    *("batched 5 ms", BENTO, "AIMD"),
)
# In the order of the tables.
ALL_SYSTEMS = (OURS, NO_TARGET, WITH_COSTS, *SYSTEMS[1:])


@dataclass(frozen=True)
class Cell:
    """One model under one load."""

    part: str
    model: str
    # The load as a share of capacity, or the number of clients.
    x: float
    # Of a closed loop, which of `PAUSES`.
    pause: str = ""
    systems: tuple[str, ...] = SYSTEMS

    def __str__(self) -> str:
        if self.part == "closed-loop":
            return f"{self.part}, {self.model}, {self.pause}, {self.x:.0f} clients"
        return f"{self.part}, {self.model}, {self.x:.0%}"


Figures = dict[str, float]
# By system.
Outcome = dict[str, Figures]


def open_loop(cell: Cell, seed: int, scale: float) -> Outcome:
    """Poisson arrivals, any latency is better than a longer one; and the exact optimum."""
    model = MODELS[cell.model]
    rate = cell.x * model.capacity
    seconds = scale * 20_000 / rate
    moments = poisson(rate, seconds, seed)
    batchers: dict[str, Batcher] = {name: make(name, model, None) for name in cell.systems}
    for name, sends_all in ((OPTIMUM, False), (OPTIMUM_OF_ALL, True)):
        batchers[name] = Planned(optimum(model, cell.x, sends_all=sends_all).sizes)
    batchers[RULE] = Planned(ruled_sizes(model, cell.x))
    return _run_all(batchers, lambda: OpenLoop(moments), lambda: Worker(model), seconds)


def closed_loop(cell: Cell, seed: int, scale: float) -> Outcome:
    """Clients that ask again a pause after their answer."""
    model = MODELS[cell.model]
    seconds = scale * 12_000 / model.capacity
    return _run_all(
        {name: make(name, model, None) for name in cell.systems},
        lambda: ClosedLoop(int(cell.x), PAUSES[cell.pause], seed),
        lambda: Worker(model),
        seconds,
        is_open=False,
    )


def overload(cell: Cell, seed: int, scale: float) -> Outcome:
    """More than the model can do; only answers within the target count."""
    model = MODELS[cell.model]
    seconds = scale * 20_000 / model.capacity
    moments = poisson(cell.x * model.capacity, seconds, seed)
    return _run_all(
        {name: make(name, model, model.target) for name in cell.systems},
        lambda: OpenLoop(moments),
        lambda: Worker(model),
        seconds,
        target=model.target,
        is_open=False,
    )


def bursts(cell: Cell, seed: int, scale: float) -> Outcome:
    """Peaks of nearly twice the capacity, a slow start, and a worker that is held up at times."""
    model = MODELS[cell.model]
    seconds = scale * 150_000 / model.capacity
    moments = bursty(model.capacity, seconds, seed)
    stalls = stall_moments(STALL_EVERY, seconds, seed)
    found = _run_all(
        {name: make(name, model, model.target) for name in cell.systems},
        lambda: OpenLoop(moments),
        lambda: Worker(
            model, slow_first=BURST_SLOW_FIRST, stalls=stalls, stall_factor=STALL_FACTOR
        ),
        seconds,
        target=model.target,
        warm_up=0.0,
    )
    return found | {BOUND: {"in_time": most_in_time(model, moments)}}


def slow_start(cell: Cell, seed: int, scale: float) -> Outcome:
    """Who believes the first three batches refuses all others."""
    model = MODELS[cell.model]
    # Not scaled: what is lost at the start is a share of the whole.
    seconds = SLOW_START_SECONDS
    moments = poisson(cell.x * model.capacity, seconds, seed)
    return _run_all(
        {name: make(name, model, model.target) for name in cell.systems},
        lambda: OpenLoop(moments),
        lambda: Worker(model, slow_first=SLOW_START),
        seconds,
        target=model.target,
        warm_up=0.0,
    )


def costs(cell: Cell, seed: int, scale: float) -> Outcome:
    """Requests of unlike lengths; a batch is padded to its longest one."""
    model = MODELS[cell.model]
    rate = cell.x * model.capacity
    seconds = scale * 20_000 / rate
    moments = poisson(rate, seconds, seed)
    lengths = log_normal_costs(len(moments), COST_SIGMA, seed)
    batchers: dict[str, Batcher] = {name: make(name, model, None) for name in cell.systems}
    batchers[WITH_COSTS] = Ours("adaptive", model.max_batch_size, costs=lengths)
    return _run_all(
        batchers,
        lambda: OpenLoop(moments),
        lambda: Worker(model, costs=lengths),
        seconds,
    )


def _run_all(
    batchers: dict[str, Batcher],
    load: Callable[[], Load],
    worker: Callable[[], Worker],
    seconds: float,
    *,
    target: float = float("inf"),
    warm_up: float = WARM_UP,
    is_open: bool = True,
) -> Outcome:
    """One after the other; an open loop ends when all is answered, others when time is over."""
    start = warm_up * seconds
    found = {}
    for name, batcher in batchers.items():
        until = float("inf") if is_open else seconds
        # What arrives later cannot be answered in time before the end.
        end = seconds if is_open or target == float("inf") else seconds - target
        found[name] = simulate(batcher, load(), worker(), until).figures(start, end, target)
    return found


RUNS = {
    "open-loop": open_loop,
    "closed-loop": closed_loop,
    "overload": overload,
    "bursts": bursts,
    "slow-start": slow_start,
    "costs": costs,
}
# Where there is a target. Windows of 100 ms are above it.
TARGET_SYSTEMS = (OURS, NO_TARGET, "FDB 5 ms", "batched 5 ms", BENTO, "AIMD")


def plan(parts: Sequence[str], systems: Sequence[str] = ALL_SYSTEMS) -> list[Cell]:
    """All cells of these parts, with those of their systems that are wanted.

    The optima are there in any case, and so is ours with costs in the part about them.
    """
    cells: list[Cell] = []
    for model in MODELS:
        cells += [Cell("open-loop", model, load) for load in LOADS]
        for pause in PAUSES:
            for clients in CLIENTS:
                compared = SYSTEMS if clients in PEERS_CLIENTS else (OURS, GREEDY)
                cells.append(Cell("closed-loop", model, clients, pause, compared))
        cells += [Cell("overload", model, load, systems=TARGET_SYSTEMS) for load in OVERLOADS]
        cells.append(Cell("bursts", model, 0.6, systems=TARGET_SYSTEMS))
        cells.append(Cell("slow-start", model, SLOW_START_LOAD, systems=(OURS, NO_TARGET, BENTO)))
        cells += [Cell("costs", model, load, systems=(OURS, GREEDY, BENTO)) for load in COST_LOADS]
    return [
        replace(cell, systems=tuple(name for name in cell.systems if name in systems))
        for part in parts
        for cell in cells
        if cell.part == part
    ]


def run(cell: Cell, seed: int, scale: float) -> Outcome:
    """Simulate all systems of a cell.

    Args:
        cell: Which one.
        seed: Of its arrivals.
        scale: Of its length; 1 for the whole.
    """
    return RUNS[cell.part](cell, seed, scale)


def run_seeds(task: tuple[Cell, int, float]) -> list[Outcome]:
    """So many seeds of one cell, at that scale."""
    cell, seeds, scale = task
    return [run(cell, FIRST_SEED + number, scale) for number in range(seeds)]
