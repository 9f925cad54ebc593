"""Each policy by itself: the queue and the moment in, the decision out."""

from math import inf, nan

import pytest
from schedulers import make_request

from fast_batcher._core.policy import (
    FixedPolicy,
    GreedyPolicy,
    Load,
    Policy,
    make_policy,
)
from fast_batcher._core.queue import RankedQueue
from fast_batcher._core.service_model import ServiceModel
from fast_batcher._core.values import Release
from fast_batcher.policy import LearnedTimes, QueueSummary

ARRIVAL = 10.0
LOAD = Load(waiting=1, running=0, workers=1, max_batch_size=4, service=ServiceModel())
MEASURED = LOAD._replace(service=ServiceModel())
MEASURED.service.observe(1, 0.1)


def queue_of(*deadlines: float) -> RankedQueue:
    """Requests that have arrived one second after each other, each with this deadline."""
    queue = RankedQueue()
    for number, deadline in enumerate(deadlines):
        request = make_request("input", deadline)
        request.id = number
        request.arrival = ARRIVAL + number
        queue.extend([request])
    return queue


@pytest.mark.parametrize(
    ("policy", "waited", "deadlines", "decision"),
    [
        pytest.param(GreedyPolicy(), 0.0, [inf], Release.IDLE, id="greedy"),
        pytest.param(GreedyPolicy(), 100.0, [inf, inf], Release.IDLE, id="greedy, late"),
        pytest.param(FixedPolicy(5.0), 1.0, [inf, inf], ARRIVAL + 5.0, id="window of the oldest"),
        pytest.param(FixedPolicy(5.0), 4.999, [inf], ARRIVAL + 5.0, id="just before its end"),
        pytest.param(FixedPolicy(5.0), 5.0, [inf, inf], Release.WINDOW, id="its end"),
        pytest.param(FixedPolicy(5.0), 105.0, [inf], Release.WINDOW, id="long after it"),
        pytest.param(FixedPolicy(0.0), 0.0, [inf], Release.WINDOW, id="no window"),
        # An answer that comes after the deadline helps no caller, so the request goes at once.
        pytest.param(FixedPolicy(5.0), 0.0, [ARRIVAL + 4.9], Release.DEADLINE, id="deadline"),
        pytest.param(
            FixedPolicy(5.0), 1.0, [inf, ARRIVAL + 3.0], Release.DEADLINE, id="of a later request"
        ),
        pytest.param(
            FixedPolicy(5.0), 0.0, [ARRIVAL + 5.0], ARRIVAL + 5.0, id="deadline at its end"
        ),
        pytest.param(make_policy("fixed", 5.0), 0.0, [inf], ARRIVAL + 5.0, id="made with delay"),
        pytest.param(make_policy("fixed", None), 1e9, [inf], inf, id="made without a bound"),
        pytest.param(make_policy("adaptive", None), 0.0, [inf], Release.IDLE, id="no evidence"),
        pytest.param(make_policy("adaptive", 5.0), 0.0, [inf], Release.IDLE, id="none yet"),
    ],
)
def test_policy_decisions(
    policy: Policy, waited: float, deadlines: list[float], decision: Release | float
) -> None:
    assert policy.decide(ARRIVAL + waited, queue_of(*deadlines), LOAD) == decision


class Rule:
    """Holds for these seconds, and keeps what it was asked."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.asked: list[QueueSummary] = []

    def hold(self, queue: QueueSummary, times: LearnedTimes) -> float:
        self.asked.append(queue)
        if self.seconds < 0:
            raise GeneratorExit
        return self.seconds


@pytest.mark.parametrize(
    ("seconds", "max_delay", "waited", "deadlines", "decision"),
    [
        (2.0, None, 1.0, [inf], ARRIVAL + 3.0),
        (2.0, 2.5, 1.0, [inf], ARRIVAL + 2.5),
        (2.0, 1.0, 1.0, [inf], Release.WINDOW),
        (2.0, None, 1.0, [ARRIVAL + 2.0], ARRIVAL + 1.795),
        (2.0, None, 1.0, [inf, ARRIVAL + 1.2], Release.DEADLINE),
        (inf, None, 1.0, [inf], inf),
        (0.0, None, 1.0, [inf], Release.IDLE),
        (nan, None, 1.0, [inf], Release.IDLE),
        (-1.0, None, 1.0, [inf], Release.IDLE),
    ],
)
def test_a_rule_of_the_user_decides_within_the_limits(
    seconds: float,
    max_delay: float | None,
    waited: float,
    deadlines: list[float],
    decision: Release | float,
) -> None:
    rule, errors = Rule(seconds), list[BaseException]()
    policy = make_policy(rule, max_delay, errors.append)
    assert policy.decide(ARRIVAL + waited, queue_of(*deadlines), MEASURED) == decision
    assert rule.asked == [QueueSummary(1, 4, waited, inf, 0, 1)]
    assert len(errors) == (seconds < 0)


def test_a_hold_of_a_rule_ends_even_if_the_rule_would_renew_it() -> None:
    rule = Rule(2.0)
    policy = make_policy(rule, None)
    held, other = queue_of(inf), queue_of(inf)
    assert policy.decide(ARRIVAL, held, LOAD) is Release.IDLE  # nothing was measured
    assert policy.decide(ARRIVAL, held, MEASURED) == ARRIVAL + 2.0
    assert policy.decide(ARRIVAL + 1.0, held, MEASURED) == ARRIVAL + 3.0  # an arrival
    assert policy.decide(ARRIVAL + 2.0, other, MEASURED) == ARRIVAL + 4.0  # of another worker
    assert policy.decide(ARRIVAL + 3.0, held, MEASURED) is Release.HOLD
    rule.seconds = 0.0
    assert policy.decide(ARRIVAL + 3.5, other, MEASURED) is Release.HOLD


@pytest.mark.parametrize("policy", [GreedyPolicy(), FixedPolicy(5.0)])
def test_stateless_policies_learn_nothing(policy: Policy) -> None:
    before = policy.decide(ARRIVAL, queue_of(inf), LOAD)
    policy.arrived(50.0, 1, True)
    policy.batch_done(50.0, 1, LOAD)
    policy.end_hold()
    policy.batch_skipped()
    assert policy.decide(ARRIVAL, queue_of(inf), LOAD) == before
