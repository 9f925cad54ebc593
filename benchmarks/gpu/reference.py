"""Part `reference`: the experiment that fast_dynamic_batcher was published with.

The systems of `benchmarks.reference_experiment` that need no environment of their own share this
process, which saves the starts. Peers have a fresh process each, where they are installed.
"""

import asyncio
import json
import os
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from typing import Any

from benchmarks import reference_experiment
from benchmarks.gpu.part import SEED, Run, read_busy
from benchmarks.load.gpu import GpuWatch
from benchmarks.resnet_model import Job, make_inputs
from benchmarks.resnet_systems import BATCH_SIZE, SYSTEMS, Answerer
from benchmarks.setup_peers import python_of

TABLE = "reference"


def measure(run: Run) -> None:
    """Measure our systems in turn, then the peers."""
    job = Job(
        system="",
        arch=run.pick("resnet101", "resnet18"),
        requests=run.pick(400, 2 * BATCH_SIZE),
        payload="array",
        device=run.pick("cuda", "cpu"),
        dtype="float32",
        # As in the reference, the images of a batch are joined by all cores. On a CPU each system
        # computes with one thread.
        threads=run.pick(len(os.sched_getaffinity(0)), 1),
        seed=SEED,
    )
    title = f"{job.requests} requests at once to a {job.arch}, {job.dtype}, batches of {BATCH_SIZE}"
    run.title(TABLE, title)
    # Models read it when they are made, here and in workers.
    os.environ["RESNET_JOB"] = json.dumps(asdict(job))
    asyncio.run(_measure_ours(run, job))
    options = reference_experiment.read_arguments(["--device", job.device])
    (table, _), *_ = reference_experiment.plan(options)
    for peer in reference_experiment.PEERS:
        if not python_of(peer).exists():
            run.note(f"{peer} is not installed; `make bench-setup` installs it")
            continue
        for repetition in range(run.repetitions):
            found = reference_experiment.measure(table, replace(job, system=peer), repetition)
            run.tell(TABLE, peer, repetition, found.figures)
            if found.error is not None:
                run.note(f"{peer}: {found.error}")


async def _measure_ours(run: Run, job: Job) -> None:
    inputs = make_inputs(job)
    names = [name for name in SYSTEMS if name not in reference_experiment.PEERS]
    async with AsyncExitStack() as stack:
        answerers = {name: await stack.enter_async_context(SYSTEMS[name]()) for name in names}
        for answer in answerers.values():
            await answer(inputs[: 2 * BATCH_SIZE])
        for repetition, name in run.take_turns(names):
            run.tell(TABLE, name, repetition, await _measure_one(answerers[name], inputs))


async def _measure_one(answer: Answerer, inputs: list[Any]) -> dict[str, float]:
    with GpuWatch() as gpu:
        start = time.perf_counter()
        answers = await answer(inputs)
        seconds = time.perf_counter() - start
    if [first for _, _, first in answers] != [float(value[0, 0, 0]) for value in inputs]:
        raise RuntimeError("an answer belongs to another input")
    rate = len(inputs) / seconds
    return {"seconds": seconds, "requests_per_second": rate, "lost": 0.0, **read_busy(gpu)}
