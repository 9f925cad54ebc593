"""`fast-batcher tune`: advice from measured times, and the command."""

import json
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import typer
from command_models import TEXTS, Constant, Doubler, Linear, Loop, Padded
from marks import long
from models.collated import FillsItself
from programs import run_command
from rich.console import Console
from typer.testing import CliRunner

from fast_batcher import DynBatcher
from fast_batcher._cli import advice as advice_module
from fast_batcher._cli.advice import (
    Advice,
    Found,
    Outcome,
    Wish,
    _list_warnings,
    advise,
    find_overridden,
    make_file,
    parse_seconds,
    predict,
    print_advice,
    read_moments,
    run_for_real,
)
from fast_batcher._cli.main import app
from fast_batcher._cli.model import (
    SEED,
    Measurement,
    Sample,
    TargetError,
    copy_for_timing,
    draw_seconds,
    measure,
    read_inputs,
)
from fast_batcher._cli.simulation import (
    Arrivals,
    open_scheduler,
    poisson,
    simulate,
    simulate_steps,
)
from fast_batcher.errors import QueueFullError

HERE = Path(__file__).parent
SIZES = (1, 2, 4, 8, 16, 32, 64)


@pytest.fixture(autouse=True)
def _short_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice_module, "REQUESTS", 2000)


def measured(fixed: float, each: float) -> Measurement:
    """A model of constant times."""
    return Measurement(
        {size: [[fixed + each * size] * 3] for size in SIZES}, overhead=0.0005, loop_seconds=1e-5
    )


def advice_for(measurement: Measurement, **wish: Any) -> Advice:
    return advise(measurement, Wish(**wish), lambda text: None)


def test_a_fixed_cost_asks_for_large_batches() -> None:
    advice = advice_for(measured(0.010, 0.0001))
    assert advice.chosen.max_batch_size == 64
    one = advice.candidates[0]
    assert advice.chosen.capacity / one.capacity > 30


def test_a_loop_over_the_inputs_asks_for_none() -> None:
    advice = advice_for(measured(0.0, 0.005))
    assert advice.chosen.max_batch_size == 1


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


def measured_steps(fixed: float, each: float, length: int) -> Measurement:
    """A model that answers in steps of constant times."""
    seconds = {size: [[fixed + each * size] * 3] for size in SIZES}
    return Measurement(seconds, overhead=0.0, loop_seconds=1e-5, lengths=[length])


def test_a_stream_joins_at_the_next_step_with_a_free_place() -> None:
    moments = [0.0, 0.5, 0.5, 9.5, 20.25]
    history = simulate_steps(Arrivals(moments), lambda: 3, 2, lambda _, live: float(len(live)))
    assert history.arrivals == moments
    # Steps of one stream end at 1, of two at 3 and 5; the third stream waits for a place until 5.
    assert history.answers == [1.0, 3.0, 7.0, 10.5, 21.25]
    assert history.batch_sizes == [1, 2, 2, 2, *[1] * 8]


def test_places_are_recommended_for_the_first_chunk() -> None:
    """So many that few streams wait for a place, and that 95 % have a chunk in time."""
    measurement = measured_steps(0.002, 0.001, 20)
    assert advice_for(measurement).chosen.capacity == pytest.approx(32 / (0.034 * 20))
    limited = advice_for(measurement, rate=30.0, target=0.050)
    assert limited.chosen.outcome.p95 <= 0.050
    assert limited.chosen.max_batch_size >= 8
    assert limited.candidates[1].outcome.p95 > 0.050
    assert limited.settings["max_latency"] == 0.050
    assert "by simulation, first chunks" in text_of(limited)
    assert not advice_for(measurement, target=0.002).meets_target


class Never:
    """A rule that holds every batch until its limits."""

    def hold(self, *_: object) -> float:
        return 60.0


def test_a_rule_of_the_user_is_simulated() -> None:
    """Its batches are larger, and later."""
    times = measured(0.03, 0.01)
    own = replace(times, options={"policy": Never(), "max_delay": 0.2, "max_latency": None})
    usual, held = (
        predict(one, [0.05 * at for at in range(200)], 8, 1, None) for one in (times, own)
    )
    assert held.p95 > usual.p95 + 0.1


def answered_within(size: int, rate: float, target: float) -> float:
    """Share of all requests that a worker answers in time; a batch of n takes 30 + 10 n ms."""
    arrivals = poisson(rate, advice_module.REQUESTS / rate, SEED)
    record = simulate(
        open_scheduler(size, 1, ()),
        Arrivals(arrivals),
        lambda _, requests: 0.03 + 0.01 * len(requests),
    )
    counted = range(int(0.2 * len(arrivals)), len(arrivals))
    in_time = [record.answers[one] - record.arrivals[one] + 0.0005 <= target for one in counted]
    return sum(in_time) / len(in_time)


@pytest.mark.parametrize("target", [None, 0.06, 0.15])
@pytest.mark.parametrize("rate", [5, 30, 60, *long(10, 15, 20, 25, 35, 40, 45, 50, 55)])
def test_recommendation_is_the_best_of_all_sizes(rate: float, target: float | None) -> None:
    """Size 1 cannot serve more than 25 requests per second, and size 2 not more than 40."""
    advice = advice_for(measured(0.03, 0.01), rate=rate, target=target)
    shares = {size: answered_within(size, rate, target or 1e9) for size in SIZES}
    enough = min(max(shares.values()), 0.95 if target else 1.0)
    served = [size for size in SIZES if shares[size] >= enough]
    capacities = {size: size / (0.03 + 0.01 * size) for size in served}
    best = min(s for s in served if capacities[s] >= 0.95 * max(capacities.values()))
    assert advice.chosen.max_batch_size == best
    assert advice.chosen.outcome.in_time == shares[best]
    assert advice.meets_target == (target is None or shares[best] >= 0.95)


def test_requests_that_expire_are_late_and_told() -> None:
    advice = advice_for(measured(0.03, 0.01), rate=60.0)
    alone = advice.candidates[0].outcome
    assert alone.lost > 0.05
    assert alone.p95 == float("inf")
    assert advice.chosen.outcome.lost == 0
    assert advice.chosen.outcome.p95 < 0.5


def test_no_recommendation_hides_a_loss() -> None:
    """Bursts that the queue has no room for: the few that are answered are answered in time."""
    bursts = [10.0 * burst + number / 1e5 for burst in range(5) for number in range(4000)]
    advice = advice_for(measured(0.004, 0.0005), moments=bursts, target=2.0)
    assert not advice.meets_target
    assert advice.chosen.outcome.lost > 0.5
    told = text_of(advice)
    assert f"{advice.chosen.outcome.lost:.1%} without an answer" in told
    assert "95 % within the target" in told
    assert "of the requests are lost" in told
    assert "max_latency" not in told


def test_any_model_and_rate_can_be_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that take from microseconds to minutes, most of them at loads beyond their reach."""
    monkeypatch.setattr(advice_module, "REQUESTS", 60)
    for seed in range(300):
        random = Random(seed)
        fixed, each = (10 ** random.uniform(-6, 2) for _ in range(2))
        seconds = {
            size: [[(fixed + each * size) * random.lognormvariate(0, 0.3) for _ in range(3)]]
            for size in random.choice([(1,), (1, 2, 4), (1, 2, 4, 8, 16, 32, 64, 100)])
        }
        measurement = Measurement(seconds, random.uniform(0, 0.01), 10 ** random.uniform(-6, -3))
        capacity = max(size / min(*times) for size, (times,) in seconds.items())
        advice = advice_for(
            measurement,
            rate=random.choice([None, capacity * 10 ** random.uniform(-2, 2)]),
            target=random.choice([None, fixed * 10 ** random.uniform(-1, 2)]),
            most_workers=random.choice([1, 3]),
        )
        best = max(one.outcome.in_time for one in advice.candidates)
        chosen = advice.chosen.outcome
        assert chosen.in_time >= (best if advice.max_latency is None else min(best, 0.95)), seed
        assert ("without an answer" in text_of(advice)) == (chosen.lost > 0), seed


def text_of(advice: Advice, **overridden: str) -> str:
    """Return the printed recommendation, in one line."""
    console = Console(width=200)
    with console.capture() as capture:
        print_advice(console, Found("ranker", advice, None, overridden))
    return " ".join(capture.get().split())


def warnings_of(advice: Advice) -> list[str]:
    return [*_list_warnings(Found("ranker", advice, None, {}))]


def test_lost_requests_wait_for_ever() -> None:
    outcome = Outcome.of([9.0] * 25 + [0.1] * 90 + [0.3] * 4 + [float("inf")] * 6, target=0.2)
    assert (outcome.p50, outcome.p95) == (0.1, float("inf"))
    assert (outcome.in_time, round(outcome.lost, 9)) == (0.9, 0.06)


def test_the_same_measurement_gives_the_same_times() -> None:
    measurement = Measurement({1: [[0.1, 0.3], [0.2]], 4: [[0.4, 0.5, 0.6]]}, 0.0, 1e-5)
    draws = [draw_seconds(measurement) for _ in range(2)]
    first, second = ([draw(0.0, [0] * size) for size in (1, 2, 3, 4) * 50] for draw in draws)
    assert first == second
    assert {*first[0::4]} == {0.1, 0.2, 0.3}
    assert {*map(round, first[1::4], [9] * 50)} == {0.2, 0.3, 0.4}
    assert {*first[3::4]} == {0.4, 0.5, 0.6}


def test_a_batch_between_two_allowed_sizes_takes_the_time_of_the_larger() -> None:
    times = {1: [[0.1]], 8: [[0.2]], 32: [[0.3]]}
    measurement = Measurement(times, 0.0, 1e-5, allowed=(1, 8, 32))
    draw = draw_seconds(measurement)
    assert [draw(0.0, [0] * size) for size in (1, 2, 8, 9, 32)] == [0.1, 0.2, 0.2, 0.3, 0.3]
    assert advise(measurement, Wish(rate=90.0), lambda _: None).chosen.max_batch_size == 32


class Level(FillsItself):
    """All batches take the same time, which no other process of the machine hides."""

    def infer(self, inputs: list[Any]) -> list[Any]:
        time.sleep(0.02)
        return inputs


class Cliff(FillsItself):
    """Two batches of 4 take less time than one of 16."""

    def infer(self, inputs: list[Any]) -> list[Any]:
        time.sleep(0.001 if len(inputs) <= 4 else 0.02)
        return inputs


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.parametrize(("model", "sizes"), [(Level, {1, 4, 16}), (Cliff, {1, 4})])
async def test_allowed_sizes_are_timed(model: Any, sizes: set[int]) -> None:
    async with DynBatcher(model, 16) as batcher:
        found = await measure(batcher, Sample(batcher, [0]), lambda _: None)
    assert {*found.seconds} <= sizes | {16}
    assert {*found.seconds} >= {1, 4}
    assert found.fails_from is None
    assert found.allowed == (1, 4, 16)


# --- Real models ----------------------------------------------------------------------------------


TRIED = (1, 4, 16)


async def find_throughput(model: Any, size: int) -> float:
    """Requests per second of a batcher whose queue is full."""
    async with DynBatcher(model, size) as batcher:
        began_at = time.perf_counter()
        await batcher.process_many(TEXTS)
        return len(TEXTS) / (time.perf_counter() - began_at)


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.parametrize(
    ("model", "recommended"),
    [
        pytest.param(Constant, 16, marks=pytest.mark.long),
        (Linear, 16),
        pytest.param(Padded, 16, marks=pytest.mark.long),
        (Loop, 1),
    ],
)
async def test_sizes_rank_as_their_real_throughput(model: Any, recommended: int) -> None:
    batcher = DynBatcher(model)
    async with copy_for_timing(batcher, max_batch_size=16) as copy:
        measurement = await measure(copy, Sample(batcher, TEXTS), lambda _: None)
    assert measurement.contradiction == ""
    advice = advice_for(measurement)
    assert advice.chosen.max_batch_size == recommended
    if recommended > 1:  # no size of a loop is better than another
        by_real = {size: await find_throughput(model, size) for size in TRIED}
        by_advice = {one.max_batch_size: one.capacity for one in advice.candidates}
        assert sorted(TRIED, key=lambda size: by_advice[size]) == sorted(
            TRIED, key=lambda size: by_real[size]
        )


def test_inputs_are_drawn_in_random_order() -> None:
    """Else a batch of ten would have a long one always, and a single one never."""
    sample = Sample(DynBatcher(Constant), TEXTS)
    counts = {sum(len(one.value) > 10 for one in sample.draw(10)) for _ in range(30)}
    assert len(counts) > 2
    assert sum(len(one.value) > 10 for one in sample.draw(100)) == 10


def test_inputs_with_costs_are_packed() -> None:
    """As the scheduler packs them: texts of one length, and at most `max_batch_cost`."""
    sample = Sample(DynBatcher(Padded, max_batch_cost=4000.0), TEXTS)
    batches = [[len(one.value) for one in sample.draw(8)] for _ in range(30)]
    assert {8 * (10,)} < {tuple(batch) for batch in batches}
    assert all(len(batch) * max(batch) <= 4000 for batch in batches)
    with pytest.raises(TargetError, match="cost raised TypeError"):
        Sample(DynBatcher(Padded), [1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "code", "text"),
    [
        (["tune", "--most", "8"], 1, "t(8) = 2"),
        (["doctor"], 0, "contradict each other, so nothing follows from these times"),
    ],
)
def test_times_that_contradict_each_other_are_no_advice(
    command: list[str], code: int, text: str
) -> None:
    name, *options = command
    target = ("command_models:Erratic", "--inputs", "command_models:TEXTS")
    done = run_command([sys.executable, "-m", "fast_batcher", name, *target, *options], cwd=HERE)
    told = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == code
    assert text in told
    assert "contradict each other" in told
    assert "Recommended" not in told


@pytest.mark.parametrize(("text", "seconds"), [("50ms", 0.05), ("0.2s", 0.2)])
def test_a_time_has_a_unit(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["soon", "0ms", "-1s", "5 min", "50"])
def test_a_wrong_time_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="write a time, like 50ms"):
        parse_seconds(text)


def test_a_trace_is_read_from_its_first_moment(tmp_path: Path) -> None:
    path = tmp_path / "arrivals.txt"
    path.write_text("100.5\n100.0\n102.0\n")
    assert read_moments(path) == [0.0, 0.5, 2.0]
    path.write_text("now\n")
    with pytest.raises(TargetError, match="one moment in seconds in each line"):
        read_moments(path)
    path.write_text("0\nnan\n1\n")
    with pytest.raises(TargetError, match="give the finite moments"):
        read_moments(path)


def test_the_file_sets_the_options_of_the_batcher() -> None:
    advice = advice_for(measured(0.002, 0.002), target=0.060)
    name = 'my \N{ROBOT FACE} "ranker"'
    found = tomllib.loads(make_file(Found(name, advice, None, {})))
    assert found["batchers"][name] == {
        "max_batch_size": advice.chosen.max_batch_size,
        "num_workers": 1,
        "max_latency": 0.06,
    }


def test_a_target_that_is_missed_is_not_a_setting() -> None:
    advice = advice_for(measured(0.002, 0.002), target=0.001)
    assert not advice.meets_target
    assert "max_latency" not in make_file(Found("ranker", advice, None, {}))
    assert warnings_of(advice) == [
        "no size answers 95 % within the target; allow more workers, or a later answer"
    ]


def test_a_rate_above_the_capacity_is_told() -> None:
    (warning,) = warnings_of(advice_for(measured(0.010, 0.001), rate=2000.0))
    assert "2000 requests per second are more than 1 workers compute" in warning
    assert warning.endswith("allow --workers 3")


def test_the_event_loop_limits_a_quick_model() -> None:
    advice = advice_for(measured(0.0, 1e-6))
    assert advice.loop_capacity == pytest.approx(1e5)
    assert max(one.capacity for one in advice.candidates) == pytest.approx(1e5)
    (warning,) = warnings_of(advice)
    assert "about 100000 requests per second; use several server processes" in warning


@pytest.mark.anyio
async def test_a_real_run_counts_what_fails() -> None:
    async def process(value: int) -> int:
        if value == 2:
            raise QueueFullError("full")
        return value

    latencies, errors = await run_for_real(process, [1, 2], [0.0] * 10)
    assert [latency == float("inf") for latency in latencies] == [False, True] * 5
    assert [*map(str, errors)] == ["full"] * 5


def test_options_that_the_code_gives_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file would have no effect on them, or would be refused beside `devices`."""
    monkeypatch.setenv("FAST_BATCHER_MAX_LATENCY", "0.5")
    advice = advice_for(measured(0.002, 0.002), target=0.060)
    batcher = DynBatcher(Doubler, max_batch_size=4, devices=["cpu"])
    overridden = find_overridden(batcher, advice)
    assert overridden == {
        "max_batch_size": "code",
        "max_latency": "FAST_BATCHER_MAX_LATENCY",
        "num_workers": "devices=",
    }
    text = make_file(Found("ranker", advice, None, overridden))
    assert tomllib.loads(text)["batchers"]["ranker"] == {}
    assert "a file has no effect on max_batch_size (code)" in text_of(advice, **overridden)
    overridden = find_overridden(DynBatcher(Doubler, max_latency=1), advice)
    assert overridden == {"max_latency": "code, not FAST_BATCHER_MAX_LATENCY"}


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--target", "soon"], "write a time"),
        (["--rate", "nan"], "nan: give a number above 0"),
        (["--rate", "0"], "0: give a number above 0"),
        (["--most", "0"], "--most"),
        (["--workers", "0"], "--workers"),
        (["--write", "missing/a.toml"], "there is no folder missing"),
    ],
)
def test_a_wrong_option_is_told_before_measuring(option: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["tune", "no_module:Model", "--inputs", "none.json", *option])
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())


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
    inputs.write_text("[1, 2, 3]")
    arguments = ["command_models:Sleeper", "--inputs", str(inputs), "--most", "8", "--json"]
    files = ["--write", str(settings)]
    done = run_command([sys.executable, "-m", "fast_batcher", "tune", *arguments, *files], cwd=HERE)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [one["max_batch_size"] for one in found["advice"]["candidates"]] == [1, 2, 4, 8]
    assert found["advice"]["chosen"]["max_batch_size"] == 8
    assert tomllib.loads(settings.read_text())["batchers"]["Sleeper"]["max_batch_size"] == 8


@pytest.mark.slow
def test_the_command_recommends_places_for_streams() -> None:
    arguments = ["command_models:Streams", "--inputs", "command_models:LENGTHS", "--most", "4"]
    done = run_command(
        [
            sys.executable,
            "-m",
            "fast_batcher",
            "tune",
            *arguments,
            "--rate",
            "10",
            "--json",
        ],
        cwd=HERE,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [one["max_batch_size"] for one in found["advice"]["candidates"]] == [1, 2, 4]
    assert found["advice"]["is_of_streams"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "error", "remedy"),
    [
        ("NoWeights", "FileNotFoundError: weights.pt", "in __init__"),
        ("TakesObjects", "'int' object has no attribute 'text'", "in <listcomp>"),
        ("NeedsPath", "missing 1 required", "name a batcher that has the model's model_args"),
    ],
)
def test_error_of_the_model_is_reported_with_its_remedy(
    model: str, error: str, remedy: str, tmp_path: Path
) -> None:
    inputs = tmp_path / "inputs.json"
    inputs.write_text("[1]")
    done = run_command(
        [
            *(sys.executable, "-m", "fast_batcher", "tune"),
            *(f"command_models:{model}", "--inputs", str(inputs)),
        ],
        cwd=HERE,
    )
    assert done.returncode == 1
    message = " ".join(done.stderr.split())
    assert error in message
    assert remedy in message
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moments", "requests"), [(None, 1), ("0\n1e-3\n0.5\n3600\n", 3)], ids=["low rate", "trace"]
)
def test_real_run_is_short(tmp_path: Path, moments: str | None, requests: int) -> None:
    """A low rate has one request, and a trace of an hour is sent for twenty seconds."""
    path = tmp_path / "arrivals.txt"
    load = ["--rate", "0.001"]
    if moments is not None:
        path.write_text(moments)
        load = ["--arrivals", str(path)]
    arguments = ["command_models:Sleeper", "--inputs", "command_models:INPUTS", "--most", "2"]
    done = run_command(
        [sys.executable, "-m", "fast_batcher", "tune", *arguments, "--check", "--json", *load],
        cwd=HERE,
    )
    assert done.returncode == 0, done.stderr
    real = json.loads(done.stdout)["real"]
    assert real["requests"] == requests
    assert real["outcome"]["lost"] == real["predicted"]["lost"] == 0
