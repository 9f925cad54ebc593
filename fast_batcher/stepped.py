"""`SteppedModel`, the base class of models that answer in steps; `Done` and `Grow`. Every process.

A stepped model gives each request a *stream* of chunks. Requests join and leave between two steps,
so that none waits for the longest of a batch. `_worker/steps.py` calls the model.
"""

from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from math import inf, nan
from typing import Any, Generic, TypeAlias, TypeVar

from fast_batcher._arrays.outputs import list_outputs
from fast_batcher.errors import is_kind
from fast_batcher.model import InferenceModel, InputT
from fast_batcher.types import Rows

ChunkT = TypeVar("ChunkT")


class Done(Generic[ChunkT]):
    """The end of a stream, as `step` returns it: its last chunk, None for no further chunk."""

    __slots__ = ("chunk",)

    def __init__(self, chunk: ChunkT | None = None) -> None:
        self.chunk: ChunkT | None = chunk

    def __repr__(self) -> str:
        return f"Done({self.chunk!r:.100})"


class Grow(Generic[ChunkT]):
    """The cost of a stream from its next step on, as `step` returns it, and its next chunk.

    With `max_batch_cost` the worker keeps the sum of the costs of its streams below that limit. It
    computes the next step of a stream only with a cost that fits. If one does not fit:

    - The youngest stream makes room, as long as it has no chunk: it leaves, and begins again when
      another stream has ended. With `idempotent=False` no stream begins again.
    - Then the stream that grows is left out of the steps, until others have ended.
    - If all streams are left out, the oldest grows beyond the limit, so that one always runs.

    Args:
        cost: The cost, which may also be lower than before.
        chunk: The next chunk, None for no chunk in this step.
    """

    __slots__ = ("chunk", "cost")

    def __init__(self, cost: float, chunk: ChunkT | None = None) -> None:
        try:
            self.cost: float = float(cost)
        except (TypeError, ValueError, OverflowError):
            self.cost = nan
        if not 0 <= self.cost < inf:
            raise ValueError(f"Grow({cost!r:.100}): the cost must be a number from 0 on")
        self.chunk: ChunkT | None = chunk


# What `step` may return for a stream.
StepOutcome: TypeAlias = ChunkT | Done[ChunkT] | Grow[ChunkT] | Exception | None


def read_outcome(outcome: Any) -> tuple[Any, bool]:
    """Return the chunk of what `step` returned for a stream, and whether the stream ends with it.

    The chunk is None for no chunk, and an exception instance for a stream that has failed.
    """
    if issubclass(type(outcome), Grow):
        outcome = outcome.chunk
    if issubclass(type(outcome), Done):
        return outcome.chunk, True
    if outcome is Done or outcome is Grow:
        name = outcome.__name__
        return TypeError(f"step returned the class {name}; return an instance of it"), True
    return outcome, is_kind(outcome, BaseException)


class SteppedModel(InferenceModel[InputT, list[ChunkT]], Generic[InputT, ChunkT]):
    """A model that computes many streams at once, one step after the other.

    `batcher.stream(x)` iterates over the chunks as they come; `process_batched(x)` waits for all of
    them. At most `max_batch_size` streams run in a worker. A request joins at the next step if a
    place is free, and its place is free as soon as it is done, or its caller has gone.
    """

    joins_running: bool = True
    """False lets newcomers wait until all running streams have ended, for a model whose batch
    cannot change while it runs.
    """

    @abstractmethod
    def join(self, inputs: list[InputT]) -> Sequence[Any]:
        """Begin some streams, beside the running ones.

        If it raises for several inputs, it is called again for each of them alone.

        Returns:
            One state per input: any object, which `step` gets. An exception instance fails that
            request alone.
        """

    @abstractmethod
    def step(self, states: list[Any]) -> Sequence[StepOutcome[ChunkT]] | Rows:
        """Compute one step of all running streams.

        Args:
            states: What `join` has returned for them, in order of joining, without streams that
                have left and streams whose callers do not keep up with their chunks.

        Returns:
            For each state its next chunk; None for no chunk in this step; `Done` at the end; `Grow`
            with a new cost. An exception instance fails that stream alone.

        Raises:
            Exception: All streams of this step fail with it, because their states are unknown. If
                it says that memory has run out, only the youngest stream ends, and the others take
                the step again: their states must be as they were before the step. The youngest
                begins again, unless it has chunks, runs alone, or the batcher is not `idempotent`.
                With `joins_running = False` all fail.
        """

    def leave(self, states: list[Any]) -> None:
        """Release what some streams hold: they have ended, or their callers have gone."""

    def infer(self, inputs: list[InputT]) -> Sequence[list[ChunkT] | Exception]:
        """Compute whole answers, for the warm-up and for tests without a batcher."""
        states = list_outputs(self.join(inputs), len(inputs), "join returned", copies=False)
        outcomes: list[Any] = [state if is_kind(state, BaseException) else [] for state in states]
        live = [pair for pair in enumerate(states) if not is_kind(pair[1], BaseException)]
        while live:
            running = [state for _, state in live]
            found = list_outputs(self.step(running), len(live), "step returned", copies=True)
            left = []
            for (at, state), outcome in zip(live, found, strict=True):
                chunk, is_last = read_outcome(outcome)
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


class _StreamedBatch:
    """A batch of a `StreamedModel`, and the parts that its streams have not taken yet."""

    def __init__(self, parts: Iterator[Any], count: int) -> None:
        self._parts = parts
        self._count = count
        # The streams that have not left, by position in the batch. A stream that is paused takes
        # nothing, and its parts wait here.
        self.waiting: dict[int, deque[Any]] = {at: deque() for at in range(count)}

    def advance(self) -> None:
        """Compute the next part; an error is also for the streams that have parts left."""
        try:
            part = next(self._parts, None)
            outcomes: Sequence[Any] = [Done()] * self._count
            if part is not None:
                outcomes = list_outputs(part, self._count, "infer_stream yielded", copies=True)
        except BaseException as error:
            for waiting in self.waiting.values():
                if waiting:
                    waiting.append(error)
            raise
        for at, waiting in self.waiting.items():
            waiting.append(outcomes[at])

    def close(self) -> None:
        """End the generator, which releases what it holds."""
        close = getattr(self._parts, "close", None)
        if close is not None:
            close()


class StreamedModel(SteppedModel[InputT, ChunkT]):
    """A model that answers a fixed batch in parts: `infer_stream` is a generator.

    The next batch begins when all streams of this one have ended.
    """

    joins_running = False

    @abstractmethod
    def infer_stream(self, inputs: list[InputT]) -> Iterator[Sequence[StepOutcome[ChunkT]] | Rows]:
        """Yield, for each step of one batch, what `step` returns for all of its inputs.

        What it yields for a stream that is done is ignored. The streams that are left are done when
        the generator ends.
        """

    def join(self, inputs: list[InputT]) -> Sequence[tuple[_StreamedBatch, int]]:
        """Begin a batch; the state of a stream is its position."""
        parts = self.infer_stream(inputs)
        if not hasattr(parts, "__next__"):
            raise TypeError(
                f"infer_stream returned an object of type {type(parts).__name__}: write it as a "
                "generator, with `def` and `yield`"
            )
        batch = _StreamedBatch(parts, len(inputs))
        return [(batch, position) for position in range(len(inputs))]

    def step(self, states: list[tuple[_StreamedBatch, int]]) -> Sequence[StepOutcome[ChunkT]]:
        """Take the next part of the batch."""
        batch = states[0][0]
        queues = [batch.waiting[position] for _, position in states]
        if not all(queues):
            batch.advance()
        return [queue.popleft() for queue in queues]

    def leave(self, states: list[tuple[_StreamedBatch, int]]) -> None:
        """Forget streams; the generator ends with the last one."""
        for batch, position in states:
            batch.waiting.pop(position, None)
            if not batch.waiting:
                batch.close()
