"""How fast large arrays are: what is measured, and what is made of it."""

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import arrays, payload
from benchmarks.arrays import SCENARIOS, copying, last_arrival, loop_lag
from benchmarks.models import MODELS, ArrayStacked
from benchmarks.payload import HUGE, LARGE, MIDDLE, SMALL, label_of, tiny
from benchmarks.report import Measurement
from benchmarks.scenarios import SCENARIOS as USUAL_SCENARIOS
from benchmarks.scenarios import Figures, Load
from benchmarks.systems import COMPARED, SYSTEMS

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("stacked", "cpu", "callers", "lag")


def measured(
    system: str, scenario: str, case: payload.Case, model: str, repetition: int, figures: Figures
) -> Measurement:
    label = label_of(scenario, case, model)
    return Measurement(system, label, payload.LOOP, case.count, repetition, figures, {})


def judge(part: str, runs: list[Measurement], what: str) -> list[tuple[float | None, bool | None]]:
    return [
        (None if verdict.measured is None else round(verdict.measured.median, 6), verdict.holds)
        for verdict in payload.verdicts(runs, [part], payload.LOOP)
        if what in verdict.claim
    ]


def test_one_item_is_as_long_as_its_name_says() -> None:
    sizes = [
        (case.count, case.load("ArrayEcho", 1.0).payload().nbytes)
        for case in (SMALL, MIDDLE, LARGE, HUGE, tiny(SMALL))
    ]
    assert sizes == [(32, 64_000), (32, 602_112), (8, 6_000_000), (2, 100_000_000), (32, 4)]


def test_everything_that_a_bar_is_about_is_measured() -> None:
    tables = payload.plan(payload.SYSTEMS, PARTS)
    labels = [one.label for one in tables]
    assert len(set(labels)) == len(labels)
    runs = []
    for one in tables:
        assert one.scenario in SCENARIOS | USUAL_SCENARIOS
        assert one.model in MODELS
        for system in one.systems:
            figures = dict.fromkeys(one.columns.values(), 1.0)
            runs.append(measured(system, one.scenario, one.case, one.model, 0, figures))
    verdicts = payload.verdicts(runs, PARTS, payload.LOOP)
    assert len(verdicts) == 2 * 3 + 6 + 6 + 2
    assert all(verdict.measured is not None for verdict in verdicts)
    assert set(payload.SYSTEMS) == {system for one in tables for system in one.systems}
    # Each part by itself too, although some share measurements.
    for part in PARTS:
        asked = {one.label for one in payload.plan(payload.SYSTEMS, [part])}
        some = [run for run in runs if run.scenario in asked]
        verdicts = payload.verdicts(some, [part], payload.LOOP)
        assert all(verdict.measured is not None for verdict in verdicts)


def test_choices_of_this_question_are_not_measured_beside_all_others() -> None:
    assert set(payload.SYSTEMS) <= set(SYSTEMS)
    assert not {payload.MEMCPY, payload.IDLE, payload.PIPE, *payload.FULL} & set(COMPARED)


def test_a_batch_may_be_one_array_half_a_millisecond_and_a_memcpy_after_its_last_input() -> None:
    case = MIDDLE
    runs = []
    for repetition, (stacked, memcpy) in enumerate([(0.7, 0.1), (0.55, 0.1), (6.4, 6.0)]):
        figures = {"stacked_ms": stacked}
        memcpys = {"memcpy_ms": memcpy, "arriving_memcpy_ms": memcpy + 0.05}
        runs += [
            measured("memcpy", "copying", case, "ArrayEcho", repetition, memcpys),
            measured(payload.OURS_FULL, "last_arrival", case, "ArrayStacked", repetition, figures),
        ]
    assert judge("stacked", runs, "32 x 602 KB") == [(0.4, True), (0.45, True)]
    assert judge("stacked", runs[:4], "32 x 602 KB") == [(0.475, True), (0.525, False)]
    assert judge("stacked", runs, "32 x 64 KB") == [(None, None)] * 2


def test_what_tiny_inputs_cost_and_reading_are_no_cost_of_the_way() -> None:
    def ours(case: payload.Case, model: str, used: float) -> Measurement:
        return measured("ours", "full_speed", case, model, 0, {"all_cpu_us": used})

    floor = {"memcpy_cpu_us": 100.0, "read_cpu_us": 40.0}
    runs = [
        measured("memcpy", "copying", LARGE, "ArrayEcho", 0, floor),
        ours(tiny(LARGE), "ArrayRead", 20.0),
        ours(LARGE, "ArrayRead", 20.0 + 40.0 + 249.0),
        ours(tiny(LARGE), "ArrayEcho", 30.0),
        ours(LARGE, "ArrayEcho", 30.0 + 2 * 251.0),
    ]
    assert judge("cpu", runs, "8 x 6 MB, read") == [(2.49, True)]
    assert judge("cpu", runs, "8 x 6 MB, and back") == [(2.51, False)]


@pytest.mark.parametrize(("model", "bar"), [("ArrayLabel", 15.0), ("ArrayEcho", 3.0)])
def test_more_requests_are_answered_than_by_every_other_way(model: str, bar: float) -> None:
    def rate(system: str, requests: float) -> Measurement:
        figures = {"requests_per_second": requests}
        return measured(system, "full_speed", MIDDLE, model, 0, figures)

    runs = [rate("ours", 100 * bar), rate(payload.PEERS[0], 99.0), rate(payload.PEERS[1], 101.0)]
    holds = [holds for _, holds in judge("callers", runs, payload.MODELS[model])]
    assert holds == [True, False, None]


def test_the_loop_may_be_later_with_100_mb_than_with_6() -> None:
    def lag(case: payload.Case, milliseconds: float) -> Measurement:
        return measured("ours", "loop_lag", case, "ArrayRead", 0, {"lag_p99_ms": milliseconds})

    assert judge("lag", [lag(LARGE, 6.0), lag(HUGE, 6.0)], "late") == [(6.0, False), (6.0, True)]


def load(model: str, callers: int) -> Load:
    return Load(model, callers, callers, 0.05, array_shape=(100,))


def test_the_last_arrival_is_what_is_timed_and_not_the_others() -> None:
    waiting: list[tuple[Any, asyncio.Future[Any]]] = []
    # Two moments on one clock: they cannot come out closer than what lies between them.
    took = 0.01

    async def process(value: Any) -> Any:
        future = asyncio.get_running_loop().create_future()
        waiting.append((value, future))
        if len(waiting) == 3:
            time.sleep(took)
            inputs = [value for value, _ in waiting]
            for (_, one), answer in zip(waiting, ArrayStacked().infer(inputs), strict=True):
                one.set_result(answer)
            waiting.clear()
        return await future

    figures = asyncio.run(last_arrival(process, load("ArrayStacked", 3)))
    assert figures["stacked_ms"] >= 1e3 * took
    assert figures["whole"] == 1.0
    assert figures["batches"] >= 1


def test_batches_that_were_not_whole_are_told() -> None:
    async def process(value: Any) -> Any:
        return ArrayStacked().infer([value])[0]

    figures = asyncio.run(last_arrival(process, load("ArrayStacked", 2)))
    assert figures["whole"] == 0.0


def test_answers_that_were_mixed_up_are_seen() -> None:
    async def process(_: Any) -> Any:
        return 1.0, 5.0

    with pytest.raises(RuntimeError, match="mixed up"):
        asyncio.run(last_arrival(process, load("ArrayStacked", 2)))


async def echo(value: Any) -> Any:
    await asyncio.sleep(0)
    return value


def test_copying_costs_something() -> None:
    figures = asyncio.run(copying(echo, load("ArrayEcho", 2)))
    names = {"memcpy_ms", "arriving_memcpy_ms", "memcpy_cpu_us", "read_cpu_us"}
    assert figures.keys() == names
    assert all(figure > 0 for figure in figures.values())


class Clock:
    """What `loop_lag` knows of time: it passes while somebody sleeps, and when the test says so."""

    gather = staticmethod(asyncio.gather)

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        """The others have one turn meanwhile."""
        end = self.now + seconds
        await asyncio.sleep(0)
        self.now = max(self.now, end)


@pytest.mark.parametrize(("callers", "late"), [(0, 0.0), (2, 2 * 4.0 - 1.0)])
def test_a_loop_that_is_blocked_is_late(
    callers: int, late: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two callers block it one after the other, and the timer rings after one millisecond."""
    clock = Clock()
    monkeypatch.setattr(arrays, "time", clock)
    monkeypatch.setattr(arrays, "asyncio", clock)

    async def block(value: Any) -> Any:
        clock.now += 0.004
        return await echo(value)

    figures = asyncio.run(loop_lag(block, load("ArrayRead", callers)))
    lags = [figures[f"lag_{which}_ms"] for which in ("p50", "p99", "max")]
    assert lags == pytest.approx([late] * 3, abs=1e-6)
    assert (figures["requests_per_second"] > 0) == bool(callers)


@pytest.mark.slow
def test_it_runs_from_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "payload.json"
    command = [sys.executable, "-m", "benchmarks.payload", "--quick", "--json", str(path)]
    command += ["--parts", "stacked", "lag", "--seconds", "0.05", "--loops", "asyncio"]
    command += ["--systems", "memcpy", "idle loop", payload.OURS_FULL]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    assert result["failures"] == []
    # The bars of `stacked` were measured, whether or not they hold here; the lag of ours was not.
    assert [v["holds"] is None for v in result["verdicts"]] == [False] * 6 + [True] * 2
    assert done.stdout.strip() == path.with_suffix(".txt").read_text().strip()
