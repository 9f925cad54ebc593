"""What does batching gain behind FastAPI, over HTTP?

Starts the app under uvicorn, or takes the address of one that runs, and loads it from other
processes: in a closed loop, with clients that ask again as soon as they are answered, and in an
open loop, with requests that arrive at random, timed from when they were due. Runs on the CPU, or
on a GPU if the app uses one.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.harness import RESULTS, ROOT, hardware, store
from benchmarks.load.gpu import NOT_MEASURED, GpuWatch
from benchmarks.load.measurement import Target, measure
from benchmarks.load.report import make_remarks, make_table
from benchmarks.load.server import serve
from fast_batcher._load.measurement import Case, LoadMeasurement, LoadSettings
from fast_batcher._load.report import draw_loads
from fast_batcher._load.run import WARM_UP, Loads, measure_in_turn, measure_loads

APP = "examples.embeddings.app:app"
SENTENCES = ROOT / "examples" / "embeddings" / "sentences.txt"
# Unmeasured share of each measurement, for the load to settle.
WARM_UP_SHARE = 0.25
DISTRIBUTIONS = (
    *("fast_batcher", "fastapi", "starlette", "uvicorn", "uvloop", "httptools", "wsproto"),
    *("pydantic", "torch", "sentence-transformers", "transformers", "numpy", "pillow"),
)


def read_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.load_test", description=(__doc__ or "").splitlines()[0]
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--app", default=APP, help=f"module:name for uvicorn ({APP})")
    where.add_argument("--url", help="of a server that runs, http://host:port, instead")
    parser.add_argument("--path", help="the batched endpoint (/embed)")
    parser.add_argument("--unbatched-path", help="the same without batching (/embed-unbatched)")
    parser.add_argument("--body-file", nargs="+", type=Path, help="request bodies (sentences)")
    parser.add_argument("--content-type", default="application/json")
    parser.add_argument("--clients", nargs="+", type=int, help="closed loops (1 8 32 128)")
    open_ = parser.add_mutually_exclusive_group()
    open_.add_argument("--rates", nargs="+", type=float, help="open loops, requests per second")
    open_.add_argument(
        "--shares",
        nargs="+",
        type=float,
        help="open loops, shares of the rate that the same path reached (0.5 0.8 0.95)",
    )
    parser.add_argument(
        "--batch-sizes",
        nargs="*",
        type=int,
        help="start the app once for each, with MAX_BATCH_SIZE in its environment (none)",
    )
    parser.add_argument("--seconds", type=float, help="per measurement (6)")
    parser.add_argument("--repetitions", type=int, help="(3)")
    parser.add_argument(
        "--late", type=float, default=1.0, help="seconds after which an answer is late (1)"
    )
    parser.add_argument("--client-processes", type=int, default=1, help="(1)")
    parser.add_argument("--seed", type=int, default=1, help="of arrivals and order of bodies (1)")
    parser.add_argument("--quick", action="store_true", help="under a minute, for a rough answer")
    parser.add_argument(
        "--json",
        type=Path,
        help="results, with .txt and .png beside it (an app of your own: printed and not stored)",
    )
    options = parser.parse_args(arguments)
    quick = options.quick
    is_own = options.url is not None or options.app != APP
    if options.path is None:
        if is_own:
            parser.error("--path is needed for an app of your own")
        options.path, options.unbatched_path = "/embed", "/embed-unbatched"
    if options.body_file is None and is_own:
        parser.error("--body-file is needed for an app of your own")
    if options.url and options.batch_sizes:
        parser.error("--batch-sizes needs --app: a server that runs cannot be started again")
    options.clients = options.clients or ([1, 32] if quick else [1, 8, 32, 128])
    if options.rates is None and options.shares is None:
        options.shares = [0.8] if quick else [0.5, 0.8, 0.95]
    options.batch_sizes = options.batch_sizes or []
    options.seconds = options.seconds or (2.0 if quick else 6.0)
    options.repetitions = options.repetitions or (1 if quick else 3)
    if options.json is None and not is_own:
        options.json = RESULTS / f"load_test{'-quick' * quick}.json"
    return options


class LoadTest:
    """Makes all measurements of one run, in order.

    Args:
        options: The command line's.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self.measurements: list[LoadMeasurement] = []
        # Of the client, against an app that does nothing.
        self.floor: LoadMeasurement
        self._settings = LoadSettings(
            bodies=read_bodies(options),
            content_type=options.content_type,
            seconds=options.seconds,
            warm_up=options.seconds * WARM_UP_SHARE,
            late=options.late,
            client_processes=options.client_processes,
            seed=options.seed,
        )
        self._paths = {"batched": options.path}
        if options.unbatched_path:
            self._paths["unbatched"] = options.unbatched_path

    def run(self) -> None:
        """Measure everything.

        Raises:
            RuntimeError: A server did not start or end, or gave no answer at all.
        """
        options = self._options
        with self._open_target() as target:
            answer_bytes = self._probe(target)
            loads = Loads(
                options.clients, options.rates or [], options.shares or [], options.repetitions
            )
            self.measurements += measure_loads(self._paths, loads, partial(self._measure, target))
        for size in options.batch_sizes:
            case = Case("batched", options.path, max(options.clients), max_batch_size=size)
            with self._open_target({"MAX_BATCH_SIZE": str(size)}) as target:
                measure_here = partial(self._measure, target)
                for name, path in self._paths.items():
                    measure_here(Case(name, path, max(options.clients)), WARM_UP)
                self.measurements += measure_in_turn([case], options.repetitions, measure_here)
        with serve("benchmarks.load.floor:app", {"FLOOR_ANSWER_BYTES": str(answer_bytes)}) as floor:
            case = Case("bare ASGI app", "/", max(options.clients))
            self.floor = self._measure(Target("127.0.0.1", floor.port, floor), case, 0)

    @contextmanager
    def _open_target(self, environment: Mapping[str, str] | None = None) -> Iterator[Target]:
        options = self._options
        if options.url:
            address = urlsplit(options.url)
            if address.scheme != "http" or address.hostname is None:
                raise RuntimeError(f"--url {options.url}: http://host:port is needed")
            yield Target(address.hostname, address.port or 80)
            return
        print(f"starting {options.app}", file=sys.stderr)
        with serve(options.app, environment) as server:
            yield Target("127.0.0.1", server.port, server)

    def _probe(self, target: Target) -> int:
        """Send each path one request; return the length of the longest answer, bytes."""
        longest = 0
        for path in self._paths.values():
            status, answer = target.ask(
                "POST", path, self._settings.bodies[0], self._options.content_type
            )
            if status != 200:
                raise RuntimeError(f"POST {path}: {status} {answer[:500].decode(errors='replace')}")
            longest = max(longest, len(answer))
        return longest

    def _measure(self, target: Target, case: Case, repetition: int) -> LoadMeasurement:
        size = f", max_batch_size {case.max_batch_size}" if case.max_batch_size else ""
        what = "warming up" if repetition == WARM_UP else f"{case.name}, {case.load}{size}"
        print(what, file=sys.stderr)
        return measure(target, case, repetition, self._settings)


def read_bodies(options: argparse.Namespace) -> list[bytes]:
    """Read the bodies of the requests."""
    if options.body_file:
        return [path.read_bytes() for path in options.body_file]
    lines = SENTENCES.read_text().splitlines()
    return [json.dumps({"text": line}).encode() for line in lines]


def find_versions() -> dict[str, str]:
    """Find the versions of the distributions that are installed."""
    found = {"python": sys.version.split()[0]}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def finish(options: argparse.Namespace, machine: dict[str, Any], test: LoadTest) -> None:
    """Print the table and the remarks; store them and draw the picture if a file is named."""
    with GpuWatch() as gpu:
        machine = {**machine, "gpu": gpu.name or NOT_MEASURED}
    settings = {name: _plain(value) for name, value in vars(options).items()}
    how = (
        f"median (range) of {options.repetitions} repetitions, {options.seconds:g} s each; "
        f"late: more than {options.late:g} s; seed {options.seed}"
    )
    remarks = make_remarks(test.measurements, test.floor)
    text = "\n".join([make_table(test.measurements), "", *remarks])
    measurements = [*test.measurements, test.floor]
    versions = find_versions()
    store(options.json, "load_test", machine, settings, measurements, how, text, versions=versions)
    processor = f"{machine['processor']}, {machine['cores']} cores, GPU: {machine['gpu']}"
    if options.json is not None:
        draw_loads(
            test.measurements, options.json.with_suffix(".png"), f"{options.app}\n{processor}"
        )


def _plain(value: object) -> object:
    if isinstance(value, Path):
        return os.path.relpath(value, ROOT)
    return [_plain(one) for one in value] if isinstance(value, list) else value


def main() -> int:
    """Measure, print, store; 1 if a server failed."""
    options = read_arguments()
    # So that the servers are ended as on Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    machine = hardware()
    test = LoadTest(options)
    try:
        test.run()
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    finish(options, machine, test)
    return 0


if __name__ == "__main__":
    sys.exit(main())
