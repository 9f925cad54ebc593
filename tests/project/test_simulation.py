"""The simulator against results that are known without it: formulas, brute force, exact chains."""

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from math import inf, isclose, isnan, nan
from pathlib import Path

import numpy as np
import pytest
from paths import ROOT
from waits import LIMIT

from benchmarks.simulation.batchers import Ours, Planned
from benchmarks.simulation.bounds import Estimate
from benchmarks.simulation.cells import (
    BOUND,
    OPTIMUM,
    OURS,
    RUNS,
    Cell,
    bursts,
    plan,
    run_seeds,
)
from benchmarks.simulation.engine import Batcher, Decision, Record, simulate
from benchmarks.simulation.loads import (
    ClosedLoop,
    OpenLoop,
    bursty,
    log_normal_costs,
    poisson,
    short_pause,
)
from benchmarks.simulation.models import MODELS, Model, Worker
from benchmarks.simulation.optimum import Optimum, most_in_time, optimum
from benchmarks.simulation.report import Result, tables, verdicts

# Takes 10 ms for any batch; and one request at a time.
FLAT = Model("flat", 10e-3, 0.0, 4, target=0.1)
SINGLE = Model("single", 10e-3, 0.0, 1, target=0.1)
SEEDS = range(10)


def latencies(batcher: Batcher, moments: Sequence[float]) -> list[float]:
    """Of each request, in milliseconds to three digits."""
    record = simulate(batcher, OpenLoop(moments), Worker(FLAT), inf)
    pairs = zip(record.arrivals, record.answers, strict=True)
    return [round(1e3 * (answer - arrival), 3) for arrival, answer in pairs]


def mean_seconds(batcher: Batcher, model: Model, load: float, seed: int) -> float:
    seconds = 10_000 / (load * model.capacity)
    moments = poisson(load * model.capacity, seconds, seed)
    record = simulate(batcher, OpenLoop(moments), Worker(model), inf)
    return record.figures(0.1 * seconds, seconds)["mean_ms"] / 1e3


# Known results.


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.3, 0.7])
def test_one_at_a_time_is_the_formula_of_pollaczek_and_khinchine(load: float) -> None:
    service = SINGLE.seconds(1)
    exact = service + load * service / (2 * (1 - load))
    found = Estimate.of([mean_seconds(Ours("greedy", 1), SINGLE, load, s) for s in SEEDS])
    assert found is not None
    assert found.low < exact < found.high
    # The interval is narrow enough that a service time more or less would be seen.
    assert found.high - found.low < 0.15 * service


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_greedy_and_the_optimum_are_what_their_chains_say(name: str) -> None:
    """Each in virtual time, and the exact mean of the policy that it follows."""
    model, load = MODELS[name], 0.7
    solved = optimum(model, load)
    all_that_wait = np.minimum(np.arange(len(solved.sizes)), model.max_batch_size)
    greedy, _ = solved.evaluate(all_that_wait)
    assert solved.mean_seconds <= greedy * (1 + 1e-9)
    makers: list[tuple[float, Callable[[], Batcher]]] = [
        (greedy, lambda: Ours("greedy", model.max_batch_size)),
        (solved.mean_seconds, lambda: Planned(solved.sizes)),
    ]
    for exact, make in makers:
        found = Estimate.of([mean_seconds(make(), model, load, seed) for seed in SEEDS])
        assert found is not None
        assert found.low < exact < found.high
        assert found.high - found.low < 0.1 * exact


@pytest.mark.parametrize("rate", [5.0, 60.0, 250.0])
@pytest.mark.parametrize(
    "model",
    [
        Model("linear", 1e-3, 4e-3, 2, target=1.0),
        Model("fixed", 10e-3, 0.1e-3, 2, target=1.0),
        Model("knee", 4e-3, 0.1e-3, 3, target=1.0, knee=2, knee_each=5e-3),
    ],
    ids=lambda model: model.name,
)
def test_policy_iteration_finds_what_brute_force_finds(model: Model, rate: float) -> None:
    states = 6
    solved = Optimum(model, rate, states)
    choices: list[Sequence[int]] = [
        range(0 if queue < states - 1 else 1, min(queue, model.max_batch_size) + 1)
        for queue in range(states)
    ]
    best = min(solved.evaluate(np.array(sizes))[0] for sizes in itertools.product(*choices))
    assert isclose(solved.mean_seconds, best, rel_tol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_longer_queue_in_the_chain_changes_nothing(name: str) -> None:
    model = MODELS[name]
    solved = optimum(model, 0.98)
    longer = Optimum(model, 0.98 * model.capacity, len(solved.sizes) * 3 // 2)
    assert isclose(solved.mean_seconds, longer.mean_seconds, rel_tol=1e-6)


def test_no_more_are_in_time_than_fit_between_arrival_and_target() -> None:
    # Four take 10 ms together, so 40 fit into 100 ms.
    assert most_in_time(FLAT, [1.0] * 40) == 1.0
    assert most_in_time(FLAT, [1.0] * 50) == 0.8
    assert most_in_time(FLAT, [*[1.0] * 50, *[1.05] * 30]) == 60 / 80
    assert most_in_time(FLAT, [*[1.0] * 50, *[2.0] * 50]) == 0.8


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_no_policy_exceeds_the_bound(name: str) -> None:
    for seed in range(2):
        found = bursts(Cell("bursts", name, 0.6), seed, 0.1)
        assert max(found, key=lambda system: found[system]["in_time"]) == BOUND


# The engine.


class Waits:
    """Sends one request per batch, and only when it is asked at a moment that it has named."""

    def __init__(self, delay: float) -> None:
        self._delay = delay
        self._queue: list[int] = []
        self._wake_at = inf

    def arrive(self, now: float, requests: list[int]) -> None:
        self._queue += requests
        self._wake_at = now + self._delay

    def done(self, now: float, batch: Sequence[int]) -> Sequence[int]:
        return batch

    def poll(self, now: float) -> Decision:
        if now < self._wake_at:
            return Decision([], [], self._wake_at)
        queue, self._queue, self._wake_at = self._queue, [], inf
        return Decision([([request], [request]) for request in queue[:2]], queue[2:], inf)


def test_batches_in_the_pipe_run_one_after_the_other_and_losses_are_noted() -> None:
    record = simulate(Waits(0.5), OpenLoop([1.0, 1.0, 1.0]), Worker(FLAT), inf)
    assert [round(answer, 9) for answer in record.answers[:2]] == [1.51, 1.52]
    assert isnan(record.answers[2])
    assert record.losses[2] == 1.5
    assert record.batch_sizes == [1, 1]


def test_time_ends_where_it_is_told_to() -> None:
    record = simulate(Waits(0.5), OpenLoop([1.0, 2.0]), Worker(FLAT), 1.505)
    assert record.arrivals == [1.0]
    assert isnan(record.answers[0])


def test_figures_count_the_arrivals_after_the_warm_up() -> None:
    record = Record()
    record.arrivals = [0.5, 1.0, 1.5, 2.0]
    record.answers = [0.6, 1.1, nan, 2.1]
    record.losses = [nan, nan, 1.52, nan]
    figures = record.figures(1.0, 2.0, target=0.05)
    assert (figures["requests"], figures["lost"], figures["in_time"]) == (2.0, 0.5, 0.0)
    assert isclose(figures["mean_ms"], 100.0)
    assert isclose(figures["loss_p99_ms"], 20.0)
    assert record.figures(1.0, 2.0)["in_time"] == 0.5
    assert "mean_ms" not in record.figures(5.0, 6.0)


def test_a_client_has_one_request_at_a_time() -> None:
    load = ClosedLoop(3, lambda random: random.uniform(0.001, 0.002), 1)
    record = simulate(Ours("greedy", 4), load, Worker(FLAT), 10.0)
    # 10 ms and 1.5 ms for each, and more where it waits for a batch without it.
    assert 10.0 / 0.0225 < len(record.arrivals) / 3 < 10.0 / 0.011
    events = sorted([(a, 1) for a in record.arrivals] + [(a, -1) for a in record.answers])
    assert max(itertools.accumulate(change for _, change in events)) <= 3


def test_slow_batches_are_slow() -> None:
    worker = Worker(FLAT, slow_first=(1, 3.0), stalls=[1.0, 1.1], stall_factor=2.0)
    assert [round(worker.seconds(now, [0]), 6) for now in (0.0, 0.1)] == [0.03, 0.01]
    # Two stalls that fell into idle time are one.
    assert [round(worker.seconds(now, [0]), 6) for now in (1.2, 1.3)] == [0.02, 0.01]


# Loads.


def test_loads_come_from_their_seeds_alone() -> None:
    assert poisson(100.0, 10.0, 1) == poisson(100.0, 10.0, 1) != poisson(100.0, 10.0, 2)
    assert bursty(100.0, 10.0, 1) == bursty(100.0, 10.0, 1) != bursty(100.0, 10.0, 2)
    assert log_normal_costs(9, 1.0, 1) == log_normal_costs(9, 1.0, 1)


def test_loads_are_as_heavy_as_they_say() -> None:
    loads = (
        (10_000, [len(poisson(100.0, 100.0, seed)) for seed in SEEDS]),
        (0.6 * 40_000, [len(bursty(100.0, 400.0, seed)) for seed in SEEDS]),
    )
    for expected, counts in loads:
        found = Estimate.of(counts)
        assert found is not None
        assert found.low < expected < found.high
    assert 0.9 < np.mean(log_normal_costs(100_000, 1.0, 0)) < 1.1


# Our policies, where they differ.


def test_ours_takes_a_lone_request_at_once_and_then_all_that_wait() -> None:
    # The second and third come while the first one runs.
    assert latencies(Ours("greedy", 4), [1.0, 1.002, 1.003]) == [10.0, 18.0, 17.0]


def test_ours_with_a_window_waits_for_it() -> None:
    assert latencies(Ours("fixed", 4, max_delay=5e-3), [1.0, 1.002]) == [15.0, 13.0]


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
def test_lengths_are_padded_much_less_than_in_order_whatever_the_budget(fixed: int) -> None:
    """Texts of 40 tokens in the mean and 256 at most; a batch costs `fixed` tokens by itself."""
    model = Model("tokens", fixed * 1e-4, 1e-4, 32, target=1.0)
    costs = [min(256.0, 40 * cost) for cost in log_normal_costs(20_000, 1.0, 1)]

    def answers_and_padding(batcher: Batcher) -> tuple[int, float]:
        worker = PaddedWorker(model, costs)
        record = simulate(batcher, ClosedLoop(128, short_pause, 1), worker, 30.0)
        answers = np.array(record.answers)
        return int((~np.isnan(answers)).sum()), worker.computed / worker.real

    answers, padding = answers_and_padding(Ours("adaptive", 32))
    for budget in (512.0, 2048.0, 4096.0, 8192.0, inf):
        batcher = Ours("adaptive", 32, costs=costs, max_batch_cost=budget)
        more_answers, less_padding = answers_and_padding(batcher)
        assert less_padding < 0.5 * padding, budget
        assert more_answers > 1.5 * answers, budget


# Cells and bars.


@pytest.mark.parametrize("part", RUNS)
def test_every_part_has_a_table_and_its_bars(part: str) -> None:
    cells = [one for one in plan([part]) if one.model == "mid"]
    cell = cells[-1]
    outcomes = run_seeds((cell, 2, 0.02))
    assert run_seeds((cell, 1, 0.02)) == outcomes[:1]
    result = Result.of(cell, outcomes)
    assert OURS in tables([result])
    found = verdicts([result], part)
    assert found
    assert all(v.measured is not None for v in found if "mid" in v.claim)


@pytest.mark.parametrize(
    ("ours", "holds"),
    [
        ([1.001, 1.002, 1.001], [True, True]),
        ([1.02, 1.021, 1.02], [False, False]),
        # The mean is below its bar; its bound is not.
        ([1.0, 1.02, 1.0], [True, False]),
    ],
)
def test_a_regret_is_judged_by_its_mean_and_its_bound(ours: list[float], holds: list[bool]) -> None:
    figures: dict[str, dict[str, list[float | None]]] = {
        OURS: {"mean_ms": [*ours]},
        OPTIMUM: {"mean_ms": [1.0] * 3},
    }
    found = verdicts([Result(Cell("open-loop", "gpu", 0.5), figures)], "open-loop")
    assert [one.holds for one in found if one.claim.startswith("gpu")] == holds


def test_an_estimate_is_a_mean_and_its_bounds() -> None:
    found = Estimate.of([1.0, 3.0])
    assert found is not None
    assert (found.mean, round(found.high, 3)) == (2.0, round(2.0 + 6.314, 3))
    assert isclose(found.mean - found.low, found.high - found.mean)
    assert Estimate.of([]) is None
    assert Estimate.of([1.0]) == Estimate(1.0, -inf, inf)


@pytest.mark.slow
def test_the_command_line_stores_a_table_and_its_numbers(tmp_path: Path) -> None:
    path = tmp_path / "simulation-overload-quick.json"
    command = [sys.executable, "-m", "benchmarks.simulation", "--quick", "--scale", "0.01"]
    command += ["--parts", "overload", "--folder", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, done.stderr
    stored = json.loads(path.read_text())
    assert len(stored["measurements"]) == len(plan(["overload"]))
    assert "% of the capacity" in path.with_suffix(".txt").read_text()
