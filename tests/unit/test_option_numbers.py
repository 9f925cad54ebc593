"""Every number that an option accepts works: random settings and costs, in virtual time."""

import math
import random
from typing import Any

import pytest

from fast_batcher._core.policy import make_policy
from fast_batcher._core.prediction import Method
from fast_batcher._core.values import Dispatch, Fail, Request
from fast_batcher._opening.kinds import BatchKind
from fast_batcher._opening.outcomes import CostEvaluator
from fast_batcher.errors import ConfigurationError
from fast_batcher.settings import OPTIONS, Option, Settings

# What a program could give, from the sensible to the absurd.
EXTREMES = [0, 1, -1, 5e-324, 1e-300, 1e-15, 1e-9, 0.5, 1.5, 1e9, 1e15, 1e24, 1e300, 1.7e308]
EXTREMES += [10**400, math.inf, -math.inf, math.nan, 2**20, 2**31, 2**63, 2**64]


def random_number(rng: random.Random) -> float:
    """Return a number of any magnitude."""
    if rng.random() < 0.3:
        return rng.choice(EXTREMES)
    number = 10 ** rng.uniform(-20, 20)
    return int(number) if rng.random() < 0.5 else number


def random_values(rng: random.Random, option: Option) -> Any:
    """Return a value that the option accepts."""
    while True:
        value = random_number(rng)
        try:
            option.range.check(option.name, value)
        except ConfigurationError:
            continue
        return value


def random_settings(rng: random.Random) -> Settings:
    """Return settings with random numbers of the scheduler."""
    names = ["max_batch_size", "max_delay", "max_latency", "max_queue_size", "timeout"]
    names += ["infer_timeout", "max_batch_cost", "max_request_cost"]
    chosen: dict[str, Any] = {
        name: random_values(rng, OPTIONS[name]) for name in names if rng.random() < 0.6
    }
    policy: Any = rng.choice(["adaptive", "greedy", "fixed"])
    if policy == "fixed":
        chosen.setdefault("max_delay", 0.01)
    if policy == "greedy":
        chosen.pop("max_delay", None)
    return Settings(cost=float, cost_is_padded=rng.random() < 0.5, policy=policy, **chosen)


@pytest.mark.parametrize("seed", range(300))
def test_no_accepted_number_is_an_internal_error(seed: int) -> None:
    rng = random.Random(seed)
    settings = random_settings(rng)
    size = settings.batch_limit
    methods = [Method("infer", None, size)]
    policy = make_policy(settings.policy, settings.max_delay)
    scheduler = BatchKind.make_scheduler(settings, methods, policy)
    evaluator = CostEvaluator(settings, "model", methods)
    scheduler.worker_ready(0.0, 1)
    now = 0.0
    for _ in range(60):
        arrivals = []
        for _ in range(rng.randint(0, 5)):
            request = Request(random_number(rng), None)
            if evaluator.evaluate(request) is None:
                arrivals.append(request)
        rejected = scheduler.submit(now, arrivals)
        assert all(isinstance(rejection.to_error(), Exception) for _, rejection in rejected)
        actions, wake_at = scheduler.poll(now)
        assert not any(isinstance(action, Fail) for action in actions), actions
        assert wake_at is None or wake_at >= 0
        for action in actions:
            if isinstance(action, Dispatch):
                now += 10 ** rng.uniform(-6, 3)
                assert scheduler.batch_done(now, 1, action.batch.id) is action.batch
        backlog = scheduler.seconds_of_backlog(now)
        assert backlog is None or backlog >= 0
        assert 0 <= scheduler.figures["padding"] <= 1
        now += 10 ** rng.uniform(-6, 3)
