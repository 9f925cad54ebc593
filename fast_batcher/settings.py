"""The options of a batcher: names, types, ranges, defaults and checks. Runs in every process.

`Settings` is the one list of them, and checks itself. The message of each check names the
parameter, the value and the remedy. Errors that only a worker can find (a failing import, a model
that does not load) are raised when the batcher opens.
"""

import inspect
import os
import sys
import warnings
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from enum import Enum
from math import inf
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypedDict, Union, get_args, get_origin

from fast_batcher._devices import check_devices, name_devices, place_workers
from fast_batcher.errors import ConfigurationError
from fast_batcher.observing import Observer
from fast_batcher.policy import BatchPolicy
from fast_batcher.types import Cache

PolicyName = Literal["adaptive", "greedy", "fixed"]
WorkerKind = Literal["threads", "processes"]

# A longer duration than a year is a unit mistake, and timers of event loops overflow at some point.
MAX_SECONDS = 365 * 24 * 3600.0
# Room for at least this many waiting requests, and for 8 batches per worker.
MIN_QUEUE_SIZE = 1024
QUEUED_BATCHES_PER_WORKER = 8
# Sessions of a worker. Source: as many as Triton's sequence batcher allows by default.
MAX_SESSIONS = 1024
# A frame holds one whole batch of inputs or outputs. 256 MiB is 400 images of 602 KB, and small
# enough that a garbage length cannot take the machine's memory.
MAX_FRAME_BYTES = 256 * 2**20
# Bytes from which on a view is cheaper than copying a buffer into the pickle and out of it: at
# 16 KiB the copies cost as much as the bookkeeping of the view.
SHARED_MEMORY_THRESHOLD = 16 * 1024


class BatcherOptions(TypedDict, total=False):
    """Keyword arguments of `DynBatcher` besides the common ones in its signature.

    `OPTIONS` and docs/settings.md describe each.
    """

    max_batch_cost: float | None
    """Highest cost of a batch."""
    max_request_cost: float | None
    """Highest cost of an input."""
    cost_is_padded: bool
    """Whether the cost of a batch is its size times its highest cost, as for padded inputs."""
    enabled: bool
    """Whether requests share batches."""
    devices: str | Sequence[str] | None
    """Devices of the workers, which take them in turn; replaces `num_workers`."""
    workers_per_device: int
    """Workers on each of `devices`."""
    mps: bool
    """Whether pinned workers share a GPU by NVIDIA MPS."""
    workers: "RemoteWorkers | WorkerKind | None"
    """Whether workers are processes, threads of this process, or actors of a Ray cluster."""
    shared: bool | str
    """Whether the processes of a server share one set of workers, in a host process."""
    shared_version: str | None
    """Text that tells apart versions of a model: they share no host and no cached outputs."""
    stage_threads: int | None
    """Threads of each worker for `prepare` and `finish` of the model."""
    stepped: bool
    """Whether the class that a text names is a `SteppedModel`."""
    max_sessions: int
    """Most sessions of a worker; the first call of a further one fails with `QueueFullError`."""
    start_timeout: float
    """Time that a worker may take to load the model; then it is killed."""
    drain_timeout: float
    """Time that `aclose()` waits for accepted requests; then the rest fail."""
    stop_timeout: float
    """Time that a worker may take to end by itself; then it is terminated, and later killed."""
    max_queue_bytes: int | None
    """Most bytes of waiting inputs."""
    idempotent: bool
    """Whether an input may be computed twice."""
    isolate_errors: bool
    """Whether a batch for which `infer` raised is divided until the failing inputs are alone."""
    max_restarts: int | None
    """Most restarts of one worker within `restart_window`."""
    restart_window: float
    """Time for which a restart counts against `max_restarts`."""
    restart_backoff: float
    """Time from the first death of a worker to its restart."""
    max_batches_per_worker: int | None
    """Batches after which a worker is replaced."""
    max_rss_bytes: int | None
    """Resident memory from which a worker is replaced."""
    cache: Cache | None
    """Cache in which outputs are looked up before they are computed."""
    key: Callable[[Any], Hashable] | None
    """Key of an input for `cache`, hashable."""
    observers: Sequence[Observer]
    """Observers of batches, requests and workers."""
    max_frame_bytes: int
    """Largest message to or from a worker."""
    max_shared_bytes: int
    """Most memory that the workers share with this process for large inputs."""
    shared_memory_threshold: int
    """Smallest buffer of a large batch that reaches the model as a view of shared memory."""
    freeze_gc: bool
    """Whether each worker leaves its loaded model out of garbage collections."""


class Reconfiguration(TypedDict, total=False):
    """Options that `DynBatcher.reconfigure` can change while the batcher runs."""

    max_batch_size: int
    """Most requests in a batch."""
    max_delay: float | None
    """Longest time for which a batch is held while a worker is free."""
    num_workers: int | tuple[int, int]
    """Worker processes, each with a copy of the model."""
    max_queue_size: int | None
    """Most waiting requests; further ones are rejected with `QueueFullError`."""
    max_latency: float | None
    """Target: time from arrival within which a request should be answered."""


class RemoteWorkers:
    """Workers on other machines: see `fast_batcher.ray.RayWorkers`."""

    num_workers: int | tuple[int, int]


@dataclass(frozen=True)
class Range:
    """The values of an option, besides None."""

    text: str
    """Description of the values for people, without the unit."""
    test: Callable[[str, Any], None]
    """Takes the option's name and a value; raises ConfigurationError if the value is another."""
    unit: str = ""
    """Name of the unit: "seconds", "milliseconds", "bytes" or ""."""

    def check(self, name: str, value: Any) -> None:
        """Raise a ConfigurationError, which names the option, for another value."""
        try:
            self.test(name, value)
        except ConfigurationError:
            raise
        except ValueError:  # the error shows the value, and Python writes 4300 digits at most
            text = f"{name}: give {self.text}, and no integer of thousands of digits"
            raise ConfigurationError(text) from None


def whole(least: int = 1, most: int | None = None, unit: str = "") -> Range:
    """Return the range of whole numbers from `least` to `most`."""
    limit = "or more" if most is None else f"to {most}"

    def check(name: str, value: Any) -> None:
        # bool is an int to Python, and never a count to a person.
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or not least <= value <= (inf if most is None else most):
            raise ConfigurationError(f"{name}={value!r:.100}: give a whole number, {least} {limit}")

    if unit == "bytes":
        limit_in_bytes = f"to {show_bytes(most)}" if most else "or more"
        return Range(f"{show_bytes(least)} {limit_in_bytes}", check, unit)
    return Range(f"{least} {limit}", check, unit)


def duration(*, zero_allowed: bool = False, unit: str = "seconds") -> Range:
    """Return the range of durations of at most a year."""
    least = "0 or more" if zero_allowed else "more than 0"
    most = MAX_SECONDS if unit == "seconds" else 1000 * MAX_SECONDS

    def check(name: str, value: Any) -> None:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # False for NaN too.
        is_valid = is_number and 0 <= value <= most
        if not is_valid or (value == 0 and not zero_allowed):
            raise ConfigurationError(
                f"{name}={value!r:.100}: give {unit} as a number, {least} and at most a year"
            )

    return Range(least, check, unit)


def choice(choices: tuple[str, ...]) -> Range:
    """Return the range of a choice between strings."""
    names = ", ".join(map(repr, choices))

    def check(name: str, value: Any) -> None:
        if not isinstance(value, str) or value not in choices:
            raise ConfigurationError(f"{name}={value!r:.100}: choose one of {names}")

    return Range(names, check)


def show_bytes(count: int | None) -> str:
    """Write a number of bytes in the largest unit that divides it."""
    for size, unit in ((2**20, "MiB"), (2**10, "KiB")):
        if count and count % size == 0:
            return f"{count // size} {unit}"
    return str(count)


def _check_num_workers(name: str, value: Any) -> None:
    if not isinstance(value, tuple):
        WORKERS.check(name, value)
        return
    # Both must be numbers before they are compared.
    are_counts = all(isinstance(count, int) and not isinstance(count, bool) for count in value)
    if not are_counts or len(value) != 2 or not 1 <= value[0] <= value[1] <= MAX_WORKERS:
        raise ConfigurationError(
            f"{name}={value!r:.100}: give a whole number, 1 to {MAX_WORKERS}, or the fewest and "
            "the most workers, for example (1, 8)"
        )


def _check_switch(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name}={value!r}: give True or False")


def _check_policy(name: str, value: object) -> None:
    is_rule = callable(getattr(value, "hold", None)) and not isinstance(value, type)
    if not is_rule and value not in get_args(PolicyName):
        raise ConfigurationError(
            f"{name}={value!r:.100}: choose one of 'adaptive', 'greedy', 'fixed', or give an "
            "object with a method hold(queue, times): see fast_batcher.policy.BatchPolicy"
        )


def _check_label(name: str, value: object) -> None:
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise ConfigurationError(f"{name}={value!r}: give a printable, non-empty string or omit it")


def _check_function(name: str, value: object) -> None:
    if not callable(value):
        raise ConfigurationError(f"{name}={value!r}: give a function of one input")
    if inspect.iscoroutinefunction(value):
        raise ConfigurationError(f"{name}={value!r}: it is async; write a plain def")


# Costs of an input, and of a batch of a million of them. Sums, products and ratios of costs over a
# whole queue must stay finite and above 0. No useful unit of cost needs more.
LEAST_COST, MOST_COST = 1e-9, 1e15
MOST_BATCH_COST = 1e21


def _check_cost_limit(name: str, value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not LEAST_COST <= value <= MOST_BATCH_COST:  # type: ignore[operator]
        raise ConfigurationError(
            f"{name}={value!r:.100}: give a number from {LEAST_COST:g} to {MOST_BATCH_COST:g}"
        )


def _check_rss(name: str, value: object) -> None:
    BYTES.check(name, value)
    if sys.platform != "linux":
        raise ConfigurationError(
            f"{name}={value}: the memory of a process can be read on Linux only; use "
            "max_batches_per_worker"
        )


def _check_observers(name: str, value: Any) -> None:
    is_sequence = isinstance(value, Sequence)
    if not is_sequence or not all(isinstance(observer, Observer) for observer in value):
        raise ConfigurationError(
            f"{name}={value!r:.100}: give a list of instances of fast_batcher.observing.Observer"
        )


def _check_cache(name: str, value: Any) -> None:
    if isinstance(value, type) or not isinstance(value, Cache):
        raise ConfigurationError(
            f"{name}={value!r:.100}: give an object with get(key) and set(key, value), for example "
            "fast_batcher.caching.LRUCache(10_000)"
        )


def _check_shared(name: str, value: object) -> None:
    is_name = isinstance(value, str) and value.strip() and value.isprintable()
    if not isinstance(value, bool) and not is_name:
        raise ConfigurationError(f"{name}={value!r}: give True, False or a printable name")


def _check_workers(name: str, value: object) -> None:
    if not isinstance(value, RemoteWorkers) and value not in get_args(WorkerKind):
        raise ConfigurationError(
            f'{name}={value!r:.100}: give "processes" (the default), "threads", or a '
            "fast_batcher.ray.RayWorkers; the number of workers is num_workers"
        )


# A share is sent with each of its requests to the host of a shared batcher.
LONGEST_SHARE = 200
MOST_SHARE = 2**63


def _check_share(name: str, value: object) -> None:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if value is not None and not (
        (is_number and -MOST_SHARE <= value < MOST_SHARE)  # type: ignore[operator]
        or (isinstance(value, str) and len(value) <= LONGEST_SHARE)
    ):
        raise ConfigurationError(f"{name}={value!r:.100}: give {SHARE.text}, or None")


COUNT = whole()
# Memory per request in flight is small, but a size with nine digits is a typing error.
BATCH_SIZE = whole(1, 2**20)
# Each priority in use adds a queue that every batch searches.
PRIORITY = whole(-100, 100)
SHARE = Range(f"a text of at most {LONGEST_SHARE} characters, or an int of 64 bits", _check_share)
# More than the cores of any machine; a larger number is meant for another parameter.
MAX_WORKERS = 1024
WORKERS = whole(1, MAX_WORKERS)
NUM_WORKERS = Range(f"{WORKERS.text}, or a tuple of the fewest and the most", _check_num_workers)
BYTES = whole(unit="bytes")
SECONDS = duration()
SECONDS_OR_ZERO = duration(zero_allowed=True)
SWITCH = Range("True or False", _check_switch)
LABEL = Range("printable text", _check_label)
FUNCTION = Range("function of one input", _check_function)
COST_LIMIT = Range("1e-9 to 1e21", _check_cost_limit)
OBSERVERS = Range("list of `Observer`", _check_observers)
CACHE = Range("object with `get(key)` and `set(key, value)`", _check_cache)


def checked_timeout(timeout: Any) -> float:
    """Check and return the timeout of a call: seconds, or `math.inf` for no limit."""
    if not (isinstance(timeout, float) and timeout == inf):
        SECONDS.check("timeout", timeout)
    return float(timeout)


def checked_priority(priority: Any) -> int:
    """Check and return the priority of a call, -100 to 100."""
    PRIORITY.check("priority", priority)
    return int(priority)


def checked_share(share: Any) -> str | int | None:
    """Check and return the share of a call, as an object of exactly one of these types."""
    SHARE.check("share", share)
    if share is None:
        return None
    return str.__str__(share) if isinstance(share, str) else int(share)


def check_fields(settings: Any) -> None:
    """Check each field of a dataclass whose annotations have a `Range`."""
    for field in fields(settings):
        kind, values, *_ = get_args(field.type)
        value = getattr(settings, field.name)
        if value is not None or NoneType not in get_args(kind):
            values.check(field.name, value)


class Circumstance(NamedTuple):
    """Circumstance in which some options have no effect."""

    words: str
    """Words for errors."""
    holds: Callable[["Settings"], bool] = lambda _: False
    """Whether the settings bring it about; with another one the kind of the model does."""


class NoEffect(NamedTuple):
    """Circumstance in which an option has no effect, so that it is refused."""

    circumstance: Circumstance
    """The circumstance."""
    remedy: str
    """The remedy, for an error."""


class Use(Enum):
    """Use of an option beside the batcher's own."""

    HERE = "here"
    """Used by the process that constructs the batcher alone: a host process does not get it."""
    MEASURED = "measured"
    """Says where and how the model computes, or how inputs get there: a copy of the batcher that is
    measured has it. The others concern arrivals, other processes, or failures.
    """


ON_CLUSTER = Circumstance(
    "with workers= on a cluster", lambda one: isinstance(one.workers, RemoteWorkers)
)
IN_THREADS = Circumstance("with workers in threads", lambda one: one.in_process)
IN_HOST = Circumstance(
    "in the host process, which does not import the app",
    lambda one: one.has_host and not isinstance(one.policy, str),
)
NO_HOLDS = Circumstance("without holds", lambda one: one.policy == "greedy")
NO_COSTS = Circumstance("without costs", lambda one: one.cost is None)
NO_CACHE = Circumstance("without a cache", lambda one: one.cache is None)
NO_IDENTITY = Circumstance("without sharing or a cache", lambda one: not one.needs_identity)
NO_DEVICES = Circumstance("without devices", lambda one: one.devices is None)
NO_SHARED_GPU = Circumstance("without sharing a GPU", lambda one: one.workers_per_device == 1)
STEPPED = Circumstance("with a SteppedModel")
STEPS_RUN = Circumstance("while a SteppedModel runs")
REMEMBERING = Circumstance("with a SessionModel")
NO_SESSIONS = Circumstance("with a model without sessions")
NO_STAGES = Circumstance("with a model without stages")

_HERE, _MEASURED = Use.HERE, Use.MEASURED
_NO_COSTS = NoEffect(NO_COSTS, "give cost=, a function from an input to its cost")
_NOT_PASSED = NoEffect(IN_THREADS, "inputs and outputs are passed on as they are; omit it")
_NOT_HELD = NoEffect(STEPPED, "a stream joins at the next step, and nothing is held")


@dataclass(frozen=True)
class Settings:
    """The checked settings of one batcher.

    This is the one list of the options of `DynBatcher`. Each field has its type, its range, a line
    for documents, where it applies, and its default; `OPTIONS` has them by name.

    Raises:
        ConfigurationError: A setting is wrong; raised for the first one.
    """

    max_batch_size: Annotated[
        int,
        BATCH_SIZE,
        "Most requests in a batch.",
        NoEffect(STEPS_RUN, "a worker keeps its places; close the batcher and open another"),
        _MEASURED,
    ] = 32
    max_delay: Annotated[
        float | None,
        SECONDS_OR_ZERO,
        "Longest time for which a batch is held while a worker is free.",
        NoEffect(NO_HOLDS, "give another policy"),
        _NOT_HELD,
    ] = None
    num_workers: Annotated[
        int | tuple[int, int], NUM_WORKERS, "Worker processes, each with a copy of the model."
    ] = 1
    policy: Annotated[
        PolicyName | BatchPolicy,
        Range("'adaptive', 'greedy', 'fixed' or a `BatchPolicy`", _check_policy),
        "Rule for the moment at which a batch that is not full leaves.",
        NoEffect(IN_HOST, "give a name, or omit shared= and RayWorkers"),
        _NOT_HELD,
    ] = "adaptive"
    max_latency: Annotated[
        float | None,
        SECONDS,
        "Target: time from arrival within which a request should be answered.",
    ] = None
    # None stands for the value of `queue_limit`.
    max_queue_size: Annotated[
        int | None,
        COUNT,
        "Most waiting requests; further ones are rejected with `QueueFullError`.",
    ] = None
    timeout: Annotated[
        float | None,
        SECONDS,
        "Time after which a call without its own timeout fails with `DeadlineExceededError`.",
    ] = 30.0
    infer_timeout: Annotated[
        float | None, SECONDS, "Time that a batch may take; then its worker is replaced."
    ] = None
    auto_open: Annotated[
        bool, SWITCH, "Whether the first awaited call opens a new batcher.", _HERE
    ] = True
    name: Annotated[str | None, LABEL, "Name in logs and health checks.", _HERE, _MEASURED] = None
    cost: Annotated[
        Callable[[Any], float] | None,
        FUNCTION,
        "Cost of an input, for example its number of tokens: 0 to 1e15.",
        _HERE,
        _MEASURED,
    ] = None
    group_by: Annotated[
        Callable[[Any], Hashable] | None,
        FUNCTION,
        "Key of an input; only inputs with equal keys share a batch.",
        NoEffect(STEPPED, "a step computes all streams; use a batcher for each group"),
        _HERE,
    ] = None
    # The options of `BatcherOptions` begin here.
    max_batch_cost: Annotated[
        float | None, COST_LIMIT, "Highest cost of a batch.", _NO_COSTS, _MEASURED
    ] = None
    max_request_cost: Annotated[
        float | None, COST_LIMIT, "Highest cost of an input.", _NO_COSTS
    ] = None
    cost_is_padded: Annotated[
        bool,
        SWITCH,
        "Whether the cost of a batch is its size times its highest cost, as for padded inputs.",
        _NO_COSTS,
        NoEffect(STEPPED, "the cost of a step is the sum of the costs of its streams"),
        _MEASURED,
    ] = True
    enabled: Annotated[bool, SWITCH, "Whether requests share batches."] = True
    # The checks replace it by a list of names, and `num_workers` by the workers on these devices.
    devices: Annotated[
        str | Sequence[str] | None,
        Range('`"auto"`, a device, or a list of devices', check_devices),
        "Devices of the workers, which take them in turn; replaces `num_workers`.",
        NoEffect(ON_CLUSTER, "give num_gpus= to the workers: each sees its own GPUs, as cuda:0"),
        _MEASURED,
    ] = None
    workers_per_device: Annotated[
        int,
        WORKERS,
        "Workers on each of `devices`.",
        NoEffect(ON_CLUSTER, "give the workers a fraction, for example num_gpus=0.5"),
        NoEffect(NO_DEVICES, "give devices=, or num_workers="),
    ] = 1
    mps: Annotated[
        bool,
        SWITCH,
        "Whether pinned workers share a GPU by NVIDIA MPS.",
        NoEffect(ON_CLUSTER, "start MPS on the nodes"),
        NoEffect(IN_THREADS, "threads share a CUDA context; omit it"),
        NoEffect(NO_SHARED_GPU, "give workers_per_device=2"),
    ] = False
    workers: Annotated[
        RemoteWorkers | WorkerKind | None,
        Range('`"processes"`, `"threads"` or `RayWorkers`', _check_workers),
        "Whether workers are processes, threads of this process, or actors of a Ray cluster.",
        _MEASURED,
    ] = None
    shared: Annotated[
        bool | str,
        Range("True, False or a name", _check_shared),
        "Whether the processes of a server share one set of workers, in a host process.",
        NoEffect(IN_THREADS, "the threads are those of one process"),
        _HERE,
    ] = False
    shared_version: Annotated[
        str | None,
        LABEL,
        "Text that tells apart versions of a model: they share no host and no cached outputs.",
        NoEffect(NO_IDENTITY, "give shared=True"),
        _HERE,
    ] = None
    stage_threads: Annotated[
        int | None,
        WORKERS,
        "Threads of each worker for `prepare` and `finish` of the model.",
        NoEffect(NO_STAGES, "give it prepare or finish, or omit it"),
        _MEASURED,
    ] = None
    stepped: Annotated[
        bool, SWITCH, "Whether the class that a text names is a `SteppedModel`.", _MEASURED
    ] = False
    max_sessions: Annotated[
        int,
        COUNT,
        "Most sessions of a worker; the first call of a further one fails with `QueueFullError`.",
        NoEffect(NO_SESSIONS, "derive its class from SessionModel, or omit it"),
    ] = MAX_SESSIONS
    start_timeout: Annotated[
        float,
        SECONDS,
        "Time that a worker may take to load the model; then it is killed.",
        _MEASURED,
    ] = 300.0
    # The default is below the 30 s that Kubernetes gives a pod.
    drain_timeout: Annotated[
        float,
        SECONDS_OR_ZERO,
        "Time that `aclose()` waits for accepted requests; then the rest fail.",
    ] = 20.0
    stop_timeout: Annotated[
        float,
        SECONDS_OR_ZERO,
        "Time that a worker may take to end by itself; then it is terminated, and later killed.",
        _MEASURED,
    ] = 2.0
    max_queue_bytes: Annotated[int | None, BYTES, "Most bytes of waiting inputs."] = None
    idempotent: Annotated[bool, SWITCH, "Whether an input may be computed twice."] = True
    isolate_errors: Annotated[
        bool,
        SWITCH,
        "Whether a batch for which `infer` raised is divided until the failing inputs are alone.",
        NoEffect(STEPPED, "the model says which stream fails: step returns an exception for it"),
    ] = True
    max_restarts: Annotated[
        int | None, whole(0), "Most restarts of one worker within `restart_window`."
    ] = 5
    restart_window: Annotated[
        float, SECONDS, "Time for which a restart counts against `max_restarts`."
    ] = 60.0
    restart_backoff: Annotated[
        float, SECONDS, "Time from the first death of a worker to its restart."
    ] = 0.1
    max_batches_per_worker: Annotated[
        int | None, COUNT, "Batches after which a worker is replaced."
    ] = None
    max_rss_bytes: Annotated[
        int | None,
        Range(BYTES.text, _check_rss, "bytes"),
        "Resident memory from which a worker is replaced.",
        NoEffect(ON_CLUSTER, "give max_batches_per_worker="),
        NoEffect(IN_THREADS, "give max_batches_per_worker="),
    ] = None
    cache: Annotated[
        Cache | None,
        CACHE,
        "Cache in which outputs are looked up before they are computed.",
        NoEffect(STEPPED, "chunks are not cached; keep the result of process_batched in the app"),
        NoEffect(REMEMBERING, "an answer depends on the earlier inputs of its session"),
        _HERE,
    ] = None
    key: Annotated[
        Callable[[Any], Hashable] | None,
        FUNCTION,
        "Key of an input for `cache`, hashable.",
        NoEffect(NO_CACHE, "give cache="),
        _HERE,
    ] = None
    observers: Annotated[
        Sequence[Observer], OBSERVERS, "Observers of batches, requests and workers.", _HERE
    ] = ()
    # The minimum leaves room for an error with text and traceback (64 Ki characters each).
    max_frame_bytes: Annotated[
        int,
        whole(2**20, unit="bytes"),
        "Largest message to or from a worker.",
        _NOT_PASSED,
        _MEASURED,
    ] = MAX_FRAME_BYTES
    # Two batches, the most that a worker has at once, of the default `max_frame_bytes`. No file can
    # be longer than `sys.maxsize`.
    max_shared_bytes: Annotated[
        int,
        Range("0 or more", whole(0, sys.maxsize).check, "bytes"),
        "Most memory that the workers share with this process for large inputs.",
        _NOT_PASSED,
        _MEASURED,
    ] = 2 * MAX_FRAME_BYTES
    # A buffer of less than 4 KiB is cheaper to copy than to describe. From 64 KiB on CPython's
    # pickler passes the buffer itself to the stream, so that keeping it out saves no copy.
    shared_memory_threshold: Annotated[
        int,
        whole(4 * 1024, 64 * 1024, "bytes"),
        "Smallest buffer of a large batch that reaches the model as a view of shared memory.",
        _NOT_PASSED,
        _MEASURED,
    ] = SHARED_MEMORY_THRESHOLD
    freeze_gc: Annotated[
        bool,
        SWITCH,
        "Whether each worker leaves its loaded model out of garbage collections.",
        _MEASURED,
    ] = True

    def __post_init__(self) -> None:
        """Check each setting, then the pairs that depend on each other."""
        check_fields(self)
        reject_without_effect(self)
        self._take_workers()
        if self.policy == "fixed" and self.max_delay is None:
            raise ConfigurationError(
                "max_delay=None: policy='fixed' waits for a full batch or max_delay seconds, so "
                "give a number of seconds, for example max_delay=0.01"
            )
        self._resolve_devices()

    def _resolve_devices(self) -> None:
        """Replace `devices` by names of existing devices, and `num_workers` by their workers.

        `mps` is turned off where no worker uses a GPU.
        """
        if self.devices is None:
            return
        devices = name_devices(self.devices, os.environ)
        count = len(devices) * self.workers_per_device
        if self.num_workers not in (1, count):
            raise ConfigurationError(
                f"num_workers={self.num_workers}: devices={devices!r:.100} and workers_per_device="
                f"{self.workers_per_device} give {count} workers; omit num_workers"
            )
        WORKERS.check("devices * workers_per_device", count)
        place_workers(devices, count, os.environ)
        object.__setattr__(self, "devices", devices)
        object.__setattr__(self, "num_workers", count)
        object.__setattr__(self, "mps", self.mps and "cuda" in "".join(devices))

    def _take_workers(self) -> None:
        """Take what `workers` implies."""
        if self.in_process:
            names = name_devices(self.devices or (), os.environ)
            if any(name.startswith("cpu:") for name in names):
                raise ConfigurationError(
                    f"devices={self.devices!r:.100}: threads are not pinned to cores; give 'cpu', "
                    'or workers="processes"'
                )
            object.__setattr__(self, "max_shared_bytes", 0)
        elif isinstance(self.workers, RemoteWorkers):
            count = self.workers.num_workers
            if self.num_workers not in (1, count):
                raise ConfigurationError(
                    f"num_workers={self.num_workers}: workers= has num_workers={count}; omit the "
                    "other"
                )
            object.__setattr__(self, "num_workers", count)

    @property
    def in_process(self) -> bool:
        """Whether the workers belong to this process, and take values as they are."""
        return self.workers == "threads"

    @property
    def has_host(self) -> bool:
        """Whether the workers belong to a host process."""
        return bool(self.shared) or isinstance(self.workers, RemoteWorkers)

    @property
    def needs_identity(self) -> bool:
        """Whether outputs are cached, in this process or in one with which this one shares."""
        return self.cache is not None or bool(self.shared)

    @property
    def batch_limit(self) -> int:
        """Most requests that are sent together: `max_batch_size`, or 1 with batching disabled."""
        return self.max_batch_size if self.enabled else 1

    @property
    def queue_limit(self) -> int:
        """Most waiting requests: `max_queue_size`, or by default room for batches per worker."""
        if self.max_queue_size is not None:
            return self.max_queue_size
        # The queue of a scaling range has to last until further workers are ready.
        room = QUEUED_BATCHES_PER_WORKER * self.max_batch_size * self.most_workers
        return max(MIN_QUEUE_SIZE, room)

    @property
    def fewest_workers(self) -> int:
        """Smallest number of workers, started at first."""
        return self.num_workers[0] if isinstance(self.num_workers, tuple) else self.num_workers

    @property
    def most_workers(self) -> int:
        """Most workers: `num_workers`, or the upper end of its range."""
        return self.num_workers[1] if isinstance(self.num_workers, tuple) else self.num_workers

    def select(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the values of the options among these names."""
        return {name: getattr(self, name) for name in names if name in OPTIONS}

    def changed(self, changes: Reconfiguration) -> "Settings":
        """Copy these settings with some of them changed."""
        unknown = sorted(set(changes) - set(LIVE_OPTIONS))
        if unknown:
            raise ConfigurationError(
                f"{unknown[0]}: it cannot be changed while the batcher runs; these can be: "
                f"{', '.join(LIVE_OPTIONS)}"
            )
        count = changes.get("num_workers", self.num_workers)
        if self.devices is not None and count != self.num_workers:
            raise ConfigurationError(
                f"num_workers={count!r:.100}: devices={self.devices!r:.100} give the batcher its "
                f"{self.num_workers} workers; for another number open a batcher with other devices"
            )
        return replace(self, **changes)


@dataclass(frozen=True)
class Option:
    """Description of a setting for documents, files and command lines."""

    name: str
    """Name of the parameter."""
    types: tuple[type, ...]
    """Types of a value that can be written as text: int, float, bool, str, list for several texts,
    tuple for a range of whole numbers. Empty for objects and functions, which only a program can
    give.
    """
    is_optional: bool
    """Whether None is a value: no limit, or the default that `doc` or the documents name."""
    range: Range
    """Values that it takes, besides None."""
    default: Any
    """Value without an argument."""
    doc: str
    """One line for people, in Markdown."""
    is_live: bool
    """Whether `DynBatcher.reconfigure` can change it while the batcher runs."""
    no_effect: Sequence[NoEffect]
    """Circumstances in which it is refused, because it has no effect."""
    uses: Collection[Use]
    """Uses beside the batcher's own."""

    def __str__(self) -> str:
        """Describe the unit and the range."""
        parts = (self.range.unit, self.range.text, "or None" if self.is_optional else "")
        return ", ".join(filter(None, parts))


def _list_options() -> Iterator[Option]:
    for field in fields(Settings):
        kind, values, doc, *facts = get_args(field.type)
        kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
        yield Option(
            name=field.name,
            types=tuple(_TYPES_OF_TEXTS[part] for part in kinds if part in _TYPES_OF_TEXTS),
            is_optional=NoneType in kinds,
            range=values,
            default=field.default,
            doc=doc,
            is_live=field.name in Reconfiguration.__annotations__,
            no_effect=[fact for fact in facts if isinstance(fact, NoEffect)],
            uses={fact for fact in facts if isinstance(fact, Use)},
        )


# Types that a text may stand for, by the annotation of a field.
_TYPES_OF_TEXTS: dict[Any, type] = {
    **{kind: kind for kind in (int, float, bool, str)},
    PolicyName: str,
    WorkerKind: str,
    Sequence[str]: list,
    tuple[int, int]: tuple,
}
# The options of `DynBatcher`, besides the model and its arguments, by name.
OPTIONS = {option.name: option for option in _list_options()}
# The names of the options that `reconfigure` can change.
LIVE_OPTIONS = [option.name for option in OPTIONS.values() if option.is_live]


class SettingValue(NamedTuple):
    """The value of an option in use, and its source."""

    value: Any
    """The value in use."""
    source: str
    """"code", "default", "reconfigure", an environment variable, or a file and the place in it."""


def reject_without_effect(
    settings: Settings, words: Collection[str] = (), given: Collection[str] | None = None
) -> None:
    """Refuse options that have no effect.

    Args:
        settings: The settings.
        words: Circumstances that hold besides those of the settings.
        given: Names of the options that may be refused; None for those without their default.
    """
    for name, option in OPTIONS.items():
        value = getattr(settings, name)
        for circumstance, remedy in option.no_effect:
            if circumstance.words in words or circumstance.holds(settings):
                # 0 bytes of shared memory are none.
                is_set = value != option.default and (value != 0 or option.range.unit != "bytes")
                if is_set if given is None else name in given:
                    text = f"{name}={value!r:.100}: it has no effect {circumstance.words}; {remedy}"
                    raise ConfigurationError(text)


def reject_for_model(
    settings: Settings, kinds: Iterable[str], changes: Collection[str] = ()
) -> None:
    """Refuse options without an effect for these kinds of models, and changes while one runs."""
    words = [f"with {kind}" for kind in kinds]
    reject_without_effect(settings, words)
    if STEPPED.words in words:
        reject_without_effect(settings, [STEPS_RUN.words], changes)


def reject_unknown_options(given: Iterable[str]) -> None:
    """Raise the error that Python raises for an unknown argument, with the nearest known name."""
    for name in given:
        if name not in BatcherOptions.__annotations__:
            hint = suggest_parameter(name, [*OPTIONS, "model_args", "model_kwargs"])
            raise TypeError(f"DynBatcher() got an unexpected keyword argument {name!r}{hint}")


def warn_about_workers(settings: Settings) -> None:
    """Warn about more workers than cores, at the line that constructs the batcher."""
    cores = os.cpu_count() or 1
    is_local = settings.devices is None and not isinstance(settings.workers, RemoteWorkers)
    if settings.most_workers > cores and is_local:
        warnings.warn(
            f"num_workers={settings.num_workers} is more than the {cores} cores of this machine; "
            "on a CPU the workers will take time from each other",
            RuntimeWarning,
            stacklevel=4,
        )


# Least similarity of a suggestion, by `difflib`. "batch_size" reaches 0.833 with "max_batch_size";
# "timeout_ms", which means another time, 0.824 with "timeout".
CLOSE = 0.83


# Options of other libraries, with ours for the same: of LitServe (batch_timeout, accelerator), Ray
# Serve, Mosec, BentoML, TorchServe, Triton and TensorFlow Serving.
OTHER_NAMES = {
    "batch_timeout": "max_delay",
    "batch_wait_timeout_s": "max_delay",
    "max_wait_time": "max_delay",
    "max_delay_ms": "max_delay",
    "max_batch_delay": "max_delay",
    "max_queue_delay_microseconds": "max_delay",
    "batch_timeout_micros": "max_delay",
    "max_latency_ms": "max_latency",
    "accelerator": "devices",
}


def suggest_parameter(name: str, known: Iterable[str], cutoff: float = CLOSE) -> str:
    """Return the end of an error message about an unknown parameter."""
    names = [*known]
    found = OTHER_NAMES.get(name.lower())
    if found in names:
        unit = f", in {OPTIONS[found].range.unit}" if OPTIONS[found].range.unit else ""
        return f". Did you mean {found!r}{unit}?"
    found = find_similar_name(name, names, cutoff)
    return f". Did you mean {found!r}?" if found else ""


def find_similar_name(name: str, known: Iterable[str], cutoff: float = CLOSE) -> str | None:
    """Return the known name that is most similar to a misspelt one, None without any."""
    return next(iter(get_close_matches(name.lower(), [*known], n=1, cutoff=cutoff)), None)
