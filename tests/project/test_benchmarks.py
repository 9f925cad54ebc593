"""The benchmarks' own arithmetic, and that a benchmark runs from the command line."""

import asyncio
import importlib
import json
import operator
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from paths import ROOT
from programs import run_command
from waits import LIMIT

from benchmarks.cpu import TreeCpu, descendants, process_cpu
from benchmarks.harness import run_git
from benchmarks.loops import mean_batch_size, open_loop
from benchmarks.publish import list_outdated
from benchmarks.report import Compared, Measurement, Table, Verdict
from benchmarks.scenarios import Load, steady_rate
from benchmarks.stepping import MEAN, PLACES, STEP_TIMES
from benchmarks.streams import compute_ideal
from benchmarks.systems import SYSTEMS
from fast_batcher._load.report import Spread

TABLE = Table("A table", "full_speed", Load("NoOp", 8, 64, 1.0), ("ours", "floor"), {"us": "cost"})


def measured(
    system: str, repetition: int, cost: float | None, one: Table = TABLE, figure: str = "cost"
) -> Measurement:
    figures = {} if cost is None else {figure: cost}
    error = "it broke" if cost is None else None
    callers = one.load.callers
    return Measurement(system, one.name, "asyncio", callers, repetition, figures, {}, error)


@contextmanager
def child(code: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that does its work, prints a line, and then waits for the end of its input."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"{code}\nprint(flush=True)\nimport sys; sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdout.readline()
        yield process
    finally:
        process.communicate(timeout=LIMIT)


# Figures and tables.


def test_spread_is_median_and_range() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert Spread.of([]) is None
    assert str(Spread(2.345678, 0.00021, 123456.7)) == "2.35 (0.0002-123457)"
    assert str(Spread(0.0, 0.0, 0.0)) == "0"


def test_ratios_and_differences_are_taken_within_a_repetition() -> None:
    # The machine is ten times slower in the second repetition; the ratio does not see it.
    runs = [measured("ours", number, cost) for number, cost in enumerate((2.0, 40.0, 3.0))]
    runs += [measured("floor", number, cost) for number, cost in enumerate((1.0, 10.0, 1.0))]
    ratio, difference = Compared("cost", "floor"), Compared("cost", "floor", operator.sub)
    assert TABLE.spread(runs, "ours", "asyncio", ratio) == Spread(3.0, 2.0, 4.0)
    assert TABLE.spread(runs, "ours", "asyncio", difference) == Spread(2.0, 1.0, 30.0)
    assert TABLE.spread(runs, "ours", "uvloop", ratio) is None


def test_a_verdict_compares_the_median_with_its_bar() -> None:
    spread = Spread(2.0, 1.0, 9.0)
    assert [Verdict("", spread, at_most=bar).holds for bar in (1.9, 2.0)] == [False, True]
    assert [Verdict("", spread, at_least=bar).holds for bar in (2.0, 2.1)] == [True, False]
    assert Verdict("", None, at_least=2.0).holds is None
    assert "MISSED" in str(Verdict("", spread, at_most=1.9))
    assert "not measured" in str(Verdict("", None, at_most=1.9))


@pytest.mark.slow
def test_published_tables_match_stored_results() -> None:
    command = [sys.executable, "-m", "benchmarks.publish", "--check"]
    done = run_command(command, cwd=ROOT)
    assert (done.returncode, done.stdout.strip()) == (0, "up to date"), done.stderr


# CPU time and the host.


@pytest.mark.slow
def test_cpu_time_of_children_counts_as_workers() -> None:
    work = "import time\nwhile time.process_time() < 0.2: pass"
    start = TreeCpu.read()
    with child(work) as busy, child("") as idle:
        assert {busy.pid, idle.pid} <= set(descendants(os.getpid()))
        assert process_cpu(busy.pid) >= 0.2
        assert process_cpu(idle.pid) < process_cpu(busy.pid)
        living = TreeCpu.read().since(start).workers
        assert living >= 0.2
    # Its CPU time does not vanish with the process.
    assert TreeCpu.read().since(start).workers >= living


# Loads.


@pytest.mark.slow
def test_open_loop_counts_answered_and_lost_requests() -> None:
    answered = 0

    async def refuse_every_fourth(value: object) -> object:
        nonlocal answered
        answered += 1
        if answered % 4 == 0:
            raise RuntimeError("no more")
        return value

    load = Load("NoOp", 1, 0, 0.5, rate=2000.0)
    figures = asyncio.run(open_loop(refuse_every_fourth, load))
    assert figures["lost"] == pytest.approx(0.25, abs=0.01)
    assert figures["within_50_ms"] <= 1 - figures["lost"]
    assert figures["p50_ms"] > 0
    # A quarter took for ever.
    assert "p99_ms" not in figures
    assert figures["api_cpu_us"] > 0
    assert figures["workers_cpu_us"] == pytest.approx(0, abs=5)


def test_means_of_batches_and_rates_of_callers() -> None:
    # One batch of 9 and one of 1: five on average, though nine of ten requests were among nine.
    assert mean_batch_size([9] * 9 + [1]) == pytest.approx(5)
    assert steady_rate([[1.0, 1.5, 2.0], [7.0, 8.0], [3.0], []]) == pytest.approx(2 + 1)


# Systems, and what is measured of them.


@pytest.mark.slow
def test_overhead_command_stores_its_results(tmp_path: Path) -> None:
    path = tmp_path / "overhead.json"
    command = [sys.executable, "-m", "benchmarks.overhead", "--quick", "--systems", "floor"]
    command += ["--seconds", "0.05", "--repetitions", "2", "--loops", "asyncio"]
    command += ["--json", str(path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=True
    )
    result = json.loads(path.read_text())
    assert set(result) == {
        *("benchmark", "date", "commit", "command", "hardware", "versions", "settings"),
        "verdicts",
        *("failures", "measurements"),
    }
    assert 0 <= result["hardware"]["stolen_percent"] <= 100
    assert result["failures"] == []
    assert [m["repetition"] for m in result["measurements"]] == [0, 1]
    for one in (Measurement(**stored) for stored in result["measurements"]):
        assert (one.system, one.figures["workers_cpu_us"]) == ("floor", 0)
        assert one.figures["api_cpu_us"] > 0
        assert one.figures["requests_per_second"] > 0
    assert result["settings"]["systems"] == {
        "floor": {"adapter": "floor", "settings": {}, "environment": None}
    }
    # Ours was not measured, so no bar holds.
    assert {verdict["holds"] for verdict in result["verdicts"]} == {None}
    assert done.stdout.strip() == path.with_suffix(".txt").read_text().strip()
    assert "[2/2]" in done.stderr


# Stored results.


@pytest.mark.slow
def test_results_older_than_the_package_are_listed(tmp_path: Path) -> None:
    checkout, results = tmp_path / "checkout", tmp_path / "results"
    results.mkdir()
    (checkout / "fast_batcher").mkdir(parents=True)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], cwd=checkout, check=True)
    for number in range(3):
        (checkout / "fast_batcher" / "file.py").write_text(f"{number}")
        (checkout / "README.md").write_text(f"{number}")
        subprocess.run([*git, "add", "."], cwd=checkout, check=True)
        subprocess.run([*git, "commit", "-qm", f"{number}"], cwd=checkout, check=True)
    for name, commit in (("old", "HEAD~1"), ("new", "HEAD")):
        stored = {"date": "2026-01-02T03:04:05+00:00"}
        stored["commit"] = str(run_git("rev-parse", commit, folder=checkout))
        (results / f"{name}.json").write_text(json.dumps(stored))
    assert list_outdated(results, checkout) == [
        "old: of 2026-01-02, 1 changes of the package since"
    ]


# Streams.


def test_the_ideal_has_no_free_place_with_twice_as_many_clients() -> None:
    figures = compute_ideal(Load("Steps", PLACES, 2 * PLACES, 1.0), 1)
    assert figures["live"] == PLACES
    assert figures["steps_per_second"] == pytest.approx(1 / STEP_TIMES["Steps"].of(PLACES))
    # The mean length is cut off.
    rate = PLACES * figures["steps_per_second"] / figures["requests_per_second"]
    assert 19 < rate < MEAN


@pytest.mark.slow
@pytest.mark.parametrize(
    "system", ["whole answers", "static batches, streamed", "continuous", "pipe and queues"]
)
def test_each_system_streams_all_chunks_and_counts_its_steps(system: str) -> None:
    known = SYSTEMS[system]
    adapter = importlib.import_module(f"benchmarks.systems.{known.adapter}")

    async def ask() -> None:
        async with adapter.opened(Load("QuickSteps", 2, 3, 1.0), **known.settings) as process:
            answers = await asyncio.gather(*map(process, (4, 6, 5)))
            assert [answer.chunks for answer in answers] == [4, 6, 5]
            steps, chunks = process.count.read()
            assert chunks == 15
            assert 8 <= steps <= 15

    asyncio.run(ask())
