"""The simulator against results that are known without it: formulas, brute force, exact chains."""

from collections.abc import Callable, Sequence
from math import inf

import numpy as np
import pytest

from benchmarks.simulation.batchers import Ours, Planned
from benchmarks.simulation.bounds import Estimate
from benchmarks.simulation.cells import (
    ALONE,
    FIRST_SEED,
    METHOD_LOADS,
    OPTIMUM,
    OURS,
    WHOLE,
    Cell,
    methods,
    stairs,
)
from benchmarks.simulation.figures import figures_of
from benchmarks.simulation.loads import RARE, ClosedLoop, log_normal_costs, short_pause
from benchmarks.simulation.models import MODELS, STAIRS, Model, Worker
from benchmarks.simulation.optimum import optimum
from fast_batcher._cli.simulation import Arrivals, poisson, simulate
from fast_batcher._core.scheduler import Scheduler

# Takes 10 ms for any batch; and one request at a time.
FLAT = Model("flat", 10e-3, 0.0, 4, target=0.1)
SINGLE = Model("single", 10e-3, 0.0, 1, target=0.1)
SEEDS = range(10)


def latencies(batcher: Scheduler, moments: Sequence[float]) -> list[float]:
    """Of each request, in milliseconds to three digits."""
    record = simulate(batcher, Arrivals(moments), Worker(FLAT).seconds)
    pairs = zip(record.arrivals, record.answers, strict=True)
    return [round(1e3 * (answer - arrival), 3) for arrival, answer in pairs]


def mean_seconds(batcher: Scheduler, model: Model, load: float, seed: int) -> float:
    seconds = 10_000 / (load * model.capacity)
    moments = poisson(load * model.capacity, seconds, seed)
    record = simulate(batcher, Arrivals(moments), Worker(model).seconds)
    return figures_of(record, 0.1 * seconds, seconds)["mean_ms"] / 1e3


# Known results.


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.3, 0.7])
def test_batches_of_one_match_pollaczek_khinchine(load: float) -> None:
    service = SINGLE.seconds(1)
    exact = service + load * service / (2 * (1 - load))
    found = Estimate.of([mean_seconds(Ours("greedy", 1), SINGLE, load, s) for s in SEEDS])
    assert found is not None
    assert found.low < exact < found.high
    # The interval is narrow enough that a service time more or less would be seen.
    assert found.high - found.low < 0.15 * service


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_greedy_and_optimum_match_their_markov_chains(name: str) -> None:
    """Each in virtual time, and the exact mean of the policy that it follows."""
    model, load = MODELS[name], 0.7
    solved = optimum(model, load)
    all_that_wait = np.minimum(np.arange(len(solved.sizes)), model.max_batch_size)
    greedy, _ = solved.evaluate(all_that_wait)
    assert solved.mean_seconds <= greedy * (1 + 1e-9)
    makers: list[tuple[float, Callable[[], Scheduler]]] = [
        (greedy, lambda: Ours("greedy", model.max_batch_size)),
        (solved.mean_seconds, lambda: Planned(solved.sizes)),
    ]
    for exact, make in makers:
        found = Estimate.of([mean_seconds(make(), model, load, seed) for seed in SEEDS])
        assert found is not None
        assert found.low < exact < found.high
        assert found.high - found.low < 0.1 * exact


# Our policies, where they differ.


def test_lone_request_and_then_all_waiting_requests() -> None:
    # The second and third come while the first one runs.
    assert latencies(Ours("greedy", 4), [1.0, 1.002, 1.003]) == [10.0, 18.0, 17.0]


class PaddedWorker(Worker):
    """Counts the cost that it computes, and the part that is not padding."""

    def __init__(self, model: Model, costs: Sequence[float]) -> None:
        super().__init__(model, costs=costs)
        self._costs_of = costs
        self.real = self.computed = 0.0

    def seconds(self, now: float, requests: Sequence[int]) -> float:
        costs = [self._costs_of[request] for request in requests]
        self.real += sum(costs)
        self.computed += len(costs) * max(costs)
        return super().seconds(now, requests)


@pytest.mark.slow
@pytest.mark.parametrize("fixed", [0, 40, 1000])
def test_cost_reduces_padding_at_every_budget(fixed: int) -> None:
    """Texts of 40 tokens in the mean and 256 at most; a batch costs `fixed` tokens by itself."""
    model = Model("tokens", fixed * 1e-4, 1e-4, 32, target=1.0)
    costs = [min(256.0, 40 * cost) for cost in log_normal_costs(20_000, 1.0, 1)]

    def answers_and_padding(batcher: Scheduler) -> tuple[int, float]:
        worker = PaddedWorker(model, costs)
        record = simulate(batcher, ClosedLoop(128, short_pause, 1), worker.seconds, 10.0)
        answers = np.array(record.answers)
        return int(np.isfinite(answers).sum()), worker.computed / worker.real

    answers, padding = answers_and_padding(Ours("adaptive", 32))
    for budget in (512.0, 2048.0, 4096.0, 8192.0, inf):
        batcher = Ours("adaptive", 32, costs=costs, max_batch_cost=budget)
        more_answers, less_padding = answers_and_padding(batcher)
        assert less_padding < 0.5 * padding, budget
        assert more_answers > 1.5 * answers, budget


@pytest.mark.slow
@pytest.mark.parametrize("load", METHOD_LOADS)
def test_rare_method_has_bounded_p99(load: float) -> None:
    """On the model whose batches cost little by themselves, so that only the order decides."""
    found = methods(Cell("methods", "cpu", load), FIRST_SEED, scale=0.3)
    assert found[RARE]["lost"] == 0
    assert found[RARE]["p99_ms"] <= 2 * found[ALONE]["p99_ms"]


@pytest.mark.slow
@pytest.mark.parametrize("shape", STAIRS)
def test_allowed_sizes_are_used_at_saturation(shape: str) -> None:
    found = stairs(Cell("stairs", shape, 1.2), FIRST_SEED, scale=0.3)
    rates = {name: figures["answered_per_second"] for name, figures in found.items()}
    assert rates[OURS] >= 0.97 * rates[OPTIMUM]
    assert rates[OURS] >= 0.99 * rates[WHOLE]


@pytest.mark.slow
def test_hold_does_not_wait_for_a_step_that_chance_may_exceed() -> None:
    """A staircase that is read at mean numbers of arrivals made latencies a third longer."""
    found = stairs(Cell("stairs", "cliff", 0.5), FIRST_SEED, scale=0.3)
    assert found[OURS]["p99_ms"] <= 1.05 * found[OPTIMUM]["p99_ms"]
