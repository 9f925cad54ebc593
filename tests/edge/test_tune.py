"""`fast-batcher tune`: advice from measured times, and the command."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from waits import LIMIT

from fast_batcher._cli import advice as advice_module
from fast_batcher._cli.advice import (
    Advice,
    Wish,
    _list_warnings,
    advise,
    make_file,
    make_rising,
    parse_seconds,
    read_moments,
    run_for_real,
)
from fast_batcher._cli.main import app
from fast_batcher._cli.model import Measurement, TargetError, read_inputs
from fast_batcher._cli.virtual import Simulation, poisson
from fast_batcher.errors import QueueFullError

HERE = Path(__file__).parent
SIZES = (1, 2, 4, 8, 16, 32, 64)


@pytest.fixture(autouse=True)
def _short_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice_module, "REQUESTS", 4000)


def measured(fixed: float, each: float) -> Measurement:
    """A model of constant times."""
    return Measurement(
        {size: [fixed + each * size] * 3 for size in SIZES}, overhead=0.0005, loop_seconds=1e-5
    )


def advice_for(measurement: Measurement, **wish: Any) -> Advice:
    return advise(measurement, Wish(**wish), lambda text: None)


def test_a_fixed_cost_asks_for_large_batches() -> None:
    advice = advice_for(measured(0.010, 0.0001))
    assert advice.chosen.max_batch_size == 64
    assert advice.gain > 30


def test_a_loop_over_the_inputs_asks_for_none() -> None:
    advice = advice_for(measured(0.0, 0.005))
    assert advice.chosen.max_batch_size == 1
    assert advice.gain == pytest.approx(1)


def test_a_target_limits_the_size() -> None:
    measurement = measured(0.010, 0.001)
    free, limited = advice_for(measurement), advice_for(measurement, target=0.060)
    assert free.chosen.outcome.p95 > 0.060
    assert limited.chosen.outcome.p95 <= 0.060
    assert limited.chosen.max_batch_size < free.chosen.max_batch_size


def test_rate_determines_the_workers() -> None:
    measurement = measured(0.010, 0.001)
    advice = advice_for(measurement, rate=2000.0, most_workers=8)
    chosen = advice.chosen
    assert chosen.capacity * chosen.num_workers >= 2000 / 0.8
    assert advice_for(measurement, rate=2000.0, most_workers=2).chosen.num_workers == 2


def test_the_arrivals_of_a_trace_are_used() -> None:
    bursts = [second + number / 10_000 for second in range(50) for number in range(40)]
    advice = advice_for(measured(0.010, 0.001), moments=bursts)
    assert advice.rate == pytest.approx(40, rel=0.05)
    # A burst of forty is one batch where that is allowed, and many where it is not.
    by_size = {one.max_batch_size: one.outcome.p95 for one in advice.candidates}
    assert by_size[64] < by_size[1] / 2


def test_load_below_capacity_loses_no_request() -> None:
    outcome = Simulation(poisson(100.0, 5000, 1), lambda size, _: 0.005, 8, 1).run()
    assert outcome.lost == 0
    assert outcome.answered_per_second == pytest.approx(100, rel=0.05)
    assert 0.005 <= outcome.p50 < outcome.p95 < 0.015


def test_the_same_seed_gives_the_same_figures() -> None:
    def run(seed: int) -> object:
        draw = lambda size, random: 0.004 * random.uniform(1, 2)  # noqa: E731
        return Simulation(poisson(150.0, 2000, seed), draw, 8, 2, seed=seed).run()

    assert run(1) == run(1) != run(2)


@pytest.mark.parametrize(
    ("values", "rising"),
    [([1, 2, 3], [1, 2, 3]), ([1, 3, 2], [1, 2.5, 2.5]), ([3, 2, 1], [2, 2, 2]), ([], [])],
)
def test_contradicting_times_are_averaged(values: list[float], rising: list[float]) -> None:
    assert make_rising(values) == rising


@pytest.mark.parametrize(("text", "seconds"), [("50ms", 0.05), ("0.2s", 0.2)])
def test_a_time_has_a_unit(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["soon", "0ms", "-1s", "5 min", "50"])
def test_a_wrong_time_is_refused(text: str) -> None:
    with pytest.raises(TargetError, match="write a time, like 50ms"):
        parse_seconds(text)


def test_a_trace_is_read_from_its_first_moment(tmp_path: Path) -> None:
    path = tmp_path / "arrivals.txt"
    path.write_text("100.5\n100.0\n102.0\n")
    assert read_moments(path) == [0.0, 0.5, 2.0]
    path.write_text("now\n")
    with pytest.raises(TargetError, match="one moment in seconds in each line"):
        read_moments(path)


def test_the_file_sets_the_options_of_the_batcher() -> None:
    advice = advice_for(measured(0.002, 0.002), target=0.060)
    found = tomllib.loads(make_file(advice, "my ranker"))
    assert found["batchers"]["my ranker"] == {
        "max_batch_size": advice.chosen.max_batch_size,
        "num_workers": 1,
        "max_latency": 0.06,
    }


def test_a_target_that_is_missed_is_not_a_setting() -> None:
    advice = advice_for(measured(0.002, 0.002), target=0.001)
    assert not advice.meets_target
    assert "max_latency" not in make_file(advice, "ranker")
    assert [*_list_warnings(advice)] == [
        "no size answers 95 % within the target; allow more workers, or a later answer"
    ]


def test_a_rate_above_the_capacity_is_told() -> None:
    (warning,) = _list_warnings(advice_for(measured(0.010, 0.001), rate=2000.0))
    assert "2000 requests per second are more than 1 workers compute" in warning
    assert warning.endswith("allow --workers 3")


def test_the_event_loop_limits_a_quick_model() -> None:
    advice = advice_for(measured(0.0, 1e-6))
    assert advice.loop_capacity == pytest.approx(1e5)
    assert max(one.capacity for one in advice.candidates) == pytest.approx(1e5)
    (warning,) = _list_warnings(advice)
    assert "about 1e+05 requests per second; use several server processes" in warning


@pytest.mark.anyio
async def test_a_real_run_counts_what_fails() -> None:
    async def process(value: int) -> int:
        if value == 2:
            raise QueueFullError("full")
        return value

    real = await run_for_real(process, [1, 2], [0.0] * 10)
    assert (real.lost, real.first_error) == (0.5, "QueueFullError: full")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--target", "soon"], "write a time"),
        (["--rate", "nan"], "nan: give a number above 0"),
        (["--rate", "0"], "0: give a number above 0"),
        (["--most", "0"], "--most"),
        (["--workers", "0"], "--workers"),
        (["--write", "missing/a.toml"], "there is no folder missing"),
        (["--picture", "missing/a.svg"], "there is no folder missing"),
    ],
)
def test_a_wrong_option_is_told_before_measuring(option: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["tune", "no_module:Model", "--inputs", "none.json", *option])
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())


def test_moments_must_be_finite(tmp_path: Path) -> None:
    path = tmp_path / "arrivals.txt"
    path.write_text("0\nnan\n1\n")
    with pytest.raises(TargetError, match="write finite moments"):
        read_moments(path)


@pytest.mark.parametrize(
    ("module", "text", "message"),
    [
        ("quits", "raise SystemExit(3)", "cannot be imported: SystemExit: 3"),
        ("raises", "def inputs(): raise KeyError('x')", r"raises:inputs\(\) raised KeyError: 'x'"),
    ],
)
def test_modules_of_inputs_may_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, text: str, message: str
) -> None:
    (tmp_path / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(TargetError, match=message):
        read_inputs(f"{module}:inputs")


def test_deeply_nested_inputs_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(TargetError, match="no inputs can be read"):
        read_inputs(str(path))


@pytest.mark.slow
def test_the_command_measures_and_recommends(tmp_path: Path) -> None:
    inputs, settings = tmp_path / "inputs.json", tmp_path / "batchers.toml"
    picture = tmp_path / "picture.svg"
    inputs.write_text("[1, 2, 3]")
    arguments = ["command_models:Sleeper", "--inputs", str(inputs), "--most", "8", "--json"]
    files = ["--write", str(settings), "--picture", str(picture)]
    done = subprocess.run(
        [sys.executable, "-m", "fast_batcher", "tune", *arguments, *files],
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [one["max_batch_size"] for one in found["advice"]["candidates"]] == [1, 2, 4, 8]
    assert found["advice"]["chosen"]["max_batch_size"] == 8
    assert tomllib.loads(settings.read_text())["batchers"]["Sleeper"]["max_batch_size"] == 8
    assert "<svg" in picture.read_text()


@pytest.mark.slow
def test_load_error_is_reported_in_one_line(tmp_path: Path) -> None:
    inputs = tmp_path / "inputs.json"
    inputs.write_text("[1]")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "fast_batcher", "tune"),
            *("command_models:NoWeights", "--inputs", str(inputs)),
        ],
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 1
    assert "FileNotFoundError: weights.pt" in done.stderr
    assert "Traceback" not in done.stderr


def test_missing_matplotlib_is_named_before_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """None in `sys.modules` is for the import system what is not installed."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    arguments = ["tune", "no_module:Model", "--inputs", "none.json", "--picture", "picture.svg"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert "pip install matplotlib" in done.output
