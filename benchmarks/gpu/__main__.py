"""How does the library use one GPU? Eight parts, seven minutes, no network.

Each part is a process, on a GPU with a time limit. A part that fails or exceeds its limit is
recorded with the reason, and the next part begins. `gpu.json` and `gpu.txt` are written after each
part, and `gpu.png` at the end, if matplotlib is installed.
"""

import argparse
import contextlib
import io
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import fast_batcher
from benchmarks.cpu import descendants
from benchmarks.gpu.part import SEED
from benchmarks.gpu.report import Results, count_lost
from benchmarks.harness import RESULTS, ROOT, hardware, store
from benchmarks.load.gpu import NOT_MEASURED, GpuWatch
from benchmarks.load_test import find_versions

# Seconds after which each part is ended, on a GPU. A CPU, on which the benchmark is only tried,
# takes as long as it needs.
LIMITS = {
    "http": 110.0,
    "lengths": 70.0,
    "processes": 75.0,
    "prepare": 50.0,
    "faults": 60.0,
    # Each peer starts a process for each repetition.
    "reference": 90.0,
    "copies": 40.0,
    "times": 80.0,
}
# Seconds for all parts; a part that begins late has a shorter limit.
TOTAL = 385.0
# A part is not begun with less time than its processes need to start, seconds.
LEAST = 10.0
# Seconds for a part to end what it has started, after SIGTERM.
GRACE = 8.0
# Lines of the log of a failed part that are printed.
LOG_LINES = 40
# Seconds of a measurement, and repetitions; the second pair is for `--quick`.
FULL, QUICK = (1.0, 3), (0.3, 1)


def read_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0]
    )
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), help="(cuda if there is a GPU, else cpu)")
    add("--quick", action="store_true", help="shorter measurements, for a rough answer")
    add("--parts", nargs="+", choices=LIMITS, default=list(LIMITS))
    add("--out", type=Path, default=RESULTS, help="folder of gpu.json, gpu.txt and gpu.png")
    options = parser.parse_args(arguments)
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return options


def choose_environment(device: str) -> dict[str, str]:
    """Choose the variables of all parts, for one GPU or none."""
    if device == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        # Threads that wait for each other sleep, as in `benchmarks.reference_experiment`.
        return {"CUDA_VISIBLE_DEVICES": visible, "OMP_WAIT_POLICY": "PASSIVE"}
    # With one thread each, a bare loop has no more cores than a worker beside others.
    return {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def run_part(name: str, options: argparse.Namespace, limit: float | None, rows: Path) -> str | None:
    """Run a part to its end or its limit, and end everything that it has started.

    Returns:
        The reason for which it has failed; None if it has not.
    """
    seconds, repetitions = QUICK if options.quick else FULL
    arguments = [options.device, str(seconds), str(repetitions), str(rows)]
    command = [sys.executable, "-m", "benchmarks.gpu.part", name, *arguments]
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | choose_environment(options.device),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired as error:
            return f"no end after {error.timeout:.0f} s"
        finally:
            end(process)
        if process.returncode == 0:
            return None
        log.seek(0)
        # The frame of an exception group has lines without words.
        lines = [line for line in log.read().splitlines() if any(map(str.isalnum, line))]
        print("\n".join(lines[-LOG_LINES:]), file=sys.stderr)
        return " ".join([f"ended with {process.returncode}", *lines[-1:]])


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a part, its process group, and servers and workers in groups of their own."""
    started = descendants(process.pid)
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    for pid in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main() -> int:
    """Run the parts; 1 if one has failed or a request was lost."""
    options = read_arguments()
    # So that a part is ended as on Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with GpuWatch() as gpu:
        machine = {**hardware(), "gpu": gpu.name or NOT_MEASURED, "device": options.device}
    versions = {
        **find_versions(),
        "fast_batcher": fast_batcher.__version__,
        "cuda": torch.version.cuda or "none",
    }
    seconds, repetitions = QUICK if options.quick else FULL
    settings = {"seconds": seconds, "repetitions": repetitions, "seed": SEED, "limits": LIMITS}
    how = f"median (range) of {repetitions} repetitions, {seconds:g} s each; seed {SEED}"
    results = Results(options.device)
    path = options.out / "gpu.json"
    begin = time.monotonic()
    text = ""
    for name in options.parts:
        start = time.monotonic()
        limit = None
        if options.device == "cuda":
            limit = min(LIMITS[name], begin + TOTAL - start)
            if limit < LEAST:
                results.add_failure(name, f"not begun: no time left of {TOTAL:.0f} s")
                continue
        print(f"{name} begins; limit: {limit or 'none'}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            rows = Path(folder, "rows")
            rows.touch()
            failure = run_part(name, options, limit, rows)
            results.read(rows)
        results.notes.append(f"{name}: took {time.monotonic() - start:.0f} s")
        if failure is not None:
            results.add_failure(name, failure)
            print(f"{name}: {failure}", file=sys.stderr, flush=True)
        report = io.StringIO()
        with contextlib.redirect_stdout(report):
            store(
                path,
                "gpu",
                machine,
                settings,
                results.measurements,
                how,
                results.text(),
                results.verdicts(),
                versions=versions,
            )
        text = report.getvalue()
    print(text, flush=True)
    with contextlib.suppress(ModuleNotFoundError):
        results.draw(path.with_suffix(".png"), f"{machine['gpu']}, torch {torch.__version__}")
    has_failed = any(m.error is not None for m in results.measurements)
    return 1 if has_failed or count_lost(results.measurements) else 0


if __name__ == "__main__":
    sys.exit(main())
