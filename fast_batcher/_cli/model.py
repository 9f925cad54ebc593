"""Checks of a model: imports it, loads it in a real worker, and measures its batches."""

import asyncio
import importlib
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from statistics import fmean, median
from time import perf_counter, thread_time
from typing import Any, cast

from fast_batcher._cli.checks import Check
from fast_batcher._independence import AT_RANDOM, find_dependence
from fast_batcher._process import read_rss
from fast_batcher.batcher import DynBatcher
from fast_batcher.configuration import find_similar
from fast_batcher.errors import BatcherError
from fast_batcher.model import InferenceModel, Model, find_cost
from fast_batcher.observing import BatchAnswered, Observer, WorkerChanged
from fast_batcher.settings import OPTIONS, RemoteWorkers

# Batches of each size that are timed; the median counts.
BATCHES = 11


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


# Options that a copy takes over: where and how the model computes, and how inputs get there. The
# others concern requests that arrive, other processes, or failures.
COPIED = (
    *("name", "max_batch_size", "workers", "devices", "stage_threads", "freeze_gc"),
    *("start_timeout", "stop_timeout", "max_frame_bytes", "max_shared_bytes"),
    *("shared_memory_threshold", "stepped"),
)
# Options of a copy whose batches are timed: batches leave at once, and may take ten minutes.
MEASURED: Any = {"policy": "greedy", "timeout": 600.0}


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
    if find_cost(model) is not None:
        # Its costs would make a batch of n other than what n requests make of it.
        options |= {"cost": lambda _: 1, "cost_is_padded": False}
    args, kwargs = batcher._model.spec.read_arguments()  # noqa: SLF001
    batcher._cores.release()  # noqa: SLF001
    return DynBatcher(model, model_args=args, model_kwargs=kwargs, **options)


def is_streaming(batcher: DynBatcher[Any, Any]) -> bool:
    """Return whether the requests of a batcher are streams."""
    return batcher._model.spec.is_stepped  # noqa: SLF001


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
    batcher = copy_batcher(original, **MEASURED)
    batcher.add_observer(watcher)
    note("loading the model in a worker")
    began_at = perf_counter()
    try:
        await batcher.open()
    except BatcherError as error:
        yield Check("model", "bad", f"{batcher.name}: {_first_line(error)}", _remedy_of(error))
        return
    try:
        seconds = perf_counter() - began_at
        yield Check("model", "good", f"{batcher.name} was loaded in {seconds:.1f} s")
        size = 0 if watcher.pid is None else read_rss(watcher.pid)
        if size:
            yield Check("worker", "good", f"pid {watcher.pid}, {size / 2**20:.0f} MiB")
        if inputs:
            chosen = select_inputs(original, inputs)
            measured = await measure(batcher, chosen, note)
            times = [(size, median(found)) for size, found in measured.seconds.items()]
            yield _judge_times(times, is_streaming(original))
            if measured.fails_from is not None:
                text = f"batches of {measured.fails_from} fail, and are computed in parts"
                yield Check("batches", "warning", text, "lower max_batch_size; the log says why")
            note("comparing outputs of different batches")
            yield await _check_independence(batcher, chosen)
        else:
            learned = batcher.explain().service_times
            times = [(round(size), seconds) for size, seconds, _ in learned]
            yield _judge_times(times, is_streaming(original))
    except BatcherError as error:
        yield Check("batches", "bad", _first_line(error), _remedy_of(error))
    finally:
        await batcher.aclose()


@dataclass(frozen=True)
class Measurement:
    """The times of a model in a worker."""

    # Seconds of single batches by their size, or of single steps by their streams; both rise.
    seconds: dict[int, list[float]]
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
    # Options of the batcher besides its defaults: a `BatchPolicy`, and the target for it.
    options: dict[str, Any] = field(default_factory=dict)

    def capacity(self, size: int) -> float:
        """Return the requests per second of full batches, or of steps of `size` streams."""
        return size / median(self.seconds[size]) / fmean(self.lengths or [1])


async def measure(
    batcher: DynBatcher[Any, Any], inputs: list[Any], note: Callable[[str], None]
) -> Measurement:
    """Time batches of 1, 2, 4 and so on up to `max_batch_size`, on an open batcher.

    With allowed batch sizes these are timed, as far as the scheduler forms batches of them. For a
    `SteppedModel` the steps are timed, with each number of streams.

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
        return await _measure_steps(batcher, inputs, sizes, note)
    values = cycle(inputs)
    fails_from = None
    latencies: list[float] = []
    cpu_seconds: list[float] = []
    # The sizes take turns, so that what slows the machine for a while slows all sizes.
    for number in range(1, BATCHES + 1):
        note(f"timing batches of 1 to {most}, {number} of {BATCHES}")
        for size in sizes:
            batch = [*islice(values, size)]
            began_at, cpu_at = perf_counter(), thread_time()
            before = len(watcher.seconds)
            await asyncio.gather(*map(batcher.process_batched, batch))
            if all(found != size for found, _ in watcher.seconds[before:]):
                # The batch has failed, and was computed in parts; or two of a smaller allowed size
                # take less time.
                sizes, fails_from = [one for one in sizes if one < size], None if allowed else size
                break
            if size == 1:
                latencies.append(perf_counter() - began_at)
                cpu_seconds.append(thread_time() - cpu_at)
    seconds: dict[int, list[float]] = {}
    for size, found in sorted(watcher.seconds):
        if size in sizes:
            seconds.setdefault(size, []).append(found)
    overhead = max(0.0, median(latencies) - median(seconds[1]))
    # Clocks of CPU time may be coarse.
    return Measurement(seconds, overhead, max(median(cpu_seconds), 1e-6), fails_from, (), allowed)


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
    for size in sizes * BATCHES:
        if len(seconds[size]) < BATCHES:
            note(f"timing steps of {size} of {sizes[-1]} streams")
            batch = enumerate(islice(values, size))
            await asyncio.gather(*[read(value, not at) for at, value in batch])
    seconds = {size: found for size, found in seconds.items() if found}
    if 1 not in seconds:
        raise TargetError("no answer has a second chunk, so no step can be timed")
    overhead = max(0.0, min(first_chunks) - median(seconds[1]))
    return Measurement(seconds, overhead, (thread_time() - cpu_at) / len(lengths), None, lengths)


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


def _judge_times(timed: list[tuple[int, float]], is_stepped: bool) -> Check:
    name, unit = ("steps", "chunks") if is_stepped else ("batches", "requests")
    if not timed:
        return Check(
            name,
            "warning",
            "nothing was timed" + ": the model has no warmup_inputs" * (not is_stepped),
            "give --inputs FILE with inputs as JSON"
            + ", or write warmup_inputs" * (not is_stepped),
        )
    text = ", ".join(f"t({size}) = {1e3 * seconds:.3g} ms" for size, seconds in timed)
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


_IS_PLAIN = re.compile(r"'(dict|list)' object has no attribute")
_LACKS_ARGUMENTS = re.compile(r"__init__\(\) missing \d+ required")


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _remedy_of(error: BaseException) -> str:
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
