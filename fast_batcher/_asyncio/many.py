"""`process_many`: queues many inputs of one caller, a few batches at a time.

Runs in the API process, on the event loop's thread, in the caller's task.
"""

import math
from asyncio import get_running_loop
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from fast_batcher._asyncio.session import Session
from fast_batcher._core.values import Request
from fast_batcher._process import monotonic
from fast_batcher.settings import Settings, checked_priority, checked_timeout

# Most full batches per worker that one `process_many` call has queued or running: one that runs and
# one that waits behind it. More would only delay other callers.
MANY_BATCHES_PER_WORKER = 2


async def process_many(
    find_session: Callable[[], Session],
    values: Iterable[Any],
    settings: Settings,
    *,
    timeout: float | None,
    priority: int,
    method: str | None = None,
) -> list[Any]:
    """Wait for the outputs of many inputs, in their order.

    While requests of the call are in flight, the next one waits until the queue has room for it; a
    request of a call that has none in flight is accepted or rejected at once.

    Args:
        find_session: Returns the session that accepts calls now, or raises.
        values: The inputs.
        settings: The batcher's settings.
        timeout: Seconds for all inputs together, None for the batcher's `timeout`.
        priority: Priority of each input.
        method: Name of the method of a model that has several; None for `infer`.
    """
    priority = checked_priority(priority)
    limit = settings.timeout if timeout is None else checked_timeout(timeout)
    deadline = math.inf if limit is None else monotonic() + limit
    # With a target, a batch that waits behind another batch of the same call might be rejected.
    batches = MANY_BATCHES_PER_WORKER if settings.max_latency is None else 1
    most_in_flight = batches * settings.batch_limit * settings.num_workers
    loop = get_running_loop()
    outputs: list[Any] = []
    in_flight: deque[Request] = deque()
    session: Session | None = None
    try:
        for value in values:
            request = Request(value, loop.create_future(), deadline)
            request.timeout = timeout
            request.priority = priority
            if timeout is None:
                request.target = math.inf  # the default timeout is no target
            while session and in_flight:
                if len(in_flight) < most_in_flight and session.has_room(request):
                    break
                outputs.append(await in_flight[0].caller)
                in_flight.popleft()
            session = find_session()
            request.group = None if method is None else session.methods[method].group
            session.accept(request)
            in_flight.append(request)
        while in_flight:
            outputs.append(await in_flight[0].caller)
            in_flight.popleft()
    finally:
        for request in in_flight:
            assert session is not None, "it has accepted them"
            session.abandon(request)
            if request.caller.done() and not request.caller.cancelled():
                request.caller.exception()  # mark as retrieved, so that asyncio does not log it
            del request
        # An error holds this frame, which must not hold the error.
        in_flight.clear()
    return outputs
