"""fast_batcher with a model that answers in steps: whole answers, static batches, continuous."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.scenarios import Load, Process
from benchmarks.stepping import Stepper
from benchmarks.stream_loads import Streams, counted
from fast_batcher import Done, DynBatcher, InferenceModel, SteppedModel, StreamedModel

DISTRIBUTIONS = ["fast_batcher"]
# Of a whole answer while more requests arrive than are served, seconds.
TIMEOUT = 300.0


class Whole(InferenceModel[int, list[str]]):
    """Answers at the end of a batch, whose steps compute only the answers that go on."""

    def __init__(self, name: str, path: str) -> None:
        self._stepper = Stepper(name, path)

    def infer(self, inputs: list[int]) -> list[list[str]]:
        """Take all steps of a batch."""
        for count in range(1, max(inputs) + 1):
            self._stepper.step(sum(length >= count for length in inputs))
        return [[f"chunk {count + 1}" for count in range(length)] for length in inputs]


class Streamed(StreamedModel[int, str]):
    """Streams the answers of a batch, whose steps compute only the answers that go on."""

    def __init__(self, name: str, path: str) -> None:
        self._stepper = Stepper(name, path)

    def infer_stream(self, inputs: list[int]) -> Iterator[list[str | Done[str]]]:
        """Take a step of a batch."""
        for count in range(1, max(inputs) + 1):
            self._stepper.step(sum(length >= count for length in inputs))
            chunk = f"chunk {count}"
            yield [Done(chunk) if count >= length else chunk for length in inputs]


class Continuous(SteppedModel[int, str]):
    """Answers in steps."""

    def __init__(self, name: str, path: str) -> None:
        self._stepper = Stepper(name, path)

    def join(self, inputs: list[int]) -> list[list[int]]:
        """Begin answers."""
        return [[0, length] for length in inputs]

    def step(self, states: list[list[int]]) -> list[str | Done[str]]:
        """Take a step."""
        self._stepper.step(len(states))
        return [advance(state) for state in states]


def advance(state: list[int]) -> str | Done[str]:
    """Return the next chunk of an answer."""
    state[0] += 1
    chunk = f"chunk {state[0]}"
    return Done(chunk) if state[0] >= state[1] else chunk


MODELS: dict[str, type[InferenceModel[Any, Any]]] = {
    "Whole": Whole,
    "Streamed": Streamed,
    "Continuous": Continuous,
}


@asynccontextmanager
async def opened(load: Load, model: str) -> AsyncIterator[Process]:
    """Start the worker and wait until it is ready.

    Args:
        load: Of the model.
        model: Its name here.
    """
    with counted() as (path, count):
        batcher: DynBatcher[Any, Any] = DynBatcher(
            MODELS[model],
            max_batch_size=load.max_batch_size,
            model_args=(load.model, path),
            max_queue_size=100_000,
            timeout=TIMEOUT,
        )

        async def begin_whole(length: int) -> AsyncIterator[Any]:
            return _iterate(await batcher.process_batched(length))

        async with batcher:
            yield Streams(begin_whole if model == "Whole" else batcher.stream, count)


async def _iterate(chunks: list[str]) -> AsyncIterator[str]:
    for chunk in chunks:
        yield chunk
