"""What is simulated: parts, their cells, and the systems in each. Runs in any process.

A cell is one model under one load. All systems of a cell meet the same arrivals, seed by seed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from random import Random

from benchmarks.simulation.batchers import (
    ByLength,
    Greedy,
    Ours,
    Planned,
    Product,
    Program,
    TrueTimes,
)
from benchmarks.simulation.figures import figures_of, select
from benchmarks.simulation.loads import (
    FLOODED,
    FREQUENT,
    RARE,
    ClosedLoop,
    Flood,
    bursty,
    draw_lengths,
    draw_methods,
    log_normal_costs,
    short_pause,
)
from benchmarks.simulation.models import (
    ENCODERS,
    LONGEST,
    MODELS,
    STAIRS,
    Model,
    NoisyEncoder,
    Worker,
)
from benchmarks.simulation.optimum import most_in_time, optimum
from fast_batcher._cli.simulation import (
    Arrivals,
    History,
    Seconds,
    poisson,
    simulate,
)
from fast_batcher._core.queue import BatchPacker, PaddedPacker
from fast_batcher._core.scheduler import Scheduler
from fast_batcher._core.service_model import PaddedModel

# The first seed's number; the others follow.
FIRST_SEED = 20
# Loads as shares of the model's capacity.
LOADS = (0.05, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98)
OVERLOADS = (1.2, 2.0, 5.0)
COST_LOADS = (0.1, 0.2, 0.3)
METHOD_LOADS = (0.5, 0.8, 0.95)
# The last one is more than any policy can do.
STAIR_LOADS = (0.5, 0.8, 0.95, 1.2)
# Of the encoders: the lengths of texts, and clients that ask again at once.
LENGTHS = ("uniform", "log-normal", "two kinds")
PADDED_CLIENTS = (16, 64)
# Requests that each of the clients beside a flood has in flight; with the most of them they use the
# capacity. The rate of the flood, in capacities.
IN_FLIGHT = (1, 4, 16)
FLOOD_LOAD = 100
# Batches of a run, of which a fifth is for learning.
PADDED_BATCHES = 1500
# Of the requests that call the rare one of two methods: one to ten of the other.
RARE_SHARE = 1 / 11
# The mean load of the bursts: see `loads.bursty`.
BURST_LOAD = 0.6
CLIENTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
# A client's pause between an answer and its next request, seconds. The last one is about as long as
# the model's time.
PAUSES: dict[str, Callable[[Random], float]] = {
    "uniform 0.1 to 1.1 ms": short_pause,
    "exponential 0.6 ms": lambda random: random.expovariate(1 / 0.6e-3),
    "exponential 5 ms": lambda random: random.expovariate(1 / 5e-3),
}
# Share of a run that does not count: queues and what is learned have settled by then.
WARM_UP = 0.2
# In the bursts the first batches load kernels, and about once a second another process slows a
# batch. Assumed, not measured.
SLOW_FIRST = (3, 10.0)
STALL_EVERY, STALL_FACTOR = 1.0, 5.0
# Log-normal: with this deviation of the logarithm the longest of 32 is seven times the mean.
COST_SIGMA = 1.0

OURS, GREEDY = "adaptive", "greedy"
FIXED = {"fixed 1 ms": 1e-3, "fixed 5 ms": 5e-3}
# Ours without `max_latency`; and ours with a cost function and `max_batch_cost`.
NO_TARGET, WITH_COSTS = "no target", "with costs"
OPTIMUM = "optimum"
# A share of answers in time that no batcher can exceed: see `most_in_time`.
BOUND = "bound"
# Of the part `methods`: the rare method if all requests call it.
ALONE = "rare, alone"
# Of the part `padded`: batches of the oldest; of the nearest lengths; those that do most work per
# second by a learned time of n x L, or of n and L; and ours, a division of all waiting ones by a
# learned or by the true time of n and L.
IN_ORDER, SORTED, PRODUCT = "in order", "by length", "n x L"
GREEDY_PADDED, TRUE = "n and L", "true times"
# Of the part `stairs`: all waiting requests, without knowledge of the steps.
WHOLE = "all waiting"
# Of the part `shares`: the clients without a flood, and beside one, with shares and without.
CALM, SHARES, NO_SHARES = "no flood", "shares", "no shares"
# In the order of the tables.
COLUMNS = (
    *(OPTIMUM, BOUND, OURS, NO_TARGET, IN_ORDER, SORTED, PRODUCT, GREEDY_PADDED, WITH_COSTS, TRUE),
    *(WHOLE, GREEDY, *FIXED, ALONE, RARE, FREQUENT),
    *(CALM, SHARES, NO_SHARES),
)


@dataclass(frozen=True)
class Cell:
    """One model under one load."""

    part: str
    model: str
    # The load as a share of the capacity, or the number of clients.
    x: float
    # Of a closed loop, which of `PAUSES`; of the part `padded`, which of `LENGTHS`.
    pause: str = ""

    def __str__(self) -> str:
        if self.part == "shares":
            return f"{self.model}, 9 clients x {self.x:.0f}"
        if self.part in ("closed-loop", "padded"):
            return f"{self.model}, {self.pause}, {self.x:.0f} clients"
        return f"{self.model} {self.x:.0%}"


Figures = dict[str, float]
# By system.
Outcome = dict[str, Figures]


def make(name: str, model: Model, target: float | None = None) -> Scheduler:
    """Make one of our policies by the name that the tables have for it.

    Args:
        name: `OURS`, `GREEDY`, `NO_TARGET` or one of `FIXED`.
        model: Whose `max_batch_size` it gets; the rest it learns.
        target: Seconds within which an answer is worth something; None for no target.
    """
    size = model.max_batch_size
    if name in FIXED:
        return Ours("fixed", size, max_delay=FIXED[name], target=target)
    if name == NO_TARGET:
        return Ours("adaptive", size)
    return Ours(name, size, target=target)


def open_loop(cell: Cell, seed: int, scale: float) -> Outcome:
    """Simulate Poisson arrivals, and the exact optimum on the same ones."""
    model = MODELS[cell.model]
    rate = cell.x * model.capacity
    seconds = scale * 20_000 / rate
    moments = poisson(rate, seconds, seed)
    batchers = {name: make(name, model) for name in (OURS, GREEDY, *FIXED)}
    batchers[OPTIMUM] = Planned(optimum(model, cell.x).sizes)
    return _run_all(batchers, lambda: Arrivals(moments), lambda: Worker(model).seconds, seconds)


def closed_loop(cell: Cell, seed: int, scale: float) -> Outcome:
    """Simulate clients that ask again a pause after their answer."""
    model = MODELS[cell.model]
    return _run_all(
        {name: make(name, model) for name in (OURS, GREEDY, *FIXED)},
        lambda: ClosedLoop(int(cell.x), PAUSES[cell.pause], seed),
        lambda: Worker(model).seconds,
        scale * 12_000 / model.capacity,
        is_open=False,
    )


def overload(cell: Cell, seed: int, scale: float) -> Outcome:
    """Simulate more than the model can do; only answers within the target count."""
    model = MODELS[cell.model]
    seconds = scale * 20_000 / model.capacity
    moments = poisson(cell.x * model.capacity, seconds, seed)
    return _run_all(
        {name: make(name, model, model.target) for name in (OURS, NO_TARGET)},
        lambda: Arrivals(moments),
        lambda: Worker(model).seconds,
        seconds,
        target=model.target,
        is_open=False,
    )


def bursts(cell: Cell, seed: int, scale: float) -> Outcome:
    """Simulate peaks of nearly twice the capacity, slow first batches, and stalls of the worker."""
    model = MODELS[cell.model]
    seconds = scale * 150_000 / model.capacity
    moments = bursty(model.capacity, seconds, seed)
    # Other random numbers than those of the arrivals.
    stalls = poisson(1.0 / STALL_EVERY, seconds, seed + 1_000_000)
    found = _run_all(
        {name: make(name, model, model.target) for name in (OURS, NO_TARGET)},
        lambda: Arrivals(moments),
        lambda: (
            Worker(model, slow_first=SLOW_FIRST, stalls=stalls, stall_factor=STALL_FACTOR).seconds
        ),
        seconds,
        target=model.target,
        warm_up=0.0,
    )
    return found | {BOUND: {"in_time": most_in_time(model, moments)}}


def costs(cell: Cell, seed: int, scale: float) -> Outcome:
    """Simulate requests of unlike lengths; a batch is padded to its longest one."""
    model = MODELS[cell.model]
    rate = cell.x * model.capacity
    seconds = scale * 20_000 / rate
    moments = poisson(rate, seconds, seed)
    lengths = log_normal_costs(len(moments), COST_SIGMA, seed)
    batchers = {name: make(name, model) for name in (OURS, GREEDY)}
    batchers[WITH_COSTS] = Ours("adaptive", model.max_batch_size, costs=lengths)
    return _run_all(
        batchers,
        lambda: Arrivals(moments),
        lambda: Worker(model, costs=lengths).seconds,
        seconds,
    )


def padded(cell: Cell, seed: int, scale: float) -> Outcome:
    """Simulate clients that ask an encoder again at once, with texts of unlike lengths."""
    encoder = ENCODERS[cell.model]
    size = encoder.max_batch_size
    lengths = draw_lengths(cell.pause, 20_000, LONGEST, seed)
    packers: dict[str, BatchPacker] = {
        WITH_COSTS: PaddedPacker(None),
        SORTED: ByLength(None, Product()),
        PRODUCT: Greedy(None, Product()),
        GREEDY_PADDED: Greedy(None, PaddedModel()),
        TRUE: Program(None, TrueTimes(encoder)),
    }
    batchers: dict[str, Scheduler] = {
        name: Ours("greedy", size, costs=lengths, packer=packer) for name, packer in packers.items()
    }
    batchers[IN_ORDER] = Ours("greedy", size)
    # The mean time of a batch is about that of half a batch of the mean length.
    seconds = scale * PADDED_BATCHES * encoder.seconds(size / 2, sum(lengths) / len(lengths))
    return _run_all(
        batchers,
        lambda: ClosedLoop(int(cell.x), lambda random: 0.0, seed),
        lambda: NoisyEncoder(encoder, lengths, seed).seconds,
        seconds,
        is_open=False,
    )


def methods(cell: Cell, seed: int, scale: float) -> Outcome:
    """Simulate two methods of one model, one at ten times the rate of the other.

    Beside them, the rare method alone: it gets all of the arrivals.
    """
    model = MODELS[cell.model]
    rate = cell.x * model.capacity
    seconds = scale * 30_000 / rate
    moments = poisson(rate, seconds, seed)
    names = draw_methods(len(moments), RARE_SHARE, seed)

    def run(methods: Sequence[str]) -> History:
        batcher = Ours(OURS, model.max_batch_size, methods=methods)
        return simulate(batcher, Arrivals(moments), Worker(model).seconds)

    both = run(names)
    records = {ALONE: run([RARE] * len(moments))}
    for method in (RARE, FREQUENT):
        records[method] = select(both, (at for at, name in enumerate(names) if name == method))
    start = WARM_UP * seconds
    return {name: figures_of(record, start, seconds) for name, record in records.items()}


def stairs(cell: Cell, seed: int, scale: float) -> Outcome:
    """Simulate a compiled model at Poisson arrivals, and the exact optimum.

    At more than the capacity the optimum is the capacity.
    """
    model = STAIRS[cell.model]
    rate = cell.x * model.capacity
    seconds = scale * 30_000 / rate
    moments = poisson(rate, seconds, seed)
    allowed = tuple(step for step, _ in model.steps)
    size = model.max_batch_size
    batchers: dict[str, Scheduler] = {
        OURS: Ours(OURS, size, warm_up=model.steps, allowed=allowed),
        WHOLE: Ours(OURS, size, warm_up=model.steps),
    }
    is_possible = cell.x < 1
    if is_possible:
        batchers[OPTIMUM] = Planned(optimum(model, cell.x).sizes)
    found = _run_all(
        batchers,
        lambda: Arrivals(moments),
        lambda: Worker(model).seconds,
        seconds,
        is_open=is_possible,
    )
    return found if is_possible else found | {OPTIMUM: {"answered_per_second": model.capacity}}


def shares(cell: Cell, seed: int, scale: float) -> Outcome:
    """Simulate clients that ask again, alone and beside one that floods the queue."""
    model, in_flight = MODELS[cell.model], int(cell.x)
    seconds = scale * 3000 / model.capacity
    flood = poisson(FLOOD_LOAD * model.capacity, seconds, seed)

    def run(moments: Sequence[float], in_share: int | None) -> Figures:
        load = Flood(in_flight, moments, seed)
        batcher = Ours(OURS, model.max_batch_size, in_share=in_share)
        history = simulate(batcher, load, Worker(model).seconds, seconds)
        others = (at for at, client in enumerate(load.clients) if client < FLOODED)
        return figures_of(select(history, others), WARM_UP * seconds, seconds)

    return {CALM: run((), None), SHARES: run(flood, in_flight), NO_SHARES: run(flood, None)}


def _run_all(
    batchers: dict[str, Scheduler],
    load: Callable[[], Arrivals],
    worker: Callable[[], Seconds],
    seconds: float,
    *,
    target: float = inf,
    warm_up: float = WARM_UP,
    is_open: bool = True,
) -> Outcome:
    """Run one after the other.

    An open loop ends when every request is answered, another load when the time is over; then what
    arrives less than the target before the end cannot be answered in time and does not count.
    """
    until = inf if is_open else seconds
    end = seconds if is_open or target == inf else seconds - target
    return {
        name: figures_of(simulate(batcher, load(), worker(), until), warm_up * seconds, end, target)
        for name, batcher in batchers.items()
    }


RUNS: dict[str, Callable[[Cell, int, float], Outcome]] = {
    "open-loop": open_loop,
    "closed-loop": closed_loop,
    "overload": overload,
    "bursts": bursts,
    "costs": costs,
    "padded": padded,
    "methods": methods,
    "stairs": stairs,
    "shares": shares,
}


def plan(parts: Sequence[str]) -> list[Cell]:
    """All cells of these parts."""
    loads = {
        "open-loop": LOADS,
        "overload": OVERLOADS,
        "bursts": (BURST_LOAD,),
        "costs": COST_LOADS,
        "methods": METHOD_LOADS,
        "shares": IN_FLIGHT,
    }
    cells = [
        Cell(part, model, load) for part, all_ in loads.items() for model in MODELS for load in all_
    ]
    cells += [
        Cell("closed-loop", model, clients, pause)
        for model in MODELS
        for pause in PAUSES
        for clients in CLIENTS
    ]
    cells += [
        Cell("padded", encoder, clients, lengths)
        for encoder in ENCODERS
        for lengths in LENGTHS
        for clients in PADDED_CLIENTS
    ]
    cells += [Cell("stairs", model, load) for model in STAIRS for load in STAIR_LOADS]
    return [cell for part in parts for cell in cells if cell.part == part]


def run_seeds(task: tuple[Cell, int, float]) -> list[Outcome]:
    """Simulate a cell with this number of seeds, at this scale of its length (1 is the whole)."""
    cell, seeds, scale = task
    return [RUNS[cell.part](cell, FIRST_SEED + number, scale) for number in range(seeds)]
