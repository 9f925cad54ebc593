"""Measures a model, and recommends settings by simulating the scheduler with its times."""

import asyncio
import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from math import ceil, inf, isfinite
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fast_batcher._cli.model import (
    AGAIN,
    CONTRADICTS,
    SEED,
    Measurement,
    Sample,
    TargetError,
    copy_batcher,
    copy_for_timing,
    draw_seconds,
    is_streaming,
    load_target,
    measure,
)
from fast_batcher._cli.simulation import Arrivals, open_scheduler, poisson, simulate, simulate_steps
from fast_batcher._opening.streams import Stream
from fast_batcher.batcher import DynBatcher
from fast_batcher.errors import BatcherError
from fast_batcher.stats import number

# Arrivals of each simulation: the 95 % quantile rests on a thousand of them.
REQUESTS = 20_000
# Share of the arrivals at the start that do not count: the policy learns, and the queue fills.
WARM_UP = 0.2
# The share of the capacity that is the load for which workers are counted, and at which a setting
# is judged.
COMFORTABLE = 0.8
# A real run is much worse than its prediction with this many times the 95 % quantile, or with this
# share of its requests lost beyond the predicted one. Busy machines stay below both.
WORSE, LOST_MORE = 2.0, 0.05
# The share of the largest capacity with which a smaller batch is preferred.
ENOUGH = 0.95
# Share of all requests that a target is for.
SHARE_IN_TIME = 0.95
# Longest real run, seconds.
CHECKED_SECONDS = 20.0


@dataclass(frozen=True)
class Outcome:
    """Latencies of a load, seconds. A lost request counts as one that waits for ever."""

    p50: float
    p95: float
    # Share of the requests that were answered within the target, 0 to 1.
    in_time: float
    # Share of the requests that were rejected or expired, 0 to 1.
    lost: float

    @classmethod
    def of(cls, latencies: Sequence[float], target: float | None) -> "Outcome":
        """Sum up the latencies of all requests, infinite for lost ones, except for the warm-up."""
        ordered = sorted(latencies[int(WARM_UP * len(latencies)) :])
        count = len(ordered)
        p50, p95 = (ordered[ceil(share * count) - 1] for share in (0.5, SHARE_IN_TIME))
        answered = bisect_left(ordered, inf)
        in_time = answered if target is None else bisect_right(ordered, target)
        return cls(p50, p95, in_time / count, 1 - answered / count)


@dataclass(frozen=True)
class Candidate:
    """A `max_batch_size`, with its capacity and its outcome at the load."""

    max_batch_size: int
    # Requests per second of one worker with full batches.
    capacity: float
    num_workers: int
    # The outcome of the load, or of `COMFORTABLE` of one worker's capacity.
    outcome: Outcome


@dataclass(frozen=True)
class Advice:
    """The recommendation."""

    chosen: Candidate
    candidates: Sequence[Candidate]
    # Requests per second of the load.
    rate: float
    # The target, None without one.
    max_latency: float | None
    # Requests per second that the event loop of one process can send and answer one by one.
    loop_capacity: float
    # Whether the latencies are those of first chunks.
    is_of_streams: bool = False

    @property
    def meets_target(self) -> bool:
        """Whether the chosen size answers 95 % within the target; True without one."""
        return self.max_latency is None or self.chosen.outcome.in_time >= SHARE_IN_TIME

    @property
    def settings(self) -> dict[str, Any]:
        """The recommended options of `DynBatcher`."""
        has_target = self.max_latency is not None and self.meets_target
        return {
            "max_batch_size": self.chosen.max_batch_size,
            "num_workers": self.chosen.num_workers,
            **({"max_latency": self.max_latency} if has_target else {}),
        }


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
    # Largest `max_batch_size` to try.
    most: int = 128
    # Whether a real run is compared with the prediction.
    is_checked: bool = False


def advise(measurement: Measurement, wish: Wish, note: Callable[[str], None]) -> Advice:
    """Simulate each size that was measured, and choose one.

    Of the sizes that answer 95 % of all requests within the target, or without a target of those
    that lose the fewest, the smallest is chosen whose capacity is nearly the largest. If no size
    meets the target, that with most answers in time is chosen.
    """
    rate = wish.rate
    if wish.moments is not None:
        rate = len(wish.moments) / wish.moments[-1]
    loop_capacity = 1 / measurement.loop_seconds
    candidates = []
    for size in measurement.seconds:
        note(f"simulating max_batch_size={size}")
        capacity = min(measurement.capacity(size), loop_capacity)
        wanted = rate or COMFORTABLE * capacity
        workers = min(wish.most_workers, max(1, ceil(wanted / (COMFORTABLE * capacity))))
        # The steps of streams are simulated, too, and batches are packed by their costs.
        takes_long = measurement.lengths or measurement.by_cost
        count = REQUESTS // 10 if takes_long else REQUESTS
        arrivals = wish.moments or poisson(wanted, count / wanted, SEED)
        outcome = predict(measurement, arrivals, size, workers, wish.target)
        candidates.append(Candidate(size, capacity, workers, outcome))
    best = max(one.outcome.in_time for one in candidates)
    enough = best if wish.target is None else min(best, SHARE_IN_TIME)
    fitting = [one for one in candidates if one.outcome.in_time >= enough]
    most = max(one.capacity for one in fitting)
    chosen = next(one for one in fitting if one.capacity >= ENOUGH * most)
    wanted = rate or COMFORTABLE * chosen.capacity
    return Advice(chosen, candidates, wanted, wish.target, loop_capacity, bool(measurement.lengths))


def predict(
    measurement: Measurement,
    moments: Sequence[float],
    max_batch_size: int,
    num_workers: int,
    target: float | None,
) -> Outcome:
    """Simulate arrivals at these moments."""
    draw = draw_seconds(measurement)
    if measurement.lengths:
        draw_length = partial(Random(SEED).choice, measurement.lengths)
        load = Arrivals(moments[::num_workers])
        history = simulate_steps(load, draw_length, max_batch_size, draw)
    else:
        allowed, options = measurement.allowed, measurement.options
        scheduler = open_scheduler(max_batch_size, num_workers, allowed, **options)
        costs = measurement.by_cost.costs if measurement.by_cost else ()
        history = simulate(scheduler, Arrivals(moments), draw, costs=costs)
    pairs = zip(history.arrivals, history.answers, strict=True)
    # The simulation does not have the way to the worker and back.
    return Outcome.of([done - begin + measurement.overhead for begin, done in pairs], target)


@dataclass(frozen=True)
class RealRun:
    """The outcome of a real run, and the prediction for its arrivals."""

    requests: int
    outcome: Outcome
    predicted: Outcome
    # The first error, empty without one.
    first_error: str


async def run_for_real(
    process: Callable[[Any], Any], inputs: Sequence[Any], moments: Sequence[float]
) -> tuple[list[float], list[BatcherError]]:
    """Send inputs at these moments; return latencies, infinite for failures, and the errors."""
    errors = []
    start = perf_counter()

    async def call(number: int, moment: float) -> float:
        latency = inf
        await asyncio.sleep(start + moment - perf_counter())
        try:
            answer = await process(inputs[number % len(inputs)])
            latency = perf_counter() - start - moment
            if isinstance(answer, Stream):  # read to its end, so that it keeps its place
                async for _ in answer:
                    pass
        except BatcherError as error:
            errors.append(error)
        return latency

    return [*await asyncio.gather(*starmap(call, enumerate(moments)))], errors


@dataclass(frozen=True)
class Found:
    """The result of `tune`."""

    name: str
    advice: Advice
    # The outcome of `--check`, None without it.
    real: RealRun | None
    # The sources that precede a file, by the names of recommended options that they give.
    overridden: dict[str, str]
    # As in `Measurement`.
    fails_from: int | None = None


async def tune_model(
    target: str, inputs: list[Any], wish: Wish, note: Callable[[str], None]
) -> Found:
    """Measure a model, and recommend its settings.

    Raises:
        TargetError: The target is no model, or no step of it can be timed.
        BatcherError: The model cannot be loaded, or fails.
    """
    found = load_target(target)
    sample = Sample(found, inputs)
    note("loading the model in a worker")
    async with copy_for_timing(found, max_batch_size=wish.most) as batcher:
        measurement = await measure(batcher, sample, note)
    if measurement.contradiction:
        raise TargetError(f"{CONTRADICTS.format(measurement.contradiction)}; {AGAIN}")
    advice = advise(measurement, wish, note)
    overridden = find_overridden(found, advice)
    if not wish.is_checked:
        return Found(found.name, advice, None, overridden, measurement.fails_from)
    seconds = min(CHECKED_SECONDS, REQUESTS / advice.rate)
    moments = wish.moments or poisson(advice.rate, seconds, SEED) or [0.0]
    moments = moments[: bisect_right(moments, seconds)]
    note(f"checking with {len(moments)} requests, {moments[-1]:.0f} s")
    size, workers = advice.chosen.max_batch_size, advice.chosen.num_workers
    async with copy_batcher(found, workers, max_batch_size=size, **measurement.options) as batcher:
        process = batcher.stream if is_streaming(found) else batcher.process_batched
        latencies, errors = await run_for_real(process, sample.shuffled, moments)
    outcome = Outcome.of(latencies, wish.target)
    predicted = predict(measurement, moments, size, workers, wish.target)
    real = RealRun(len(moments), outcome, predicted, "".join(map(repr, errors[:1])))
    return Found(found.name, advice, real, overridden, measurement.fails_from)


def find_overridden(batcher: DynBatcher[Any, Any], advice: Advice) -> dict[str, str]:
    """Return the sources of recommended options that a file cannot change, by option."""
    sources = {name: batcher.settings[name].source for name in advice.settings}
    found = {name: one for name, one in sources.items() if one.startswith(("code", "FAST_BATCHER"))}
    for name in ("devices", "workers"):
        if not isinstance(batcher.settings[name].value, str | None):  # it has a number of its own
            found["num_workers"] = f"{name}="
    return found


def parse_seconds(text: str) -> float:
    """Return the seconds of a text like "50ms" or "0.2s".

    Raises:
        BadParameter: It is something else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s)", text.strip())
    if match is None or not float(match[1]):
        raise typer.BadParameter(f"--target {text!r}: write a time, like 50ms or 0.2s")
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
    if not all(map(isfinite, moments)) or len({*moments}) < 2:
        raise TargetError(f"{path}: give the finite moments of several arrivals")
    return [moment - moments[0] for moment in moments]


def make_file(found: Found) -> str:
    """Make a file for FAST_BATCHER_CONFIG, with the options that it can change."""
    # TOML has no surrogates: a character beyond the basic plane stands for itself.
    name = json.dumps(found.name, ensure_ascii=False)
    text = f"# By fast-batcher tune, for {found.advice.rate:.4g} requests per second.\n"
    text += f"[batchers.{name}]\n"
    for option, value in found.advice.settings.items():
        text += "" if option in found.overridden else f"{option} = {value}\n"
    return text


def print_advice(console: Console, found: Found) -> None:
    """Print a table of the candidates, and the recommendation."""
    advice = found.advice
    title = f"{escape(found.name)}, by simulation" + ", first chunks" * advice.is_of_streams
    table = Table(box=SIMPLE, pad_edge=False, title=title)
    for heading in ("max_batch_size", "workers", "capacity/s", "p50 ms", "p95 ms", "lost"):
        table.add_column(heading, justify="right")
    for one in advice.candidates:
        table.add_row(
            *(str(one.max_batch_size), str(one.num_workers)),
            f"{one.capacity * one.num_workers:.4g}",
            *(f"{1e3 * seconds:.3g}" for seconds in (one.outcome.p50, one.outcome.p95)),
            f"{one.outcome.lost:.1%}",
            style="bold green" if one is advice.chosen else None,
        )
    console.print(table)
    settings = ", ".join(f"{option}={value}" for option, value in advice.settings.items())
    gain = advice.chosen.capacity / advice.candidates[0].capacity
    lines = [
        f"Recommended: [bold]{settings}[/]",
        f"It answers {gain:.2g} times as many requests per second as single requests do; at "
        f"{number(advice.rate)} per second {_describe_outcome(advice.chosen.outcome)}.",
    ]
    if found.real is not None:
        real, predicted = map(_describe_outcome, (found.real.outcome, found.real.predicted))
        lines.append(f"A real run, {found.real.requests} requests: {real}; predicted: {predicted}.")
    lines += [f"[yellow]warning[/] {escape(warning)}" for warning in _list_warnings(found)]
    console.print("\n".join(lines), highlight=False)


def _describe_outcome(outcome: Outcome) -> str:
    parts = [] if outcome.p95 == inf else [f"95 % within {1e3 * outcome.p95:.3g} ms"]
    parts += [f"{outcome.lost:.1%} without an answer"] if outcome.lost else []
    return ", ".join(parts)


def is_much_worse(outcome: Outcome, predicted: Outcome) -> bool:
    """Return whether a real run is no scatter around its prediction."""
    return outcome.p95 > WORSE * predicted.p95 or outcome.lost > predicted.lost + LOST_MORE


def _list_warnings(found: Found) -> Iterator[str]:
    if found.fails_from is not None:
        yield f"batches of {found.fails_from} fail; larger ones were not timed"
    yield from _list_warnings_of_load(found)
    if found.overridden:
        names = ", ".join(f"{name} ({source})" for name, source in found.overridden.items())
        yield f"a file has no effect on {names}: change it there"
    if found.real is not None and is_much_worse(found.real.outcome, found.real.predicted):
        yield "the real run is much worse than predicted: do not use these settings"
    if found.real is not None and found.real.first_error:
        yield f"in the real run: {found.real.first_error}"


def _list_warnings_of_load(found: Found) -> Iterator[str]:
    advice, chosen = found.advice, found.advice.chosen
    if not advice.meets_target:
        yield "no size answers 95 % within the target; allow more workers, or a later answer"
    if advice.rate > chosen.capacity * chosen.num_workers:
        needed = ceil(advice.rate / (COMFORTABLE * chosen.capacity))
        yield (
            f"{number(advice.rate)} requests per second are more than {chosen.num_workers} workers "
            f"compute; allow --workers {needed}"
        )
    elif chosen.outcome.lost:
        yield (
            f"{chosen.outcome.lost:.1%} of the requests are lost: they arrive while the queue is "
            "full, or wait longer than the timeout; allow more workers"
        )
    if advice.rate >= COMFORTABLE * advice.loop_capacity:
        yield (
            f"the event loop of one process sends and answers about {number(advice.loop_capacity)} "
            "requests per second; use several server processes"
        )
