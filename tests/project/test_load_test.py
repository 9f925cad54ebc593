"""The load test: its client, its arithmetic and its end; and the reference experiment."""

import json
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest
import torch
from apps.doubling import SLOWNESS
from paths import PYTHONPATH, ROOT
from programs import run_command
from waits import LIMIT

from benchmarks.load.measurement import Target, measure
from benchmarks.load.server import serve
from fast_batcher._load.client import draw_arrivals
from fast_batcher._load.measurement import (
    Case,
    LoadSettings,
    _start_client,
    make_plans,
    run_clients,
)

# In a separate file: a server and worker that import this file would load torch.
APP = "apps.doubling:app"
# With which the server finds it.
PATHS = {"PYTHONPATH": PYTHONPATH}
BODIES = [b'{"number": 1}', b'{"number": 2}', b'{"number": 3}']
SETTINGS = LoadSettings(
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
def test_closed_loop_counts_every_answer(target: Target) -> None:
    settings = replace(SETTINGS, client_processes=2)
    figures = measure(target, Case("batched", "/double", 5), 0, settings).figures
    assert figures["requests"] > 0
    assert figures["lost"] == 0
    assert figures["late"] == 0
    assert figures["requests_per_second"] > 0
    assert 0 < figures["p50_ms"] <= figures["p95_ms"] <= figures["p99_ms"]
    assert 1 <= figures["mean_batch"] <= 5
    assert figures["max_batch_size"] == 8
    assert figures["api_cpu_ms"] > 0
    assert figures["workers_cpu_ms"] > 0
    assert figures["client_cpu_us"] > 0


@pytest.mark.slow
def test_open_loop_sends_exactly_the_drawn_arrivals(target: Target) -> None:
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
def test_open_loop_counts_connection_wait(target: Target) -> None:
    (plan,) = make_plans(target, Case("slow", "/slow", 1, rate=100.0), 0, SHORT)
    (record,) = run_clients([plan])
    # One connection answers one request in SLOWNESS: the last cannot be answered before all.
    assert record.answers > 20
    assert max(record.latencies) >= record.answers * SLOWNESS - plan.warm_up - plan.seconds


@pytest.mark.slow
def test_an_open_loop_without_arrivals_ends(target: Target) -> None:
    (plan,) = make_plans(target, Case("batched", "/double", 1, rate=0.001), 0, SETTINGS)
    (record,) = run_clients([plan])
    assert (record.requests, record.lost) == (0, {})


@pytest.mark.slow
def test_a_client_ends_with_its_starter(target: Target) -> None:
    long = replace(SETTINGS, seconds=LIMIT)
    (plan,) = make_plans(target, Case("batched", "/double", 1), 0, long)
    with TemporaryFile("w+") as output, _start_client(plan, output) as client:
        assert client.stderr is not None
        assert client.stdin is not None
        assert client.stderr.readline() == "ready\n"
        client.stdin.write("go\n")
        client.stdin.close()  # as the system does when the process that started it ends
        assert "the process that started the client has ended" in client.stderr.read()
    assert client.returncode == 1


# --- the commands ---------------------------------------------------------------------------------


def run_to_the_end(command: list[str], folder: Path) -> tuple[Any, str]:
    """The results that a command stores, and what it prints."""
    done = run_command(
        [*command, "--json", str(folder / "results.json")], cwd=ROOT, env=os.environ | PATHS
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == (folder / "results.txt").read_text().strip()
    return json.loads((folder / "results.json").read_text()), done.stdout


@pytest.mark.slow
def test_load_test_command_stores_its_results(tmp_path: Path) -> None:
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
    assert result["measurements"][-2]["figures"]["max_batch_size"] == 1
    assert (result["hardware"]["gpu"] == "not yet measured on a GPU") != torch.cuda.is_available()
    assert "us of CPU per request" in stdout
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")
