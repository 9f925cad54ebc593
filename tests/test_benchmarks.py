"""The benchmarks' own arithmetic, and that a benchmark runs from the command line."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from waits import LIMIT, Watch, one_loop, until

from benchmarks import harness, peers
from benchmarks.arrivals import due_times
from benchmarks.cpu import TreeCpu, descendants, process_cpu, read_ticks, stolen_percent
from benchmarks.harness import MOST_STOLEN, Host, Job, measure, measure_all, parse_arguments
from benchmarks.limit import open_loop_limit
from benchmarks.models import MODELS
from benchmarks.report import Measurement, Series, Spread, Verdict, failures, number, table
from benchmarks.scenarios import SCENARIOS, Load, open_loop
from benchmarks.systems import PEERS, SYSTEMS

ROOT = Path(__file__).resolve().parent.parent


def measured(system: str, repetition: int, cost: float | None) -> Measurement:
    figures = {} if cost is None else {"cost": cost}
    error = "it broke" if cost is None else None
    return Measurement(system, "full_speed", "asyncio", 64, repetition, figures, {}, error)


def series(*measurements: Measurement, system: str) -> Series:
    return Series.of(measurements, system, "full_speed", "asyncio", 64)


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
        process.communicate(timeout=30)


def test_a_spread_is_median_and_range() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert Spread.of([]) is None
    assert str(Spread(2.345678, 1.0, 1234.5)) == "2.35 (1-1234)"
    assert str(Spread(2.0, 2.0, 2.0)) == "2"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.00021, "0.0002"), (0.0123456, "0.0123"), (99.94, "99.9"), (123456.7, "123457")],
)
def test_numbers_have_no_exponent(value: float, text: str) -> None:
    assert number(value) == text


def test_ratios_and_differences_are_taken_within_a_repetition() -> None:
    # The machine is ten times slower in the second repetition; the ratio does not see it.
    runs = [measured("ours", 0, 2.0), measured("ours", 1, 40.0), measured("ours", 2, 3.0)]
    runs += [measured("floor", 0, 1.0), measured("floor", 1, 10.0), measured("floor", 2, 1.0)]
    ours, floor = series(*runs, system="ours"), series(*runs, system="floor")
    assert ours.ratio("cost", floor) == Spread(3.0, 2.0, 4.0)
    assert ours.difference("cost", floor) == Spread(2.0, 1.0, 30.0)


def test_a_failed_repetition_is_left_out_of_both_sides_and_is_reported() -> None:
    runs = [measured("ours", 0, 2.0), measured("ours", 1, None)]
    runs += [measured("floor", 0, 1.0), measured("floor", 1, 1.0)]
    ours = series(*runs, system="ours")
    assert ours.spread("cost") == Spread(2.0, 2.0, 2.0)
    assert ours.ratio("cost", series(*runs, system="floor")) == Spread(2.0, 2.0, 2.0)
    assert failures(runs) == ["ours on asyncio: it broke"]


def test_a_verdict_compares_the_median_with_its_bar() -> None:
    spread = Spread(2.0, 1.0, 9.0)
    assert Verdict("", spread, at_most=2.0).holds is True
    assert Verdict("", spread, at_most=1.9).holds is False
    assert Verdict("", spread, at_least=2.1).holds is False
    assert Verdict("", spread, at_least=2.0).holds is True
    assert Verdict("", None, at_least=2.0).holds is None
    assert "MISSED" in str(Verdict("", spread, at_most=1.9))
    assert "not measured" in str(Verdict("", None, at_most=1.9))


def test_a_table_aligns_its_columns_and_shows_what_is_missing() -> None:
    text = table(["system", "us"], [["a long name", Spread(1.0, 1.0, 1.0)], ["b", None]])
    assert text.splitlines() == [
        "system       us",
        "-" * len("system       us"),
        "a long name   1",
        "b             -",
    ]


def test_the_cpu_of_a_process_is_what_it_says_itself() -> None:
    before = time.process_time()
    read = process_cpu(os.getpid())
    assert before <= read <= time.process_time()


def test_a_busy_child_counts_as_workers_and_an_idle_one_hardly() -> None:
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


def test_grandchildren_are_descendants() -> None:
    code = "import subprocess, sys\n"
    code += "subprocess.Popen([sys.executable, '-c', 'import sys; sys.stdin.read()'])"
    with child(code) as parent:
        assert parent.pid in descendants(os.getpid())
        assert len(descendants(parent.pid)) == 1


def test_every_system_has_its_adapter_file() -> None:
    for system in SYSTEMS.values():
        if system.adapter is not None:
            assert (ROOT / "benchmarks" / "systems" / f"{system.adapter}.py").exists()


def test_a_system_that_fails_is_reported_and_not_dropped() -> None:
    load = Load("NoSuchModel", max_batch_size=1, callers=1, seconds=0.01)
    failed = measure(Job("thread", "lone_requests", "asyncio", load), repetition=0)
    assert failed.error == "ended with 1 KeyError: 'NoSuchModel'"
    assert failed.figures == {}


@pytest.mark.slow
def test_the_cost_of_the_core_is_compared_with_another_revision() -> None:
    command = [sys.executable, "-m", "benchmarks.core_cost", "HEAD"]
    command += ["--repetitions", "1", "--batches", "50"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.stderr == ""
    assert "HEAD: " in result.stdout
    assert "at most 0.3 us more" in result.stdout


def test_overhead_runs_from_the_command_line_and_stores_what_it_measured(tmp_path: Path) -> None:
    path = tmp_path / "overhead.json"
    command = [sys.executable, "-m", "benchmarks.overhead", "--quick", "--systems", "floor"]
    command += [
        "--seconds",
        "0.05",
        "--repetitions",
        "2",
        "--loops",
        "asyncio",
        "--json",
        str(path),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    result = json.loads(path.read_text())
    assert set(result) == {
        *("benchmark", "date", "command", "hardware", "versions", "settings", "verdicts"),
        *("failures", "measurements"),
    }
    assert 0 <= result["hardware"]["stolen_percent"] <= 100
    assert result["failures"] == []
    assert [m["repetition"] for m in result["measurements"]] == [0, 1]
    for measurement in result["measurements"]:
        assert measurement["system"] == "floor"
        assert 0 <= measurement["stolen_percent"] <= 100
        assert measurement["figures"]["api_cpu_us"] > 0
        assert measurement["figures"]["workers_cpu_us"] == 0
        assert measurement["figures"]["requests_per_second"] > 0
    assert result["settings"]["systems"] == {
        "floor": {"adapter": "floor", "settings": {}, "environment": None}
    }
    # Nothing was said about ours, so nothing holds.
    assert {verdict["holds"] for verdict in result["verdicts"]} == {None}
    assert done.stdout.strip() == path.with_suffix(".txt").read_text().strip()
    assert "[2/2]" in done.stderr


def test_what_the_host_disturbed_is_measured_again_while_there_is_patience() -> None:
    host = Host()
    host.patience = 3.0
    assert host.was_calm(MOST_STOLEN, seconds=2.0)
    assert host.describe() == {"stolen_percent": MOST_STOLEN}
    assert not host.was_calm(MOST_STOLEN + 0.1, seconds=2.0)
    assert not host.was_calm(MOST_STOLEN + 0.1, seconds=2.0)
    assert host.was_calm(None, seconds=2.0)  # it has failed, as it would again
    assert host.was_calm(MOST_STOLEN + 0.1, seconds=2.0)  # no patience is left
    assert host.describe() == {"stolen_percent": MOST_STOLEN + 0.05, "measured_again": 2}


def test_patience_is_a_matter_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host()
    monkeypatch.setattr(harness, "host", host)
    # Nothing is calm then.
    monkeypatch.setattr(harness, "MOST_STOLEN", -1.0)
    monkeypatch.setattr(sys, "argv", ["overhead", "--patience", "0.001"])
    parse_arguments("overhead", "What?", systems=("floor",), seconds=1.0, quick_seconds=1.0)
    assert host.patience == pytest.approx(0.06)
    (measurement,) = measure_all(
        [Job("floor", "full_speed", "asyncio", Load("NoOp", 8, 1, 0.01))], 1
    )
    assert measurement.error is None
    assert host.discarded == 1
    assert host.patience < 0


@pytest.mark.anyio
@one_loop
async def test_no_cpu_sleeps_long_while_a_benchmark_runs_that_was_asked_for_it() -> None:
    cpus = os.sched_getaffinity(0)
    with child(
        "from benchmarks import harness; import sys; sys.argv = ['overhead', '--awake'];"
        "harness.parse_arguments("
        "'overhead', 'What?', systems=('floor',), seconds=1.0, quick_seconds=1.0);"
        f"assert harness.host.describe()['cpus_kept_awake'] == {len(cpus)}"
    ) as benchmark:
        pids = descendants(benchmark.pid)
        assert len(pids) == len(cpus)
        await until(lambda: all(os.sched_getscheduler(pid) == os.SCHED_IDLE for pid in pids))
        assert [os.sched_getaffinity(pid) for pid in sorted(pids)] == [{c} for c in sorted(cpus)]
        for pid in pids:  # it wakes again and again
            used = process_cpu(pid)
            await until(lambda pid=pid, used=used: process_cpu(pid) > used)  # type: ignore[misc]
        watch = Watch(pids)
    with watch:
        assert benchmark.returncode == 0
        assert not watch.survivors(LIMIT)  # nobody has told them: they see that it is gone


def test_the_share_of_the_host_is_in_percent_of_the_cores_time() -> None:
    assert stolen_percent((5000, 70), (6000, 85)) == 1.5
    assert stolen_percent((5000, 70), (5000, 70)) == 0.0
    all_ticks, stolen = read_ticks()
    assert 0 <= stolen < all_ticks


def test_arrivals_are_the_same_for_the_same_seed_and_come_at_the_rate() -> None:
    times = due_times(1000.0, 10.0, seed=1)
    assert times == due_times(1000.0, 10.0, seed=1)
    assert times != due_times(1000.0, 10.0, seed=2)
    assert times == sorted(times)
    assert times[0] > 0
    assert times[-1] < 10.0
    # A Poisson process has as much variance as mean: 4 standard deviations either way.
    assert abs(len(times) - 10_000) < 4 * 100


def test_an_open_loop_counts_what_is_answered_and_what_is_lost() -> None:
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
    assert figures["in_time_per_second"] <= 2200 * figures["within_50_ms"]
    assert figures["refusal_p99_ms"] > 0
    assert "batch_size" not in figures
    assert figures["p50_ms"] > 0
    # A quarter took for ever.
    assert "p99_ms" not in figures
    assert figures["api_cpu_us"] > 0
    assert figures["workers_cpu_us"] == pytest.approx(0, abs=5)


def test_without_any_cost_there_is_the_models_time_and_the_wait_for_it() -> None:
    # Its timer is late by 0.2 ms: a full batch of 32 takes 8.4 ms.
    capacity = 32 / 0.0084
    alone = open_loop_limit(Load("Linear5ms", 32, 0, 100.0, rate=2.0, seed=1), capacity)
    assert alone["p50_ms"] == pytest.approx(5.3)
    # Where the model is always busy, a request waits for half a batch and then for its own.
    busy = open_loop_limit(Load("Linear5ms", 32, 0, 100.0, rate=500.0, seed=1), capacity)
    batch = 5.2 / (1 - 0.0001 * 500)
    assert busy["p50_ms"] == pytest.approx(1.5 * batch, rel=0.05)
    # Twice the capacity: what comes t seconds after the start is answered t seconds later. Those of
    # seconds 1 to 11 count.
    late = open_loop_limit(Load("Linear5ms", 32, 0, 10.0, rate=2 * capacity, seed=1), capacity)
    assert late["p50_ms"] == pytest.approx(6000, rel=0.05)


def test_the_plan_of_all_peers_measures_each_system_where_it_can_be() -> None:
    parts = peers.plan(SYSTEMS, ("overhead", "idle", "saturation", "open-loop", "arrays"))
    for tables in parts.values():
        for measured in tables:
            scenario, load = peers.load_of(measured, 1.0, capacity=100.0)
            assert scenario in SCENARIOS
            assert load.model in MODELS
            assert {"ours", *PEERS} - {peers.ON_THE_LOOP} <= set(measured.systems)
            assert "bare loop" not in measured.systems or measured.label == "saturation"
    rates = [peers.load_of(t, 1.0, capacity=100.0)[1].rate for t in parts["open-loop"]]
    assert rates == [20, 50, 80, 95]


def test_published_tables_say_what_the_stored_results_say() -> None:
    command = [sys.executable, "-m", "benchmarks.publish", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "up to date"), done.stderr
