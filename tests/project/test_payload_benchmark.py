"""How fast large arrays are: what is measured, and how the bars are judged."""

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT
from waits import LIMIT

from benchmarks import payload
from benchmarks.arrays import last_arrival
from benchmarks.models import ArrayStacked
from benchmarks.payload import LARGE, MIDDLE, SMALL, label_of
from benchmarks.peers import LOOP
from benchmarks.report import Measurement
from benchmarks.scenarios import Figures, Load

PARTS = payload.plan(payload.SYSTEMS, ("stacked", "callers"), 1.0)
TABLES = [one for tables in PARTS.values() for one in tables]


def measured(
    system: str, scenario: str, case: payload.Case, model: str, repetition: int, figures: Figures
) -> Measurement:
    label = label_of(scenario, case, model)
    return Measurement(system, label, LOOP, case.count, repetition, figures, {})


def judge(runs: list[Measurement], what: str) -> list[tuple[float | None, bool | None]]:
    return [
        (None if verdict.measured is None else round(verdict.measured.median, 6), verdict.holds)
        for verdict in payload.verdicts(runs, PARTS, LOOP)
        if what in verdict.claim
    ]


def test_one_input_is_as_long_as_its_name_says() -> None:
    sizes = {one.title.split(",")[0]: one.load.payload().nbytes for one in TABLES}
    assert sizes == {SMALL.name: 64_000, MIDDLE.name: 602_112, LARGE.name: 6_000_000}


def test_every_bar_is_about_what_is_measured() -> None:
    runs = [
        Measurement(
            system=system,
            scenario=one.name,
            loop=LOOP,
            callers=one.load.callers,
            repetition=0,
            figures={str(figure): 1.0 for figure in one.columns.values()},
            versions={},
        )
        for one in TABLES
        for system in one.systems
    ]
    verdicts = payload.verdicts(runs, PARTS, LOOP)
    assert len(verdicts) == 3 + 6
    assert all(verdict.measured is not None for verdict in verdicts)
    assert set(payload.SYSTEMS) == {system for one in TABLES for system in one.systems}


def test_a_batch_is_one_array_within_the_bar_and_a_memcpy_of_its_last_input() -> None:
    runs = []
    for repetition, (stacked, memcpy) in enumerate([(0.9, 0.1), (0.55, 0.1), (6.5, 6.0)]):
        ours, floor = {"stacked_ms": stacked}, {"memcpy_ms": memcpy}
        system = payload.OURS_FULL
        runs += [
            measured("memcpy", "copying", MIDDLE, "ArrayEcho", repetition, floor),
            measured(system, "last_arrival", MIDDLE, "ArrayStacked", repetition, ours),
        ]
    assert judge(runs, "32 x 602 KB: ms") == [(0.5, True)]
    assert judge(runs[:2], "32 x 602 KB: ms") == [(0.8, False)]
    assert judge(runs, "32 x 64 KB") == [(None, None)]


@pytest.mark.parametrize(("model", "bar"), [("ArrayLabel", 15.0), ("ArrayEcho", 3.0)])
def test_more_requests_are_answered_than_by_every_other_way(model: str, bar: float) -> None:
    def rate(system: str, requests: float) -> Measurement:
        figures = {"requests_per_second": requests}
        return measured(system, "full_speed", MIDDLE, model, 0, figures)

    runs = [rate("ours", 100 * bar), rate(payload.PEERS[0], 99.0), rate(payload.PEERS[1], 101.0)]
    holds = [holds for _, holds in judge(runs, payload.MODELS[model])]
    assert holds == [True, False, None]


def load(callers: int) -> Load:
    return Load("ArrayStacked", callers, callers, 0.05, array_shape=(100,))


def test_the_last_arrival_is_timed_and_not_the_others() -> None:
    waiting: list[tuple[Any, asyncio.Future[Any]]] = []
    # Two moments on one clock: they cannot be closer than what lies between them.
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

    figures = asyncio.run(last_arrival(process, load(3)))
    assert figures["stacked_ms"] >= 1e3 * took
    assert figures["whole"] == 1.0


def test_batches_that_were_not_whole_are_told_and_mixed_up_answers_are_seen() -> None:
    async def alone(value: Any) -> Any:
        return ArrayStacked().infer([value])[0]

    async def mixed_up(_: Any) -> Any:
        return 1.0, 5.0

    assert asyncio.run(last_arrival(alone, load(2)))["whole"] == 0.0
    with pytest.raises(RuntimeError, match="mixed up"):
        asyncio.run(last_arrival(mixed_up, load(2)))


@pytest.mark.slow
def test_it_runs_from_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "payload.json"
    command = [sys.executable, "-m", "benchmarks.payload", "--quick", "--json", str(path)]
    command += ["--parts", "stacked", "--seconds", "0.05", "--loops", "asyncio"]
    command += ["--systems", "memcpy", payload.OURS_FULL]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    assert result["failures"] == []
    # The bars were measured, whether or not they hold here.
    assert [v["holds"] is None for v in result["verdicts"]] == [False] * 3
    assert done.stdout.strip() == path.with_suffix(".txt").read_text().strip()
