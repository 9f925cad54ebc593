"""No batching: the model in a process behind two bare pipes, read by the event loop.

It is the least that a model in another process costs: pickle, two pipes, two wake-ups.
"""

import asyncio
import multiprocessing
import pickle
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.models import MODELS
from benchmarks.scenarios import Load, Process

DISTRIBUTIONS: list[str] = []


def _serve(inputs: Connection, outputs: Connection, model_name: str) -> None:
    model = MODELS[model_name]()
    while data := inputs.recv_bytes():
        outputs.send_bytes(pickle.dumps(model.infer(pickle.loads(data))))


@asynccontextmanager
async def opened(load: Load) -> AsyncIterator[Process]:
    """Start one process."""
    loop = asyncio.get_running_loop()
    context = multiprocessing.get_context("spawn")
    inputs, our_inputs = context.Pipe(duplex=False)
    our_outputs, outputs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(inputs, outputs, load.model))
    process.start()
    waiting: deque[asyncio.Future[Any]] = deque()

    def read() -> None:
        waiting.popleft().set_result(pickle.loads(our_outputs.recv_bytes())[0])

    async def call(value: Any) -> Any:
        future = loop.create_future()
        waiting.append(future)
        our_inputs.send_bytes(pickle.dumps([value]))
        return await future

    loop.add_reader(our_outputs.fileno(), read)
    yield call
    loop.remove_reader(our_outputs.fileno())
    our_inputs.send_bytes(b"")
    process.join()
    for end in (inputs, our_inputs, our_outputs, outputs):
        end.close()
