"""The public interface as a type checker sees it. Checked by mypy and pyright; never run.

`assert_type` says what must come out. Each `type: ignore` marks a use that must be refused, and
the checkers complain about one that is not needed.
"""

# pyright: strict, reportUnnecessaryTypeIgnoreComment=true

import concurrent.futures
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, assert_type

import numpy as np
import torch
from fastapi import FastAPI
from starlette.routing import Route

import fast_batcher
from fast_batcher import BatcherStats, Done, DynBatcher, Grow, InferenceModel, SteppedModel
from fast_batcher._opening.streams import Stream
from fast_batcher.aio import AsyncBatchedFunction
from fast_batcher.dyn_batcher import DynBatcher as DynBatcherByOtherPath
from fast_batcher.dynamic import BatchedFunction
from fast_batcher.errors import (
    BatcherError,
    DeadlineExceededError,
    DynamicBatchIndexError,
    OutputMismatchError,
    QueueFullError,
)
from fast_batcher.fastapi import JsonEndpoint
from fast_batcher.inference_template import InferenceModel as InferenceModelByOtherPath
from fast_batcher.settings import BatcherOptions


def use(*values: object) -> None:
    """Check the static type of a value."""


class Vector:
    """An array, as a type checker sees it."""

    def __len__(self) -> int:
        return 1


# Models.


class Lengths(InferenceModel[str, int]):
    """Takes texts, gives numbers."""

    def __init__(self, path: str = "", *, scale: float = 1.0) -> None:
        self.path = path
        self.scale = scale

    def infer(self, inputs: list[str]) -> list[int]:
        return [len(text) for text in inputs]

    def warmup_inputs(self) -> list[str]:
        return ["warm"]

    def close(self) -> None: ...


class Tuples(InferenceModel[bytes, float]):
    """Any sequence will do as a result."""

    def infer(self, inputs: list[bytes]) -> tuple[float, ...]:
        return tuple(0.5 for _ in inputs)


class FailsForSome(InferenceModel[str, int]):
    """An exception at a position fails that request alone, and changes no types."""

    def infer(self, inputs: list[str]) -> list[int | Exception]:
        return [len(text) if text else ValueError("empty") for text in inputs]


class ByOtherPath(InferenceModelByOtherPath[str, int]):
    """The same base under its other name."""

    def infer(self, inputs: list[str]) -> Sequence[int]:
        return [len(text) for text in inputs]


class Untyped(InferenceModel[Any, Any]):
    """For those who do not care."""

    def infer(self, inputs: list[Any]) -> list[Any]:
        return inputs


class TakesOneInput(InferenceModel[str, int]):
    """Not a batch."""

    def infer(self, inputs: str) -> list[int]:  # type: ignore[override]
        return [len(inputs)]


class GivesOneOutput(InferenceModel[str, int]):
    """Not a batch either."""

    def infer(self, inputs: list[str]) -> int:  # type: ignore[override]
        return len(inputs)


class IsAsync(InferenceModel[str, int]):
    """There is no loop in a worker."""

    async def infer(self, inputs: list[str]) -> list[int]:  # type: ignore[override]
        return [len(text) for text in inputs]


class Forgets(InferenceModel[str, int]):
    """Has no `infer`."""


Forgets()  # type: ignore[abstract]

# Construction: the types come from the model.

batcher = DynBatcher(Lengths)
assert_type(batcher, DynBatcher[str, int])
assert_type(DynBatcher(Tuples), DynBatcher[bytes, float])
assert_type(DynBatcher(FailsForSome), DynBatcher[str, int])
assert_type(DynBatcher(ByOtherPath), DynBatcher[str, int])
assert_type(DynBatcher(Untyped), DynBatcher[Any, Any])
assert_type(DynBatcherByOtherPath(Lengths), DynBatcher[str, int])
assert_type(fast_batcher.DynBatcher(Lengths), DynBatcher[str, int])

# A string says nothing about types, so the user does.
assert_type(DynBatcher[str, int]("app.models:Lengths"), DynBatcher[str, int])
by_name: DynBatcher[str, int] = DynBatcher("app.models:Lengths")

everything = DynBatcher(
    Lengths,
    16,
    0.01,
    model_args=("weights.pt",),
    model_kwargs={"scale": 2.0},
    num_workers=2,
    policy="fixed",
    max_queue_size=100,
    timeout=None,
    infer_timeout=5,
    start_timeout=60.0,
    stop_timeout=1,
    drain_timeout=10,
    max_frame_bytes=2**26,
    auto_open=False,
    name="lengths",
    max_latency=0.5,
    cost=len,
    max_batch_cost=4096,
    max_request_cost=512.0,
    cost_is_padded=False,
    group_by=str.islower,
)
assert_type(everything, DynBatcher[str, int])
DynBatcher(Lengths, max_batch_size=8, max_delay=None, model_args=["weights.pt"])

DynBatcher(Lengths())  # type: ignore[arg-type]
DynBatcher(str)  # type: ignore[arg-type]
DynBatcher(7)  # type: ignore[arg-type]
DynBatcher(lambda inputs: inputs)  # type: ignore[arg-type]
DynBatcher(Lengths, "8")  # type: ignore[arg-type]
DynBatcher(Lengths, 1.5)  # type: ignore[arg-type]
DynBatcher(Lengths, 8, "10ms")  # type: ignore[arg-type]
DynBatcher(Lengths, 8, 0.01, ())  # type: ignore[call-arg]
DynBatcher(Lengths, policy="fastest")  # type: ignore[arg-type]
DynBatcher(Lengths, timeout_ms=5)  # type: ignore[call-arg]
DynBatcher(Lengths, model_args=7)  # type: ignore[arg-type]
DynBatcher(Lengths, model_kwargs=["scale"])  # type: ignore[arg-type]
DynBatcher(Lengths, start_timeout=None)  # type: ignore[arg-type]
DynBatcher(Lengths, drain_timout=1.0)  # type: ignore[call-arg]


class Speaker(SteppedModel[str, bytes]):
    """Takes texts, gives streams of sound."""

    def join(self, inputs: list[str]) -> list[str]:
        return inputs

    def step(self, states: list[str]) -> list[bytes | Done[bytes] | Grow[bytes] | None]:
        return [Done(state.encode()) for state in states]


spoken = DynBatcher(Speaker, workers="threads")
assert_type(spoken, DynBatcher[str, list[bytes]])
DynBatcher(Speaker, workers="thread")  # type: ignore[arg-type]


class Embeds(InferenceModel[str, "np.ndarray[Any, Any]"]):
    """Returns an array with a row per input."""

    def infer(self, inputs: list[str]) -> np.ndarray[Any, Any]:
        return np.zeros((len(inputs), 3))


class EmbedsTensors(InferenceModel[str, torch.Tensor]):
    """Returns a tensor with a row per input."""

    def infer(self, inputs: list[str]) -> torch.Tensor:
        return torch.zeros(len(inputs), 3)


class Doubles(SteppedModel[float, float]):
    """Returns the chunks of a step as an array."""

    def join(self, inputs: list[float]) -> list[float]:
        return inputs

    def step(self, states: list[float]) -> np.ndarray[Any, Any]:
        return 2 * np.array(states)


class Returns(InferenceModel[str, int]):
    """Returns no sequence of outputs."""

    def infer(self, inputs: list[str]) -> int:  # type: ignore[override]
        return len(inputs)


assert_type(DynBatcher(EmbedsTensors), DynBatcher[str, torch.Tensor])
DynBatcher(Embeds)
DynBatcher(Doubles)

options: BatcherOptions = {"max_restarts": 3, "max_shared_bytes": 0}
assert_type(DynBatcher(Lengths, **options), DynBatcher[str, int])
assert_type(DynBatcher(Lengths, cost=len, **options), DynBatcher[str, int])
wrong_types: DynBatcher[int, str] = DynBatcher(Lengths)  # type: ignore[arg-type]

# Calls.


async def calls() -> None:
    assert_type(await batcher.process_batched("text"), int)
    assert_type(await batcher.process_batched("text", timeout=1.5), int)
    assert_type(await batcher.process_many(["a", "b"]), list[int])
    assert_type(await batcher.process_many(text for text in "ab"), list[int])
    assert_type(await batcher.process_many((), timeout=3), list[int])
    errors = await batcher.process_many(["a"], return_exceptions=True)
    assert_type(errors, list[int | BatcherError])
    assert_type(await batcher.process_many(["a"], return_exceptions=False), list[int])
    assert_type(batcher.submit("text"), concurrent.futures.Future[int])
    assert_type(batcher.submit("text", timeout=1).result(), int)
    assert_type(await by_name.process_batched("text"), int)
    assert_type(await batcher.process_batched("text", priority=2), int)
    assert_type(await batcher.process_many(["a"], priority=-2), list[int])
    assert_type(batcher.submit("text", priority=2).result(), int)
    assert_type(await batcher.process_batched("text", share="client"), int)
    assert_type(await batcher.process_many(["a"], share=7), list[int])
    assert_type(batcher.submit("text", share=None).result(), int)
    batcher.reconfigure(max_batch_size=8, max_delay=None, max_queue_size=None, max_latency=0.5)
    batcher.reconfigure()

    batcher.reconfigure(num_workers=2)
    batcher.reconfigure(num_workers=(1, 8))
    batcher.reconfigure(timeout=2.0)  # type: ignore[call-arg]
    batcher.reconfigure(max_batch_size="8")  # type: ignore[arg-type]
    await batcher.process_batched("text", priority="high")  # type: ignore[arg-type]
    await batcher.process_batched("text", share=1.5)  # type: ignore[arg-type]

    await batcher.process_batched(7)  # type: ignore[arg-type]
    await batcher.process_batched(["text"])  # type: ignore[arg-type]
    await batcher.process_batched("text", 1.5)  # type: ignore[call-arg]
    await batcher.process_batched("text", timeout="1")  # type: ignore[arg-type]
    await batcher.process_many([1, 2])  # type: ignore[list-item]
    batcher.submit(7)  # type: ignore[arg-type]
    text: str = await batcher.process_batched("text")  # type: ignore[assignment]
    stream = await spoken.stream("text", timeout=1, priority=2, share="client")
    assert_type(stream, Stream[bytes])
    assert_type([chunk async for chunk in stream], list[bytes])
    assert_type(await spoken.process_batched("text"), list[bytes])
    await spoken.stream(7)  # type: ignore[arg-type]
    await batcher.stream("text")  # type: ignore[misc]
    use(text)


# Life.


async def life() -> None:
    async with DynBatcher(Lengths) as opened:
        assert_type(opened, DynBatcher[str, int])
    await batcher.open()
    await batcher.open(wait_ready=False)
    await batcher.aclose()
    batcher.begin_drain()
    batcher.stop()
    await batcher.stop()  # type: ignore[func-returns-value, misc]
    await batcher.open(False)  # type: ignore[call-arg]


FastAPI(lifespan=batcher.lifespan)
FastAPI(lifespan=batcher.lifespan(wait_ready=False))
FastAPI(lifespan=everything.lifespan)
FastAPI(lifespan=batcher)  # type: ignore[arg-type]

app = FastAPI()


async def shout(body: str) -> int:
    return await batcher.process_batched(body)


app.router.routes.append(Route("/shout", JsonEndpoint(shout), methods=["POST"]))
JsonEndpoint(shout, cancel_on_disconnect=True)
JsonEndpoint(len)  # type: ignore[arg-type]
assert_type(batcher.lifespan(app), AbstractAsyncContextManager[None])
assert_type(batcher.lifespan(wait_ready=False), Callable[[Any], AbstractAsyncContextManager[None]])


@asynccontextmanager
async def by_hand(app: FastAPI) -> AsyncGenerator[dict[str, DynBatcher[str, int]]]:
    async with DynBatcher(Lengths) as mine:
        yield {"batcher": mine}


FastAPI(lifespan=by_hand)

# What can be seen.

assert_type(batcher.name, str)
assert_type(batcher.state, str)
assert_type(batcher.is_ready, bool)
assert_type(batcher.start_error, BatcherError | None)
assert_type(batcher.stats, BatcherStats)
assert_type(batcher.stats.completed, int)
assert_type(batcher.stats.batch_sizes, dict[int, int])
assert_type(batcher.stats.releases, dict[str, int])
assert_type(batcher.stats.infer_p95, float | None)
assert_type(batcher.stats.mean_batch_size, float)
batcher.state = "open"  # type: ignore[misc]
batcher.stats.completed = 0  # type: ignore[misc]


# Errors.


async def failures() -> None:
    try:
        await batcher.process_batched("text")
    except QueueFullError as full:
        assert_type(full.retry_after, float | None)
    except DeadlineExceededError as late:
        assert_type(late.retry_after, float | None)
        timeout: TimeoutError = late
        use(timeout)
    except DynamicBatchIndexError as mismatch:
        same: OutputMismatchError = mismatch
        index: IndexError = mismatch
        use(same, index)
    except BatcherError as error:
        assert_type(error, BatcherError)


# Decorators: the types come from the function.


@fast_batcher.dynamically
def count_words(texts: list[str]) -> list[int]:
    return [len(text.split()) for text in texts]


assert_type(count_words("a text"), int)
assert_type(count_words(["a text", "another"]), list[int])
count_words(b"bytes")  # type: ignore[call-overload]


@fast_batcher.aio.dynamically
async def count_words_async(texts: list[str]) -> list[int]:
    return [len(text.split()) for text in texts]


class Counter:
    """Has a batched method."""

    @fast_batcher.dynamically
    def count(self, texts: list[str]) -> list[int]:
        return [len(text) for text in texts]


async def call_decorated() -> None:
    assert_type(await count_words.acall("a text"), int)
    assert_type(await count_words_async("a text"), int)
    assert_type(await count_words_async(["a text"]), list[int])
    assert_type(Counter().count("a text"), int)
    assert_type(count_words.stats.total_batches, int)
    await count_words_async.shutdown()
    count_words.shutdown()


# Decorators with settings keep the types, too.


@fast_batcher.dynamically(batch_size=8)
def with_settings(texts: list[str]) -> tuple[int, ...]:
    return tuple(len(text) for text in texts)


@fast_batcher.dynamically(batch_size=8, max_queue_size=64)
async def with_settings_async(texts: list[str]) -> list[int]:
    return [len(text) for text in texts]


@fast_batcher.aio.dynamically(batch_size=8, cache=None)
async def with_aio_settings(texts: list[str]) -> list[int]:
    return [len(text) for text in texts]


@fast_batcher.dynamically(batch_size=8)
def untyped(texts: Any) -> Any:
    return texts


class WithSettings:
    """Has batched methods with settings."""

    @fast_batcher.dynamically(batch_size=8)
    def count(self, texts: list[str]) -> list[int]:
        return [len(text) for text in texts]

    @fast_batcher.aio.dynamically()
    async def count_async(self, texts: list[str]) -> list[int]:
        return [len(text) for text in texts]

    @fast_batcher.inference.dynamically(batch_size=8)
    def scale(self, features: dict[str, Vector]) -> dict[str, Vector]:
        return features


@fast_batcher.inference.dynamically
def scale(features: dict[str, Vector]) -> Vector:
    return features["x"]


@fast_batcher.inference.dynamically(pad_tokens={"x": 0}, spread_kwargs=True)
async def scale_with_settings(x: Vector) -> tuple[Vector, Vector]:
    return x, x


@fast_batcher.inference.dynamically(outputs="rows")
def in_rows(features: dict[str, Vector]) -> list[float]:
    return [0.0] * len(features["x"])


@fast_batcher.aio.inference.dynamically
async def scale_async(features: dict[str, Vector]) -> Vector:
    return features["x"]


@fast_batcher.aio.inference.dynamically(batch_size=8)
def scale_async_with_settings(features: dict[str, Vector]) -> dict[str, Vector]:
    return features


assert_type(with_settings, BatchedFunction[str, int])
assert_type(with_settings("a text"), int)
assert_type(with_settings(["a text"]), list[int])
assert_type(with_settings_async, BatchedFunction[str, int])
assert_type(with_aio_settings, AsyncBatchedFunction[str, int])
assert_type(WithSettings().count("a text"), int)
assert_type(WithSettings().count_async, AsyncBatchedFunction[str, int])
use(untyped(1), untyped.stats)
with_settings(b"bytes")  # type: ignore[call-overload]
with_aio_settings(b"bytes")  # type: ignore[call-overload]
WithSettings().count(7)  # type: ignore[call-overload]
fast_batcher.dynamically(batch_size="8")  # type: ignore[call-overload]
fast_batcher.dynamically(batch_sise=8)  # type: ignore[call-overload]

assert_type(scale({"x": [1.0]}), Vector)
assert_type(scale(x=[1.0]), Vector)
assert_type(scale_with_settings({"x": [1.0]}), tuple[Vector, Vector])
assert_type(WithSettings().scale(x=[1.0]), dict[str, Vector])
assert_type(in_rows(x=[1.0]), Any)  # an array of them
scale([1.0])  # type: ignore[call-overload]


async def call_inference() -> None:
    assert_type(await scale.acall(x=[1.0]), Vector)
    assert_type(await scale_async(x=[1.0]), Vector)
    assert_type(await scale_async_with_settings({"x": [1.0]}), dict[str, Vector])
    await scale_async([1.0])  # type: ignore[call-overload]
