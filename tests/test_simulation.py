"""The simulator against results that are known without it: formulas, brute force, exact chains."""

import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from math import inf, isclose, isnan, nan
from pathlib import Path

import numpy as np
import pytest

from benchmarks.simulation import cells
from benchmarks.simulation.batchers import Ours, Planned
from benchmarks.simulation.bounds import Estimate, percent_over
from benchmarks.simulation.cells import (
    BOUND,
    LOADS,
    NO_TARGET,
    OPTIMUM,
    OURS,
    RUNS,
    SYSTEMS,
    Cell,
    make,
    plan,
    run,
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
from benchmarks.simulation.optimum import (
    Optimum,
    most_in_time,
    optimum,
    poisson_weights,
    ruled_sizes,
)
from benchmarks.simulation.peers import Aimd, Batched, Bento, FastDynamicBatcher
from benchmarks.simulation.report import Result, tables, verdicts

ROOT = Path(__file__).resolve().parent.parent
# Takes 10 ms for any batch; and one request at a time.
FLAT = Model("flat", 10e-3, 0.0, 4, target=0.1)
SINGLE = Model("single", 10e-3, 0.0, 1, target=0.1)
SEEDS = range(10)
every_system = pytest.mark.parametrize("name", [NO_TARGET, *SYSTEMS])


def latencies(batcher: Batcher, moments: Sequence[float], model: Model = FLAT) -> list[float]:
    """Of each request, in milliseconds to three digits."""
    record = simulate(batcher, OpenLoop(moments), Worker(model), inf)
    return [
        round(1e3 * (answer - arrival), 3)
        for arrival, answer in zip(record.arrivals, record.answers, strict=True)
    ]


def mean_seconds(batcher: Batcher, model: Model, load: float, seed: int) -> float:
    seconds = 10_000 / (load * model.capacity)
    moments = poisson(load * model.capacity, seconds, seed)
    record = simulate(batcher, OpenLoop(moments), Worker(model), inf)
    return record.figures(0.1 * seconds, seconds)["mean_ms"] / 1e3


# Known results.


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_one_at_a_time_is_the_formula_of_pollaczek_and_khinchine(load: float) -> None:
    service = SINGLE.seconds(1)
    exact = service + load * service / (2 * (1 - load))
    found = Estimate.of([mean_seconds(Ours("greedy", 1), SINGLE, load, s) for s in SEEDS])
    assert found is not None
    assert found.low < exact < found.high
    # The interval is narrow enough that a service time more or less would be seen.
    assert found.high - found.low < 0.15 * service


@pytest.mark.parametrize("name", MODELS)
def test_greedy_is_what_its_chain_says(name: str) -> None:
    """The scheduler in virtual time, and the exact mean of the policy that it follows."""
    model, load = MODELS[name], 0.7
    solved = optimum(model, load)
    sends_all = np.minimum(np.arange(len(solved.sizes)), model.max_batch_size)
    exact, _ = solved.evaluate(sends_all)
    batch = model.max_batch_size
    found = Estimate.of([mean_seconds(Ours("greedy", batch), model, load, s) for s in SEEDS])
    assert found is not None
    assert found.low < exact < found.high
    assert found.high - found.low < 0.1 * exact


@pytest.mark.parametrize("name", MODELS)
def test_the_optimum_is_what_its_chain_says_and_below_greedy(name: str) -> None:
    model, load = MODELS[name], 0.7
    solved = optimum(model, load)
    values = [mean_seconds(Planned(solved.sizes), model, load, seed) for seed in SEEDS]
    found = Estimate.of(values)
    assert found is not None
    assert found.low < solved.mean_seconds < found.high
    sends_all = optimum(model, load, sends_all=True)
    assert solved.mean_seconds <= sends_all.mean_seconds * (1 + 1e-9)
    greedy, _ = solved.evaluate(np.minimum(np.arange(len(solved.sizes)), model.max_batch_size))
    assert sends_all.mean_seconds <= greedy * (1 + 1e-9)


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
    whole = Optimum(model, rate, states, sends_all=True)
    choices = [
        sorted({0, min(queue, model.max_batch_size)} if queue < states - 1 else {choice[-1]})
        for queue, choice in enumerate(choices)
    ]
    best = min(solved.evaluate(np.array(sizes))[0] for sizes in itertools.product(*choices))
    assert isclose(whole.mean_seconds, best, rel_tol=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_a_longer_queue_in_the_chain_changes_nothing(name: str) -> None:
    model = MODELS[name]
    solved = optimum(model, 0.98)
    longer = Optimum(model, 0.98 * model.capacity, len(solved.sizes) * 3 // 2)
    assert isclose(solved.mean_seconds, longer.mean_seconds, rel_tol=1e-6)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("name", MODELS)
def test_the_rule_of_sizes_is_near_the_optimum(name: str, load: float) -> None:
    model = MODELS[name]
    solved = optimum(model, load)
    ruled, _ = solved.evaluate(ruled_sizes(model, load))
    assert ruled < 1.006 * solved.mean_seconds


@pytest.mark.parametrize("load", [0.5, 0.7])
def test_ours_learns_to_be_within_a_percent_of_the_optimum(load: float) -> None:
    """Where a batch costs little by itself, greedy is 3 % above it."""
    model = MODELS["cpu"]
    planned = optimum(model, load).sizes
    found = [
        mean_seconds(make(OURS, model, None), model, load, seed)
        / mean_seconds(Planned(planned), model, load, seed)
        for seed in range(3)
    ]
    assert np.mean(found) < 1.01


def test_no_more_are_in_time_than_fit_between_arrival_and_target() -> None:
    # Four take 10 ms together, so 40 fit into 100 ms.
    assert most_in_time(FLAT, [1.0] * 40) == 1.0
    assert most_in_time(FLAT, [1.0] * 50) == 0.8
    assert most_in_time(FLAT, [*[1.0] * 50, *[1.05] * 30]) == 60 / 80
    assert most_in_time(FLAT, [*[1.0] * 50, *[2.0] * 50]) == 0.8


@pytest.mark.parametrize("name", MODELS)
def test_nobody_is_beyond_the_bound(name: str) -> None:
    (cell,) = [cell for cell in plan(["bursts"]) if cell.model == name]
    for seed in range(2):
        found = run(cell, seed, 0.1)
        assert max(found, key=lambda system: found[system]["in_time"]) == BOUND


def test_poisson_weights_are_a_distribution_with_that_mean() -> None:
    weights = poisson_weights(62.7)
    assert isclose(weights.sum(), 1.0)
    assert isclose(weights @ np.arange(len(weights)), 62.7)


# The engine.


class Waits:
    """Sends one request per batch, and only when it is asked at a moment that it has named."""

    answer_tick = 0.0

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


def test_who_wants_to_be_asked_at_once_for_ever_is_named() -> None:
    class Hasty(Waits):
        def poll(self, now: float) -> Decision:
            return Decision([], [], now)

    with pytest.raises(RuntimeError, match="Hasty"):
        simulate(Hasty(0.0), OpenLoop([1.0]), Worker(FLAT), inf)


def test_figures_count_who_arrived_after_the_warm_up() -> None:
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


def test_a_batch_is_padded_to_its_longest() -> None:
    model = Model("linear", 1.0, 0.5, 8, target=1.0)
    assert Worker(model, costs=[1.0, 4.0, 2.0]).seconds(0.0, [0, 1]) == 1.0 + 0.5 * 8


# Loads.


def test_loads_come_from_their_seeds_alone() -> None:
    assert poisson(100.0, 10.0, 1) == poisson(100.0, 10.0, 1) != poisson(100.0, 10.0, 2)
    assert bursty(100.0, 10.0, 1) == bursty(100.0, 10.0, 1) != bursty(100.0, 10.0, 2)
    assert log_normal_costs(9, 1.0, 1) == log_normal_costs(9, 1.0, 1)


def test_loads_are_as_heavy_as_they_say() -> None:
    counts = [len(poisson(100.0, 100.0, seed)) for seed in SEEDS]
    found = Estimate.of(counts)
    assert found is not None
    assert found.low < 10_000 < found.high
    counts = [len(bursty(100.0, 400.0, seed)) for seed in SEEDS]
    found = Estimate.of(counts)
    assert found is not None
    assert found.low < 0.6 * 40_000 < found.high
    assert 0.9 < np.mean(log_normal_costs(100_000, 1.0, 0)) < 1.1
    moments = bursty(100.0, 100.0, 0)
    assert moments == sorted(moments)


# Systems: what their code does, in places where they differ.


@every_system
def test_all_are_answered_and_the_same_again(name: str) -> None:
    model = MODELS["mid"]
    moments = poisson(0.5 * model.capacity, 1.0, 3)

    def once() -> Record:
        return simulate(make(name, model, None), OpenLoop(moments), Worker(model), inf)

    first, second = once(), once()
    assert len(first.arrivals) == len(moments)
    assert not any(isnan(answer) for answer in first.answers)
    assert first.answers == second.answers
    assert sum(first.batch_sizes) == len(moments)
    assert max(first.batch_sizes) <= model.max_batch_size


def test_ours_takes_a_lone_request_at_once_and_then_all_that_wait() -> None:
    # The second and third come while the first one runs.
    assert latencies(Ours("greedy", 4), [1.0, 1.002, 1.003]) == [10.0, 18.0, 17.0]


def test_ours_with_a_window_waits_for_it() -> None:
    assert latencies(Ours("fixed", 4, max_delay=5e-3), [1.0, 1.002]) == [15.0, 13.0]


def test_ours_refuses_what_would_be_late() -> None:
    """Once it has seen batches; the first of a worker does not count."""
    moments = [0.0, 1.0, *[2.0] * 3]
    record = simulate(Ours("greedy", 1, target=0.025), OpenLoop(moments), Worker(FLAT), inf)
    assert [round(answer, 9) for answer in record.answers[:4]] == [0.01, 1.01, 2.01, 2.02]
    assert record.losses[4] == 2.0


def test_ours_with_costs_puts_like_lengths_together() -> None:
    """Four wait, long and short by turns, and two of a length fit into a batch."""
    costs = [1.0, 2.0, 0.5, 2.0, 0.5]
    batcher = Ours("greedy", 4, costs=costs)
    record = simulate(batcher, OpenLoop([1.0, *[1.001] * 4]), Worker(FLAT, costs=costs), inf)
    assert record.batch_sizes == [1, 2, 2]
    ended = [round(answer, 6) for answer in record.answers]
    assert ended[1] == ended[3] != ended[2] == ended[4]


class PaddedWorker(Worker):
    """Counts what it computes, and what of that is not padding."""

    def __init__(self, model: Model, costs: Sequence[float]) -> None:
        super().__init__(model, costs=costs)
        self._costs_of = costs
        self.real = self.computed = 0.0

    def seconds(self, now: float, requests: Sequence[int]) -> float:
        costs = [self._costs_of[request] for request in requests]
        self.real += sum(costs)
        self.computed += len(costs) * max(costs)
        return super().seconds(now, requests)


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


def test_fast_dynamic_batcher_opens_a_window_after_every_batch() -> None:
    batcher = FastDynamicBatcher(4, 5e-3)
    # Sees the first at 1.000, computes at 1.005; the other, which came meanwhile, is seen at 1.015
    # and waits until 1.020 with nothing else to do.
    assert latencies(batcher, [1.0, 1.006]) == [15.0, 24.0]


def test_fast_dynamic_batcher_sends_a_full_batch_when_it_looks_again() -> None:
    # The last of four comes 0.5 ms after a look; the answer is fetched at a millisecond.
    assert latencies(FastDynamicBatcher(4, 5e-3), [1.0, 1.0, 1.0, 1.0015])[0] == 12.0


def test_batched_sleeps_unless_a_full_batch_waits() -> None:
    # It sleeps 5 ms at a time from the start, so it is awake at 1.005 for what came at 1.001.
    assert latencies(Batched(4, 5e-3), [1.001]) == [14.0]
    # Five wait: four of them leave, the last one is seen one sleep after those are done.
    assert latencies(Batched(4, 5e-3), [1.001] * 5) == [14.0] * 4 + [29.0]


def test_batched_computes_several_full_batches_before_it_looks_again() -> None:
    assert latencies(Batched(2, 5e-3), [1.001] * 4, FLAT) == [14.0, 14.0, 24.0, 24.0]
    # A full batch waits when it is done, so it does not sleep.
    assert latencies(Batched(2, 5e-3), [1.001, 1.001, 1.01, 1.01])[2:] == [15.0, 15.0]


def test_aimd_grows_by_one_and_shrinks_by_a_tenth() -> None:
    wide = Model("wide", 10e-3, 0.0, 64, target=0.1)
    record = simulate(Aimd(64, 1.0), OpenLoop([0.0] * 28), Worker(wide), inf)
    assert record.batch_sizes == [1, 2, 3, 4, 5, 6, 7]
    linear = Model("linear", 0.0, 1e-3, 64, target=0.1)
    record = simulate(Aimd(64, 3.5e-3), OpenLoop([0.0] * 24), Worker(linear), inf)
    # Behind them the size is 1, 2, 3, 4, 3.6, 4.6, 4.14, 3.726.
    assert record.batch_sizes == [1, 2, 3, 4, 3, 4, 4, 3]


def test_bentoml_refuses_what_its_line_says_is_late() -> None:
    """Twelve lone calls, then a burst: the line has seen one size only, and refuses nearly all.

    This is what its own code does with these calls.
    """
    model = Model("flat", 50e-3, 0.0, 64, target=0.3)
    lone = [float(number) for number in range(12)]
    batcher = Bento(64, 0.3)
    record = simulate(batcher, OpenLoop([*lone, *[20.0] * 100]), Worker(model), inf)
    answered = [not isnan(answer) for answer in record.answers]
    assert all(answered[:12])
    assert sum(answered[12:]) < 20


def test_bentoml_looks_again_a_millisecond_later() -> None:
    # The first trains it; the other comes while the worker is busy and is seen at 1.0105.
    assert latencies(Bento(4), [1.0, 1.0005]) == [10.0, 20.0]
    assert latencies(Bento(4), [1.0, 1.0008]) == [10.0, 20.0]


# Cells and bars.


@pytest.mark.parametrize("part", RUNS)
def test_a_cell_of_each_part_says_what_is_stored(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It is not scaled.
    monkeypatch.setattr(cells, "SLOW_START_SECONDS", 3.0)
    *_, cell = [one for one in plan([part]) if one.model == "mid"]
    scale = 0.02
    outcomes = [run(cell, seed, scale) for seed in (1, 2)]
    assert outcomes[0] == run(cell, 1, scale)
    result = Result.of(cell, outcomes)
    assert Result.read(json.loads(json.dumps(result.as_data()))) == result
    assert OURS in tables([result])
    assert all(v.measured is not None for v in verdicts([result], part) if "mid" in v.claim)


def test_a_plan_has_all_systems_of_a_part_or_those_that_are_wanted() -> None:
    assert all(NO_TARGET in cell.systems for cell in plan(["bursts", "overload"]))
    assert {cell.systems for cell in plan(["open-loop"], ["greedy", "AIMD"])} == {
        ("greedy", "AIMD")
    }
    assert {cell.systems for cell in plan(["bursts"], [OURS])} == {(OURS,)}


def result_of(part: str, **figures: list[float]) -> Result:
    cell = Cell(part, "gpu", 0.5)
    stored: dict[str, list[float | None]] = {"mean_ms": [*figures.pop("ours")]}
    optimal: dict[str, list[float | None]] = {"mean_ms": [*figures.pop("optimum")]}
    return Result(cell, {OURS: stored, OPTIMUM: optimal})


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
    found = verdicts([result_of("open-loop", ours=ours, optimum=[1.0] * 3)], "open-loop")
    assert [
        verdict.holds
        for verdict in found
        if "gpu: mean latency over the optimum at" in verdict.claim
    ] == holds


def test_an_estimate_is_a_mean_and_its_bounds() -> None:
    found = Estimate.of([1.0, 3.0])
    assert found is not None
    assert (found.mean, round(found.high, 3)) == (2.0, round(2.0 + 6.314, 3))
    assert isclose(found.mean - found.low, found.high - found.mean)
    assert Estimate.of([]) is None
    assert Estimate.of([1.0]) == Estimate(1.0, -inf, inf)
    assert percent_over([1.1, 2.2], [1.0, 2.0]) is not None


@pytest.mark.slow
def test_the_command_line_stores_a_table_and_its_numbers(tmp_path: Path) -> None:
    path = tmp_path / "simulation-overload-quick.json"
    command = [sys.executable, "-m", "benchmarks.simulation", "--quick", "--scale", "0.01"]
    command += ["--parts", "overload", "--folder", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    stored = json.loads(path.read_text())
    assert len(stored["cells"]) == len(plan(["overload"]))
    assert "% of capacity" in path.with_suffix(".txt").read_text()
    assert path.with_suffix(".png").stat().st_size > 0
