"""Measures a model, and recommends settings by simulating the scheduler with its times."""

import asyncio
import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, inf, isfinite
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fast_batcher._cli.model import Measurement, TargetError, copy_batcher, load_target, measure
from fast_batcher._cli.virtual import WARM_UP, Outcome, Simulation, poisson
from fast_batcher.errors import BatcherError

# Arrivals of each simulation: the 95 % quantile rests on a thousand of them.
REQUESTS = 20_000
SEED = 1
# Of the capacity: the load for which workers are counted, and at which a setting is judged.
COMFORTABLE = 0.8
# Of the largest capacity: a smaller batch that reaches it is preferred.
ENOUGH = 0.95


@dataclass(frozen=True)
class Candidate:
    """A `max_batch_size`, with what it promises of one worker and of the load."""

    max_batch_size: int
    # Requests per second of one worker with full batches.
    capacity: float
    num_workers: int
    # Of the load, or of `COMFORTABLE` of one worker's capacity.
    outcome: Outcome


@dataclass(frozen=True)
class Advice:
    """The recommendation."""

    chosen: Candidate
    candidates: Sequence[Candidate]
    # Requests per second of the load.
    rate: float
    # Times the requests per second of batches of one.
    gain: float
    # The target, None without one.
    max_latency: float | None
    # Requests per second that the event loop of one process can send and answer one by one.
    loop_capacity: float

    @property
    def meets_target(self) -> bool:
        """Whether the chosen size answers 95 % within the target; True without one."""
        return self.max_latency is None or self.chosen.outcome.p95 <= self.max_latency

    @property
    def workers_for_rate(self) -> int:
        """Workers of the chosen size that the rate needs."""
        return ceil(self.rate / (COMFORTABLE * self.chosen.capacity))


class Times:
    """Seconds of batches by their size, drawn from measured ones."""

    def __init__(self, measurement: Measurement) -> None:
        self._sizes = sorted(measurement.seconds)
        self._seconds = [sorted(measurement.seconds[size]) for size in self._sizes]
        self._medians = make_rising([median(seconds) for seconds in self._seconds])

    def median(self, size: int) -> float:
        """Return the median, between measured sizes on a line through their medians."""
        medians = self._medians
        at = bisect_left(self._sizes, size)
        if at == len(self._sizes):
            return medians[-1] * size / self._sizes[-1]
        if self._sizes[at] == size or at == 0:
            return medians[at]
        left, right = self._sizes[at - 1], self._sizes[at]
        return medians[at - 1] + (size - left) / (right - left) * (medians[at] - medians[at - 1])

    def draw(self, size: int, random: Random) -> float:
        """Draw a time: the median of the size, times the scatter of the nearest measured one."""
        at = min(bisect_left(self._sizes, size), len(self._sizes) - 1)
        seconds = self._seconds[at]
        return self.median(size) * random.choice(seconds) / median(seconds)


def make_rising(values: Sequence[float]) -> list[float]:
    """Return the rising sequence nearest to these values: what contradicts is averaged.

    Source: the pool-adjacent-violators algorithm of isotonic regression.
    """
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (high, many), (low, few) = pools[-2:]
            pools[-2:] = [((high * many + low * few) / (many + few), many + few)]
    return [mean for mean, count in pools for _ in range(count)]


@dataclass(frozen=True)
class Wish:
    """The load and the target that settings are chosen for."""

    # Requests per second to serve; None for `COMFORTABLE` of one worker's capacity.
    rate: float | None = None
    # Arrivals of a trace, seconds; None for independent ones.
    moments: Sequence[float] | None = None
    # Seconds within which 95 % are to be answered; None for no target.
    target: float | None = None
    # Workers that the machine has room for.
    most_workers: int = 1


def advise(measurement: Measurement, wish: Wish, note: Callable[[str], None]) -> Advice:
    """Simulate each size that was measured, and choose one.

    Without a target the smallest size is chosen whose capacity is nearly the largest; with one,
    of the sizes that answer 95 % in time, that of the largest capacity.
    """
    rate = wish.rate
    if wish.moments is not None:
        rate = len(wish.moments) / wish.moments[-1]
    times = Times(measurement)
    sizes = sorted(measurement.seconds)
    loop_capacity = 1 / measurement.loop_seconds
    capacities = {size: min(size / times.median(size), loop_capacity) for size in sizes}
    candidates = []
    for size in sizes:
        note(f"simulating max_batch_size={size}")
        wanted = rate or COMFORTABLE * capacities[size]
        workers = min(wish.most_workers, max(1, ceil(wanted / (COMFORTABLE * capacities[size]))))
        arrivals = wish.moments or poisson(wanted, REQUESTS, SEED)
        found = Simulation(arrivals, times.draw, size, workers).run()
        outcome = _add(found, measurement.overhead)
        candidates.append(Candidate(size, capacities[size], workers, outcome))
    chosen = _choose(candidates, wish.target)
    gain = chosen.capacity / capacities[sizes[0]]
    wanted = rate or COMFORTABLE * chosen.capacity
    return Advice(chosen, candidates, wanted, gain, wish.target, loop_capacity)


def _add(outcome: Outcome, seconds: float) -> Outcome:
    """Add the way to the worker and back, which the simulation doesn't have."""
    return Outcome(
        outcome.answered_per_second,
        outcome.lost,
        outcome.p50 + seconds,
        outcome.p95 + seconds,
        outcome.p99 + seconds,
        outcome.mean_batch_size,
    )


def _choose(candidates: Sequence[Candidate], target: float | None) -> Candidate:
    in_time = [one for one in candidates if target is None or one.outcome.p95 <= target]
    if not in_time:
        return min(candidates, key=lambda one: one.outcome.p95)
    most = max(one.capacity for one in in_time)
    return next(one for one in in_time if one.capacity >= ENOUGH * most)


@dataclass(frozen=True)
class RealRun:
    """The figures of a real run."""

    answered_per_second: float
    # Seconds, infinite if nothing was answered.
    p95: float
    # Share of the requests that failed, and the first error.
    lost: float
    first_error: str


async def run_for_real(
    process: Callable[[Any], Any], inputs: Sequence[Any], moments: Sequence[float]
) -> RealRun:
    """Send the inputs at these moments; the first ones do not count, as in a simulation."""
    latencies: list[float] = []
    errors: list[str] = []
    start = perf_counter()

    async def call(value: Any, moment: float) -> None:
        try:
            await process(value)
        except BatcherError as error:
            errors.append(f"{type(error).__name__}: {error}")
        else:
            latencies.append(perf_counter() - start - moment)

    tasks = []
    for number, moment in enumerate(moments):
        delay = start + moment - perf_counter()
        if delay > 0:
            await asyncio.sleep(delay)
        tasks.append(asyncio.create_task(call(inputs[number % len(inputs)], moment)))
    await asyncio.gather(*tasks)
    latencies = sorted(latencies[int(WARM_UP * len(latencies)) :])
    return RealRun(
        (len(moments) - len(errors)) / (perf_counter() - start),
        latencies[int(0.95 * len(latencies))] if latencies else inf,
        len(errors) / len(moments),
        errors[0] if errors else "",
    )


@dataclass(frozen=True)
class Found:
    """The result of `tune`."""

    name: str
    advice: Advice
    # With `--check`: a real run, and the prediction of its 95 % quantile for the same arrivals.
    real: RealRun | None
    predicted_p95: float | None


# Of a real run: as long as the simulated one, and twenty seconds at most.
CHECKED_SECONDS = 20.0


async def tune_model(
    target: str,
    inputs: list[Any],
    most: int,
    wish: Wish,
    is_checked: bool,
    note: Callable[[str], None],
) -> Found:
    """Measure a model, and recommend its settings.

    Raises:
        TargetError: The target is no model.
        BatcherError: The model cannot be loaded, or fails.
    """
    found = load_target(target)
    note("loading the model in a worker")
    async with copy_batcher(found, max_batch_size=most, num_workers=1) as batcher:
        measurement = await measure(batcher, inputs, note)
    advice = advise(measurement, wish, note)
    chosen = advice.chosen
    real = predicted_p95 = None
    if is_checked:
        requests = min(REQUESTS, int(CHECKED_SECONDS * advice.rate))
        moments = wish.moments or poisson(advice.rate, requests, SEED)
        note(f"checking with {len(moments)} requests, {moments[-1]:.0f} s")
        size, workers = chosen.max_batch_size, chosen.num_workers
        async with copy_batcher(found, max_batch_size=size, num_workers=workers) as batcher:
            real = await run_for_real(batcher.process_batched, inputs, moments)
        outcome = Simulation(moments, Times(measurement).draw, size, workers).run()
        predicted_p95 = _add(outcome, measurement.overhead).p95
    return Found(found.name, advice, real, predicted_p95)


def parse_seconds(text: str) -> float:
    """Return the seconds of a text like "50ms" or "0.2s".

    Raises:
        TargetError: It is something else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s)", text.strip())
    if match is None or not float(match[1]):
        raise TargetError(f"--target {text!r}: write a time, like 50ms or 0.2s")
    return float(match[1]) / (1000 if match[2] == "ms" else 1)


def read_moments(path: Path) -> list[float]:
    """Read the moments of arrivals, seconds, one in each line; the first becomes 0.

    Raises:
        TargetError: The file has something else.
    """
    try:
        moments = sorted(float(line) for line in path.read_text(encoding="utf-8").split())
    except (OSError, ValueError) as error:
        raise TargetError(f"{path}: {error}; write one moment in seconds in each line") from None
    if not all(map(isfinite, moments)):
        raise TargetError(f"{path}: write finite moments")
    if len(moments) < 2 or moments[0] == moments[-1]:
        raise TargetError(f"{path}: give the moments of several arrivals")
    return [moment - moments[0] for moment in moments]


def make_file(advice: Advice, name: str) -> str:
    """Make a file for FAST_BATCHER_CONFIG."""
    chosen = advice.chosen
    lines = [
        f"# By fast-batcher tune, for {advice.rate:.4g} requests per second.",
        f"[batchers.{json.dumps(name)}]",
        f"max_batch_size = {chosen.max_batch_size}",
        f"num_workers = {chosen.num_workers}",
    ]
    if advice.max_latency is not None and advice.meets_target:
        lines.append(f"max_latency = {advice.max_latency:g}")
    return "\n".join(lines) + "\n"


def print_advice(console: Console, found: Found) -> None:
    """Print a table of the candidates, and the recommendation."""
    advice = found.advice
    table = Table(box=SIMPLE, pad_edge=False, title=f"{found.name}, by simulation")
    for heading in ("max_batch_size", "workers", "capacity/s", "p50 ms", "p95 ms", "mean batch"):
        table.add_column(heading, justify="right")
    for one in advice.candidates:
        table.add_row(
            f"{one.max_batch_size}",
            f"{one.num_workers}",
            f"{one.capacity * one.num_workers:.4g}",
            *(f"{1e3 * seconds:.3g}" for seconds in (one.outcome.p50, one.outcome.p95)),
            f"{one.outcome.mean_batch_size:.1f}",
            style="bold green" if one is advice.chosen else None,
        )
    console.print(table)
    chosen = advice.chosen
    settings = [f"max_batch_size={chosen.max_batch_size}", f"num_workers={chosen.num_workers}"]
    if advice.max_latency is not None and advice.meets_target:
        settings.append(f"max_latency={advice.max_latency:g}")
    console.print(f"Recommended: [bold]{', '.join(settings)}[/]", highlight=False)
    console.print(
        f"It answers {advice.gain:.2g} times as many requests per second as single requests do; at "
        f"{advice.rate:.4g} per second 95 % within {1e3 * chosen.outcome.p95:.3g} ms.",
        highlight=False,
    )
    for warning in _list_warnings(advice):
        console.print(f"[yellow]warning[/] {warning}", highlight=False)
    if found.real is not None and found.predicted_p95 is not None:
        real = found.real
        console.print(
            f"A real run: {real.answered_per_second:.4g} requests per second "
            f"({real.answered_per_second / advice.rate:.2f} of those asked), 95 % within "
            f"{1e3 * real.p95:.3g} ms ({real.p95 / found.predicted_p95:.2f} of the prediction "
            "for its arrivals).",
            highlight=False,
        )
        if real.lost:
            console.print(
                f"[yellow]warning[/] {real.lost:.1%} of its requests failed: "
                f"{escape(real.first_error)}",
                highlight=False,
            )


def _list_warnings(advice: Advice) -> Iterator[str]:
    chosen = advice.chosen
    if not advice.meets_target:
        yield "no size answers 95 % within the target; allow more workers, or a later answer"
    if advice.rate > chosen.capacity * chosen.num_workers:
        yield (
            f"{advice.rate:.4g} requests per second are more than {chosen.num_workers} workers "
            f"compute; allow --workers {advice.workers_for_rate}"
        )
    if max(advice.rate, chosen.capacity) >= COMFORTABLE * advice.loop_capacity:
        yield (
            f"the event loop of one process sends and answers about {advice.loop_capacity:.3g} "
            "requests per second; use several server processes"
        )


def draw(advice: Advice, path: Path) -> None:
    """Draw capacity and 95 % quantile by batch size, with matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    sizes = [str(one.max_batch_size) for one in advice.candidates]
    axes.bar(sizes, [one.capacity * one.num_workers for one in advice.candidates], color="#3b6ea5")
    axes.set_xlabel("max_batch_size")
    axes.set_ylabel("capacity, requests per second")
    latencies = axes.twinx()
    latencies.plot(
        sizes, [1e3 * one.outcome.p95 for one in advice.candidates], color="#c05020", marker="o"
    )
    latencies.set_ylabel("95 % of the answers within, ms", color="#c05020")
    latencies.set_ylim(bottom=0)
    figure.suptitle(f"at {advice.rate:.4g} requests per second")
    figure.tight_layout()
    figure.savefig(path)
