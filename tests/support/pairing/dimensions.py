"""The dimensions of a batcher and of a schedule, and the pairs that have no meaning. Pure data."""

import asyncio
import random
from collections.abc import Mapping
from itertools import combinations
from typing import Any, TypeAlias

from models import paired

from fast_batcher import DynBatcher
from fast_batcher.caching import LRUCache
from fast_batcher.errors import ConfigurationError

# A value of each dimension, by the name of the dimension.
Case: TypeAlias = dict[str, str]
# A dimension and its value.
Choice: TypeAlias = tuple[str, str]
Pair: TypeAlias = frozenset[Choice]

# The first value of each dimension is the ordinary one, to which a failing case shrinks.
DIMENSIONS: dict[str, tuple[str, ...]] = {
    "model": (
        "Plain", "Methods", "Stages", "Stacked", "Padded", "Ragged", "Stepped", "Streamed",
        "Remembering",
    ),
    "workers": ("processes", "threads", "shared", "kit"),
    "count": ("1", "2", "1-2"),
    "policy": ("adaptive", "greedy", "fixed", "own"),
    "cache": ("none", "lru", "slow"),
    "cost": ("none", "summed", "padded", "zero"),
    "latency": ("none", "target"),
    "recycling": ("none", "batches"),
    "sizes": ("any", "allowed"),
    "isolation": ("on", "off"),
    "places": ("many", "few"),
    "others": ("none", "coming"),
    "outputs": ("own", "buffer", "odd"),
    "loading": ("quick", "slow", "flaky"),
    "share": ("none", "several"),
    "priority": ("none", "mixed"),
    "inputs": ("plain", "failing", "raising", "slow", "large"),
    "call": ("process_batched", "process_many", "submit", "stream", "session", "rows"),
    "callers": ("patient", "impatient", "cancelled", "pinging"),
    "event": (
        "none", "reload", "failed reload", "lost way back", "reconfigure", "scale", "kill",
        "kill host", "stall",
    ),
    "ending": ("rest", "aclose", "stop", "drain", "cancelled aclose", "reopen", "early drain"),
}  # fmt: skip
DEFAULTS: Case = {name: values[0] for name, values in DIMENSIONS.items()}
# Dimensions of which every three values meet: almost all faults so far needed three.
THREE_WAY = (("workers", "model", "outputs"), ("workers", "call", "ending"))
# The same for long runs.
MORE_THREE_WAY = (*THREE_WAY, ("workers", "model", "event"), ("workers", "event", "ending"))
# The dimensions that the constructor of a batcher sees.
CONSTRUCTED = (
    "model", "workers", "count", "policy", "cache", "cost", "latency", "recycling", "sizes",
    "isolation", "places",
)  # fmt: skip

ARRAYS = ("Stacked", "Padded", "Ragged")
STEPPED = ("Stepped", "Streamed")
LOCAL_THREADS = ("threads", "kit")
# Streams that a worker has side by side: fewer than there are callers.
PLACES = 3
# Numbers in a large input, which goes through shared memory; and the bytes of that, with room for
# three of these inputs where a process has a quarter of it.
LARGE = 8_000
FEW_SHARED_BYTES = 2**20


def _pairs(one: str, values: tuple[str, ...], other: str, others: tuple[str, ...]) -> set[Pair]:
    return {frozenset({(one, a), (other, b)}) for a in values for b in others}


def but(name: str, *values: str) -> tuple[str, ...]:
    return tuple(value for value in DIMENSIONS[name] if value not in values)


# Pairs of values that no run can have, with the reason.
NO_MEANING: dict[Pair, str] = {
    **dict.fromkeys(
        _pairs("workers", LOCAL_THREADS, "event", ("kill", "kill host", "stall")),
        "a thread has no process to kill or to stop",
    ),
    **dict.fromkeys(
        _pairs("workers", ("processes",), "event", ("kill host",)), "there is no host process"
    ),
    **dict.fromkeys(
        _pairs("workers", but("workers", "shared"), "others", ("coming",)),
        "another process has workers of its own",
    ),
    **dict.fromkeys(
        _pairs("event", but("event", "none"), "ending", ("early drain",)),
        "it is drained before anything happens",
    ),
    **dict.fromkeys(
        _pairs("event", ("lost way back",), "ending", ("reopen",)),
        "a model that loads in one worker alone may be the last one",
    ),
    **dict.fromkeys(
        _pairs("model", ARRAYS, "outputs", ("odd",)), "a collation takes arrays alone"
    ),
    **dict.fromkeys(
        _pairs("call", but("call", "stream"), "callers", ("pinging",)), "only a stream is read"
    ),
    **dict.fromkeys(
        _pairs("call", ("session",), "share", ("several",))
        | _pairs("call", ("session",), "priority", ("mixed",)),
        "a call of a session has neither a share nor a priority",
    ),
    **dict.fromkeys(
        _pairs("cost", ("zero",), "model", ("Ragged",)), "a row of a ragged batch has positions"
    ),
}  # fmt: skip
# Pairs that the call refuses, with the type of its error; the constructor cannot know the call.
REFUSED_LATE: dict[Pair, str] = {
    **dict.fromkeys(
        _pairs("call", ("stream",), "model", but("model", *STEPPED)), "ConfigurationError"
    ),
    **dict.fromkeys(
        _pairs("call", ("session",), "model", but("model", "Remembering")), "ConfigurationError"
    ),
    **dict.fromkeys(
        _pairs("call", ("rows",), "model", but("model", *ARRAYS)), "CollationError"
    ),
}  # fmt: skip


class Rule:
    """A rule of the app: holds for 3 ms, and counts its questions."""

    def __init__(self) -> None:
        self.asked = 0

    def hold(self, queue: Any, times: Any) -> float:
        self.asked += 1
        return 0.003


class SlowCache:
    """An asynchronous cache: some look-ups take longer than most calls."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._outputs: dict[Any, Any] = {}

    async def get(self, key: Any) -> Any:
        await asyncio.sleep(self._random.choice((0, 0, 0.005, 0.5)))
        return self._outputs.get(key)

    async def set(self, key: Any, value: Any) -> None:
        await asyncio.sleep(0)
        self._outputs[key] = value


def count_length(value: Any) -> float:
    """The cost that docs/tuning.md has for texts: 0 for an empty one."""
    is_row = not isinstance(value, list) and len(value) < LARGE
    return len(value) - 2.0 if is_row else float(value[2])


def count_at_least_one(value: Any) -> float:
    return max(1.0, count_length(value))


def make_options(case: Case, seed: int) -> dict[str, Any]:  # noqa: C901  a table in code
    """Return the options of the batcher of a case, without `model_kwargs`."""
    options: dict[str, Any] = {
        "max_batch_size": PLACES if case["model"] in STEPPED else 8,
        "num_workers": {"1": 1, "2": 2, "1-2": (1, 2)}[case["count"]],
        # With the short one, deadlines pass while a worker has further batches.
        "timeout": (0.8, 0.3)[seed % 2],
        "drain_timeout": 0.5,
        "stop_timeout": 1.0,
        "max_restarts": None,
        "restart_backoff": 0.01,
        "isolate_errors": case["isolation"] == "on",
        "name": f"pairs-{seed}",
    }
    if case["workers"] == "shared":
        options["shared"] = f"pairs-{seed}"
    elif case["workers"] == "threads":
        options["workers"] = "threads"
    if case["inputs"] == "large" and case["workers"] in ("processes", "shared"):
        options["max_shared_bytes"] = FEW_SHARED_BYTES
    if case["policy"] != "adaptive":
        options["policy"] = Rule() if case["policy"] == "own" else case["policy"]
    if case["policy"] == "fixed":
        options["max_delay"] = 0.01
    if case["cache"] != "none":
        options["cache"] = LRUCache(50) if case["cache"] == "lru" else SlowCache(seed)
    if case["cost"] != "none":
        options["cost"] = count_length if case["cost"] == "zero" else count_at_least_one
        if case["cost"] != "zero":
            options |= {"max_batch_cost": 12.0, "cost_is_padded": case["cost"] == "padded"}
    if case["places"] == "few":
        options["max_sessions"] = 2
    if case["latency"] == "target":
        options["max_latency"] = 0.3
    if case["recycling"] == "batches":
        options["max_batches_per_worker"] = 12
    return options


def model_of(case: Case) -> Any:
    return getattr(paired, case["model"] + ("Sized" if case["sizes"] == "allowed" else ""))


def ask_constructor(case: Case) -> str:
    """Return what the constructor says of a case, "" if it takes it."""
    try:
        DynBatcher(model_of(case), **make_options(case, 0))
    except ConfigurationError as error:
        return str(error)
    return ""


def list_pairs(names: tuple[str, ...] = tuple(DIMENSIONS)) -> list[Pair]:
    """Return all pairs of values of different dimensions."""
    return [
        frozenset({(one, a), (other, b)})
        for one, other in combinations(names, 2)
        for a in DIMENSIONS[one]
        for b in DIMENSIONS[other]
    ]


# What a value needs besides the ordinary ones.
NEEDS: dict[Choice, Case] = {("places", "few"): {"model": "Remembering"}}


def complete(pair: Pair) -> Case:
    """Return a case with a pair, and with ordinary values of the other dimensions."""
    case = dict(DEFAULTS)
    for choice in pair:
        case |= NEEDS.get(choice, {})
    return case | dict(pair)


def find_refused() -> dict[Pair, str]:
    """Ask the constructor about each pair."""
    refused = {}
    for pair in list_pairs(CONSTRUCTED):
        said = ask_constructor(complete(pair))
        if said:
            refused[pair] = said
    return refused


def is_in(pair: Pair, case: Mapping[str, str]) -> bool:
    return all(case.get(name) == value for name, value in pair)
