"""Part `http`: requests over HTTP, batched and one by one, beside a bare loop of the same model.

A ResNet takes bodies of 602 KB, which the API process has to copy. An encoder takes token ids as
JSON, which are small, so that the GPU is the limit.
"""

import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.gpu.models import Classifier, EncoderModel, make_texts
from benchmarks.gpu.part import SEED, WARM_UP_SHARE, Figures, Run
from benchmarks.load import tied
from benchmarks.load.measurement import Target
from benchmarks.load.measurement import measure as measure_load
from benchmarks.load.server import UVICORN_OPTIONS, Server, start
from examples.image_classification.prediction import ARRAY_SHAPE
from fast_batcher._load.measurement import Case, LoadSettings

# Tokens of a text. Even a large encoder computes short texts faster than one process reads HTTP.
TOKENS = 256
# Texts with different ids.
TEXTS = 16
IMAGES, TEXT = "benchmarks.gpu.image_app:app", "benchmarks.gpu.app:app"
# Server processes that share one model: one process cannot copy as many images as a GPU computes.
PROCESSES = 4
# A server drains its clients' requests in this time, seconds.
STOP_LIMIT = 10.0


@dataclass(frozen=True)
class Cell:
    """A system of a table: a path of a server under load, or a bare loop."""

    table: str
    system: str
    measure: Callable[[int], Figures]


def measure(run: Run) -> None:
    """Start all servers, then let the systems take turns."""
    size = run.pick(64, 4)
    clients = 4 * size
    arch = run.pick("resnet50", "resnet18")
    encoder: dict[str, Any] = {
        "dtype": run.dtype,
        "hidden": run.pick(1024, 128),
        "layers": run.pick(24, 2),
    }
    resnet = {"arch": arch, "dtype": run.dtype}
    images = {"devices": run.device, "model_kwargs": resnet}
    batched, unbatched = (
        {"GPU_BENCHMARK_IMAGES": json.dumps({"max_batch_size": number, **images})}
        for number in (size, 1)
    )
    options = {"max_batch_size": size, "devices": run.device, "model_kwargs": encoder}
    run.title("resnet", f"{arch}, {run.dtype}, batches of {size}, {clients} clients, 602 KB bodies")
    shape = f"{encoder['layers']} layers of {encoder['hidden']}, {TOKENS} token ids as JSON"
    run.title("encoder", f"Encoder, {run.dtype}, batches of {size}, {clients} clients, {shape}")
    image = np.random.default_rng(SEED).standard_normal(ARRAY_SHAPE, np.float32)
    texts = make_texts([TOKENS] * TEXTS)
    bodies = [json.dumps({"tokens": text.tolist()}).encode() for text in texts]

    def load(server: Server, path: str, bodies: list[bytes], kind: str) -> Callable[[int], Figures]:
        settings = LoadSettings(
            bodies=bodies,
            content_type=kind,
            seconds=run.seconds,
            warm_up=WARM_UP_SHARE * run.seconds,
            late=30.0,
            # On a machine with many cores the client is not the limit.
            client_processes=max(1, min(4, len(os.sched_getaffinity(0)) // 4)),
            seed=SEED,
        )
        target = Target("127.0.0.1", server.port, server)

        def measure_path(repetition: int) -> Figures:
            figures = measure_load(target, Case("", path, clients), repetition, settings).figures
            if server is servers[-1]:  # it is the first of several processes, which only waits
                del figures["api_cpu_ms"]
            return figures

        return measure_path

    with ExitStack() as stack:
        # uvicorn reads the number of its processes from this variable.
        shared = {"WEB_CONCURRENCY": f"{PROCESSES}", "FAST_BATCHER_SHARED": "1"}
        servers = [
            start(tied.command("uvicorn", app, "--port", "0", *UVICORN_OPTIONS), environment)
            for app, environment in (
                (IMAGES, batched),
                (IMAGES, unbatched),
                (TEXT, {"GPU_BENCHMARK_ENCODER": json.dumps(options)}),
                (IMAGES, batched | shared),
            )
        ]
        for server in servers:
            stack.callback(server.end, STOP_LIMIT)
        classify, encode = _bare_loops(run, resnet, encoder, size, image, texts)
        for server in servers:
            server.wait_until_listening()
        octets, text = "application/octet-stream", "application/json"
        array = image.astype("<f4").tobytes()
        cells = [
            Cell("resnet", "bare loop", classify),
            Cell("resnet", "batched", load(servers[0], "/classify", [array], octets)),
            Cell(
                "resnet",
                f"batched, {PROCESSES} processes",
                load(servers[3], "/classify", [array], octets),
            ),
            Cell("resnet", "unbatched", load(servers[1], "/classify", [array], octets)),
            Cell("encoder", "bare loop", encode),
            Cell("encoder", "batched", load(servers[2], "/encode", bodies, text)),
            Cell("encoder", "unbatched", load(servers[2], "/encode-unbatched", bodies, text)),
        ]
        for cell in cells:
            cell.measure(-1)
        for repetition, cell in run.take_turns(cells):
            run.tell(cell.table, cell.system, repetition, cell.measure(repetition))


def _bare_loops(
    run: Run,
    resnet: dict[str, Any],
    encoder: dict[str, Any],
    size: int,
    image: Any,
    texts: list[Any],
) -> tuple[Callable[[int], Figures], Callable[[int], Figures]]:
    """Load both models into this process; full batches include the copy to the device."""
    Classifier.device = EncoderModel.device = run.device
    classifier = Classifier(**resnet)
    text_model = EncoderModel(**encoder)
    # Rows of one array, which `stack` joins without a copy.
    images = [*np.repeat(image[None], size, axis=0)]
    full = [texts[index % len(texts)] for index in range(size)]
    return (
        lambda _: run.bare_loop(classifier.infer, [images]),
        lambda _: run.bare_loop(text_model.infer, [full]),
    )
