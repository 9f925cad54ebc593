"""Each policy by itself: the queue and the moment in, the decision out."""

from math import inf

import pytest

from fast_batcher._core.adaptive import AdaptivePolicy, make_policy
from fast_batcher._core.messages import Release, Request
from fast_batcher._core.policy import FixedPolicy, GreedyPolicy, Load, Policy
from fast_batcher._core.ranked_queue import RankedQueue
from fast_batcher._core.service_model import ServiceModel

ARRIVAL = 10.0
LOAD = Load(waiting=1, running=0, workers=1, max_batch_size=4, service=ServiceModel())


def queue_of(*deadlines: float, arrival: float = ARRIVAL) -> RankedQueue:
    """Requests that have arrived one second after each other, each with this deadline."""
    queue = RankedQueue()
    for number, deadline in enumerate(deadlines):
        request = Request("input", caller=None, deadline=deadline)
        request.id = number
        request.arrival = arrival + number
        queue.extend([request])
    return queue


def test_greedy_sends_what_is_there() -> None:
    assert GreedyPolicy().decide(ARRIVAL, queue_of(inf), LOAD) is Release.IDLE
    assert GreedyPolicy().decide(ARRIVAL + 100, queue_of(inf, inf), LOAD) is Release.IDLE


def test_fixed_holds_until_the_end_of_the_window_of_the_oldest() -> None:
    queue = queue_of(inf, inf)
    assert FixedPolicy(max_delay=5.0).decide(ARRIVAL + 1.0, queue, LOAD) == ARRIVAL + 5.0
    assert FixedPolicy(max_delay=5.0).decide(ARRIVAL + 4.999, queue, LOAD) == ARRIVAL + 5.0


@pytest.mark.parametrize("late", [0.0, 0.001, 100.0])
def test_fixed_sends_from_the_end_of_the_window_on(late: float) -> None:
    assert FixedPolicy(5.0).decide(ARRIVAL + 5.0 + late, queue_of(inf, inf), LOAD) is Release.WINDOW


def test_fixed_does_not_wait_beyond_a_deadline() -> None:
    """An answer that comes after the deadline helps nobody, so the request goes at once."""
    assert FixedPolicy(5.0).decide(ARRIVAL, queue_of(ARRIVAL + 4.9), LOAD) is Release.DEADLINE


def test_fixed_looks_at_every_deadline_not_only_at_the_oldest() -> None:
    assert (
        FixedPolicy(5.0).decide(ARRIVAL + 1.0, queue_of(inf, ARRIVAL + 3.0), LOAD)
        is Release.DEADLINE
    )


def test_fixed_waits_for_a_deadline_at_the_end_of_the_window() -> None:
    assert FixedPolicy(5.0).decide(ARRIVAL, queue_of(ARRIVAL + 5.0), LOAD) == ARRIVAL + 5.0


def test_fixed_without_a_delay_is_greedy() -> None:
    assert FixedPolicy(0.0).decide(ARRIVAL, queue_of(inf), LOAD) is Release.WINDOW


@pytest.mark.parametrize("policy", [GreedyPolicy(), FixedPolicy(5.0)])
def test_they_learn_nothing(policy: Policy) -> None:
    before = policy.decide(ARRIVAL, queue_of(inf), LOAD)
    policy.arrived(50.0, 1, True)
    policy.batch_done(50.0, 1, LOAD)
    policy.end_hold()
    policy.batch_skipped()
    assert policy.decide(ARRIVAL, queue_of(inf), LOAD) == before


@pytest.mark.parametrize(
    ("name", "max_delay"), [("greedy", None), ("greedy", 5.0), ("adaptive", 0.0)]
)
def test_adaptive_without_a_delay_is_greedy(name: str, max_delay: float | None) -> None:
    assert isinstance(make_policy(name, max_delay), GreedyPolicy)


@pytest.mark.parametrize("max_delay", [None, 5.0])
def test_adaptive_does_not_hold_without_evidence(max_delay: float | None) -> None:
    assert isinstance(make_policy("adaptive", max_delay), AdaptivePolicy)
    assert make_policy("adaptive", max_delay).decide(ARRIVAL, queue_of(inf), LOAD) is Release.IDLE


def test_fixed_is_made_with_its_delay() -> None:
    assert make_policy("fixed", 5.0).decide(ARRIVAL, queue_of(inf), LOAD) == ARRIVAL + 5.0


def test_fixed_without_a_bound_waits_for_a_full_batch() -> None:
    assert make_policy("fixed", None).decide(1e9, queue_of(inf), LOAD) == inf
