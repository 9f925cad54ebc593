"""The load test: its client, its arithmetic and its end; and the reference experiment."""

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from time import monotonic
from typing import Any

import psutil
import pytest
import torch
from apps.doubling import SLOWNESS
from paths import PYTHONPATH, ROOT
from waits import LIMIT, Watch

from benchmarks import resnet_systems
from benchmarks.harness import RESULTS
from benchmarks.load.client import Plan, Record, draw_arrivals
from benchmarks.load.measurement import (
    Case,
    Measurement,
    Settings,
    Target,
    count_batches,
    make_plans,
    measure,
    run_clients,
    summarise,
)
from benchmarks.load.report import make_remarks, make_table
from benchmarks.load.server import serve
from benchmarks.load_test import read_arguments
from benchmarks.resnet_model import NO_NETWORK, Job, Model

# In a separate file: a server and worker that import this file would load torch.
APP = "apps.doubling:app"
# With which the server finds it.
PATHS = {"PYTHONPATH": PYTHONPATH}
BODIES = [b'{"number": 1}', b'{"number": 2}', b'{"number": 3}']
SETTINGS = Settings(
    bodies=BODIES,
    content_type="application/json",
    seconds=0.5,
    warm_up=0.1,
    late=30.0,
    client_processes=1,
    seed=1,
)
SHORT = replace(SETTINGS, seconds=0.2, warm_up=0.0)


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with serve(APP, PATHS) as server:
        yield Target("127.0.0.1", server.port, server)


# --- the client -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_in_a_closed_loop_every_request_is_answered_and_counted(target: Target) -> None:
    settings = replace(SETTINGS, client_processes=2)
    figures = measure(target, Case("batched", "/double", 5), 0, settings).figures
    assert figures["requests"] > 0
    assert figures["lost"] == 0
    assert figures["late"] == 0
    assert figures["requests_per_second"] > 0
    assert 0 < figures["p50_ms"] <= figures["p95_ms"] <= figures["p99_ms"]
    assert 1 <= figures["mean_batch"] <= figures["largest_batch"] <= 5
    assert figures["api_cpu_ms"] > 0
    assert figures["workers_cpu_ms"] > 0
    assert figures["client_cpu_us"] > 0


@pytest.mark.slow
def test_in_an_open_loop_exactly_the_arrivals_that_were_drawn_are_sent(target: Target) -> None:
    (plan,) = make_plans(target, Case("batched", "/double", 50, rate=200.0), 0, SETTINGS)
    (record,) = run_clients([plan])
    arrivals = draw_arrivals(plan, 0.0, random.Random(plan.seed))
    assert record.requests == sum(moment >= plan.warm_up for moment in arrivals)
    assert len(record.latencies) == len(record.lags) == record.requests
    assert record.answers == len(arrivals)
    assert record.lost == {}
    # What it was late by is part of what the request waited.
    assert max(record.lags) <= max(record.latencies)


@pytest.mark.slow
def test_in_an_open_loop_waiting_for_a_connection_counts(target: Target) -> None:
    (plan,) = make_plans(target, Case("slow", "/slow", 1, rate=100.0), 0, SHORT)
    (record,) = run_clients([plan])
    # One connection answers one request in SLOWNESS: the last cannot be answered before all.
    assert record.answers > 20
    assert max(record.latencies) >= record.answers * SLOWNESS - plan.warm_up - plan.seconds


@pytest.mark.slow
def test_answers_with_an_error_status_are_lost(target: Target) -> None:
    measurement = measure(target, Case("bad", "/every-third-fails", 1), 0, SETTINGS)
    assert set(measurement.lost) == {"status 500"}
    # One in three, warm-up included.
    assert measurement.lost["status 500"] * 3 >= measurement.figures["requests"] - 2
    assert "p50_ms" in measurement.figures


@pytest.mark.slow
def test_an_address_without_a_server_is_an_error() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # and does not listen
        target = Target("127.0.0.1", probe.getsockname()[1])
        (plan,) = make_plans(target, Case("none", "/", 1, rate=50.0), 0, SHORT)
        with pytest.raises(RuntimeError, match="no connection to 127"):
            run_clients([plan])


def plan_for(listener: socket.socket, **changes: Any) -> Plan:
    """One client's plan for a server that the test plays itself."""
    target = Target("127.0.0.1", listener.getsockname()[1])
    (plan,) = make_plans(target, Case("played", "/", 1), 0, SHORT)
    return replace(plan, **changes)


@pytest.mark.slow
def test_clients_give_up_what_is_not_answered_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=1000) as mute:
        plan = plan_for(mute, rate=200.0, connections=1000, give_up=0.1)
        (record,) = run_clients([plan])
    assert record.lost == {"given up": len(draw_arrivals(plan, 0.0, random.Random(plan.seed)))}
    assert record.latencies == []
    assert record.longest_gap == pytest.approx(plan.seconds)


@pytest.mark.slow
def test_an_answer_in_chunks_is_read_and_a_server_that_goes_away_is_tried_again() -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

    def answer_once(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(10_000)
            for part in (head, b"2\r\nok\r\n", b"0\r\n\r\n"):
                connection.sendall(part)
            connection.recv(10_000)
            listener.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        plan = plan_for(listener, connections=1, reconnect=True, seconds=2.0)
        server = threading.Thread(target=answer_once, args=(listener,))
        server.start()
        (record,) = run_clients([plan])
        server.join()
    assert len(record.latencies) == 1
    assert record.lost.pop("connection refused") > 0
    assert record.lost == {"connection closed": 1}


def test_a_load_is_divided_among_processes() -> None:
    case = Case("batched", "/", 5, rate=90.0)
    plans = make_plans(Target("h", 1), case, 0, replace(SETTINGS, client_processes=3))
    assert [plan.connections for plan in plans] == [2, 2, 1]
    assert [plan.rate for plan in plans] == [30.0, 30.0, 30.0]
    again = make_plans(Target("h", 1), case, 1, replace(SETTINGS, client_processes=3))
    assert len({plan.seed for plan in plans + again}) == 6
    alone = make_plans(Target("h", 1), replace(case, clients=1), 0, SETTINGS)
    assert [plan.connections for plan in alone] == [1]


# --- the arithmetic -------------------------------------------------------------------------------


def test_records_of_several_processes_are_put_together() -> None:
    records = [
        Record(
            latencies=[0.001] * 98 + [0.1],
            rate=100.0,
            requests=100,
            lost={"status 503": 1},
            answers=200,
            cpu=0.01,
            elapsed=1.0,
        ),
        Record(latencies=[0.002], rate=1.0, requests=1, answers=1, cpu=0.5, elapsed=1.0, lags=[]),
    ]
    figures = summarise(records, replace(SETTINGS, late=0.05))
    assert figures["requests_per_second"] == 101.0
    assert figures["requests"] == 101
    assert figures["lost"] == 1
    assert figures["late"] == 1
    assert figures["client_busy"] == 0.5
    assert figures["client_cpu_us"] == pytest.approx(0.51 / 201 * 1e6)
    assert figures["p50_ms"] == pytest.approx(1.0)
    assert "lag_p50_ms" not in figures


def measured(
    name: str, clients: int, answered: float, repetition: int = 0, **more: Any
) -> Measurement:
    case = Case(name, f"/{name}", clients, **more)
    figures = {"requests_per_second": answered, "p50_ms": 1.0, "p95_ms": 2.0, "p99_ms": 3.0}
    figures |= {"client_busy": 0.1, "lost": 1.0, "late": 0.0, "requests": 10.0}
    return Measurement(case, repetition, figures | {"client_cpu_us": 20.0}, {"status 503": 1})


MEASURED = [
    measured("batched", 8, 30.0),
    measured("unbatched", 8, 10.0),
    measured("unbatched", 8, 20.0, 1),
    measured("batched", 8, 80.0, 1),
    measured("batched", 512, 24.0, rate=24.5, share=0.8),
    measured("batched", 8, 25.0, max_batch_size=4),
]
FLOOR = measured("bare ASGI app", 8, 5000.0)


def test_the_table_has_a_row_per_case_with_median_and_range_and_sums() -> None:
    lines = make_table(MEASURED).splitlines()
    assert len(lines) == 2 + 4
    assert lines[2].split() == [
        *("batched", "8", "clients", "-", "55", "(30-80)", "1", "2", "3", "0.1", "20", "2", "0")
    ]
    assert "24/s (80%)" in lines[4]
    assert "API CPU" not in lines[0]


def test_the_remarks_compare_within_a_repetition_and_tell_what_spoils_the_figures() -> None:
    remarks = "\n".join(make_remarks(MEASURED, FLOOR))
    assert "20 us of CPU per request" in remarks
    assert "8 clients: batched answers 3.50 times as many." in remarks
    assert "Lost: 6 times status 503." in remarks
    busy = replace(MEASURED[0], figures=MEASURED[0].figures | {"client_busy": 0.9})
    deaf = replace(MEASURED[-1], figures=MEASURED[-1].figures | {"largest_batch": 8.0})
    warnings = "\n".join(make_remarks([busy, deaf], FLOOR))
    for warning in ("THE CLIENT MAY HAVE BEEN THE LIMIT", "THE APP DOES NOT READ MAX_BATCH_SIZE"):
        assert warning in warnings
        assert warning not in remarks


@pytest.mark.parametrize(
    ("stats", "sizes"),
    [
        ({"state": "open", "batch_sizes": {"8": 2}}, {8: 2}),
        (
            {"one": {"batch_sizes": {"8": 2}}, "other": {"batch_sizes": {"8": 1, "4": 1}}},
            {8: 3, 4: 1},
        ),
        ({"requests": 5}, None),
        ([], None),
    ],
)
def test_an_app_tells_its_batch_sizes_as_stats_of_one_batcher_or_of_several(
    stats: Any, sizes: dict[int, int] | None
) -> None:
    assert count_batches(stats) == sizes


# --- servers and their end ------------------------------------------------------------------------


@pytest.mark.slow
def test_a_watch_sees_a_process_dead_that_died_before_it_was_made() -> None:
    program = subprocess.Popen(["true"])
    program.wait()
    with Watch([program.pid]) as watch:
        assert watch.survivors(0.0) == []


@pytest.mark.slow
def test_an_error_while_the_server_runs_ends_it_and_its_workers() -> None:
    manager = serve(APP, PATHS)
    process = psutil.Process(manager.__enter__().process.pid)
    family = [process.pid, *(child.pid for child in process.children(recursive=True))]
    assert len(family) >= 2
    with Watch(family) as watch:
        assert not manager.__exit__(KeyError, KeyError(), None)
        assert watch.survivors(LIMIT) == []


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[str]) -> Any:
    """Wait until the condition is true, while a process lives."""
    deadline = monotonic() + LIMIT
    while not (found := condition()):
        assert monotonic() < deadline, "the condition has not become true"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_however_the_load_test_ends_its_server_and_workers_end_too(
    how: signal.Signals, tmp_path: Path
) -> None:
    (tmp_path / "body").write_bytes(BODIES[0])
    command = [sys.executable, "-m", "benchmarks.load_test", "--app", APP]
    command += ["--path", "/double", "--body-file", str(tmp_path / "body"), "--seconds", "60"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | PATHS,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    parent = psutil.Process(process.pid)

    def find_clients() -> bool:
        return any("benchmarks.load.client" in child.cmdline() for child in parent.children())

    try:
        wait_for(find_clients, process)
        family = [child.pid for child in parent.children(recursive=True)]
        assert len(family) >= 3  # server, worker, client
        with Watch(family) as watch:
            process.send_signal(how)
            process.communicate(timeout=LIMIT)
            assert watch.survivors(LIMIT) == []
    finally:
        process.kill()
        process.communicate()


# --- the commands ---------------------------------------------------------------------------------


def run_to_the_end(command: list[str], folder: Path) -> tuple[Any, str]:
    """The results that a command stores, and what it prints."""
    done = subprocess.run(
        [*command, "--json", str(folder / "results.json")],
        cwd=ROOT,
        env=os.environ | PATHS,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == (folder / "results.txt").read_text().strip()
    return json.loads((folder / "results.json").read_text()), done.stdout


def test_the_results_of_an_own_app_are_stored_where_its_user_says_or_not_at_all() -> None:
    own = ["--path", "/", "--body-file", "body"]
    assert read_arguments(["--app", "mine:app", *own]).json is None
    assert read_arguments(["--url", "http://localhost:8000", *own]).json is None
    assert read_arguments(["--app", "mine:app", *own, "--json", "mine.json"]).json == Path(
        "mine.json"
    )
    assert read_arguments([]).json == RESULTS / "load_test.json"


@pytest.mark.slow
def test_the_load_test_runs_from_the_command_line_and_stores_what_it_measured(
    tmp_path: Path,
) -> None:
    (tmp_path / "body").write_bytes(BODIES[0])
    command = [sys.executable, "-m", "benchmarks.load_test", "--app", APP]
    command += ["--path", "/double", "--unbatched-path", "/slow", "--seconds", "0.3"]
    command += ["--body-file", str(tmp_path / "body"), "--clients", "4", "--shares", "0.5"]
    command += ["--batch-sizes", "1", "--repetitions", "1"]
    result, stdout = run_to_the_end(command, tmp_path)
    cases = [m["case"] for m in result["measurements"]]
    assert [(c["name"], c["clients"], c["max_batch_size"]) for c in cases] == [
        *[("batched", 4, None), ("unbatched", 4, None)],
        *[("batched", 512, None), ("unbatched", 512, None)],
        ("batched", 4, 1),
        ("bare ASGI app", 4, None),
    ]
    assert {m["figures"]["lost"] for m in result["measurements"]} == {0}
    assert result["measurements"][-2]["figures"]["largest_batch"] == 1
    assert (result["hardware"]["gpu"] == "not yet measured on a GPU") != torch.cuda.is_available()
    assert "us of CPU per request" in stdout
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_reference_experiment_runs_and_stores_what_it_measured(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.reference_experiment", "--quick"]
    command += ["--systems", "bare loop", "ours", "--requests", "16", "--repetitions", "1"]
    command += ["--device", "cpu"]
    result, _ = run_to_the_end(command, tmp_path)
    assert result["failures"] == []
    assert [(m["scenario"], m["system"]) for m in result["measurements"]] == [
        *[("network", "bare loop"), ("network", "ours")],
        *[("moving", "bare loop"), ("moving", "ours")],
    ]
    for measurement in result["measurements"]:
        assert measurement["figures"]["seconds"] > 0
        assert measurement["versions"]["torch"] == torch.__version__
    assert result["verdicts"] == []  # they are about ResNet-101


@pytest.mark.slow
def test_the_reference_experiment_notices_answers_in_the_wrong_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job("wrong", NO_NETWORK, 4, "array", "cpu", "float32", threads=torch.get_num_threads())
    monkeypatch.setenv("RESNET_JOB", json.dumps(asdict(job)))

    @asynccontextmanager
    async def wrong() -> AsyncIterator[Callable[[Any], Awaitable[list[Any]]]]:
        model = Model()

        async def answer(inputs: Any) -> list[Any]:
            return model.infer(list(inputs))[::-1]

        yield answer

    monkeypatch.setitem(resnet_systems.SYSTEMS, "wrong", wrong)
    with pytest.raises(RuntimeError, match="mixed up"):
        asyncio.run(resnet_systems.measure(job))
