"""How much of a model's speed on full batches reaches single requests? The reference's experiment.

fast_dynamic_batcher was published with it: 400 requests at once to a ResNet-101, batches of 16,
against the same images one by one. Here all systems get the same images (seeded random floats,
3 x 224 x 224, as NumPy arrays, which cost all of them less than tensors), the same model class,
the same number of threads, a fresh process each, and take turns. The ceiling is a bare loop over
stacked batches of 16. A second table has no network: it measures moving the images (602 KB each)
and stacking them, in one thread. Runs on the CPU or on a GPU.
"""

import argparse
import json
import os
import sys
import sysconfig
from dataclasses import asdict, replace
from pathlib import Path

import torch

from benchmarks.harness import RESULTS, hardware, in_fresh_process, store
from benchmarks.load.gpu import NOT_MEASURED, GpuWatch
from benchmarks.report import Columns, Compared, Measurement, Table, Verdict
from benchmarks.resnet_model import NO_NETWORK, Job
from benchmarks.resnet_systems import BATCH_SIZE, SYSTEMS
from benchmarks.scenarios import Load
from examples.image_classification.resnet import ARCHITECTURES

# Systems that run with the interpreter of a peer's virtual environment of that name.
PEERS = ("fast_dynamic_batcher", "batched")
# Share of the bare loop's rate that must reach single requests. On a GPU the network takes less
# time, so moving the images weighs more.
CEILING_BARS = {"cpu": 0.97, "cuda": 0.95}
# Times one by one: the reference's own figure on a T4, 7.65 s to 3.07 s.
SPEED_UP_BAR = 2.5
# One image takes a slow core no longer, with the warm-up, seconds. They only end what hangs.
SECONDS_PER_REQUEST = 2.0
START_LIMIT = 300.0
LOOP = "asyncio"
OF_CEILING = Compared("requests_per_second", "bare loop")
OF_ONE_BY_ONE = Compared("requests_per_second", "one by one")
COLUMNS: Columns = {
    "seconds": "seconds",
    "requests/s": "requests_per_second",
    "API CPU ms/request": "api_cpu_ms",
    "workers CPU ms/request": "workers_cpu_ms",
    "GPU busy": "gpu_busy",
    "of the bare loop": OF_CEILING,
    "of one by one": OF_ONE_BY_ONE,
}


def read_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reference_experiment",
        description=(__doc__ or "").splitlines()[0],
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="64 requests to a ResNet-18")
    add("--requests", type=int, help="(400)")
    add("--arch", choices=ARCHITECTURES, help="(resnet101)")
    add("--device", help="(cuda if there is a GPU, else cpu)")
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add("--payload", choices=("array", "tensor"), default="array")
    add("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    add("--repetitions", type=int, default=3, help="(3)")
    add("--threads", type=int, help="of each system's model (all cores)")
    add("--json", type=Path, help="results, with a .txt beside it")
    add("--check", action="store_true", help="end with 1 if a bar is missed")
    options = parser.parse_args(arguments)
    options.requests = options.requests or (64 if options.quick else 400)
    options.arch = options.arch or ("resnet18" if options.quick else "resnet101")
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options.threads = options.threads or len(os.sched_getaffinity(0))
    name = f"reference_experiment-{options.device}" + "-quick" * options.quick
    options.json = options.json or RESULTS / f"{name}.json"
    return options


def plan(options: argparse.Namespace) -> list[tuple[Table, Job]]:
    """What to measure: with the network, and without."""
    job = Job(
        system="",
        arch=options.arch,
        requests=options.requests,
        payload=options.payload,
        device=options.device,
        dtype=options.dtype,
        threads=options.threads,
    )
    network = Table(
        f"{job.requests} requests to a {job.arch}, {job.dtype} on {job.device}, "
        f"{job.threads} threads, images as {job.payload}s",
        "network",
        Load(job.arch, BATCH_SIZE, job.requests, seconds=0.0),
        tuple(options.systems),
        COLUMNS,
    )
    title = "Without a network: moving the images and stacking them, 1 thread"
    moving = replace(job, arch=NO_NETWORK, device="cpu", dtype="float32", threads=1)
    return [(network, job), (replace(network, title=title, scenario="moving"), moving)]


def measure_all(options: argparse.Namespace) -> list[Measurement]:
    """Take turns within a repetition; every other repetition goes backwards."""
    measurements: list[Measurement] = []
    for table, job in plan(options):
        for repetition in range(options.repetitions):
            for system in table.systems[::-1] if repetition % 2 else table.systems:
                found = measure(table, replace(job, system=system), repetition)
                measurements.append(found)
                result = found.error or f"{found.figures['seconds']:.2f} s"
                print(f"{table.scenario}: {system}: {result}", file=sys.stderr)
    return measurements


def measure(table: Table, job: Job, repetition: int) -> Measurement:
    """Measure once in a fresh process, and leave nothing of it running."""
    environment = {
        "RESNET_JOB": json.dumps(asdict(job)),
        "LENT_PACKAGES": sysconfig.get_path("purelib"),
        # PyTorch reads these when it is imported, in workers too. Threads that wait for each other
        # sleep: by default they spin, unless their process has two pools of them, as that of
        # `batched` has, and spinning takes a third of a busy machine's cores.
        "OMP_NUM_THREADS": str(job.threads),
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    limit = START_LIMIT + SECONDS_PER_REQUEST * job.requests
    peer = job.system if job.system in PEERS else None
    command = ["-m", "benchmarks.resnet_systems"]
    outcome = in_fresh_process(peer, command, environment, limit)
    return Measurement(job.system, table.name, LOOP, job.requests, repetition, **outcome)


def verdicts(measurements: list[Measurement], options: argparse.Namespace) -> list[Verdict]:
    """The bars, for the experiment as it was published; one by one is compared on GPUs only."""
    kind = options.device.partition(":")[0]
    if options.arch != "resnet101":
        return []
    (network, _), _ = plan(options)
    found = [
        Verdict(
            f"{kind}: ours reaches at least {CEILING_BARS[kind]:.0%} of the bare loop's rate",
            network.spread(measurements, "ours", LOOP, OF_CEILING),
            at_least=CEILING_BARS[kind],
        )
    ]
    if kind == "cuda":
        found.append(
            Verdict(
                f"cuda: ours reaches at least {SPEED_UP_BAR:g} x one by one",
                network.spread(measurements, "ours", LOOP, OF_ONE_BY_ONE),
                at_least=SPEED_UP_BAR,
            )
        )
    return found


def main() -> int:
    """Measure, print, store."""
    options = read_arguments()
    with GpuWatch() as gpu:
        machine = {**hardware(), "gpu": gpu.name or NOT_MEASURED}
    measurements = measure_all(options)
    found = verdicts(measurements, options)
    settings = {name: str(value) for name, value in vars(options).items()}
    how = f"median (range) of {options.repetitions} repetitions"
    text = "\n\n".join(table.text(measurements, LOOP) for table, _ in plan(options))
    name = "reference_experiment"
    store(options.json, name, machine, settings, measurements, how, text, found)
    return 1 if options.check and not all(verdict.holds for verdict in found) else 0


if __name__ == "__main__":
    sys.exit(main())
