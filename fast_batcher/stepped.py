"""`SteppedModel`, the base class of models that answer in steps, and `Done`. Every process.

A stepped model gives each request a *stream* of chunks. Requests join and leave between two steps,
so that none waits for the longest of a batch. `_worker/steps.py` calls the model.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

from fast_batcher._arrays.joining import list_outputs
from fast_batcher.errors import is_kind
from fast_batcher.model import InferenceModel, InputT

ChunkT = TypeVar("ChunkT")


class Done(Generic[ChunkT]):
    """The end of a stream, as `step` returns it: its last chunk, None for no further chunk."""

    __slots__ = ("chunk",)

    def __init__(self, chunk: ChunkT | None = None) -> None:
        self.chunk: ChunkT | None = chunk

    def __repr__(self) -> str:
        return f"Done({self.chunk!r:.100})"


class SteppedModel(InferenceModel[InputT, list[ChunkT]], Generic[InputT, ChunkT]):
    """A model that computes many streams at once, one step after the other.

    `batcher.stream(x)` iterates over the chunks as they come; `process_batched(x)` waits for all of
    them. At most `max_batch_size` streams run in a worker. A request joins at the next step if a
    place is free, and its place is free as soon as it is done, or its caller has gone.
    """

    # False lets newcomers wait until all running streams have ended, for a model whose batch cannot
    # change while it runs.
    joins_running: bool = True

    @abstractmethod
    def join(self, inputs: list[InputT]) -> Sequence[Any]:
        """Begin some streams, beside the running ones.

        If it raises for several inputs, it is called again for each of them alone.

        Returns:
            One state per input: any object, which `step` gets. An exception instance fails that
            request alone.
        """

    @abstractmethod
    def step(self, states: list[Any]) -> Sequence[ChunkT | Done[ChunkT] | Exception | None]:
        """Compute one step of all running streams.

        Args:
            states: What `join` has returned for them, in order of joining, without streams that
                have left and streams whose callers do not keep up with their chunks.

        Returns:
            For each state its next chunk; None for no chunk in this step; `Done` at the end. An
            exception instance fails that stream alone.

        Raises:
            Exception: All streams of this step fail with it, because their states are unknown.
        """

    def leave(self, states: list[Any]) -> None:
        """Release what some streams hold: they have ended, or their callers have gone."""

    def infer(self, inputs: list[InputT]) -> Sequence[list[ChunkT] | Exception]:
        """Compute whole answers, for the warm-up and for tests without a batcher."""
        outcomes: list[Any] = [[] for _ in inputs]
        live = list(enumerate(list_outputs(self.join(inputs), len(inputs), "join", copies=False)))
        while live:
            states = [state for _, state in live]
            found = list_outputs(self.step(states), len(live), "step returned", copies=True)
            left = []
            for (at, state), outcome in zip(live, found, strict=True):
                is_last = type(outcome) is Done or is_kind(outcome, BaseException)
                chunk = outcome.chunk if type(outcome) is Done else outcome
                if is_kind(chunk, BaseException):
                    outcomes[at] = chunk
                elif chunk is not None:
                    outcomes[at].append(chunk)
                if is_last:
                    self.leave([state])
                else:
                    left.append((at, state))
            live = left
        return outcomes


class StreamedModel(SteppedModel[InputT, ChunkT]):
    """A model that answers a fixed batch in parts: `infer_stream` is a generator.

    The next batch begins when all streams of this one have ended.
    """

    joins_running = False
    _parts: Iterator[Sequence[Any]]

    @abstractmethod
    def infer_stream(
        self, inputs: list[InputT]
    ) -> Iterator[Sequence[ChunkT | Done[ChunkT] | Exception | None]]:
        """Yield, for each step of one batch, what `step` returns for all of its inputs.

        What it yields for a stream that is done is ignored. The streams that are left are done when
        the generator ends.
        """

    def join(self, inputs: list[InputT]) -> Sequence[int]:
        """Begin a batch; the state of a stream is its position."""
        self._parts = self.infer_stream(inputs)
        self._count = len(inputs)
        return range(len(inputs))

    def step(self, states: list[int]) -> Sequence[ChunkT | Done[ChunkT] | Exception | None]:
        """Take the next part of the batch."""
        part = next(self._parts, None)
        if part is None:
            return [Done() for _ in states]
        outputs = list_outputs(part, self._count, "infer_stream yielded", copies=True)
        return [outputs[position] for position in states]
