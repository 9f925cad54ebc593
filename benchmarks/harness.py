"""Runs measurements, each in a fresh process, and stores what they say. Runs in the command itself.

The systems take turns within a repetition, and every other repetition goes backwards, so that
a machine that gets slower or faster meanwhile treats all alike.
"""

import argparse
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.report import Measurement, Verdict, failures
from benchmarks.scenarios import Load
from benchmarks.setup_peers import python_of
from benchmarks.systems import SYSTEMS

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
LOOPS = ("asyncio", "uvloop")
# For the start, the warm-up and the end of the slowest peer. It only ends what hangs.
SPARE_TIME = 60.0
# Of the arrivals of open loops, by repetition: SEED, SEED + 1, ...
SEED = 20
# Percent of the cores' time that a virtual machine's host may take while something is measured. It
# takes that in pieces of ten milliseconds and more: of five seconds on two cores half a percent are
# a few of them, and with more the 99th percentile of a latency is the host's.
MOST_STOLEN = 0.5


@dataclass(frozen=True)
class Job:
    """One measurement to make: which system, which load, which event loop."""

    system: str
    scenario: str
    loop: str
    load: Load
    # What the results call the scenario, where its name alone does not tell.
    label: str = ""


def parse_arguments(
    name: str,
    description: str,
    *,
    systems: Sequence[str],
    seconds: float,
    quick_seconds: float,
    callers: Sequence[int] = (),
    loops: Sequence[str] = LOOPS,
    parts: Sequence[str] | None = None,
    repetitions: int = 5,
    quick_repetitions: int = 3,
) -> argparse.Namespace:
    """The command line that all measurements share, as `overhead --quick --systems floor ours`."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=description.splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="a minute, for a rough answer")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=systems, metavar="SYSTEM")
    parser.add_argument("--loops", nargs="+", choices=LOOPS, default=loops)
    if parts is not None:
        parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    if callers:
        parser.add_argument("--callers", nargs="+", type=int, default=callers)
    parser.add_argument(
        "--repetitions", type=int, help=f"{repetitions}, or {quick_repetitions} if quick"
    )
    parser.add_argument(
        "--seconds", type=float, help=f"per measurement: {seconds:g}, or {quick_seconds:g} if quick"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=0.0,
        metavar="MINUTES",
        help="so long, measure again what the host of a virtual machine has disturbed (0)",
    )
    parser.add_argument(
        "--awake",
        action="store_true",
        help="let no CPU sleep long meanwhile: that of a virtual machine is given to others then",
    )
    parser.add_argument("--json", type=Path, help="where the results go, with a .txt beside it")
    parser.add_argument("--check", action="store_true", help="end with 1 if a bar is missed")
    arguments = parser.parse_args()
    arguments.name = name
    host.patience = 60 * arguments.patience
    if arguments.awake:
        host.stay_awake()
    # Odd numbers, so that the median is one of the repetitions.
    usual = quick_repetitions if arguments.quick else repetitions
    arguments.repetitions = arguments.repetitions or usual
    arguments.seconds = arguments.seconds or (quick_seconds if arguments.quick else seconds)
    arguments.json = arguments.json or RESULTS / f"{name}{'-quick' * arguments.quick}.json"
    return arguments


def measure_all(jobs: Sequence[Job], repetitions: int, first: int = 0) -> list[Measurement]:
    """Do all jobs so often, taking turns, with progress on stderr.

    Args:
        jobs: What to measure.
        repetitions: How often.
        first: The number of the first repetition.
    """
    measurements: list[Measurement] = []
    for repetition in range(first, first + repetitions):
        for job in reversed(jobs) if repetition % 2 else jobs:
            done = f"[{len(measurements) + 1}/{len(jobs) * repetitions}]"
            what = f"{job.label or job.scenario}, {job.loop}: {job.system}"
            if job.load.callers > 1:
                what = f"{job.load.callers} callers, {what}"
            print(f"{done} {what}", file=sys.stderr)
            load = replace(job.load, seed=SEED + repetition)
            measurements.append(_measure_in_calm(replace(job, load=load), repetition))
            if measurements[-1].error is not None:
                print(f"    FAILED: {measurements[-1].error}", file=sys.stderr)
    return measurements


def _measure_in_calm(job: Job, repetition: int) -> Measurement:
    """Measure; again if the host took too much of the time, while there is patience."""
    while True:
        begin = time.monotonic()
        measurement = measure(job, repetition)
        if host.was_calm(measurement.stolen_percent, time.monotonic() - begin):
            return measurement


def measure(job: Job, repetition: int) -> Measurement:
    """Measure once in a fresh process, and leave nothing of it running."""
    system = SYSTEMS[job.system]
    python = python_of(system.environment) if system.environment else Path(sys.executable)
    outcome: dict[str, Any] = {"figures": {}, "versions": {}}
    if not python.exists():
        outcome["error"] = "not installed, see `make bench-setup`"
    else:
        request = {
            "adapter": system.adapter,
            "settings": system.settings,
            "scenario": job.scenario,
            "loop": job.loop,
            "load": asdict(job.load),
        }
        outcome |= in_fresh_process(
            [str(python), "-m", "benchmarks.measured_process", json.dumps(request)],
            {},
            job.load.seconds * 4 + SPARE_TIME,
        )
    label = job.label or job.scenario
    return Measurement(job.system, label, job.loop, job.load.callers, repetition, **outcome)


def in_fresh_process(
    command: list[str], environment: dict[str, str], time_limit: float
) -> dict[str, Any]:
    """Run it, end all that it has started, and read the JSON that it printed last.

    Args:
        command: What to run, in the root of the source tree, which it can import from.
        environment: Variables besides ours.
        time_limit: Seconds after which it is ended.

    Returns:
        What it printed; or `error` and nothing else.
    """
    # Files and not pipes: what it has started may outlive it and hold a pipe open.
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as complaints:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
            stdout=output,
            stderr=complaints,
            start_new_session=True,  # a group of its own, so that all of it can be ended
        )
        try:
            process.wait(time_limit)
        except subprocess.TimeoutExpired:
            return {"error": f"no end after {time_limit:.0f} s"}
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for file in (output, complaints):
            file.seek(0)
        if process.returncode != 0:
            last_line = complaints.read().strip().splitlines()[-1:]
            return {"error": " ".join([f"ended with {process.returncode}", *last_line])}
        outcome: dict[str, Any] = json.loads(output.read().splitlines()[-1])
        return outcome


def hardware() -> dict[str, Any]:
    """What the figures depend on, and how busy the machine is with other work."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    models = [
        line.partition(":")[2].strip() for line in cpuinfo.splitlines() if "model name" in line
    ]
    return {
        "processor": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average_at_start": os.getloadavg()[0],
    }


class Host:
    """What a virtual machine's host takes of it while we measure. One command is one process."""

    def __init__(self) -> None:
        # Seconds left for measurements that do not count.
        self.patience = 0.0
        # Those.
        self.discarded = 0
        # Of each of the others.
        self._stolen_percents: list[float] = []
        # One for each CPU that must not sleep long; they end with us.
        self.sleepless: list[subprocess.Popen[bytes]] = []

    def stay_awake(self) -> None:
        """Let no CPU that we may use sleep long from now on."""
        for cpu in sorted(os.sched_getaffinity(0)):
            command = [sys.executable, "-m", "benchmarks.awake", str(cpu), str(os.getpid())]
            # In a group of its own: an interrupt from the keyboard is for us alone.
            self.sleepless.append(subprocess.Popen(command, cwd=ROOT, start_new_session=True))

    def was_calm(self, stolen_percent: float | None, seconds: float) -> bool:
        """Whether a measurement counts.

        Args:
            stolen_percent: Of the cores' time meanwhile; None if it has failed.
            seconds: How long it has taken.
        """
        if stolen_percent is None:
            return True
        if stolen_percent > MOST_STOLEN and self.patience > 0:
            self.patience -= seconds
            self.discarded += 1
            print(f"    again: the host took {stolen_percent:.1f} % of the time", file=sys.stderr)
            return False
        self._stolen_percents.append(stolen_percent)
        return True

    def describe(self) -> dict[str, Any]:
        """For the results."""
        # Of the cores' time while what counts was measured; beside much of it that says little.
        percent = round(sum(self._stolen_percents) / max(1, len(self._stolen_percents)), 2)
        discarded = {"measured_again": self.discarded} if self.discarded else {}
        still_there = sum(one.poll() is None for one in self.sleepless)
        awake = {"cpus_kept_awake": still_there} if self.sleepless else {}
        return {"stolen_percent": percent, **discarded, **awake}


host = Host()


def finish(
    arguments: argparse.Namespace,
    machine: dict[str, Any],
    measurements: list[Measurement],
    text: str,
    verdicts: list[Verdict],
) -> int:
    """Print the table and the verdicts, store them with everything measured.

    Returns:
        The exit status: 1 if `--check` was given and a bar was missed or not measured, else 0.
    """
    machine = {**machine, **host.describe()}
    versions: dict[str, str] = {}
    for measurement in measurements:
        versions |= measurement.versions
    result = {
        "benchmark": arguments.name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", f"benchmarks.{arguments.name}", *sys.argv[1:]]),
        "hardware": machine,
        "versions": versions,
        "settings": {
            "systems": {name: asdict(SYSTEMS[name]) for name in arguments.systems},
            "repetitions": arguments.repetitions,
            "seconds": arguments.seconds,
            # Of the arrivals of an open loop; the other loads are regular.
            "seed": SEED,
        },
        "verdicts": [{**asdict(v), "holds": v.holds} for v in verdicts],
        "failures": failures(measurements),
        "measurements": [asdict(m) for m in measurements],
    }
    lines = [
        f"{result['command']}   {result['date']}",
        ", ".join(f"{key} {value}" for key, value in machine.items()),
        ", ".join(f"{key} {value}" for key, value in versions.items()),
        f"median (range) of {arguments.repetitions} repetitions, {arguments.seconds:g} s each",
        "",
        text,
        "",
        *(str(verdict) for verdict in verdicts),
        *(f"      FAILED  {line}" for line in failures(measurements)),
    ]
    report = "\n".join(lines) + "\n"
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    arguments.json.with_suffix(".txt").write_text(report)
    print(report)
    return 1 if arguments.check and not all(v.holds for v in verdicts) else 0
