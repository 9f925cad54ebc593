"""The adaptive policy sends less than what waits only where that is known to be better."""

import pytest
from schedules import make, poll_batches, settle, submit
from virtual_time import Seconds, World, with_knee

from fast_batcher._core.adaptive import AdaptivePolicy
from fast_batcher._core.batch_sizes import BatchSizes
from fast_batcher._core.messages import Batch, Release, Request
from fast_batcher._core.scheduler import Scheduler
from fast_batcher._core.straight_line import Costs


def linear(size: float) -> float:
    return 0.0005 + 0.002 * size


def half_fixed(size: float) -> float:
    return 0.004 + 0.0003 * size


def one_by_one(**options: object) -> Scheduler:
    """Its policy believes that nothing is gained by larger batches."""
    policy = AdaptivePolicy(None)
    policy.sizes = BatchSizes(Costs(0.0, 1.0), 0.0)
    return make(policy, max_batch_size=4, **options)  # type: ignore[arg-type]


def sizes_of(batches: list[Batch]) -> list[int]:
    return [len(batch.requests) for batch in batches]


# What the scheduler makes of it.


def test_the_oldest_go_first_and_the_others_wait_for_the_worker() -> None:
    scheduler = one_by_one()
    requests = submit(scheduler, 0.0, 3)
    for request in requests:
        (batch,) = poll_batches(scheduler, 0.0)
        assert batch.requests == [request]
        assert batch.release is Release.IDLE
        assert poll_batches(scheduler, 0.5) == []
        settle(scheduler, 1.0, batch)


def test_a_full_queue_is_no_full_batch() -> None:
    """Nor is a second one put behind the first: what is in the pipe goes together."""
    scheduler = one_by_one()
    submit(scheduler, 0.0, 9)
    assert sizes_of(poll_batches(scheduler, 0.0)) == [1]


def test_what_comes_together_to_a_free_worker_goes_the_long_way() -> None:
    scheduler = one_by_one()
    assert scheduler.submit_at_once(0.0, [Request("one", None), Request("two", None)]) is None
    assert scheduler.submit_at_once(0.0, [Request("one", None)]) is not None


def test_with_targets_all_that_wait_are_sent() -> None:
    for max_latency, deadline in ((100.0, None), (None, 100.0)):
        scheduler = one_by_one(max_latency=max_latency)
        submit(scheduler, 0.0, 3, deadline)
        assert sizes_of(poll_batches(scheduler, 0.0)) == [3]
        scheduler = one_by_one(max_latency=max_latency)
        scheduler.worker_ready(0.0, 1, [(4, 1.0)])
        submit(scheduler, 0.0, 17, deadline)
        assert sizes_of(poll_batches(scheduler, 0.0)) == [4, 4, 4, 4]


def test_while_a_target_may_be_left_all_that_wait_are_sent() -> None:
    """Else a full batch would pass for one that is not, and none would wait behind it."""
    scheduler = one_by_one(max_latency=100.0)
    scheduler.worker_ready(0.0, 1, [(4, 1.0)])
    scheduler.reconfigure(max_batch_size=4, max_queue_size=100, max_latency=None, policy=None)
    submit(scheduler, 0.0, 17)
    batches = poll_batches(scheduler, 0.0)
    assert sizes_of(batches) == [4, 4, 4, 4]
    assert {batch.release for batch in batches} == {Release.FULL}


def test_where_requests_are_no_equals_all_that_wait_are_sent() -> None:
    scheduler = one_by_one()
    scheduler.rank_requests()
    submit(scheduler, 0.0, 3)
    assert sizes_of(poll_batches(scheduler, 0.0)) == [3]


# When it is known.


def learned(seconds: Seconds, load: float, *, workers: int = 1) -> World:
    """After some thousand batches of a model that can do `load` times as much in batches of 16."""
    rate = load * workers * 16 / seconds(16)
    world = World(rate=rate, max_batch_size=16, seconds=seconds, workers=workers)
    return world.run(5_000 / rate)


def sizes_in(world: World) -> BatchSizes | None:
    assert isinstance(world.policy, AdaptivePolicy)
    return world.policy.sizes


def test_before_anything_is_known_all_that_wait_are_sent() -> None:
    world = World(rate=300.0, max_batch_size=16, seconds=linear).run(0.02)
    assert sizes_in(world) is None


@pytest.mark.parametrize("load", [0.5, 0.7, 0.9])
def test_it_is_what_the_true_times_and_the_true_rate_say(load: float) -> None:
    sizes = sizes_in(learned(linear, load))
    assert sizes is not None
    wanted = BatchSizes(Costs(0.0005, 0.002), load * 16 / linear(16))
    for waiting in (2, 4, 8, 16):
        # The rate is known to some percent.
        assert sizes.best(waiting) == pytest.approx(wanted.best(waiting), rel=0.25, abs=1)


@pytest.mark.parametrize("seconds", [half_fixed, with_knee, lambda _: 0.005])
@pytest.mark.parametrize("load", [0.1, 0.5, 0.8])
def test_where_a_batch_costs_much_by_itself_all_that_wait_are_sent(
    seconds: Seconds, load: float
) -> None:
    sizes = sizes_in(learned(seconds, load))
    if sizes is not None:
        assert [sizes.best(waiting) for waiting in (2, 4, 8)] == [2, 4, 8]


def test_with_several_workers_all_that_wait_are_sent() -> None:
    assert sizes_in(learned(linear, 0.6, workers=2)) is None


def test_it_is_given_up_when_batches_begin_to_cost_much_by_themselves() -> None:
    world = learned(linear, 0.6)
    assert sizes_in(world) is not None
    world.seconds = lambda _: 0.005
    world.run(5.0)
    sizes = sizes_in(world)
    assert sizes is None or sizes.best(8) == 8


def test_a_worker_is_never_free_while_somebody_waits() -> None:
    world = learned(linear, 0.8)
    assert world.longest_hold == 0.0
    assert world.share(Release.IDLE) > 0.9


@pytest.mark.parametrize("load", [0.5, 0.7])
def test_the_mean_latency_is_below_greedys(load: float) -> None:
    rate = load * 16 / linear(16)
    ours, greedy = (
        World(policy, rate=rate, max_batch_size=16, seconds=linear).run(20_000 / rate)
        for policy in ("adaptive", "greedy")
    )
    assert ours.latency / ours.answered < 0.985 * greedy.latency / greedy.answered
