"""Who waits for whom, so that no function waits for itself. Runs on every thread that calls.

An engine computes one batch at a time. When a function calls a decorated function, its engine waits
for the other one; a call that would close a circle of such waits could never be answered. It is
computed where it was made, at once.
"""

import asyncio
import inspect
import os
import threading
from collections.abc import Coroutine, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from fast_batcher._local.function import Failure, Function, as_error


class RunningBatch:
    """What is being computed, as those see it who are called from there.

    Args:
        engine: Whose batch it is.
    """

    __slots__ = ("engine", "has_ended")

    def __init__(self, engine: Hashable) -> None:
        self.engine = engine
        # A task that an async function has started may go on after its batch. From then on the
        # engine does not wait for what it does, and it is a caller like any other. Never set on an
        # engine's own thread: whatever runs there keeps the engine from its next batch.
        self.has_ended = False


# The batch that this thread or task computes, None outside of all batches. A thread that a function
# starts by itself does not have it: nobody can know what it waits for.
running_batch: ContextVar[RunningBatch | None] = ContextVar("running_batch", default=None)

_lock = threading.Lock()
# For each engine those that its batch waits for, as often as it does.
_waits: dict[Hashable, list[Hashable]] = {}


@contextmanager
def waiting(batch: RunningBatch | None, target: Hashable) -> Iterator[bool]:
    """Note for the duration of the block that a batch, and so its engine, waits for an engine.

    Gives:
        False if that would never end: the target waits for the batch's engine already, or is that
        engine. Then nothing is noted, nor for no batch or one that has ended.
    """
    if batch is None or batch.has_ended:
        yield True
        return
    waiter = batch.engine
    with _lock:
        may_wait = not _is_reached(waiter, target)
        if may_wait:
            _waits.setdefault(waiter, []).append(target)
    try:
        yield may_wait
    finally:
        if may_wait:
            with _lock:
                targets = _waits.get(waiter, [])  # empty in a forked child
                if target in targets:
                    targets.remove(target)
                if not targets:
                    _waits.pop(waiter, None)


async def compute_here(function: Function, items: Sequence[Any], batch_size: int) -> list[Any]:
    """Call the function itself with so many items at a time; errors are those of batched calls."""
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


def drive(computing: Coroutine[Any, Any, list[Any]], *, is_async: bool) -> list[Any]:
    """Run `compute_here` in a thread that blocks.

    Args:
        computing: What to run.
        is_async: Whether it waits, so that it needs an event loop.
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


def _is_reached(engine: Hashable, start: Hashable) -> bool:
    """Whether the waits lead from `start` to `engine`."""
    seen: set[Hashable] = set()
    todo = [start]
    while todo:
        one = todo.pop()
        if one is engine:
            return True
        if one not in seen:
            seen.add(one)
            todo.extend(_waits.get(one, ()))
    return False


def _begin_anew() -> None:
    """In a forked child only the thread that forked is left, and it may not have had the lock."""
    global _lock
    _lock = threading.Lock()
    _waits.clear()


os.register_at_fork(after_in_child=_begin_anew)
