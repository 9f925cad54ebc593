"""The simulator beside real processes: what it is given, and what is compared."""

import asyncio
from dataclasses import replace

import pytest

from benchmarks import differential
from benchmarks.closed_loop import SCENARIOS as CLOSED
from benchmarks.differential import Cell, WorkerBehindPipes, interpolate, simulated
from benchmarks.harness import SEED
from benchmarks.models import SIZED
from benchmarks.report import Measurement
from benchmarks.scenarios import SCENARIOS, Load
from benchmarks.systems import SYSTEMS
from benchmarks.systems.at_once import opened

LOOP = "uvloop"
# Milliseconds beyond the model's time that batches of 1, 16 and 64 have taken.
WAYS = {1: 0.2, 16: 0.35, 64: 0.83}
CELL = Cell("Gpu", "ours", clients=8)


def measured_apart(model: str = "Gpu") -> list[Measurement]:
    found = []
    for size, way in WAYS.items():
        figures = {"requests_per_second": size / (SIZED[model].seconds(size) + way / 1e3)}
        label = f"{model}, batches of {size}"
        found.append(Measurement(differential.NONE_AHEAD, label, LOOP, 4 * size, 0, figures, {}))
    for scenario, callers in (("closed_loop", 1), ("open_loop", 0)):
        figures = {"p50_ms": 0.1, "requests_per_second": 1000.0}
        found.append(Measurement(differential.AT_ONCE, scenario, LOOP, callers, 0, figures, {}))
    return found


def test_between_the_sizes_that_were_measured_are_lines() -> None:
    assert interpolate([(1, 10.0), (3, 14.0), (4, 20.0)], 4) == [10.0, 10.0, 12.0, 14.0, 20.0]


def test_the_way_is_what_a_batch_takes_beyond_the_model() -> None:
    transport = differential.transport_of(measured_apart(), "Gpu", LOOP)
    assert transport is not None
    for size, way in WAYS.items():
        assert transport[size] == pytest.approx(way / 1e3)
    assert transport[40] == pytest.approx((0.35 + 0.83) / 2 / 1e3)
    # One size could not be measured.
    assert differential.transport_of(measured_apart()[1:], "Gpu", LOOP) is None
    assert differential.lateness_of(measured_apart(), CELL, LOOP) == pytest.approx(0.1e-3)
    assert differential.lateness_of(measured_apart()[:3], CELL, LOOP) is None


def test_a_worker_behind_pipes_takes_the_way_as_well() -> None:
    worker = WorkerBehindPipes(SIZED["Gpu"], [0.0, 0.001, 0.002])
    assert worker.seconds(0.0, [7]) == pytest.approx(SIZED["Gpu"].seconds(1) + 0.001)
    assert worker.seconds(0.0, [7, 8]) == pytest.approx(SIZED["Gpu"].seconds(2) + 0.002)


def test_a_lone_client_meets_the_model_the_way_and_its_own_lateness() -> None:
    cell = Cell("Gpu", "ours greedy", clients=1)
    figures = simulated(cell, cell.load(1.0), [0.0005] * 65, lateness=0.0002)
    assert figures["mean_ms"] == pytest.approx(1e3 * SIZED["Gpu"].seconds(1) + 0.5 + 0.2)
    assert figures["batch_size"] == 1


def test_a_quiet_open_loop_meets_little_else_and_a_busy_one_waits() -> None:
    quiet, busy = (Cell("Mid", "ours", share=share) for share in (0.01, 0.9))
    none = [0.0] * 33
    alone = simulated(quiet, quiet.load(20.0), none, lateness=0.001)["mean_ms"]
    assert alone == pytest.approx(1e3 * SIZED["Mid"].seconds(1) + 1, rel=0.1)
    assert simulated(busy, busy.load(5.0), none, lateness=0.0)["mean_ms"] > 2 * alone


def test_every_cell_can_be_measured_and_is_simulated_with_the_same_seed() -> None:
    for cell in differential.CELLS:
        assert cell.scenario in SCENARIOS | CLOSED
        assert cell.system in SYSTEMS
        load = cell.load(1.0)
        assert (load.callers > 0) != (load.rate > 0)
    cells = [CELL, Cell("Mid", "ours", share=0.3)]
    (found,) = differential.simulate_all(measured_apart(), cells, LOOP, 3, seconds=0.5)
    assert (found.system, found.scenario, found.repetition) == ("ours, simulated", CELL.label, 3)
    transport = differential.transport_of(measured_apart(), "Gpu", LOOP)
    assert transport is not None
    load = replace(CELL.load(0.5), seed=SEED + 3)
    assert found.figures == simulated(CELL, load, transport, 0.1e-3)


@pytest.mark.parametrize(
    ("real", "holds"), [(10.9, True), (9.1, True), (11.1, False), (8.9, False)]
)
def test_a_difference_either_way_is_one(real: float, holds: bool) -> None:
    runs = [
        Measurement(system, CELL.label, LOOP, 8, 0, {"mean_ms": mean, "batch_size": 4.0}, {})
        for system, mean in (("ours", real), ("ours, simulated", 10.0))
    ]
    latency, size = differential.verdicts(runs, [CELL], LOOP)
    assert (latency.holds, size.holds) == (holds, True)
    assert f"{real / 10:.3g}" in differential.text_of(runs, [CELL], [LOOP])


def test_an_open_loop_of_a_sized_model_tells_its_batches() -> None:
    async def measure() -> dict[str, float]:
        load = Load("Gpu", 64, 0, 0.3, rate=500.0)
        async with opened(load) as process:
            return await SCENARIOS["open_loop"](process, load)

    figures = asyncio.run(measure())
    assert figures["batch_size"] == 1
    assert figures["p50_ms"] <= figures["p99_ms"]
    assert figures["mean_ms"] > 0
