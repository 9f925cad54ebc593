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
    "bare loop": System(None),
    "ours": System("ours"),
    "our aio": System("ours_aio"),
    "our aio on the loop": System("ours_aio", {"on_the_loop": True}),
    "our thread": System("ours_thread"),
    "thread": System("thread"),
    "process pool": System("process_pool"),
    "batched.aio": System("batched_aio", environment="batched"),
    "batched.aio 0.1 ms": System("batched_aio", {"timeout_ms": 0.1}, environment="batched"),
    "batched.aio 0.1 ms on the loop": System(
        "batched_aio", {"timeout_ms": 0.1, "on_the_loop": True}, environment="batched"
    ),
    "batched thread": System("batched_thread", environment="batched"),
    "batched thread 0.1 ms": System("batched_thread", {"timeout_ms": 0.1}, environment="batched"),
    "fast_dynamic_batcher": System("fast_dynamic_batcher", environment="fast_dynamic_batcher"),
    "fast_dynamic_batcher tuned": System(
        "fast_dynamic_batcher", {"tuned": True}, environment="fast_dynamic_batcher"
    ),
    "async-batcher": System("async_batcher", environment="async_batcher"),
    "async-batcher 1 ms": System(
        "async_batcher", {"max_queue_time": 0.001}, environment="async_batcher"
    ),
    "BentoML dispatcher": System("bentoml_dispatcher", environment="bentoml"),
    "BentoML dispatcher 100 ms": System(
        "bentoml_dispatcher", {"max_latency_ms": 100}, environment="bentoml"
    ),
    "Ray Serve batch": System("ray_serve", environment="ray_serve"),
    # Not 1 ms: it forms batches while another runs, so they would be small and pile up.
    "Ray Serve batch tuned": System("ray_serve", {"wait": 0.01}, environment="ray_serve"),
}

# What batches and is not ours, with its defaults and tuned; bars are about these.
PEERS = tuple(name for name, system in SYSTEMS.items() if system.environment is not None)
# Choices that one question each is about: not among those that are measured beside all others.
COMPARED = tuple(SYSTEMS)
SYSTEMS |= {
    "ours greedy": System("ours", {"policy": "greedy"}),
    "ours greedy, none ahead": System("ours", {"policy": "greedy", "none_ahead": True}),
    "ours 50 ms": System("ours", {"max_latency": 0.05}),
    "BentoML dispatcher 50 ms": System(
        "bentoml_dispatcher", {"max_latency_ms": 50}, environment="bentoml"
    ),
    "at once": System("at_once"),
    "embeddings in order": System("ours_embeddings"),
    # A full batch of the longest texts, 256 tokens; and a full one of texts of 64, eight of 256.
    "embeddings by cost": System("ours_embeddings", {"max_batch_tokens": 8192.0}),
    "embeddings by cost, 2048": System("ours_embeddings", {"max_batch_tokens": 2048.0}),
}
# What `benchmarks.payload` compares. Full batches leave because they are full: this wait is several
# times what 32 arrivals take there, seconds.
_WAIT = 1.0
SYSTEMS |= {
    "memcpy": System("floor"),
    "idle loop": System("floor"),
    "ours by pipe": System("ours", {"max_shared_bytes": 0}),
    "ours, full batches": System("ours", {"policy": "fixed", "max_delay": _WAIT}),
    "ours by pipe, full batches": System(
        "ours", {"policy": "fixed", "max_delay": _WAIT, "max_shared_bytes": 0}
    ),
    "fast_dynamic_batcher, full batches": System(
        "fast_dynamic_batcher", {"max_delay": _WAIT}, environment="fast_dynamic_batcher"
    ),
    "process pool of tensors": System("process_pool", {"tensors": True}),
}
# Of those, what has the model in a process of its own, as we have.
PEERS_WITH_A_PROCESS = ("fast_dynamic_batcher", "fast_dynamic_batcher tuned")
