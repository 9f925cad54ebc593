"""Settings of a batcher, checked once at construction. Pure; a leaf.

Each check names the parameter, the value and the remedy. What only the worker can know (does the
module import, does the class load) is found at open.
"""

import inspect
import os
import pickle
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Literal, get_args

from fast_batcher._arrays.collation import Collation
from fast_batcher.errors import ConfigurationError

PolicyName = Literal["adaptive", "greedy", "fixed"]

# Memory per request in flight is small, but a size with nine digits is a typing error.
MAX_BATCH_SIZE = 2**20
# More processes than any machine has cores for; above it someone confused two parameters.
MAX_WORKERS = 1024
# A longer duration than a year is a unit mistake, and timers of event loops overflow at some point.
MAX_SECONDS = 365 * 24 * 3600.0
# Priorities go from its negative to it: each that is used costs every batch a look.
MAX_PRIORITY = 100
# Room for at least this many waiting requests, and for 8 batches per worker (DESIGN: POLICY 5.8).
MIN_QUEUE_SIZE = 1024
QUEUED_BATCHES_PER_WORKER = 8
# A frame holds one whole batch of inputs or outputs. 256 MiB is 400 images of 602 KB, and small
# enough that a garbage length cannot take the machine's memory.
MAX_FRAME_BYTES = 256 * 2**20
# Below it an error with its text and traceback (64 Ki characters each) might not fit.
MIN_MAX_FRAME_BYTES = 2**20
# Memory that workers share with their parent: the two batches that a worker has at most, each as
# large as one may be by default. It is taken as it is needed.
MAX_SHARED_BYTES = 2 * MAX_FRAME_BYTES
# From here on a view is cheaper than to copy a buffer into the pickle and out of it: the copies of
# 16 KiB that it saves cost as much as the bookkeeping.
SHARED_MEMORY_THRESHOLD = 16 * 1024

# What `DynBatcher.reconfigure` changes.
RECONFIGURABLE = ("max_batch_size", "max_delay", "max_queue_size", "max_latency")

# Of what is defined in a `__main__` that `is_main_importable` denies.
NOT_IN_WORKER = (
    "what is defined in a notebook, at a prompt, in `python -c`, in a program read from standard "
    "input or in the __main__.py of a package does not exist in the worker process; put it into "
    "another .py file and import it from there"
)

_MODEL_STRING = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True)
class Settings:
    """The checked settings of one batcher; see `DynBatcher` for what each means."""

    max_batch_size: int = 32
    max_delay: float | None = None
    num_workers: int = 1
    policy: PolicyName = "adaptive"
    max_queue_size: int = MIN_QUEUE_SIZE
    timeout: float | None = 30.0
    infer_timeout: float | None = None
    start_timeout: float = 300.0
    stop_timeout: float = 2.0
    drain_timeout: float = 20.0
    max_frame_bytes: int = MAX_FRAME_BYTES
    auto_open: bool = True
    max_queue_bytes: int | None = None
    idempotent: bool = True
    isolate_errors: bool = True
    max_restarts: int | None = 5
    restart_window: float = 60.0
    restart_backoff: float = 0.1
    max_batches_per_worker: int | None = None
    max_rss_bytes: int | None = None
    max_latency: float | None = None
    max_shared_bytes: int = MAX_SHARED_BYTES
    shared_memory_threshold: int = SHARED_MEMORY_THRESHOLD
    pin_memory: bool = False


@dataclass(frozen=True)
class Costs:
    """What requests cost and who shares a batch, checked; see `DynBatcher` for each."""

    cost: Callable[[Any], float] | None
    max_batch_cost: float | None
    max_request_cost: float | None
    cost_is_padded: bool
    group_by: Callable[[Any], object] | None


@dataclass(frozen=True)
class ModelSpec:
    """Which model a worker loads, in a form that crosses the process boundary.

    `pickled` holds (class or "module:Class", args, kwargs). It is pickled once, in the parent, and
    read in the worker inside a `try`, so that a module that does not import is a clear error.
    """

    name: str
    pickled: bytes


def check_settings(
    *,
    max_batch_size: int,
    max_delay: float | None,
    num_workers: int,
    policy: str,
    max_queue_size: int | None,
    timeout: float | None,
    infer_timeout: float | None,
    start_timeout: float,
    stop_timeout: float,
    drain_timeout: float,
    max_frame_bytes: int,
    auto_open: bool,
    max_queue_bytes: int | None,
    idempotent: bool,
    isolate_errors: bool,
    max_restarts: int | None,
    restart_window: float,
    restart_backoff: float,
    max_batches_per_worker: int | None,
    max_rss_bytes: int | None,
    max_latency: float | None,
    max_shared_bytes: int,
    shared_memory_threshold: int,
    pin_memory: bool,
) -> Settings:
    """Check every value; raise `ConfigurationError` for the first wrong one."""
    _check_count("max_batch_size", max_batch_size, 1, MAX_BATCH_SIZE)
    _check_count("num_workers", num_workers, 1, MAX_WORKERS)
    if policy not in get_args(PolicyName):
        names = ", ".join(repr(name) for name in get_args(PolicyName))
        raise ConfigurationError(f"policy={policy!r}: choose one of {names}")
    _check_delay(max_delay, policy)
    max_queue_size = _check_queue_size(max_queue_size, max_batch_size, num_workers)
    if max_queue_bytes is not None:
        _check_count("max_queue_bytes", max_queue_bytes, 1, None)
    _check_timeouts(timeout, infer_timeout, max_latency, start_timeout, stop_timeout, drain_timeout)
    _check_count("max_frame_bytes", max_frame_bytes, MIN_MAX_FRAME_BYTES, None)
    for name, switch in (
        ("auto_open", auto_open),
        ("idempotent", idempotent),
        ("isolate_errors", isolate_errors),
        ("pin_memory", pin_memory),
    ):
        if not isinstance(switch, bool):
            raise ConfigurationError(f"{name}={switch!r}: give True or False")
    _check_supervision(max_restarts, restart_window, restart_backoff)
    _check_recycling(max_batches_per_worker, max_rss_bytes)
    # No file can be longer.
    _check_count("max_shared_bytes", max_shared_bytes, 0, sys.maxsize)
    _check_count("shared_memory_threshold", shared_memory_threshold, 1, None)
    if pin_memory:
        _check_pinned(max_shared_bytes, max_rss_bytes)
    _warn_about_workers(num_workers)
    return Settings(
        max_batch_size=max_batch_size,
        max_delay=max_delay,
        num_workers=num_workers,
        policy=policy,  # type: ignore[arg-type]  # checked against the literal above
        max_queue_size=max_queue_size,
        timeout=timeout,
        infer_timeout=infer_timeout,
        start_timeout=start_timeout,
        stop_timeout=stop_timeout,
        drain_timeout=drain_timeout,
        max_frame_bytes=max_frame_bytes,
        auto_open=auto_open,
        max_queue_bytes=max_queue_bytes,
        idempotent=idempotent,
        isolate_errors=isolate_errors,
        max_restarts=max_restarts,
        restart_window=restart_window,
        restart_backoff=restart_backoff,
        max_batches_per_worker=max_batches_per_worker,
        max_rss_bytes=max_rss_bytes,
        max_latency=max_latency,
        max_shared_bytes=max_shared_bytes,
        shared_memory_threshold=shared_memory_threshold,
        pin_memory=pin_memory,
    )


def change_settings(settings: Settings, changes: Mapping[str, Any]) -> Settings:
    """The settings with some of those changed that `DynBatcher.reconfigure` takes.

    Raises:
        ConfigurationError: One of the new values is wrong; for the first wrong one.
    """
    wanted: dict[str, Any] = {name: getattr(settings, name) for name in RECONFIGURABLE}
    wanted.update(changes)
    _check_count("max_batch_size", wanted["max_batch_size"], 1, MAX_BATCH_SIZE)
    _check_delay(wanted["max_delay"], settings.policy)
    wanted["max_queue_size"] = _check_queue_size(
        wanted["max_queue_size"], wanted["max_batch_size"], settings.num_workers
    )
    if wanted["max_latency"] is not None:
        _check_seconds("max_latency", wanted["max_latency"])
    return replace(settings, **wanted)


def _check_delay(max_delay: float | None, policy: str) -> None:
    if max_delay is not None:
        _check_seconds("max_delay", max_delay, zero_allowed=True)
    elif policy == "fixed":
        raise ConfigurationError(
            "max_delay=None: policy='fixed' waits for a full batch or max_delay seconds, so give a "
            "number of seconds, for example max_delay=0.01"
        )


def _check_queue_size(max_queue_size: int | None, max_batch_size: int, num_workers: int) -> int:
    if max_queue_size is None:
        room = QUEUED_BATCHES_PER_WORKER * max_batch_size * num_workers
        return max(MIN_QUEUE_SIZE, room)
    _check_count("max_queue_size", max_queue_size, 1, None)
    return max_queue_size


def check_costs(
    model: object,
    *,
    cost: Callable[[Any], float] | None,
    max_batch_cost: float | None,
    max_request_cost: float | None,
    cost_is_padded: bool,
    group_by: Callable[[Any], object] | None,
) -> Costs:
    """Check every value; a model class may bring its own `cost`."""
    for name, function in (("cost", cost), ("group_by", group_by)):
        if function is not None and not callable(function):
            raise ConfigurationError(f"{name}={function!r}: give a function of one input")
        if inspect.iscoroutinefunction(function):
            raise ConfigurationError(f"{name}={function!r}: it is async; write a plain def")
    if not isinstance(cost_is_padded, bool):
        raise ConfigurationError(f"cost_is_padded={cost_is_padded!r}: give True or False")
    if cost is None:
        cost = _find_cost(model)
    for name, limit in (("max_batch_cost", max_batch_cost), ("max_request_cost", max_request_cost)):
        if limit is not None:
            _check_cost_limit(name, limit, has_costs=cost is not None)
    return Costs(cost, max_batch_cost, max_request_cost, cost_is_padded, group_by)


def _check_cost_limit(name: str, limit: object, *, has_costs: bool) -> None:
    is_number = isinstance(limit, int | float) and not isinstance(limit, bool)
    if not is_number or not 0 < limit < inf:  # type: ignore[operator]  # a number by then
        raise ConfigurationError(f"{name}={limit!r:.100}: give a finite number above 0")
    if not has_costs:
        raise ConfigurationError(
            f"{name}={limit!r:.100}: without costs it has no meaning; give cost=, a function "
            "from an input to its cost"
        )


def _find_cost(model: object) -> Callable[[Any], float] | None:
    """The model's own `cost`. It is called in this process, where there is no instance."""
    own = inspect.getattr_static(model, "cost", None) if isinstance(model, type) else None
    if own is None:
        return None
    if not isinstance(own, staticmethod | classmethod):
        raise ConfigurationError(
            f"model={model!r}: its cost is called without an instance, so it has to be a "
            "staticmethod or classmethod; or give another function as cost="
        )
    found: Callable[[Any], float] = getattr(model, "cost")  # noqa: B009  of any class
    return found


def _check_timeouts(
    timeout: float | None,
    infer_timeout: float | None,
    max_latency: float | None,
    start_timeout: float,
    stop_timeout: float,
    drain_timeout: float,
) -> None:
    for name, seconds in (
        ("timeout", timeout),
        ("infer_timeout", infer_timeout),
        ("max_latency", max_latency),
    ):
        if seconds is not None:
            _check_seconds(name, seconds)
    _check_seconds("start_timeout", start_timeout)
    _check_seconds("stop_timeout", stop_timeout, zero_allowed=True)
    _check_seconds("drain_timeout", drain_timeout, zero_allowed=True)


def _check_supervision(
    max_restarts: int | None, restart_window: float, restart_backoff: float
) -> None:
    if max_restarts is not None:
        _check_count("max_restarts", max_restarts, 0, None)
    _check_seconds("restart_window", restart_window)
    _check_seconds("restart_backoff", restart_backoff)


def _check_recycling(max_batches_per_worker: int | None, max_rss_bytes: int | None) -> None:
    if max_batches_per_worker is not None:
        _check_count("max_batches_per_worker", max_batches_per_worker, 1, None)
    if max_rss_bytes is not None:
        _check_count("max_rss_bytes", max_rss_bytes, 1, None)
        if sys.platform != "linux":
            raise ConfigurationError(
                f"max_rss_bytes={max_rss_bytes}: the memory of a process can be read on Linux only;"
                " use max_batches_per_worker"
            )


def _check_pinned(max_shared_bytes: int, max_rss_bytes: int | None) -> None:
    if max_shared_bytes == 0:
        raise ConfigurationError(
            "pin_memory=True: with max_shared_bytes=0 there is no memory to pin; leave one of them "
            "out"
        )
    if max_rss_bytes is not None and max_rss_bytes <= max_shared_bytes:
        raise ConfigurationError(
            f"max_rss_bytes={max_rss_bytes}: with pin_memory=True all of max_shared_bytes="
            f"{max_shared_bytes} is resident, so every worker would be above it at once; lower "
            "max_shared_bytes or raise max_rss_bytes"
        )


def check_name(name: object, model_name: str) -> str:
    """The batcher's name for logs and health checks: as given, else the model's."""
    if name is None:
        return model_name
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise ConfigurationError(f"name={name!r}: give a printable, non-empty string or leave it")
    return name


def check_model(
    model: object,
    model_args: object,
    model_kwargs: object,
    max_frame_bytes: int,
) -> ModelSpec:
    """Check what can be known without running the model's code, and pickle it for the workers."""
    if isinstance(model, str):
        if not _MODEL_STRING.fullmatch(model):
            raise ConfigurationError(
                f"model={model!r}: write 'package.module:Class', as in 'app.models:Embedder'"
            )
        name = model.rpartition(":")[2]
    elif isinstance(model, type):
        _check_class(model)
        name = model.__name__
    elif hasattr(type(model), "infer"):
        raise ConfigurationError(
            f"model is an instance of {type(model).__qualname__}: give the class; each worker "
            "makes its own. Arguments of the constructor go into model_args and model_kwargs"
        )
    else:
        raise ConfigurationError(
            f"model is of type {type(model).__qualname__}: give a subclass of InferenceModel or a "
            "'module:Class' string"
        )
    args, kwargs = _check_arguments(model_args, model_kwargs)
    try:
        pickled = pickle.dumps((model, args, kwargs), protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise ConfigurationError(
            f"{describe_arguments(args, kwargs)}: they cannot be pickled ({error}), so they cannot "
            "reach the worker; pass a path or a name instead and load the thing in the model's "
            "__init__"
        ) from error
    if len(pickled) > max_frame_bytes:
        raise ConfigurationError(
            f"model_args and model_kwargs take {len(pickled)} bytes, more than max_frame_bytes="
            f"{max_frame_bytes}; pass a path and load the data in the model's __init__"
        )
    return ModelSpec(name=name, pickled=pickled)


def describe_arguments(args: Sequence[object], kwargs: Mapping[str, object]) -> str:
    """The arguments of a model's constructor for an error: types and names, as values are secrets.

    "model_args of types (str, int) and model_kwargs of types {token: str}".
    """
    types = ", ".join(type(value).__qualname__ for value in args)
    named = ", ".join(f"{name}: {type(value).__qualname__}" for name, value in kwargs.items())
    return f"model_args of types ({types}) and model_kwargs of types {{{named}}}"


def find_model_fault(model: type) -> str | None:
    """What is wrong with a model class, or None; asked in the parent and again in the worker."""
    infer = getattr(model, "infer", None)
    if not callable(infer):
        return "it has no method infer(self, inputs)"
    abstract = sorted(getattr(model, "__abstractmethods__", ()))
    if abstract:
        return f"it does not implement {', '.join(abstract)}"
    if inspect.iscoroutinefunction(infer) or inspect.isasyncgenfunction(infer):
        return "infer is async; the worker has no event loop, write a plain def"
    if inspect.isgeneratorfunction(infer):
        return "infer is a generator; return a list with one output per input"
    collation = getattr(model, "collation", None)
    # A property says what it is when there is an instance.
    if collation is not None and not isinstance(collation, Collation | property):
        return (
            f"its collation is {collation!r:.100}; make one with Collation.stack() or "
            "Collation.pad()"
        )
    return _find_arity_fault(model, infer)


def is_main_importable() -> bool:
    """Whether `__main__` exists in the worker, which spawning runs it for: under another name."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return spec.name != "__main__" and not spec.name.endswith(".__main__")
    # There is none at a prompt; of a program from standard input it is "<stdin>".
    return os.path.isfile(getattr(main, "__file__", None) or "")


def _find_arity_fault(model: type, infer: Any) -> str | None:
    try:
        signature = inspect.signature(infer)
    except (TypeError, ValueError):  # written in C: the first call will tell
        return None
    is_static = isinstance(inspect.getattr_static(model, "infer"), staticmethod | classmethod)
    try:
        signature.bind(*([()] if is_static else [None, ()]))
    except TypeError:
        return f"infer{signature} must take exactly one argument besides self, the list of inputs"
    return None


def _check_class(model: type) -> None:
    fault = find_model_fault(model)
    if fault is not None:
        raise ConfigurationError(f"model={model!r}: {fault}")
    name = f"{model.__module__}.{model.__qualname__}"
    if "<locals>" in model.__qualname__:
        raise ConfigurationError(
            f"model={model!r}: {name} is defined inside a function, so the worker process cannot "
            "import it; move the class to the top level of a module"
        )
    if model.__module__ == "__main__" and not is_main_importable():
        raise ConfigurationError(f"model={model!r}: {NOT_IN_WORKER}")
    try:
        pickle.dumps(model)
    except Exception as error:
        raise ConfigurationError(
            f"model={model!r}: the worker process cannot import it ({error}); it must be reachable "
            "under its own name at the top level of its module"
        ) from error


def _check_arguments(
    model_args: object, model_kwargs: object
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(model_args, str | bytes) or not isinstance(model_args, Sequence):
        raise ConfigurationError(
            f"model_args is of type {type(model_args).__qualname__}: give a tuple, for example "
            "('weights.pt',)"
        )
    kwargs = {} if model_kwargs is None else model_kwargs
    if not isinstance(kwargs, Mapping):
        raise ConfigurationError(
            f"model_kwargs is of type {type(kwargs).__qualname__}: give a dict with names as keys"
        )
    for key in kwargs:
        if not isinstance(key, str):
            raise ConfigurationError(
                f"model_kwargs has a key of type {type(key).__qualname__}: give a dict with names "
                "as keys"
            )
    return tuple(model_args), dict(kwargs)


def _check_count(name: str, value: object, least: int, most: int | None) -> None:
    # bool is an int to Python, and never a count to a person.
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigurationError(f"{name}={value!r}: give a whole number, {least} or more")
    if value < least or (most is not None and value > most):
        limits = f"{least} or more" if most is None else f"{least} to {most}"
        raise ConfigurationError(f"{name}={value!r:.100}: must be {limits}")


def _check_seconds(name: str, value: object, *, zero_allowed: bool = False) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ConfigurationError(f"{name}={value!r}: give seconds as a number, for example 0.5")
    if not 0 <= value <= MAX_SECONDS or (value == 0 and not zero_allowed):  # false for NaN too
        least = "0 or more" if zero_allowed else "more than 0"
        raise ConfigurationError(f"{name}={value!r:.100}: must be {least} seconds, at most a year")


def _warn_about_workers(num_workers: int) -> None:
    cores = os.cpu_count() or 1
    if num_workers > cores:
        warnings.warn(
            f"num_workers={num_workers} is more than the {cores} cores of this machine; on a CPU "
            "the workers will take time from each other",
            RuntimeWarning,
            stacklevel=4,
        )
