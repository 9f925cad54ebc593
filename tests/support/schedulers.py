"""Driver of a scheduler for tests of the core: every time is an argument. No process, no clock."""

from collections.abc import Callable, Sequence
from typing import Any

from fast_batcher._core.policy import GreedyPolicy, Policy
from fast_batcher._core.queue import BatchPacker
from fast_batcher._core.scheduler import Scheduler
from fast_batcher._core.values import Action, Batch, Dispatch, Expire, Fail, Limits, Request, Skip

# What a lost worker gives back when all of it is tried again.
# The requests of a dead worker that fail: not to be computed twice, and with too many deaths.
Lost = tuple[list[Request], list[Request]]
NOTHING: Lost = ([], [])


def make(
    policy: Policy | None = None,
    *,
    measure_size: Callable[[object], int] | None = None,
    packer: BatchPacker | None = None,
    is_grouped: bool = False,
    workers: int = 1,
    **limits: Any,
) -> Scheduler:
    """A scheduler whose workers are ready since moment 0; `limits` are those of `Limits`."""
    scheduler = Scheduler(
        policy or GreedyPolicy(),
        Limits(**{"max_batch_size": 2, "max_queue_size": 100, **limits}),
        measure_size=measure_size,
        packer=packer,
        is_grouped=is_grouped,
    )
    for worker in range(workers):
        scheduler.worker_ready(0.0, worker)
    return scheduler


def make_request(value: object = "input", deadline: float | None = None) -> Request:
    """A request, whose caller has named its timeout if there is a deadline."""
    request = Request(value, None)
    if deadline is not None:
        request.fix_deadline(0.0, deadline, None)
    return request


def reject(scheduler: Scheduler, now: float, requests: list[Request]) -> list[Request]:
    """The requests that are not accepted of those that arrive together."""
    return [request for request, _ in scheduler.submit(now, requests)]


def submit(
    scheduler: Scheduler, now: float, count: int = 1, deadline: float | None = None
) -> list[Request]:
    """Requests that arrive together and are all accepted."""
    requests = [make_request(f"input {number}", deadline) for number in range(count)]
    assert scheduler.submit(now, requests) == []
    return requests


def dispatched(actions: Sequence[Action]) -> list[Batch]:
    """The batches that leave, where nothing else happens."""
    batches = []
    for action in actions:
        assert isinstance(action, Dispatch)
        batches.append(action.batch)
    return batches


def poll_batches(scheduler: Scheduler, now: float) -> list[Batch]:
    actions, _ = scheduler.poll(now)
    return dispatched(actions)


def run(scheduler: Scheduler, now: float, count: int = 1, deadline: float | None = None) -> Batch:
    """Requests that arrive together and leave at once as one batch."""
    requests = submit(scheduler, now, count, deadline)
    (batch,) = poll_batches(scheduler, now)
    assert batch.requests == requests
    return batch


def told(actions: Sequence[Action]) -> list[object]:
    """Actions in a form that can be compared."""
    plain: list[object] = []
    for action in actions:
        if isinstance(action, Dispatch):
            plain.append(action.batch.requests)
        elif isinstance(action, Expire):
            plain.append((action.reason, action.request))
        elif isinstance(action, Fail):
            plain.append((action.error, action.requests))
        elif isinstance(action, Skip):
            plain.append((Skip, action.batch.id))
        else:
            plain.append((type(action), action.worker))
    return plain


def settle(scheduler: Scheduler, now: float, batch: Batch) -> list[Request]:
    """Settle an answered batch as a shell does; return its settled requests."""
    assert scheduler.batch_done(now, batch.worker, batch.id) is batch
    answered = [request for request in batch.requests if not request.is_settled]
    for request in answered:
        request.is_settled = True
    return answered
