"""Errors inside the core: every request has one place, and ends once."""

from collections.abc import Callable, Sequence
from itertools import count

import pytest
from faulty_policy import FaultyPolicy
from schedulers import make, poll_batches, reject, run, settle, submit, told

from fast_batcher._core.queue import PaddedPacker
from fast_batcher._core.service_model import PaddedModel, Shape
from fast_batcher._core.values import Dispatch, Expire, Fail, Request


def test_arrivals_are_taken_all_or_not_at_all() -> None:
    policy = FaultyPolicy("arrived")
    scheduler = make(policy, max_batch_size=2)
    requests = [Request(None, None) for _ in range(2)]
    with pytest.raises(IndexError):
        scheduler.submit(0.0, requests)
    assert (scheduler.waiting, scheduler.running) == (0, 0)
    assert run(scheduler, 1.0, 2).id == 0


def test_raising_decision_fails_only_waiting_requests() -> None:
    policy = FaultyPolicy("decide")
    scheduler = make(policy, max_batch_size=2, timeout=5.0, workers=2)
    running = run(scheduler, 0.0, 2)
    expiring = run(scheduler, 0.0, 2, deadline=1.0)
    waiting = submit(scheduler, 1.0)
    actions, wake_at = scheduler.poll(1.0)
    # Both workers are busy, so nothing is decided; then one answers.
    assert [type(action) for action in actions] == [Expire, Expire]
    settle(scheduler, 2.0, expiring)
    actions, wake_at = scheduler.poll(2.0)
    assert told(actions) == [(policy.error, waiting)]
    assert all(request.is_settled for request in waiting)
    assert wake_at == 5.0
    assert (scheduler.waiting, scheduler.running) == (0, 2)
    later = submit(scheduler, 2.0)
    (batch,) = poll_batches(scheduler, 2.0)
    assert batch.requests == later
    assert settle(scheduler, 3.0, batch) == later
    assert settle(scheduler, 3.0, running) == running.requests


def test_failed_learning_loses_no_answer() -> None:
    policy = FaultyPolicy("batch_done")
    scheduler = make(policy, max_batch_size=2)
    batch = run(scheduler, 0.0)
    assert settle(scheduler, 1.0, batch) == batch.requests
    assert told(scheduler.poll(1.0)[0]) == [(policy.error, [])]
    assert scheduler.poll(1.0)[0] == []
    settle(scheduler, 3.0, run(scheduler, 2.0))


class FaultyTimes(PaddedModel):
    """Counts what it learns."""

    def __init__(self, count: Callable[[], None]) -> None:
        super().__init__()
        self._count_call = count

    def observe(self, shape: Shape, seconds: float) -> None:
        """Learn."""
        self._count_call()
        super().observe(shape, seconds)

    def high(self, shape: Shape) -> float:
        """Predict."""
        self._count_call()
        return super().high(shape)


class FaultyPacker(PaddedPacker):
    """Raises when it is asked for the `at`th time."""

    def __init__(self, at: int) -> None:
        super().__init__(20.0)
        self.times = FaultyTimes(self._count)
        self._left = at

    def _count(self) -> None:
        self._left -= 1
        if self._left == 0:
            raise ZeroDivisionError("costs")

    def fill(self, chosen: list[Request], waiting: Sequence[Request], count: int) -> None:
        """Choose."""
        self._count()
        super().fill(chosen, waiting, count)


def test_requests_end_once_if_forming_raises() -> None:  # noqa: C901  flat on purpose
    """With costs and targets, where most is asked: some are dropped, and batches made smaller."""
    kinds = set()
    for at in count(1):
        packer = FaultyPacker(at)
        scheduler = make(max_batch_size=4, max_latency=12.0, packer=packer)
        ended: list[Request] = []
        accepted: list[Request] = []
        has_raised = False
        for now in range(40):
            requests = [Request(None, None) for _ in range(3 if now % 3 else 1)]
            for number, request in enumerate(requests):
                request.cost = float(1 + (now + number) % 5)
            try:
                refused = reject(scheduler, float(now), requests)
                accepted += [one for one in requests if one not in refused]
            except ZeroDivisionError:
                has_raised = True
            actions, _ = scheduler.poll(float(now))
            for action in actions:
                kinds.add(type(action))
                if isinstance(action, Expire):
                    ended.append(action.request)
                elif isinstance(action, Fail):
                    has_raised = True
                    assert isinstance(action.error, ZeroDivisionError)
                    ended += action.requests
            for slot in list(scheduler._workers.slots.values()):
                if slot.batches and now - slot.started_at >= len(slot.batches[0].requests):
                    ended += settle(scheduler, float(now), slot.batches[0])
                    assert len(set(map(id, ended))) == len(ended)
        rest = scheduler.close()
        assert {*map(id, ended), *map(id, rest)} == {*map(id, accepted)}
        assert len(ended) + len(rest) == len(accepted)
        if not has_raised:
            break
    assert at > 50
    assert kinds == {Dispatch, Expire, Fail}
