"""How much of a model's speed on full batches reaches single requests? The reference's experiment.

fast_dynamic_batcher was published with it: 400 requests at once to a ResNet-101, batches of 16,
against the same images one by one. Here all systems get the same images (seeded random floats,
3 x 224 x 224, as NumPy arrays, which cost all of them less than tensors), the same model class,
the same number of threads, a fresh process each, and take turns. The ceiling is a bare loop over
stacked batches of 16. A second table has no network: what it takes is moving the images (602 KB
each) and stacking them, in one thread.
"""

import argparse
import json
import os
import shlex
import sys
import sysconfig
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.harness import RESULTS, hardware, in_fresh_process
from benchmarks.load.gpu import NOT_MEASURED, GpuWatch
from benchmarks.report import Measurement, Series, Spread, Verdict, failures, table
from benchmarks.resnet_model import NO_NETWORK, Job
from benchmarks.resnet_systems import SYSTEMS
from benchmarks.setup_peers import python_of
from examples.image_classification.resnet import ARCHITECTURES

# Systems that run with the interpreter of a peer's virtual environment of that name.
PEERS = ("fast_dynamic_batcher", "batched")
# Share of the bare loop's rate that must reach single requests. On a GPU the network takes less
# time, so moving the images weighs more.
CEILING_BARS = {"cpu": 0.97, "cuda": 0.95}
# Times one by one: what the reference says for itself on a T4, 7.65 s to 3.07 s.
SPEED_UP_BAR = 2.5
# One image takes a slow core no longer, with the warm-up. It only ends what hangs.
SECONDS_PER_REQUEST = 2.0
START_LIMIT = 120.0
COLUMNS = {
    "seconds": "seconds",
    "requests/s": "requests_per_second",
    "API CPU ms/request": "api_cpu_ms",
    "workers CPU ms/request": "workers_cpu_ms",
    "GPU busy": "gpu_busy",
}


def read_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reference_experiment",
        description=(__doc__ or "").splitlines()[0],
    )
    parser.add_argument("--quick", action="store_true", help="64 requests to a ResNet-18")
    parser.add_argument("--requests", type=int, help="(400)")
    parser.add_argument("--arch", choices=ARCHITECTURES, help="(resnet101)")
    parser.add_argument("--device", help="(cuda if there is a GPU, else cpu)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--payload", choices=("array", "tensor"), default="array")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--repetitions", type=int, default=3, help="(3)")
    parser.add_argument("--threads", type=int, help="of each system's model (all cores)")
    parser.add_argument("--json", type=Path, help="results, with a .txt beside it")
    parser.add_argument("--check", action="store_true", help="end with 1 if a bar is missed")
    options = parser.parse_args(arguments)
    options.requests = options.requests or (64 if options.quick else 400)
    options.arch = options.arch or ("resnet18" if options.quick else "resnet101")
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options.threads = options.threads or len(os.sched_getaffinity(0))
    name = f"reference_experiment-{options.device}" + "-quick" * options.quick
    options.json = options.json or RESULTS / f"{name}.json"
    return options


@dataclass(frozen=True)
class Experiment:
    """One of the two tables: `scenario` names it in the results."""

    scenario: str
    job: Job


def plan(options: argparse.Namespace) -> list[Experiment]:
    """With the network, and without."""
    job = Job(
        system="",
        arch=options.arch,
        requests=options.requests,
        payload=options.payload,
        device=options.device,
        dtype=options.dtype,
        threads=options.threads,
    )
    moving = replace(job, arch=NO_NETWORK, device="cpu", dtype="float32", threads=1)
    return [Experiment("network", job), Experiment("moving", moving)]


def measure_all(options: argparse.Namespace, progress: Progress) -> list[Measurement]:
    """Take turns within a repetition; every other repetition goes backwards."""
    measurements: list[Measurement] = []
    experiments = plan(options)
    turns = len(experiments) * options.repetitions * len(options.systems)
    bar = progress.add_task("", total=turns)
    for experiment in experiments:
        for repetition in range(options.repetitions):
            systems = options.systems[::-1] if repetition % 2 else options.systems
            for system in systems:
                progress.update(bar, description=f"{experiment.job.arch}: {system}")
                measurement = measure(experiment, system, repetition)
                measurements.append(measurement)
                progress.advance(bar)
                seconds = measurement.figures.get("seconds")
                result = measurement.error or f"{seconds:.2f} s"
                progress.console.print(f"{experiment.job.arch}: {system}: {result}", markup=False)
    return measurements


def measure(experiment: Experiment, system: str, repetition: int) -> Measurement:
    """Measure once in a fresh process, and leave nothing of it running."""
    job = replace(experiment.job, system=system)
    python = python_of(system) if system in PEERS else Path(sys.executable)
    outcome: dict[str, Any] = {"figures": {}, "versions": {}}
    if python.exists():
        environment = {
            "RESNET_JOB": json.dumps(asdict(job)),
            "LENT_PACKAGES": sysconfig.get_path("purelib"),
            # What PyTorch reads when it is imported, in workers as well. Threads that wait for
            # each other sleep: by default they spin, unless their process has two pools of them,
            # as that of `batched` has, and that takes a third of a busy machine's cores.
            "OMP_NUM_THREADS": str(job.threads),
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        limit = START_LIMIT + SECONDS_PER_REQUEST * job.requests
        command = [str(python), "-m", "benchmarks.resnet_systems"]
        outcome |= in_fresh_process(command, environment, limit)
    else:
        outcome["error"] = "not installed, see `make bench-setup`"
    return Measurement(system, experiment.scenario, "asyncio", job.requests, repetition, **outcome)


def verdicts(measurements: list[Measurement], options: argparse.Namespace) -> list[Verdict]:
    """The bars, for the experiment as it was published; one by one is one for GPUs only."""
    kind = options.device.partition(":")[0]
    if options.arch != "resnet101":
        return []
    found = [
        Verdict(
            f"{kind}: ours reaches at least {CEILING_BARS[kind]:.0%} of the bare loop's rate",
            _ratio(measurements, options, "ours", "bare loop"),
            at_least=CEILING_BARS[kind],
        )
    ]
    if kind == "cuda":
        found.append(
            Verdict(
                f"cuda: ours reaches at least {SPEED_UP_BAR:g} x one by one",
                _ratio(measurements, options, "ours", "one by one"),
                at_least=SPEED_UP_BAR,
            )
        )
    return found


def _series(
    measurements: list[Measurement], options: argparse.Namespace, scenario: str, system: str
) -> Series:
    return Series.of(measurements, system, scenario, "asyncio", options.requests)


def _ratio(
    measurements: list[Measurement], options: argparse.Namespace, system: str, other: str
) -> Spread | None:
    """Rate over rate, repetition by repetition."""
    return _series(measurements, options, "network", system).ratio(
        "requests_per_second", _series(measurements, options, "network", other)
    )


def make_table(measurements: list[Measurement], options: argparse.Namespace, scenario: str) -> str:
    """One row per system; columns that nothing was measured for are left out."""
    measured = {figure for m in measurements for figure in m.figures}
    columns = {title: figure for title, figure in COLUMNS.items() if figure in measured}
    header = ["system", *columns, "of the bare loop", "of one by one"]
    rows: list[list[object]] = []
    for system in options.systems:
        series = _series(measurements, options, scenario, system)
        ratios = [
            series.ratio("requests_per_second", _series(measurements, options, scenario, other))
            for other in ("bare loop", "one by one")
        ]
        rows.append([system, *(series.spread(figure) for figure in columns.values()), *ratios])
    return table(header, rows)


def store(
    options: argparse.Namespace, machine: dict[str, Any], measurements: list[Measurement]
) -> bool:
    """Print and write the results; whether every bar was held."""
    with GpuWatch() as gpu:
        machine = {**machine, "gpu": gpu.name or NOT_MEASURED}
    versions: dict[str, str] = {}
    for measurement in measurements:
        versions |= measurement.versions
    found = verdicts(measurements, options)
    command = shlex.join(["python", "-m", "benchmarks.reference_experiment", *sys.argv[1:]])
    date = datetime.now(UTC).isoformat(timespec="seconds")
    result = {
        "benchmark": "reference_experiment",
        "date": date,
        "command": command,
        "hardware": machine,
        "versions": versions,
        "settings": {
            "experiments": {e.scenario: asdict(e.job) for e in plan(options)},
            "repetitions": options.repetitions,
        },
        "verdicts": [{**asdict(v), "holds": v.holds} for v in found],
        "failures": failures(measurements),
        "measurements": [asdict(m) for m in measurements],
    }
    gpu_line = [] if gpu.name else [f"{'':>12}  GPU: {NOT_MEASURED}"]
    text = "\n".join(
        [
            f"{command}   {date}",
            ", ".join(f"{key} {value}" for key, value in machine.items()),
            ", ".join(f"{key} {value}" for key, value in versions.items()),
            f"median (range) of {options.repetitions} repetitions",
            "",
            f"{options.requests} requests to a {options.arch}, {options.dtype} on "
            f"{options.device}, {options.threads} threads, images as {options.payload}s",
            make_table(measurements, options, "network"),
            "",
            "The same without a network: moving the images and stacking them, 1 thread",
            make_table(measurements, options, "moving"),
            "",
            *(str(verdict) for verdict in found),
            *gpu_line,
            *(f"      FAILED  {line}" for line in failures(measurements)),
            "",
        ]
    )
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    options.json.with_suffix(".txt").write_text(text)
    print(text)
    return all(verdict.holds for verdict in found)


def main() -> int:
    """Measure, print, store."""
    options = read_arguments()
    machine = hardware()
    text, done = TextColumn("{task.description}"), MofNCompleteColumn()
    console = Console(stderr=True)
    # Once a second: drawing costs CPU that the model could use.
    with Progress(
        text, BarColumn(), done, TimeElapsedColumn(), console=console, refresh_per_second=1
    ) as progress:
        measurements = measure_all(options, progress)
    holds = store(options, machine, measurements)
    return 1 if options.check and not holds else 0


if __name__ == "__main__":
    sys.exit(main())
