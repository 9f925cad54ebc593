"""Calls that functions make while they compute, and the waits between engines.

An engine computes one batch at a time. While its function calls another decorated function, the
engine waits for the other engine. A call that closes a circle of waits would wait for ever: it is
computed inline, where it was made. Runs on every thread that calls.
"""

import asyncio
import inspect
import os
import threading
from collections.abc import Coroutine, Hashable, Sequence
from contextvars import ContextVar
from typing import Any

from fast_batcher._local.function import FailedOutput, Function, as_error


class RunningBatch:
    """The batch that a thread or task computes, as calls see it that are made from there.

    Args:
        engine: The engine of the batch.
    """

    __slots__ = ("engine", "has_ended")

    def __init__(self, engine: Hashable) -> None:
        self.engine = engine
        # A task that an async function starts may outlive the batch. From then on the engine does
        # not wait for what the task does. Never set on an engine's own thread: whatever runs there
        # delays the engine's next batch.
        self.has_ended = False


# The batch that this thread or task computes, None outside of all batches. A thread that a function
# starts does not inherit it, because nothing shows whether the function waits for that thread.
running_batch: ContextVar[RunningBatch | None] = ContextVar("running_batch", default=None)

# Protects `_waits`.
_lock = threading.Lock()
# The engines that each engine waits for, once per wait.
_waits: dict[Hashable, list[Hashable]] = {}


class EngineWait:
    """Notes, while it is entered, that the batch of this thread or task waits for an engine.

    Entering it returns whether the wait can end. It cannot if the engine is the batch's own or
    waits for that one; then nothing is noted. Nor is anything noted outside of all batches.

    A class, because `contextlib.contextmanager` sets an attribute of each error that passes, and
    errors of users may refuse that.

    Args:
        target: The engine to wait for.
    """

    __slots__ = ("_target", "_waiter")

    def __init__(self, target: Hashable) -> None:
        self._target = target
        # The engine that waits, None if nothing was noted.
        self._waiter: Hashable | None = None

    def __enter__(self) -> bool:
        batch = running_batch.get()
        if batch is None or batch.has_ended:
            return True
        with _lock:
            if _waits_for(self._target, batch.engine):
                return False
            self._waiter = batch.engine
            _waits.setdefault(batch.engine, []).append(self._target)
        return True

    def __exit__(self, *_: object) -> None:
        if self._waiter is None:
            return
        with _lock:
            targets = _waits.get(self._waiter, [])  # empty in a forked child
            if self._target in targets:
                targets.remove(self._target)
            if not targets:
                _waits.pop(self._waiter, None)


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


def _waits_for(start: Hashable, engine: Hashable) -> bool:
    """Whether `start` is the engine, or waits for it, directly or through others."""
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


def _reset_after_fork() -> None:
    """Forget all waits: a forked child has one thread, and another one may have held the lock."""
    global _lock
    _lock = threading.Lock()
    _waits.clear()


os.register_at_fork(after_in_child=_reset_after_fork)
