"""Checks of a model: imports it, loads it in a real worker, and measures its batches."""

import asyncio
import importlib
import json
import os
import re
import sys
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import chain, combinations, cycle, groupby, islice
from operator import attrgetter
from pathlib import Path
from random import Random
from statistics import fmean, median
from time import perf_counter, thread_time
from typing import Any, cast

from fast_batcher._cli.checks import Check
from fast_batcher._cli.simulation import Arrivals, open_scheduler, simulate
from fast_batcher._core.queue import WINDOW_BATCHES
from fast_batcher._core.service_model import ServiceModel, Shape, ShapeModel
from fast_batcher._core.values import Request
from fast_batcher._independence import AT_RANDOM, find_dependence
from fast_batcher._opening.kinds import BatchKind
from fast_batcher._opening.outcomes import CostEvaluator
from fast_batcher._process import read_rss
from fast_batcher.batcher import DynBatcher
from fast_batcher.configuration import find_similar
from fast_batcher.errors import BatcherError
from fast_batcher.model import InferenceModel, Model, ModelKind
from fast_batcher.observing import BatchAnswered, Observer, WorkerChanged
from fast_batcher.settings import OPTIONS, RemoteWorkers, Settings, Use

# Different batches of each size that are timed: as many as hold the inputs of the largest batch, in
# these bounds. Inputs may take times of their own, and a few small batches show little of that.
LEAST_BATCHES, MOST_BATCHES = 2, 16
# Times of each of these batches; their median counts, which one disturbance does not move.
ROUNDS = 3
# Steps of each number of streams that are timed.
STEPS = 11
SEED = 1
# Costs that are drawn from those of the inputs, for the requests of a simulation.
COSTS = 4096
# Full batches of the largest size that a simulation counts the capacity with.
FULL_BATCHES = 20
# Rows contradict each other if the batches of the smaller size take this many times as long as the
# larger ones, and longer by these seconds: shorter times are noise of the machine.
CONTRADICTION, NOISE = 2.0, 0.001


class TargetError(Exception):
    """The target cannot be used; the text says why, and what to do."""


class _Watcher(Observer):
    """Keeps what the worker tells."""

    def __init__(self) -> None:
        self.seconds: list[tuple[int, float]] = []
        self.pid: int | None = None

    def batch_answered(self, event: BatchAnswered) -> None:
        """Note the size and the seconds of a batch; the parts of one that failed do not count."""
        if not event.retried:
            self.seconds.append((event.size, event.infer_seconds))

    def worker_changed(self, event: WorkerChanged) -> None:
        """Note the process of a worker that is ready."""
        if event.change == "ready":
            self.pid = event.pid


def _find_object(target: str) -> Any:
    """Return the object that "module:name" names; the current folder is on the path."""
    module_name, _, name = target.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == module_name
        remedy = "; run the command in the folder that has it" if is_missing else ""
        raise TargetError(
            f"the module {module_name!r} cannot be imported: {type(error).__name__}: "
            f"{error}{remedy}"
        ) from error
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise TargetError(
                f"the module {module_name!r} has no {name!r}{_list_targets(found)}"
            ) from error
    return found


def _list_targets(found: Any) -> str:
    """Return the end of an error about a name: the models and batchers that a module has."""
    known = getattr(found, "__dict__", {})
    names = [name for name, value in known.items() if _is_target(value)]
    return f"; it has {', '.join(sorted(names))}" if names else ""


def _is_target(value: object) -> bool:
    if isinstance(value, DynBatcher):
        return True
    is_model = isinstance(value, type) and issubclass(value, Model)
    return is_model and value not in (InferenceModel, Model)


def load_target(target: str) -> DynBatcher[Any, Any]:
    """Return the batcher that "module:name" names, or one of a model class of that name.

    Raises:
        TargetError: There is nothing of that name, or it is something else.
    """
    if not target.partition(":")[2]:
        raise TargetError(f"{target!r}: write it as module:Model or module:batcher")
    found = _find_object(target)
    if isinstance(found, DynBatcher):
        return found
    if isinstance(found, type) and issubclass(found, Model):
        try:
            return DynBatcher(found)
        except BatcherError as error:
            raise TargetError(str(error)) from error
    raise TargetError(
        f"{target} is a {type(found).__name__}: name a DynBatcher or a subclass of InferenceModel"
    )


# Options that a copy takes over.
COPIED = [name for name, option in OPTIONS.items() if Use.MEASURED in option.uses]


def copy_for_timing(batcher: DynBatcher[Any, Any], **changes: Any) -> DynBatcher[Any, Any]:
    """Return a copy whose batches are timed.

    Inputs that are sent together leave at once as one batch, and may take ten minutes.
    """
    if batcher.settings["cost"].value is not None:
        changes |= {"cost": lambda _: 1, "cost_is_padded": False, "max_batch_cost": None}
    return copy_batcher(batcher, policy="greedy", timeout=600.0, **changes)


def copy_batcher(
    batcher: DynBatcher[Any, Any], num_workers: int = 1, **changes: Any
) -> DynBatcher[Any, Any]:
    """Return a batcher of the same model, with workers of its own and without the app's limits.

    All options are given, so that none comes from outside. The copy gets the batcher's share of the
    cores.
    """
    options: dict[str, Any] = {name: option.default for name, option in OPTIONS.items()}
    options |= {name: batcher.settings[name].value for name in COPIED} | changes
    options["num_workers"] = num_workers
    if is_streaming(batcher):  # nothing is held
        options["policy"] = OPTIONS["policy"].default
    if options["devices"] is not None:
        options["devices"] = [*islice(cycle(options["devices"]), num_workers)]
    if isinstance(options["workers"], RemoteWorkers):
        options["workers"] = replace(cast("Any", options["workers"]), num_workers=num_workers)
    model = batcher._model_class  # noqa: SLF001  part of the library
    args, kwargs = batcher._model.spec.read_arguments()  # noqa: SLF001
    batcher._cores.release()  # noqa: SLF001
    return DynBatcher(model, model_args=args, model_kwargs=kwargs, **options)


def is_streaming(batcher: DynBatcher[Any, Any]) -> bool:
    """Return whether the requests of a batcher are streams."""
    return batcher._model.spec.kind is ModelKind.STEPS  # noqa: SLF001


def select_inputs(batcher: DynBatcher[Any, Any], inputs: list[Any]) -> list[Any]:
    """Return the inputs of the largest group that may share a batch.

    Raises:
        TargetError: `group_by` fails.
    """
    group_by = batcher.settings["group_by"].value
    groups: dict[Any, list[Any]] = {}
    try:
        for value in inputs:
            groups.setdefault(group_by and group_by(value), []).append(value)
    except Exception as error:
        raise TargetError(f"group_by raised {type(error).__name__}: {error}") from error
    return max(groups.values(), key=len)


def read_inputs(source: str) -> list[Any]:
    """Read inputs from a file, or from a list or function that "module:name" names.

    A file has a JSON list, or one JSON value in each line. A function returns the inputs.

    Raises:
        TargetError: There is no such file or object, or it has no input.
    """
    path = Path(source)
    if not path.exists() and re.fullmatch(r"[\w.]+:[\w.]+", source):
        found = _find_object(source)
        try:
            found = found() if callable(found) else found
        except (Exception, SystemExit) as error:
            raise TargetError(f"{source}() raised {type(error).__name__}: {error}") from error
        if not isinstance(found, Iterable) or isinstance(found, str | bytes | Mapping):
            raise TargetError(f"{source} is a {type(found).__name__}: name a list of inputs")
        found = list(found)
    else:
        found = _parse_inputs(path)
    if not found:
        raise TargetError(f"{source} has no input")
    return found


def _parse_inputs(path: Path) -> list[Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
        try:
            found = json.loads(text)
        except ValueError:
            # Other ends of lines than this one may be in texts.
            return [json.loads(line) for line in text.split("\n") if line.strip()]
    except (OSError, ValueError, RecursionError) as error:
        raise TargetError(
            f"{path}: no inputs can be read: {error}; give a file with a JSON list, or with one "
            "JSON value in each line, or module:name of a list"
        ) from error
    return found if isinstance(found, list) else [found]


def check_options(batcher: DynBatcher[Any, Any]) -> Iterator[Check]:
    """Tell the options from outside, and options that have no effect."""
    outside, overridden = [], []
    for name, (value, source) in batcher.settings.items():
        if source.startswith("code, not "):
            overridden.append((name, source.removeprefix("code, not ")))
        elif source not in ("default", "code"):
            outside.append(f"{name}={value!r} ({source})")
    if outside:
        yield Check("options", "good", f"from outside: {', '.join(outside)}")
    for name, source in overridden:
        text = f"{source} has no effect, because the code gives {name}="
        yield Check("options", "warning", text, f"remove {name}= from the code, or {source}")
    for source in find_similar(batcher.name):
        yield Check(
            "options",
            "warning",
            f"{source} is not for the batcher {batcher.name!r}, whose name is similar",
            "correct the name if this batcher was meant",
        )


async def examine_model(
    original: DynBatcher[Any, Any], inputs: list[Any], note: Callable[[str], None]
) -> AsyncIterator[Check]:
    """Load the model in a worker, and time batches of it; ends with the first bad check."""
    watcher = _Watcher()
    batcher = copy_for_timing(original)
    batcher.add_observer(watcher)
    note("loading the model in a worker")
    began_at = perf_counter()
    try:
        await batcher.open()
    except BatcherError as error:
        yield Check("model", "bad", f"{batcher.name}: {_first_line(error)}", find_remedy(error))
        return
    try:
        seconds = perf_counter() - began_at
        yield Check("model", "good", f"{batcher.name} was loaded in {seconds:.1f} s")
        size = 0 if watcher.pid is None else read_rss(watcher.pid)
        if size:
            yield Check("worker", "good", f"pid {watcher.pid}, {size / 2**20:.0f} MiB")
        if inputs:
            sample = Sample(original, inputs)
            measured = await measure(batcher, sample, note)
            times = [(size, measured.seconds_of(size)) for size in measured.seconds]
            yield _judge_times(original, times, measured.contradiction)
            if measured.fails_from is not None:
                text = f"batches of {measured.fails_from} fail, and are computed in parts"
                yield Check("batches", "warning", text, "lower max_batch_size; the log says why")
            note("comparing outputs of different batches")
            yield await _check_independence(batcher, sample.inputs)
        else:
            learned = batcher.explain().service_times
            times = [(round(size), seconds) for size, seconds, _ in learned]
            yield _judge_times(original, times)
    except BatcherError as error:
        yield Check("batches", "bad", _first_line(error), find_remedy(error))
    finally:
        await batcher.aclose()


def list_own_options(batcher: DynBatcher[Any, Any]) -> dict[str, Any]:
    """Return the `BatchPolicy` and the costs of a batcher, and the options that go with them."""
    found = {name: setting.value for name, setting in batcher.settings.items()}
    names = [] if isinstance(found["policy"], str) else ["policy", "max_delay", "max_latency"]
    if found["cost"] is not None:
        names += ["cost", "cost_is_padded", "max_batch_cost"]
    return {name: found[name] for name in names}


class Sample:
    """Draws batches of a batcher's inputs: in random order, and packed by their costs.

    Raises:
        TargetError: `group_by` or `cost` fails.
    """

    def __init__(self, batcher: DynBatcher[Any, Any], inputs: list[Any]) -> None:
        settings = batcher._settings  # noqa: SLF001
        self.inputs = select_inputs(batcher, inputs)
        # It has learned nothing yet, so that its batches are as large as they may be.
        self.packer = None if is_streaming(batcher) else BatchKind.make_packer(settings)
        self._random, requests = Random(SEED), [Request(value, None) for value in self.inputs]
        evaluator = CostEvaluator(Settings(cost=settings.cost), batcher.name)
        for request in requests if self.packer is not None else ():
            if error := evaluator.evaluate(request):
                raise TargetError(str(error)) from error
        costs = [request.cost for request in requests]
        self.costs = [] if self.packer is None else self._random.choices(costs, k=COSTS)
        self._requests = self._shuffle(requests)
        self.options = list_own_options(batcher)

    @property
    def shuffled(self) -> list[Any]:
        """The inputs in random order."""
        return Random(SEED).sample(self.inputs, len(self.inputs))

    def _shuffle(self, requests: list[Request]) -> Iterator[Request]:
        while True:
            yield from map(copy, self._random.sample(requests, len(requests)))

    def draw(self, size: int) -> list[Request]:
        """Return the next batch of at most `size` requests."""
        if self.packer is None:
            return [*islice(self._requests, size)]
        batch: list[Request] = []
        self.packer.fill(batch, [*islice(self._requests, WINDOW_BATCHES * size)], size)
        return batch


@dataclass(frozen=True)
class CostTimes:
    """The times of batches by what their inputs cost."""

    # Of requests, in random order.
    costs: Sequence[float]
    # Learned from the batches that were timed.
    model: ShapeModel
    # Measured seconds over those of the model, for each time.
    ratios: list[float]
    # The allowed batch sizes.
    allowed: tuple[int, ...]

    def shape_of(self, costs: Sequence[float]) -> Shape:
        """Return the shape of a batch, which is filled up to an allowed size."""
        return Shape(ServiceModel(self.allowed).fill(len(costs)), max(costs), sum(costs))


@dataclass(frozen=True)
class Measurement:
    """The times of a model in a worker."""

    # Seconds of the runs of each batch, or of single steps, by the size or the streams; both rise.
    seconds: dict[int, list[list[float]]]
    # Seconds of a lone request beside its batch: to the worker and back.
    overhead: float
    # CPU seconds that the thread of the event loop takes for a lone request. Requests that arrive
    # together take less.
    loop_seconds: float
    # The smallest size whose batches fail as a whole, None without one. No larger one was timed.
    fails_from: int | None = None
    # Chunks of the answers of a `SteppedModel`; empty for another model.
    lengths: Sequence[int] = ()
    # The allowed batch sizes of the model; empty if it takes any size.
    allowed: tuple[int, ...] = ()
    # Options of the batcher besides its defaults: a `BatchPolicy` and the target for it, and those
    # by which its batches are packed.
    options: dict[str, Any] = field(default_factory=dict)
    # None without a `cost`.
    by_cost: CostTimes | None = None
    # The sizes and seconds of two rows that cannot both be right, "" without them.
    contradiction: str = ""

    def capacity(self, size: int) -> float:
        """Return the requests per second of full batches, or of steps of `size` streams."""
        return size / self.seconds_of(size) / fmean(self.lengths or [1])

    def seconds_of(self, size: int) -> float:
        """Return the mean seconds of full batches; with costs those for `size` requests."""
        if self.by_cost is None:
            return fmean(map(median, self.seconds[size]))
        # Packed by the scheduler out of a full queue.
        count = FULL_BATCHES * max(self.seconds)
        options = self.options | {"policy": "greedy", "max_queue_size": count, "timeout": None}
        options |= {"max_latency": None, "max_delay": None}
        scheduler = open_scheduler(size, 1, self.allowed, **options)
        load = Arrivals([0.0] * count)
        history = simulate(scheduler, load, draw_seconds(self), costs=self.by_cost.costs)
        return size * max(history.answers) / count


def draw_seconds(measurement: Measurement) -> Callable[[float, Sequence[int]], float]:
    """Draw times of batches: a random quantile of the measured size, or between two sizes.

    With costs: what they let expect, times a random one of the ratios of measured times to that.
    """
    random, by_cost = Random(SEED), measurement.by_cost
    seconds = {size: sorted(chain(*found)) for size, found in measurement.seconds.items()}
    sizes = [*seconds]

    def draw_by_cost(_: float, requests: Sequence[int]) -> float:
        assert by_cost is not None, "it is chosen with costs alone"
        costs = [by_cost.costs[number % len(by_cost.costs)] for number in requests]
        return by_cost.model.median(by_cost.shape_of(costs)) * random.choice(by_cost.ratios)

    def draw(_: float, requests: Sequence[int]) -> float:
        at, quantile = bisect_left(sizes, len(requests)), random.random()
        # A batch is filled up to the next allowed size.
        left, right = sizes[at if measurement.allowed else max(0, at - 1)], sizes[at]
        low, high = (one[int(quantile * len(one))] for one in (seconds[left], seconds[right]))
        share = (len(requests) - left) / (right - left) if right > left else 0.0
        return low + share * (high - low)

    return draw if by_cost is None else draw_by_cost


async def measure(
    batcher: DynBatcher[Any, Any], sample: Sample, note: Callable[[str], None]
) -> Measurement:
    """Time batches of 1, 2, 4 and so on up to `max_batch_size`, on an open batcher.

    With allowed batch sizes these are timed, as far as the scheduler forms batches of them. With
    costs, a row has the batches that are packed with this `max_batch_size`. For a `SteppedModel`
    the steps are timed, with each number of streams.

    Raises:
        BatcherError: The model failed.
        TargetError: No stream has a second chunk.
    """
    watcher = _Watcher()
    batcher.add_observer(watcher)
    allowed = tuple(batcher.explain().allowed_batch_sizes)
    most = min([int(batcher.settings["max_batch_size"].value), *allowed[-1:]])
    usual = allowed or [1 << power for power in range(20)]
    sizes = sorted({1, most, *(size for size in usual if size < most)})
    if is_streaming(batcher):
        return await _measure_steps(batcher, sample.inputs, sizes, note)
    batches = [
        _TimedBatch(size, sample.draw(size))
        for size in sizes
        for _ in range(min(MOST_BATCHES, max(LEAST_BATCHES, most // size)))
    ]
    fails_from = None
    overheads: list[float] = []
    cpu_seconds: list[float] = []
    # The sizes take turns, so that what slows the machine for a while slows all sizes.
    for number in range(1, ROUNDS + 1):
        note(f"timing batches of 1 to {most}, {number} of {ROUNDS}")
        for one in batches:
            began_at, cpu_at = perf_counter(), thread_time()
            before = len(watcher.seconds)
            await asyncio.gather(*[batcher.process_batched(each.value) for each in one.requests])
            latency, count = perf_counter() - began_at, len(one.requests)
            whole = [seconds for size, seconds in watcher.seconds[before:] if size == count]
            if not whole:
                # The batch has failed, and was computed in parts; or two of a smaller allowed size
                # take less time.
                fails_from = None if allowed else one.row
                batches = [other for other in batches if other.row < one.row]
                break
            one.seconds.append(whole[0])
            if one.row == 1:
                overheads.append(latency - whole[0])
                cpu_seconds.append(thread_time() - cpu_at)
    rows = {one.row: list[list[float]]() for one in batches}
    for one in batches:
        rows[one.row].append(one.seconds)
    by_cost = _learn_costs(sample, allowed, batches)
    # Clocks of CPU time may be coarse.
    return Measurement(
        rows,
        overhead=max(0.0, median(overheads)),
        loop_seconds=max(median(cpu_seconds), 1e-6),
        fails_from=fails_from,
        allowed=allowed,
        options=sample.options,
        by_cost=by_cost,
        contradiction=_find_contradiction(batches, by_cost),
    )


@dataclass(frozen=True)
class _TimedBatch:
    # The `max_batch_size` of its row, which it may be smaller than.
    row: int
    requests: list[Request]
    seconds: list[float] = field(default_factory=list)

    @property
    def costs(self) -> list[float]:
        return [request.cost for request in self.requests]


def _learn_costs(
    sample: Sample, allowed: tuple[int, ...], batches: list[_TimedBatch]
) -> CostTimes | None:
    if sample.packer is None:
        return None
    found = CostTimes(sample.costs, sample.packer.times, [], allowed)
    times = [(found.shape_of(one.costs), seconds) for one in batches for seconds in one.seconds]
    # In random order: the model bounds what one time changes, and later ones weigh more.
    Random(SEED).shuffle(times)
    for shape, seconds in times:
        found.model.observe(shape, seconds)
    found.ratios.extend(seconds / found.model.median(shape) for shape, seconds in times)
    return found


def _find_contradiction(batches: list[_TimedBatch], by_cost: CostTimes | None) -> str:
    """Return two rows of which the larger batches take far less time, "" without them.

    With costs: less than the other row and the costs let expect.
    """
    rows: dict[int, tuple[float, float]] = {}
    for row, group in groupby(batches, key=attrgetter("row")):
        each = [*group]
        shapes = [by_cost.shape_of(one.costs) for one in each] if by_cost else []
        expected = sum([by_cost.model.median(shape) for shape in shapes]) if by_cost else len(each)
        rows[row] = fmean(median(one.seconds) for one in each), expected / len(each)
    for (small, (first, least)), (large, (last, most)) in combinations(rows.items(), 2):
        if first * most / least > max(CONTRADICTION * last, last + NOISE):
            return f"t({small}) = {1e3 * first:.3g} ms and t({large}) = {1e3 * last:.3g} ms"
    return ""


async def _measure_steps(
    batcher: DynBatcher[Any, Any], inputs: list[Any], sizes: list[int], note: Callable[[str], None]
) -> Measurement:
    """Time the steps of whole answers that begin together."""
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    first_chunks: list[float] = []
    lengths: list[int] = []
    live = 0

    async def read(value: Any, is_first: bool) -> None:
        nonlocal live
        moments = [perf_counter()]
        async with await batcher.stream(value) as stream:
            async for _ in stream:
                moments.append(perf_counter())
                if len(moments) == 2:
                    first_chunks.append(moments[1] - moments[0])
                    live += 1
                # The first is woken before the others: `live` streams had a chunk before this one.
                elif is_first and live in seconds:
                    seconds[live].append(moments[-1] - moments[-2])
        live -= len(moments) > 1
        lengths.append(len(moments) - 1)

    values, cpu_at = cycle(inputs), thread_time()
    for size in sizes * STEPS:
        if len(seconds[size]) < STEPS:
            note(f"timing steps of {size} of {sizes[-1]} streams")
            batch = enumerate(islice(values, size))
            await asyncio.gather(*[read(value, not at) for at, value in batch])
    rows = {size: [found] for size, found in seconds.items() if found}
    if 1 not in rows:
        raise TargetError("no answer has a second chunk, so no step can be timed")
    overhead = max(0.0, min(first_chunks) - median(seconds[1]))
    return Measurement(rows, overhead, (thread_time() - cpu_at) / len(lengths), None, lengths)


async def _check_independence(batcher: DynBatcher[Any, Any], inputs: list[Any]) -> Check:
    name = "batch independence"
    if batcher.settings["max_batch_size"].value < 2:
        return Check(name, "good", "max_batch_size=1: no request shares a batch")
    found = await find_dependence(
        lambda batch: asyncio.gather(*map(batcher.process_batched, batch)), inputs
    )
    if found is not None:
        # A model may be random on purpose.
        return Check(name, "warning" if AT_RANDOM in found else "bad", found)
    return Check(name, "good", "outputs do not depend on the other inputs of their batch")


# What is timed; its unit; a cause and a remedy if nothing was timed: a warm-up times batches alone.
_BATCHES = ("batches", "requests", ": the model has no warmup_inputs", ", or write warmup_inputs")
_STEPS = ("steps", "chunks", "", "")


def _judge_times(
    batcher: DynBatcher[Any, Any], timed: list[tuple[int, float]], contradiction: str = ""
) -> Check:
    name, unit, cause, remedy = _STEPS if is_streaming(batcher) else _BATCHES
    if not timed:
        remedy = f"give --inputs FILE with inputs as JSON{remedy}"
        return Check(name, "warning", f"nothing was timed{cause}", remedy)
    text = ", ".join(f"t({size}) = {1e3 * seconds:.3g} ms" for size, seconds in timed)
    if contradiction:
        return Check(name, "warning", f"{text}: {CONTRADICTS.format(contradiction)}", AGAIN)
    (small, first), (large, last) = timed[0], timed[-1]
    gain = (large / last) / (small / first)
    if large > small and gain < 1.2:
        return Check(
            name,
            "warning",
            f"{text}: {gain:.2f} times the {unit} per second of single ones",
            f"this model gains little from {name}; is it a loop over its inputs?",
        )
    return Check(name, "good", f"{text}; {gain:.2g} times as many {unit} per second")


# What doctor and tune say about rows that contradict each other.
CONTRADICTS = "{} contradict each other, so nothing follows from these times"
AGAIN = "try again while the machine does nothing else, with more inputs"


_IS_PLAIN = re.compile(r"'(dict|list)' object has no attribute")
_LACKS_ARGUMENTS = re.compile(r"__init__\(\) missing \d+ required")


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def find_remedy(error: BaseException) -> str:
    """Name the place in the model that raised, from the traceback of the worker."""
    places = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', str(error.__cause__ or ""))
    own = [place for place in places if f"{os.sep}fast_batcher{os.sep}_" not in place[0]]
    if _LACKS_ARGUMENTS.search(str(error)):
        return "name a batcher that has the model's model_args, as module:batcher"
    if not own:
        return ""
    file, line, function = own[-1]
    place = f"look at {file}, line {line}, in {function}"
    if _IS_PLAIN.search(str(error)):
        return f"{place}; JSON has dicts and lists only: give other objects as --inputs module:name"
    return place
