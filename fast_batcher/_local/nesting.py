"""Nested calls of decorated functions: detection of deadlocks between engines, inline computation.

An engine computes one batch at a time. While its function calls another decorated function, the
engine waits for the other engine. A call that closes a cycle of waits would be a deadlock: it is
computed inline, by its caller. Runs on every calling thread.
"""

import asyncio
import inspect
import threading
from collections import Counter
from collections.abc import Coroutine, Hashable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from fast_batcher._core.values import Failure
from fast_batcher._local.function import Function, as_error
from fast_batcher._process import at_fork


@dataclass(slots=True, eq=False)
class RunningBatch:
    """The batch that a thread or task computes; nested calls find it in `running_batch`."""

    engine: Hashable
    # A task that an async function starts may outlive the batch. From then on the engine does not
    # wait for the task. Never set on an engine's own thread: anything that runs there delays the
    # engine's next batch.
    has_ended: bool = False


# The batch that this thread or task computes, None outside of all batches. A thread that a function
# starts does not inherit it, because nothing shows whether the function waits for that thread.
running_batch: ContextVar[RunningBatch | None] = ContextVar("running_batch", default=None)


class _Waits:
    """Wait-for graph of the engines, with the number of waits on each edge."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Reset, also in a forked child: it has one thread, and another may have held the lock."""
        self.lock = threading.Lock()
        self.targets: dict[Hashable, Counter[Hashable]] = {}

    def has_path(self, start: Hashable, engine: Hashable) -> bool:
        """Return whether `start` is the engine, or waits for it, directly or through others."""
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
    """Context manager that records that the running batch of this thread or task waits.

    `__enter__` returns whether the wait can end. It cannot if the target engine is the batch's own,
    or waits for that engine; then no wait is recorded. Outside of batches none is recorded either.

    A class, because `contextlib.contextmanager` sets an attribute of each error that passes, and
    errors of users may refuse that.
    """

    # The engine to wait for.
    target: Hashable
    # The engine that waits, None if no wait was recorded.
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
            # The default is for a forked child, which has no waits of its parent.
            left = _waits.targets.pop(self.waiter, Counter()) - Counter([self.target])
            if left:
                _waits.targets[self.waiter] = left


async def compute_inline(function: Function, items: Sequence[Any], batch_size: int) -> list[Any]:
    """Call the function directly, with `batch_size` items at a time; same errors as in a batch."""
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
            if type(outcome) is Failure:
                raise outcome.error
            outputs.append(outcome)
    return outputs


def run_inline(computing: Coroutine[Any, Any, list[Any]], *, is_async: bool) -> list[Any]:
    """Run `compute_inline` in a thread that has no event loop.

    Args:
        computing: The coroutine of `compute_inline`.
        is_async: Whether the function is async, and needs an event loop.
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
