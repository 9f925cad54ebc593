"""No batcher: a model that answers in steps behind two bare pipes, and a queue for each stream.

It is the least that streams of a model in another process cost: pickle, pipes, wake-ups, queues.
"""

import asyncio
import multiprocessing
import os
import pickle
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.scenarios import Load, Process
from benchmarks.stepping import Stepper
from benchmarks.stream_loads import Streams, counted

DISTRIBUTIONS: list[str] = []
HEADER = 4
READ_SIZE = 256 * 1024


def _serve(inputs: Connection, outputs: Connection, load: Load, path: str) -> None:
    stepper = Stepper(load.model, path)
    sink = outputs.fileno()
    waiting: list[tuple[int, int]] = []
    # Chunks so far and length, by stream.
    live: dict[int, list[int]] = {}
    while True:
        while inputs.poll(0.0 if live or waiting else None):
            if not (data := inputs.recv_bytes()):
                return
            waiting.append(pickle.loads(data))
        while waiting and len(live) < load.max_batch_size:
            number, length = waiting.pop(0)
            live[number] = [0, length]
        stepper.step(len(live))
        ids, chunks = list(live), []
        for state in live.values():
            state[0] += 1
            chunks.append(f"chunk {state[0]}")
        ended = [number for number, state in live.items() if state[0] >= state[1]]
        for number in ended:
            del live[number]
        body = pickle.dumps((ids, chunks, ended), 5)
        os.write(sink, len(body).to_bytes(HEADER, "little") + body)


class _Stream:
    def __init__(self, queue: "asyncio.Queue[str | None]") -> None:
        self._queue = queue

    def __aiter__(self) -> "_Stream":
        return self

    async def __anext__(self) -> str:
        chunk = await self._queue.get()
        if chunk is None:
            raise StopAsyncIteration
        return chunk


@asynccontextmanager
async def opened(load: Load) -> AsyncIterator[Process]:
    """Start one process."""
    loop = asyncio.get_running_loop()
    context = multiprocessing.get_context("spawn")
    inputs, our_inputs = context.Pipe(duplex=False)
    our_outputs, outputs = context.Pipe(duplex=False)
    source = our_outputs.fileno()
    queues: dict[int, asyncio.Queue[str | None]] = {}
    numbers = count()
    buffer = bytearray()

    def read() -> None:
        buffer.extend(os.read(source, READ_SIZE))
        while len(buffer) >= HEADER:
            end = HEADER + int.from_bytes(buffer[:HEADER], "little")
            if len(buffer) < end:
                return
            ids, chunks, ended = pickle.loads(buffer[HEADER:end])
            del buffer[:end]
            for number, chunk in zip(ids, chunks, strict=True):
                queues[number].put_nowait(chunk)
            for number in ended:
                queues.pop(number).put_nowait(None)

    async def begin(length: int) -> AsyncIterator[Any]:
        number = next(numbers)
        queues[number] = asyncio.Queue()
        our_inputs.send_bytes(pickle.dumps((number, length)))
        return _Stream(queues[number])

    with counted() as (path, steps):
        process = context.Process(target=_serve, args=(inputs, outputs, load, path))
        process.start()
        os.set_blocking(source, False)
        loop.add_reader(source, read)
        yield Streams(begin, steps)
        loop.remove_reader(source)
        process.kill()
        process.join()
        for end in (inputs, our_inputs, our_outputs, outputs):
            end.close()
