"""A batcher with every option, the same model without them, and a server that shares its model."""

import time
from typing import Any

import uvicorn
from fastapi import FastAPI

from fast_batcher import DynBatcher, InferenceModel
from fast_batcher.caching import LRUCache
from fast_batcher.observing import Observer
from fast_batcher.settings import OPTIONS


class Counts(InferenceModel[Any, int]):
    """Answers how many inputs it has computed.

    A batch takes 10 ms and 0.25 ms for each input: 16 answer far more per second than 8 do, and far
    fewer than an event loop sends.
    """

    def __init__(self) -> None:
        self._count = 0

    @staticmethod
    def cost(value: Any) -> float:
        return float(value)

    def infer(self, inputs: list[Any]) -> list[int]:
        time.sleep(0.01 + 0.00025 * len(inputs))
        self._count += len(inputs)
        return [self._count] * len(inputs)


EVERY_OPTION: dict[str, Any] = {
    "stepped": False,
    # For models that remember.
    "max_sessions": OPTIONS["max_sessions"].default,
    "max_batch_size": 16,
    "max_delay": 1.0,
    "num_workers": 1,
    "policy": "fixed",
    "max_latency": 0.001,
    "max_queue_size": 1,
    "timeout": 0.001,
    "infer_timeout": 0.001,
    "auto_open": False,
    "name": "limited",
    "cost": float,
    "group_by": lambda value: value > 0,
    "start_timeout": 200.0,
    "stop_timeout": 1.0,
    "drain_timeout": 1.0,
    "idempotent": False,
    "isolate_errors": False,
    "max_restarts": 0,
    "restart_window": 1.0,
    "restart_backoff": 1.0,
    "max_batches_per_worker": 1,
    "max_rss_bytes": 1,
    "max_queue_bytes": 1,
    "max_frame_bytes": 2**20,
    "max_batch_cost": 1000.0,
    "max_request_cost": 1.0,
    "cost_is_padded": True,
    "max_shared_bytes": 2**20,
    "shared_memory_threshold": 2**13,
    "freeze_gc": False,
    "observers": [Observer()],
    "shared": "limited",
    "shared_version": "1",
    "devices": ["cpu"],
    "workers_per_device": 1,
    "mps": False,
    "stage_threads": None,
    "enabled": False,
    "cache": LRUCache(100),
    "key": int,
    "workers": "processes",
}
limited: DynBatcher[Any, int] = DynBatcher(Counts, **EVERY_OPTION)
bare: DynBatcher[Any, int] = DynBatcher(Counts, max_batch_size=16)
served: DynBatcher[Any, int] = DynBatcher(Counts, shared="counts")
INPUTS = [1, 2, 3]

app = FastAPI(lifespan=served.lifespan)


@app.get("/computed")
async def computed() -> int:
    return await served.process_batched(1)


if __name__ == "__main__":
    # A program of this folder has the `sys.path` of a command that is run in it: with another one
    # it would not share a host with the command.
    uvicorn.run("limited_app:app", port=0)
