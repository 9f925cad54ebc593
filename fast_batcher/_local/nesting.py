"""Calls that functions make while they compute, and the waits between engines.

An engine computes one batch at a time. While its function calls another decorated function, the
engine waits for the other engine. A call that closes a circle of waits would wait for ever: it is
computed inline, where it was made. Runs on every thread that calls.
"""

import asyncio
import inspect
import threading
from collections import Counter
from collections.abc import Coroutine, Hashable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from fast_batcher._fork import at_fork
from fast_batcher._local.function import FailedOutput, Function, as_error


@dataclass(slots=True, eq=False)
class RunningBatch:
    """The batch that a thread or task computes, as calls see it that are made from there."""

    engine: Hashable
    # A task that an async function starts may outlive the batch. From then on the engine does not
    # wait for what the task does. Never set on an engine's own thread: whatever runs there delays
    # the engine's next batch.
    has_ended: bool = False


# The batch that this thread or task computes, None outside of all batches. A thread that a function
# starts does not inherit it, because nothing shows whether the function waits for that thread.
running_batch: ContextVar[RunningBatch | None] = ContextVar("running_batch", default=None)


class _Waits:
    """Which engines each engine waits for, and how many times."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin without waits: a forked child has one thread, and another may hold the lock."""
        self.lock = threading.Lock()
        self.targets: dict[Hashable, Counter[Hashable]] = {}

    def has_path(self, start: Hashable, engine: Hashable) -> bool:
        """Whether `start` is the engine, or waits for it, directly or through others."""
        reached: set[Hashable] = set()
        following = {start}
        while following:
            reached |= following
            following = set().union(*(self.targets.get(one, ()) for one in following)) - reached
        return engine in reached


_waits = _Waits()
at_fork(_waits, in_child=_Waits.forget)


@dataclass(slots=True)
class EngineWait:
    """Notes, while it is entered, that the batch of this thread or task waits for an engine.

    Entering it returns whether the wait can end. It cannot if the engine is the batch's own or
    waits for that one; then nothing is noted. Nor is anything noted outside of all batches.

    A class, because `contextlib.contextmanager` sets an attribute of each error that passes, and
    errors of users may refuse that.
    """

    # The engine to wait for.
    target: Hashable
    # The engine that waits, None if nothing was noted.
    waiter: Hashable | None = None

    def __enter__(self) -> bool:
        batch = running_batch.get()
        if batch is None or batch.has_ended:
            return True
        with _waits.lock:
            if _waits.has_path(self.target, batch.engine):
                return False
            self.waiter = batch.engine
            _waits.targets.setdefault(self.waiter, Counter())[self.target] += 1
        return True

    def __exit__(self, *_: object) -> None:
        if self.waiter is None:
            return
        with _waits.lock:
            # A forked child has none of its parent's.
            left = _waits.targets.pop(self.waiter, Counter()) - Counter([self.target])
            if left:
                _waits.targets[self.waiter] = left


async def compute_inline(function: Function, items: Sequence[Any], batch_size: int) -> list[Any]:
    """Call the function here, with `batch_size` items at a time; errors are those of batches."""
    outputs: list[Any] = []
    for start in range(0, len(items), batch_size):
        part = list(items[start : start + batch_size])
        try:
            result = function.call(part)
            if inspect.isawaitable(result):
                result = await result
        except Exception as error:
            raise as_error(error) from error
        for outcome in function.outcomes(result, len(part)):
            if type(outcome) is FailedOutput:
                raise outcome.error
            outputs.append(outcome)
    return outputs


def run_inline(computing: Coroutine[Any, Any, list[Any]], *, is_async: bool) -> list[Any]:
    """Run `compute_inline` in a thread that has no event loop.

    Args:
        computing: What to run.
        is_async: Whether the function is async, so that it needs an event loop.
    """
    if is_async:
        with asyncio.Runner() as runner:
            return runner.run(computing)
    try:
        computing.send(None)
    except StopIteration as done:
        outputs: list[Any] = done.value
        return outputs
    computing.close()
    raise RuntimeError(
        "a function that called itself returned something to be awaited; write it with `async def`"
    )
