"""The systems that are compared, one adapter file for each.

An adapter has `DISTRIBUTIONS`, whose versions go into the results, and
`opened(load, **settings)`, an asynchronous context manager that starts the system under the running
loop, yields the coroutine function that answers one input, and closes the system. It imports only
the standard library, its own system, and files of `benchmarks` that import no more than that.
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


def _peer(adapter: str, environment: str = "", **settings: Any) -> System:
    return System(adapter, settings, environment or adapter)


SYSTEMS: dict[str, System] = {
    "floor": System("floor"),
    "bare loop": System(None),
    "ours": System("ours"),
    "our aio": System("ours_aio"),
    "our aio on the loop": System("ours_aio", {"on_the_loop": True}),
    "our thread": System("ours_thread"),
    "thread": System("thread"),
    "process pool": System("process_pool"),
    "pipe": System("pipe"),
    "batched.aio": _peer("batched_aio", "batched"),
    "batched.aio 0.1 ms": _peer("batched_aio", "batched", timeout_ms=0.1),
    "batched.aio 0.1 ms on the loop": _peer(
        "batched_aio", "batched", timeout_ms=0.1, on_the_loop=True
    ),
    "batched thread": _peer("batched_thread", "batched"),
    "batched thread 0.1 ms": _peer("batched_thread", "batched", timeout_ms=0.1),
    "fast_dynamic_batcher": _peer("fast_dynamic_batcher"),
    "fast_dynamic_batcher tuned": _peer("fast_dynamic_batcher", tuned=True),
    "async-batcher": _peer("async_batcher"),
    "async-batcher 1 ms": _peer("async_batcher", max_queue_time=0.001),
    "BentoML dispatcher": _peer("bentoml_dispatcher", "bentoml"),
    "BentoML dispatcher 100 ms": _peer("bentoml_dispatcher", "bentoml", max_latency_ms=100),
    "Ray Serve batch": _peer("ray_serve"),
    # Not 1 ms: it forms batches while another runs, so they would be small and pile up.
    "Ray Serve batch tuned": _peer("ray_serve", wait=0.01),
}

# The other batching libraries, with their defaults and tuned; the bars of `peers` are about these.
PEERS = tuple(name for name, system in SYSTEMS.items() if system.environment is not None)
# The peers whose model has its own process, as ours has.
PEERS_WITH_A_PROCESS = ("fast_dynamic_batcher", "fast_dynamic_batcher tuned")
# What `peers` measures. Each system below is about one other question.
COMPARED = tuple(name for name in SYSTEMS if name != "pipe")
# In `payload` full batches leave because they are full: this wait is several times what 32 arrivals
# take there, seconds.
_WAIT = 1.0
SYSTEMS |= {
    "ours with Prometheus and traces of 1 %": System("ours_observed"),
    "ours greedy": System("ours", {"policy": "greedy"}),
    "memcpy": System("floor"),
    "ours, full batches": System("ours", {"policy": "fixed", "max_delay": _WAIT}),
    "fast_dynamic_batcher, full batches": _peer("fast_dynamic_batcher", max_delay=_WAIT),
    "in stages": System("ours_stages", {"model": "Stages"}),
    "inside infer": System("ours_stages", {"model": "Inside"}),
    "inside infer, 2 threads": System("ours_stages", {"model": "InsideThreads"}),
    "decoding alone": System("ours_stages", {"model": "Decoding"}),
    "infer alone": System("ours_stages", {"model": "Infer"}),
    "whole answers": System("ours_streams", {"model": "Whole"}),
    "static batches, streamed": System("ours_streams", {"model": "Streamed"}),
    "continuous": System("ours_streams", {"model": "Continuous"}),
    "pipe and queues": System("pipe_streams"),
    "LitServe, streamed batches": _peer("litserve_streams", "litserve"),
    "process pool of tensors": System("process_pool", {"tensors": True}),
}
