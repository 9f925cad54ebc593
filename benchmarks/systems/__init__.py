"""The systems that are compared; one adapter file each.

An adapter has `DISTRIBUTIONS`, whose versions go into the results, and
`opened(load, **settings)`, an asynchronous context manager that starts the system under the running
loop, yields the coroutine function that answers one input, and ends the system. It imports only the
standard library, its own system and the stdlib-only files of `benchmarks`.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class System:
    """One system with one choice of settings."""

    # The adapter's file name here; None for the bare loop, which takes no requests.
    adapter: str | None
    settings: dict[str, Any] = field(default_factory=dict)
    # The peer's virtual environment under `.venv-peers`; None for the interpreter that runs us.
    environment: str | None = None


SYSTEMS: dict[str, System] = {
    "floor": System("floor"),
    "ours": System("ours"),
    "thread": System("thread"),
    "bare loop": System(None),
    "batched.aio": System("batched_aio", environment="batched"),
    "batched.aio 1 ms": System("batched_aio", {"timeout_ms": 1.0}, environment="batched"),
    "batched.aio 0.1 ms": System("batched_aio", {"timeout_ms": 0.1}, environment="batched"),
    "batched.aio 0.1 ms on the loop": System(
        "batched_aio", {"timeout_ms": 0.1, "on_the_loop": True}, environment="batched"
    ),
    "fast_dynamic_batcher": System("fast_dynamic_batcher", environment="fast_dynamic_batcher"),
    "fast_dynamic_batcher tuned": System(
        "fast_dynamic_batcher", {"tuned": True}, environment="fast_dynamic_batcher"
    ),
}
