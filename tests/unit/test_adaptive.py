"""The hold of the adaptive policy: its bounds, what it brings, and that it costs nobody much."""

from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import long
from schedulers import make_request, poll_batches, submit
from virtual_time import Seconds, World, with_knee

from fast_batcher._core.policy import MOST_LATENESS, PATIENCE, REST, AdaptivePolicy, Policy
from fast_batcher._core.values import Release

ALONE = with_knee(1)
GREEDY_IS_AS_GOOD = 0.99


def half_fixed(size: float) -> float:
    return 0.004 + 0.0003 * size


def linear(size: float) -> float:
    return 0.0005 + 0.002 * size


SOURCES: dict[str, dict[str, float]] = {
    "closed": {"clients": 8},
    "poisson": {"rate": 2000.0},
    "bursts": {"rate": 60.0, "together": 6},
    "both": {"clients": 5, "rate": 500.0},
}


def world_of(source: str, **options: object) -> World:
    return World(**{**SOURCES[source], **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("max_delay", [None, 20.0, 0.5 * ALONE, 0.1 * ALONE])
@pytest.mark.parametrize("source", SOURCES)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32), workers=st.integers(1, 3))
def test_hold_keeps_its_bounds(
    max_delay: float | None, source: str, seed: int, workers: int
) -> None:
    """And it is never idle in vain: `World` checks both after each poll."""
    world = world_of(source, max_delay=max_delay, seed=seed, workers=workers).run(0.5)
    longest = min(inf if max_delay is None else max_delay, 1.1 * ALONE)
    assert world.longest_hold <= longest * (1 + 1e-9)
    assert all(size <= 64 for _, _, size in world.log)
    assert not world.rejected


@pytest.mark.slow
@pytest.mark.parametrize("clients", [1, 3, 16, 64, *long(2, 4, 8, 24, 32, 48)])
@pytest.mark.parametrize("seconds", [with_knee, half_fixed, linear])
def test_clients_that_come_back_are_never_worse_off(clients: int, seconds: Seconds) -> None:
    adaptive = World(clients=clients, seconds=seconds).run(4.0)
    greedy = World("greedy", clients=clients, seconds=seconds).run(4.0)
    # One more batch at the end, which holds all of them, is chance.
    assert adaptive.answered + clients >= GREEDY_IS_AS_GOOD * greedy.answered


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *long(1, 2)])
def test_returning_clients_are_served_a_quarter_faster(seed: int) -> None:
    """32 of them, whom greedy divides into one and 31."""
    adaptive = World(clients=32, seed=seed).run(4.0)
    greedy = World("greedy", clients=32, seed=seed).run(4.0)
    assert adaptive.answered >= 1.25 * greedy.answered


@pytest.mark.slow
@pytest.mark.parametrize("rate", [50, 500, 2000, 3500])
@pytest.mark.parametrize("seed", [0, *long(1)])
def test_arrivals_that_depend_on_nothing_are_hardly_held(rate: float, seed: int) -> None:
    adaptive = World(rate=rate, seed=seed).run(8.0)
    greedy = World("greedy", rate=rate, seed=seed).run(8.0)
    assert adaptive.share(Release.HOLD) < 0.05
    assert adaptive.latency / adaptive.answered <= 1.01 * greedy.latency / greedy.answered


@pytest.mark.parametrize(("clients", "workers"), [(1, 1), (1, 2), (2, 2), (3, 4)])
def test_request_with_a_worker_of_its_own_leaves(clients: int, workers: int) -> None:
    world = World(clients=clients, workers=workers).run(2.0)
    assert world.share(Release.IDLE) == 1.0


def test_useless_decisions_are_followed_by_a_pause() -> None:
    """Clients whose pauses are long and irregular."""
    world = World(clients=6, pause=lambda random: random.expovariate(1 / 0.05), seconds=linear)
    policy = world.policy

    def is_resting() -> bool:
        return not policy.learns

    while not is_resting():
        world.run(0.001)
    assert len(world.log) >= PATIENCE
    batches = len(world.log)
    while is_resting():
        world.run(0.001)
    assert len(world.log) - batches >= REST - 1  # one was running


def test_a_drain_ends_the_hold() -> None:
    world = held(World(clients=8))
    world.scheduler.begin_drain()
    (batch,) = poll_batches(world.scheduler, world.now)
    assert batch.release is Release.DRAIN


def held(world: World) -> World:
    """Run until a batch is being held."""
    world.run(0.5)
    while not world.is_holding:
        world.run(0.0001)
    return world


def test_a_deadline_ends_the_hold() -> None:
    """Its batch takes its time too."""
    world = held(World(clients=8))
    # In time if it goes now, by a hair.
    high = world.scheduler._times.by_size.high(world.scheduler.queue_size + 1)
    request = make_request("input", world.now + 1.0005 * high)
    request.target = inf  # the door asks for more than a hair
    assert world.scheduler.submit(world.now, [request]) == []
    (batch,) = poll_batches(world.scheduler, world.now)
    assert batch.release is Release.HOLD


def test_a_hold_whose_requests_have_gone_is_forgotten() -> None:
    world = held(World(clients=8))
    scheduler = world.scheduler
    for request in list(scheduler._queue):
        assert world.is_holding
        scheduler.cancel(request)
    # Before the next poll, which comes no sooner than the hold would have ended.
    assert not world.is_holding


def test_a_hold_without_a_free_worker_is_forgotten() -> None:
    world = held(World(clients=8))
    world.scheduler.worker_lost(0)
    assert world.scheduler.poll(world.now)[0] == []
    assert not world.is_holding


@pytest.mark.slow
@pytest.mark.parametrize("clients", [2, 8, 32])
@pytest.mark.parametrize("lateness", [0.0001, 0.001, 0.003])
def test_late_timer_costs_at_most_its_gain(clients: int, lateness: float) -> None:
    adaptive = World(clients=clients, lateness=lateness, pause=exponential).run(4.0)
    greedy = World("greedy", clients=clients, pause=exponential).run(4.0)
    assert adaptive.answered >= GREEDY_IS_AS_GOOD * greedy.answered


def exponential(random: Random) -> float:
    return random.expovariate(1 / 0.0006)


def test_lateness_suspends_holds() -> None:
    """Without holds nobody sees any more that timers are punctual again."""
    world = World(clients=2, pause=exponential).run(1.0)
    assert isinstance(world.policy, AdaptivePolicy)
    world.policy._lateness = MOST_LATENESS
    start = world.now
    world.run(0.01)
    assert world.run(0.05).share(Release.HOLD, since=start + 0.01) == 0.0
    end = world.run(5.0).now
    assert world.run(1.0).share(Release.HOLD, since=end) > 0.9


@pytest.mark.slow
def test_a_blocked_loop_leaves_no_trace() -> None:
    world, undisturbed = World(clients=8), World(clients=8)
    for _ in range(20):
        world.run(0.1).stall(10.0)
    end, before = world.now, world.answered
    undisturbed.run(4.0)
    world.run(4.0)
    assert world.share(Release.HOLD, since=end) > 0.9
    assert world.answered - before >= 0.97 * undisturbed.answered


# What is learned from.


def observed(policy: Policy | str = "adaptive") -> tuple[World, list[tuple[float, float]]]:
    world = World(policy)
    seen: list[tuple[float, float]] = []
    world.scheduler._times.by_size.observe = (  # type: ignore[method-assign]
        lambda size, seconds: seen.append((size, seconds))
    )
    return world, seen


def test_first_batch_of_a_worker_is_ignored() -> None:
    world, seen = observed()
    scheduler = world.scheduler
    for moment in (1.0, 2.0, 3.0):
        submit(scheduler, moment, count=2)
        (batch,) = poll_batches(scheduler, moment)
        scheduler.batch_done(moment + 0.5, 0, batch.id)
    assert seen == [(2, 0.5), (2, 0.5)]
    scheduler.worker_lost(0)
    scheduler.worker_ready(4.0, 0)
    submit(scheduler, 5.0)
    (batch,) = poll_batches(scheduler, 5.0)
    scheduler.batch_done(5.5, 0, batch.id)
    assert len(seen) == 2


def test_piped_batch_starts_when_worker_is_free() -> None:
    world, seen = observed()
    scheduler = world.scheduler
    submit(scheduler, 0.0, count=128)
    first, second = poll_batches(scheduler, 0.0)
    scheduler.batch_done(3.0, 0, first.id)
    scheduler.batch_done(4.0, 0, second.id)
    assert seen == [(64, 1.0)]


def test_failures_and_second_tries_are_no_examples() -> None:
    world, seen = observed()
    scheduler = world.scheduler
    submit(scheduler, 0.0)
    (batch,) = poll_batches(scheduler, 0.0)
    scheduler.batch_done(0.5, 0, batch.id)
    submit(scheduler, 1.0, count=2)
    (batch,) = poll_batches(scheduler, 1.0)
    assert scheduler.batch_done(1.5, 0, batch.id, has_raised=True) is batch
    assert scheduler.batch_raised(1.5, batch, out_of_memory=False, is_fatal=False) == []
    for _ in range(2):
        (retry,) = poll_batches(scheduler, 2.0)
        assert retry.release is Release.RETRY
        scheduler.batch_done(2.5, 0, retry.id)
    assert seen == []


def test_a_warm_up_is_an_example() -> None:
    world = World()
    service = world.scheduler._times.by_size
    world.scheduler.worker_ready(0.0, 1, [(1, 0.5), (64, 4.0)])
    assert (service.median(1), service.median(64)) == pytest.approx((0.5, 4.0), rel=0.1)
