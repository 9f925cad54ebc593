"""The settings of a batcher: names, types, defaults and checks. Runs in every process.

`Settings` checks itself. The message of each check names the parameter, the value and the remedy.
Errors that only a worker can find (a failing import, a model that does not load) are raised when
the batcher opens.
"""

import inspect
import os
import sys
import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from math import inf
from types import NoneType
from typing import Annotated, Any, Literal, TypedDict, get_args

from fast_batcher._devices import check_devices, name_devices, place_workers
from fast_batcher._suggestions import suggest_parameter
from fast_batcher.errors import ConfigurationError
from fast_batcher.observing import Observer
from fast_batcher.types import Cache

PolicyName = Literal["adaptive", "greedy", "fixed"]

# Memory per request in flight is small, but a size with nine digits is a typing error.
MAX_BATCH_SIZE = 2**20
# More than the cores of any machine; a larger number is meant for another parameter.
MAX_WORKERS = 1024
MAX_STAGE_THREADS = 1024
# A longer duration than a year is a unit mistake, and timers of event loops overflow at some point.
MAX_SECONDS = 365 * 24 * 3600.0
# Priorities range from -MAX_PRIORITY to MAX_PRIORITY: each priority in use adds a queue that every
# batch searches.
MAX_PRIORITY = 100
# Room for at least this many waiting requests, and for 8 batches per worker.
MIN_QUEUE_SIZE = 1024
QUEUED_BATCHES_PER_WORKER = 8
# A frame holds one whole batch of inputs or outputs. 256 MiB is 400 images of 602 KB, and small
# enough that a garbage length cannot take the machine's memory.
MAX_FRAME_BYTES = 256 * 2**20
# Room for an error with its text and traceback (64 Ki characters each).
MIN_MAX_FRAME_BYTES = 2**20
# Memory that workers share with their parent: two batches, the most that a worker has at once, each
# of the default MAX_FRAME_BYTES. The system provides it as it is used.
MAX_SHARED_BYTES = 2 * MAX_FRAME_BYTES
# Bytes from which on a view is cheaper than copying a buffer into the pickle and out of it: at
# 16 KiB the copies cost as much as the bookkeeping of the view.
SHARED_MEMORY_THRESHOLD = 16 * 1024
# A buffer of less than 4 KiB is cheaper to copy than to describe. From 64 KiB on CPython's pickler
# passes the buffer itself to the stream, so that keeping it out saves no copy.
MIN_SHARED_MEMORY_THRESHOLD = 4 * 1024
MAX_SHARED_MEMORY_THRESHOLD = 64 * 1024


class BatcherOptions(TypedDict, total=False):
    """Keyword arguments of `DynBatcher` besides the common ones in its signature.

    Attributes:
        start_timeout: Seconds that a worker may take to load the model; then opening fails with
            `WorkerStartupError`. Above 0. Default 300.
        stop_timeout: Seconds that a worker may take to end by itself; then it is terminated, and
            half a second later killed. 0 or more. Default 2.
        drain_timeout: Seconds that `aclose` waits for accepted requests; then the rest fail with
            `BatcherClosedError`. 0 or more. Default 20, which is below the 30 s that Kubernetes
            gives a pod.
        idempotent: Whether an input may be computed twice. With False, a request that a worker has
            begun is not retried, and a batch that fails is not divided. Default True.
        isolate_errors: Whether a batch for which `infer` raised is divided until the failing inputs
            are alone, so that the others are answered. A batch that runs out of memory is divided
            too. Default True.
        max_restarts: Most restarts of one worker within `restart_window`, 0 or more, or None for no
            limit. When every worker has spent its restarts, calls fail at once until a later try
            succeeds. Default 5.
        restart_window: Seconds for which a restart counts against `max_restarts`; also the seconds
            until the next try after the restarts are spent. Above 0. Default 60.
        restart_backoff: Seconds from a worker's first death to its restart; doubles with each
            further death, up to 10 s. Above 0. Default 0.1.
        max_batches_per_worker: Batches after which a worker is replaced, 1 or more, or None for no
            limit. The replacement loads first, so for a while there is one more copy of the model.
            Default None.
        max_rss_bytes: Resident memory, in bytes, from which a worker is replaced in the same way, 1
            or more, or None for no limit. Shared memory counts once the worker has read it. Linux
            only. Default None.
        max_queue_bytes: Most bytes of waiting inputs, 1 or more, or None for no limit; beyond it
            calls fail with `QueueFullError`. Every input is then measured: a buffer, array or
            tensor by its length, anything else by pickling it. Default None.
        max_frame_bytes: Bytes of the longest message to or from a worker, 1 MiB or more. A larger
            batch is sent in parts; a single larger input fails with `RequestTooLargeError`.
            Default 256 MiB.
        max_batch_cost: Highest cost of a batch, above 0, or None for no limit; needs `cost`. An
            input that costs more runs alone. Default None.
        max_request_cost: Highest cost of an input, above 0, or None for no limit; needs `cost`. An
            input that costs more fails with `RequestTooLargeError`. Default None.
        cost_is_padded: Whether the cost of a batch is its size times its highest cost, as for
            inputs that are padded to the longest; with False it is the sum of the costs. Default
            True.
        max_shared_bytes: Most bytes of memory that the workers share with this process for large
            inputs and for batches of 256 KiB or more; the system provides it as it is used. Each
            worker has another such memory for its outputs, which are copied out. If it is full,
            values go through a pipe. 0 sends everything through the pipe, as on systems other than
            Linux. Default 512 MiB.
        shared_memory_threshold: Bytes, from 4096 to 65536, from which an array, CPU tensor or other
            buffer in a large batch reaches the model as a view of shared memory instead of a copy.
            Default 16384.
        freeze_gc: Whether each worker collects garbage once after its warm-up, and excludes the
            live objects, the model and its libraries, from all later collections. With False a full
            collection in a worker that has imported torch takes tens of milliseconds. Default True.
        observers: Observers of the batcher (`fast_batcher.observing.Observer`), for metrics and
            traces. More can be added with `add_observer`. Default ().
        shared: Whether all processes of one server share one set of workers: a host process has
            the queue and the workers, and this process sends it the requests. A name instead of
            True is for all processes of this user that give it. Default False. See
            docs/server_processes.md.
        shared_version: A text that tells apart processes that must not share, for example the id
            of a release whose weights no file name shows; needs `shared`. Default None.
        devices: Devices of the workers, which take them in turn: "auto" for all GPUs of this
            process, or the CPU without any; "cpu"; or a list such as ["cuda:0", "cuda:1"], or
            ["cpu:0-3", "cpu:4-7"] to pin workers to cores. It replaces `num_workers`. With None
            workers use what they find. Default None. See docs/gpus.md.
        workers_per_device: Workers on each of `devices`, 1 or more. Default 1.
        stage_threads: Threads of each worker for the `prepare` and `finish` of a model that has
            them, 1 to 1024. With None as many as its numeric libraries get, a share of the cores.
            Default None. See docs/stages.md.
        enabled: Whether requests share batches. With False each request is sent alone to a worker,
            and all other settings keep their meaning: for comparing and for debugging. Default
            True.
        cache: Cache in which outputs are looked up before they are computed: an object with
            `get(key)` and `set(key, value)`, for example a `fast_batcher.caching.LRUCache`. Equal
            inputs that are in flight at the same time are computed once. Default None. See
            docs/caching.md.
        key: Function that returns the hashable key of an input for `cache`, called like `cost`.
            With None it is a hash of the pickled input. Default None.
    """

    start_timeout: float
    stop_timeout: float
    drain_timeout: float
    idempotent: bool
    isolate_errors: bool
    max_restarts: int | None
    restart_window: float
    restart_backoff: float
    max_batches_per_worker: int | None
    max_rss_bytes: int | None
    max_queue_bytes: int | None
    max_frame_bytes: int
    max_batch_cost: float | None
    max_request_cost: float | None
    cost_is_padded: bool
    max_shared_bytes: int
    shared_memory_threshold: int
    freeze_gc: bool
    observers: Sequence[Observer]
    shared: bool | str
    shared_version: str | None
    devices: str | Sequence[str] | None
    workers_per_device: int
    stage_threads: int | None
    enabled: bool
    cache: Cache | None
    key: Callable[[Any], Hashable] | None


class Reconfiguration(TypedDict, total=False):
    """Settings that `DynBatcher.reconfigure` can change; see `DynBatcher` for each."""

    max_batch_size: int
    max_delay: float | None
    max_queue_size: int | None
    max_latency: float | None


@dataclass(frozen=True)
class _Count:
    """Checks a whole number."""

    least: int
    most: int | None = None

    def __call__(self, name: str, value: Any) -> None:
        # bool is an int to Python, and never a count to a person.
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or not self.least <= value <= (inf if self.most is None else self.most):
            limit = "or more" if self.most is None else f"to {self.most}"
            raise ConfigurationError(
                f"{name}={value!r:.100}: give a whole number, {self.least} {limit}"
            )


@dataclass(frozen=True)
class _Seconds:
    """Checks a duration."""

    zero_allowed: bool = False

    def __call__(self, name: str, value: Any) -> None:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # False for NaN too.
        is_valid = is_number and 0 <= value <= MAX_SECONDS
        if not is_valid or (value == 0 and not self.zero_allowed):
            least = "0 or more" if self.zero_allowed else "more than 0"
            raise ConfigurationError(
                f"{name}={value!r:.100}: give seconds as a number, {least} and at most a year"
            )


def _check_switch(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name}={value!r}: give True or False")


def _check_policy(name: str, value: object) -> None:
    if value not in get_args(PolicyName):
        names = ", ".join(repr(policy) for policy in get_args(PolicyName))
        raise ConfigurationError(f"{name}={value!r}: choose one of {names}")


def _check_label(name: str, value: object) -> None:
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise ConfigurationError(
            f"{name}={value!r}: give a printable, non-empty string or leave it"
        )


def _check_function(name: str, value: object) -> None:
    if not callable(value):
        raise ConfigurationError(f"{name}={value!r}: give a function of one input")
    if inspect.iscoroutinefunction(value):
        raise ConfigurationError(f"{name}={value!r}: it is async; write a plain def")


def _check_cost_limit(name: str, value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < inf:  # type: ignore[operator]  # a number by then
        raise ConfigurationError(f"{name}={value!r:.100}: give a finite number above 0")


def _check_rss(name: str, value: object) -> None:
    _Count(1)(name, value)
    if sys.platform != "linux":
        raise ConfigurationError(
            f"{name}={value}: the memory of a process can be read on Linux only; use "
            "max_batches_per_worker"
        )


def check_observers(name: str, value: Any) -> None:
    """Check a sequence of observers.

    Raises:
        ConfigurationError: It is something else.
    """
    is_sequence = isinstance(value, Sequence)
    if not is_sequence or not all(isinstance(one, Observer) for one in value):
        raise ConfigurationError(
            f"{name}={value!r:.100}: give a list of instances of fast_batcher.observing.Observer"
        )


def refuse_followers(observers: Sequence[Observer], shared: bool | str) -> None:
    """Raise if an observer needs the contexts of callers, which a host process does not have.

    Raises:
        ConfigurationError: One does.
    """
    for observer in observers if shared else ():
        if observer.needs_context:
            raise ConfigurationError(
                f"observers: {type(observer).__qualname__} needs the context of each caller "
                f"(needs_context), which the host process of shared={shared!r} does not have; "
                "remove the observer, or give shared=False"
            )


def check_cache(name: str, value: Any) -> None:
    """Check a cache.

    Raises:
        ConfigurationError: It lacks a method.
    """
    if isinstance(value, type) or not isinstance(value, Cache):
        raise ConfigurationError(
            f"{name}={value!r:.100}: give an object with get(key) and set(key, value), for example "
            "fast_batcher.caching.LRUCache(10_000)"
        )


def _check_shared(name: str, value: object) -> None:
    is_name = isinstance(value, str) and value.strip() and value.isprintable()
    if not isinstance(value, bool) and not is_name:
        raise ConfigurationError(f"{name}={value!r}: give True, False or a printable name")


def check_seconds(name: str, value: Any) -> None:
    """Check a duration of 0 or more seconds.

    Raises:
        ConfigurationError: It is something else.
    """
    _Seconds(zero_allowed=True)(name, value)


def checked_timeout(timeout: Any) -> float:
    """Check and return the timeout of a call: seconds, or `math.inf` for no limit.

    Raises:
        ConfigurationError: The timeout is neither.
    """
    if not (isinstance(timeout, float) and timeout == inf):
        _Seconds()("timeout", timeout)
    return float(timeout)


def checked_priority(priority: Any) -> int:
    """Check and return the priority of a call, -100 to 100.

    Raises:
        ConfigurationError: The priority is no whole number in this range.
    """
    _Count(-MAX_PRIORITY, MAX_PRIORITY)("priority", priority)
    return int(priority)


@dataclass(frozen=True)
class Settings:
    """The checked settings of one batcher: one line for each, with type, check and default.

    `DynBatcher` and `BatcherOptions` describe them.

    Raises:
        ConfigurationError: A setting is wrong; raised for the first one.
    """

    max_batch_size: Annotated[int, _Count(1, MAX_BATCH_SIZE)] = 32
    max_delay: Annotated[float | None, _Seconds(zero_allowed=True)] = None
    num_workers: Annotated[int, _Count(1, MAX_WORKERS)] = 1
    policy: Annotated[PolicyName, _check_policy] = "adaptive"
    max_latency: Annotated[float | None, _Seconds()] = None
    # None stands for the value of `queue_limit`.
    max_queue_size: Annotated[int | None, _Count(1)] = None
    timeout: Annotated[float | None, _Seconds()] = 30.0
    infer_timeout: Annotated[float | None, _Seconds()] = None
    auto_open: Annotated[bool, _check_switch] = True
    name: Annotated[str | None, _check_label] = None
    cost: Annotated[Callable[[Any], float] | None, _check_function] = None
    group_by: Annotated[Callable[[Any], Hashable] | None, _check_function] = None
    # From here on the options of `BatcherOptions`.
    start_timeout: Annotated[float, _Seconds()] = 300.0
    stop_timeout: Annotated[float, _Seconds(zero_allowed=True)] = 2.0
    drain_timeout: Annotated[float, _Seconds(zero_allowed=True)] = 20.0
    idempotent: Annotated[bool, _check_switch] = True
    isolate_errors: Annotated[bool, _check_switch] = True
    max_restarts: Annotated[int | None, _Count(0)] = 5
    restart_window: Annotated[float, _Seconds()] = 60.0
    restart_backoff: Annotated[float, _Seconds()] = 0.1
    max_batches_per_worker: Annotated[int | None, _Count(1)] = None
    max_rss_bytes: Annotated[int | None, _check_rss] = None
    max_queue_bytes: Annotated[int | None, _Count(1)] = None
    max_frame_bytes: Annotated[int, _Count(MIN_MAX_FRAME_BYTES)] = MAX_FRAME_BYTES
    max_batch_cost: Annotated[float | None, _check_cost_limit] = None
    max_request_cost: Annotated[float | None, _check_cost_limit] = None
    cost_is_padded: Annotated[bool, _check_switch] = True
    # No file can be longer than `sys.maxsize`.
    max_shared_bytes: Annotated[int, _Count(0, sys.maxsize)] = MAX_SHARED_BYTES
    shared_memory_threshold: Annotated[
        int, _Count(MIN_SHARED_MEMORY_THRESHOLD, MAX_SHARED_MEMORY_THRESHOLD)
    ] = SHARED_MEMORY_THRESHOLD
    freeze_gc: Annotated[bool, _check_switch] = True
    observers: Annotated[Sequence[Observer], check_observers] = ()
    shared: Annotated[bool | str, _check_shared] = False
    shared_version: Annotated[str | None, _check_label] = None
    # After the checks a list of names, and `num_workers` the workers on them.
    devices: Annotated[str | Sequence[str] | None, check_devices] = None
    workers_per_device: Annotated[int, _Count(1, MAX_WORKERS)] = 1
    stage_threads: Annotated[int | None, _Count(1, MAX_STAGE_THREADS)] = None
    enabled: Annotated[bool, _check_switch] = True
    cache: Annotated[Cache | None, check_cache] = None
    key: Annotated[Callable[[Any], Hashable] | None, _check_function] = None

    def __post_init__(self) -> None:
        """Check each setting, then the pairs that depend on each other."""
        for field in fields(self):
            kind, check = get_args(field.type)
            value = getattr(self, field.name)
            if value is not None or NoneType not in get_args(kind):
                check(field.name, value)
        refuse_followers(self.observers, self.shared)
        if self.policy == "fixed" and self.max_delay is None:
            raise ConfigurationError(
                "max_delay=None: policy='fixed' waits for a full batch or max_delay seconds, so "
                "give a number of seconds, for example max_delay=0.01"
            )
        for name in ("max_batch_cost", "max_request_cost"):
            limit = getattr(self, name)
            if limit is not None and self.cost is None:
                raise ConfigurationError(
                    f"{name}={limit!r:.100}: without costs it has no meaning; give cost=, a "
                    "function from an input to its cost"
                )
        if self.key is not None and self.cache is None:
            raise ConfigurationError(
                f"key={self.key!r:.100}: without a cache it has no meaning; give cache="
            )
        if self.shared_version is not None and not self.shared:
            raise ConfigurationError(
                f"shared_version={self.shared_version!r:.100}: without sharing it has no meaning; "
                "give shared=True"
            )
        self._resolve_devices()

    def _resolve_devices(self) -> None:
        """Replace `devices` by names of existing devices, and `num_workers` by their workers."""
        if self.devices is None:
            if self.workers_per_device != 1:
                raise ConfigurationError(
                    f"workers_per_device={self.workers_per_device}: without devices it has no "
                    "meaning; give devices=, or num_workers="
                )
            return
        devices = name_devices(self.devices, os.environ)
        count = len(devices) * self.workers_per_device
        if self.num_workers not in (1, count):
            raise ConfigurationError(
                f"num_workers={self.num_workers}: devices={devices!r:.100} and workers_per_device="
                f"{self.workers_per_device} give {count} workers; omit num_workers"
            )
        _Count(1, MAX_WORKERS)("devices * workers_per_device", count)
        place_workers(devices, count, os.environ)
        object.__setattr__(self, "devices", devices)
        object.__setattr__(self, "num_workers", count)

    @property
    def batch_limit(self) -> int:
        """Most requests that are sent together: `max_batch_size`, or 1 with batching disabled."""
        return self.max_batch_size if self.enabled else 1

    @property
    def queue_limit(self) -> int:
        """Most waiting requests: `max_queue_size`, or by default room for batches per worker."""
        if self.max_queue_size is not None:
            return self.max_queue_size
        room = QUEUED_BATCHES_PER_WORKER * self.max_batch_size * self.num_workers
        return max(MIN_QUEUE_SIZE, room)

    def changed(self, changes: Reconfiguration) -> "Settings":
        """Copy these settings with some of them changed.

        Raises:
            ConfigurationError: A new value is wrong, or its setting cannot be changed.
        """
        names = Reconfiguration.__annotations__
        unknown = sorted(set(changes) - set(names))
        if unknown:
            raise ConfigurationError(
                f"{unknown[0]}: it cannot be changed while the batcher runs; what can is "
                f"{', '.join(names)}"
            )
        # A queue keeps its length when `max_batch_size` alone is changed.
        kept = replace(self, max_queue_size=self.queue_limit)
        return replace(kept, **changes)


def reject_unknown_options(given: Iterable[str]) -> None:
    """Raise the error that Python raises for an unknown argument, with the nearest known name.

    Args:
        given: Names of the options of one call of `DynBatcher`.

    Raises:
        TypeError: `BatcherOptions` has no such option; raised for the first one.
    """
    for name in given:
        if name not in BatcherOptions.__annotations__:
            known = [*(field.name for field in fields(Settings)), "model_args", "model_kwargs"]
            hint = suggest_parameter(name, known)
            raise TypeError(f"DynBatcher() got an unexpected keyword argument {name!r}{hint}")


def warn_about_workers(settings: Settings) -> None:
    """Warn about more workers than cores, at the line that constructs the batcher."""
    cores, num_workers = os.cpu_count() or 1, settings.num_workers
    if num_workers > cores and settings.devices is None:
        warnings.warn(
            f"num_workers={num_workers} is more than the {cores} cores of this machine; on a CPU "
            "the workers will take time from each other",
            RuntimeWarning,
            stacklevel=3,
        )
