"""Runs measurements, each in a fresh process, and stores them. Runs in the command itself.

The systems take turns within a repetition, and every other repetition goes backwards, so that
a machine that becomes slower or faster meanwhile treats all alike.
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
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.report import Measurement, Table, Verdict, failures
from benchmarks.scenarios import Load
from benchmarks.setup_peers import python_of
from benchmarks.systems import SYSTEMS

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
LOOPS = ("asyncio", "uvloop")
# For the start, the warm-up and the end of the slowest peer, seconds. It only ends what hangs.
SPARE_TIME = 300.0
# Of the arrivals of open loops, by repetition: SEED, SEED + 1, ...
SEED = 20
# How long the capacity is measured before each repetition of an open loop, seconds.
CAPACITY_SECONDS = 1.0
# Percent of the cores' time that a virtual machine's host may take during a measurement. The host
# takes it in pieces of ten milliseconds and more: of five seconds on two cores half a percent is
# a few pieces, and with more the 99th percentile of a latency is the host's.
MOST_STOLEN = 0.5


def parse_arguments(
    name: str,
    description: str,
    *,
    systems: Sequence[str],
    seconds: float,
    quick_seconds: float,
    callers: Sequence[int] = (),
    loops: Sequence[str] = LOOPS,
    parts: Sequence[str] = (),
    repetitions: int = 5,
    quick_repetitions: int = 3,
    flags: Mapping[str, str] | None = None,
) -> argparse.Namespace:
    """Read the command line that most benchmarks share, as `overhead --quick --systems ours`.

    Returns:
        The options, and besides them `name`, `machine` (what `hardware` says) and `host`.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=description.splitlines()[0]
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="a minute, for a rough answer")
    for flag, text in (flags or {}).items():
        add(f"--{flag}", action="store_true", help=text)
    known = [*SYSTEMS, *(one for one in systems if one not in SYSTEMS)]
    add("--systems", nargs="+", choices=known, default=systems, metavar="SYSTEM")
    if loops:
        add("--loops", nargs="+", choices=LOOPS, default=loops)
    if parts:
        add("--parts", "--scenarios", nargs="+", choices=parts, default=parts)
    if callers:
        add("--callers", nargs="+", type=int, default=callers)
    add("--repetitions", type=int, help=f"{repetitions}, or {quick_repetitions} if quick")
    text = f"per measurement: {seconds:g}, or {quick_seconds:g} if quick"
    add("--seconds", type=float, help=text)
    text = "for this long in all, repeat what the host of a virtual machine has disturbed (0)"
    add("--patience", type=float, default=0.0, metavar="MINUTES", help=text)
    text = "let no CPU sleep long: the host of a virtual machine gives a sleeping one to others"
    add("--awake", action="store_true", help=text)
    add("--json", type=Path, help="where the results go, with a .txt beside it")
    add("--check", action="store_true", help="end with 1 if a bar is missed")
    arguments = parser.parse_args()
    arguments.name = name
    arguments.host = Host(60 * arguments.patience)
    if arguments.awake:
        arguments.host.stay_awake()
    arguments.machine = hardware()
    # Odd numbers, so that the median is one of the repetitions.
    usual = quick_repetitions if arguments.quick else repetitions
    arguments.repetitions = arguments.repetitions or usual
    arguments.seconds = arguments.seconds or (quick_seconds if arguments.quick else seconds)
    arguments.json = arguments.json or RESULTS / f"{name}{'-quick' * arguments.quick}.json"
    return arguments


def measure_all(tables: Sequence[Table], arguments: argparse.Namespace) -> list[Measurement]:
    """Measure everything, table by table, with progress on stderr."""
    measurements: list[Measurement] = []
    repetitions = arguments.repetitions
    total = sum(len(one.systems) for one in tables) * len(arguments.loops) * repetitions
    for one in tables:
        for repetition in range(repetitions):
            load = replace(one.load, seed=SEED + repetition)
            if one.share:
                load = replace(load, rate=one.share * _measure_capacity(load))
            turns = [(loop, system) for loop in arguments.loops for system in one.systems]
            for loop, system in reversed(turns) if repetition % 2 else turns:
                done = f"[{len(measurements) + 1}/{total}]"
                print(f"{done} {one.title}, {loop}: {system}", file=sys.stderr)
                found = _measure_in_calm(one, load, system, loop, repetition, arguments.host)
                measurements.append(found)
                if found.error is not None:
                    print(f"    FAILED: {found.error}", file=sys.stderr)
    return measurements


def _measure_capacity(load: Load) -> float:
    """Measure the requests per second of a process that computes full batches and nothing else.

    Again for each repetition: timers are late by another tenth of a millisecond in another quarter
    of an hour, and at 95 % of the capacity that is a large part of what is left.
    """
    found = measure(replace(load, seconds=CAPACITY_SECONDS), "bare loop", "saturation", "uvloop")
    rate: float = found["figures"]["requests_per_second"]
    return rate


def _measure_in_calm(
    one: Table, load: Load, system: str, loop: str, repetition: int, host: "Host"
) -> Measurement:
    """Measure; again if the host took too much of the time, while there is patience."""
    while True:
        begin = time.monotonic()
        outcome = measure(load, system, one.scenario, loop)
        found = Measurement(system, one.name, loop, load.callers, repetition, **outcome)
        if host.was_calm(found.stolen_percent, time.monotonic() - begin):
            return found


def measure(load: Load, system: str, scenario: str, loop: str) -> dict[str, Any]:
    """Measure once in a fresh process and leave nothing of it running.

    Returns:
        The figures, versions and the host's share of the time; or an error.
    """
    known = SYSTEMS[system]
    request = {
        "adapter": known.adapter,
        "settings": known.settings,
        "scenario": scenario,
        "loop": loop,
        "load": asdict(load),
    }
    command = ["-m", "benchmarks.measured_process", json.dumps(request)]
    return in_fresh_process(known.environment, command, {}, load.seconds * 4 + SPARE_TIME)


def in_fresh_process(
    peer: str | None, command: list[str], environment: dict[str, str], time_limit: float
) -> dict[str, Any]:
    """Run Python, end everything that it has started, and read the JSON that it printed last.

    Args:
        peer: Whose virtual environment has the interpreter; None for the one that runs us.
        command: Python's arguments. It runs in the root of the source tree.
        environment: Variables besides ours.
        time_limit: Seconds after which it is ended.

    Returns:
        What it printed; or no figures, no versions and an `error`.
    """
    python = python_of(peer) if peer else Path(sys.executable)
    nothing: dict[str, Any] = {"figures": {}, "versions": {}}
    if not python.exists():
        return {**nothing, "error": "not installed, see `make bench-setup`"}
    # Files and not pipes: a process that it has started may outlive it and hold a pipe open.
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as complaints:
        process = subprocess.Popen(
            [str(python), *command],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
            stdout=output,
            stderr=complaints,
            start_new_session=True,  # a new process group, so that all of it can be ended
        )
        try:
            process.wait(time_limit)
        except subprocess.TimeoutExpired:
            return {**nothing, "error": f"no end after {time_limit:.0f} s"}
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for file in (output, complaints):
            file.seek(0)
        if process.returncode != 0:
            last_line = complaints.read().strip().splitlines()[-1:]
            error = " ".join([f"ended with {process.returncode}", *last_line])
            return {**nothing, "error": error}
        outcome: dict[str, Any] = json.loads(output.read().splitlines()[-1])
        return outcome


def hardware() -> dict[str, Any]:
    """Describe what the figures depend on, and how busy the machine is with other work."""
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
        "load_average_at_start": round(os.getloadavg()[0], 2),
    }


class Host:
    """Decides which measurements count on a virtual machine whose host takes time from it.

    Args:
        patience: Seconds that may be spent on measurements that do not count.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._discarded = 0
        # Of each measurement that counts.
        self._stolen_percents: list[float] = []
        # One process for each CPU that must not sleep long; they end with this one.
        self._sleepless: list[subprocess.Popen[bytes]] = []

    def stay_awake(self) -> None:
        """Let no CPU that we may use sleep long from now on."""
        for cpu in sorted(os.sched_getaffinity(0)):
            command = [sys.executable, "-m", "benchmarks.awake", str(cpu), str(os.getpid())]
            # In a new process group: an interrupt from the keyboard is for this process alone.
            self._sleepless.append(subprocess.Popen(command, cwd=ROOT, start_new_session=True))

    def was_calm(self, stolen_percent: float | None, seconds: float) -> bool:
        """Whether a measurement counts.

        Args:
            stolen_percent: Of the cores' time meanwhile; None if the measurement has failed.
            seconds: How long it has taken.
        """
        if stolen_percent is None:
            return True
        if stolen_percent > MOST_STOLEN and self._patience > 0:
            self._patience -= seconds
            self._discarded += 1
            print(f"    again: the host took {stolen_percent:.1f} % of the time", file=sys.stderr)
            return False
        self._stolen_percents.append(stolen_percent)
        return True

    def describe(self) -> dict[str, Any]:
        """Describe it for the results."""
        percent = round(sum(self._stolen_percents) / max(1, len(self._stolen_percents)), 2)
        discarded = {"measured_again": self._discarded} if self._discarded else {}
        still_there = sum(one.poll() is None for one in self._sleepless)
        awake = {"cpus_kept_awake": still_there} if self._sleepless else {}
        return {"stolen_percent": percent, **discarded, **awake}


def text_of(tables: Iterable[Table], measurements: Sequence[Measurement], loops: list[str]) -> str:
    """Put all tables below each other."""
    return "\n\n".join(one.text(measurements, loop) for one in tables for loop in loops)


def finish(
    arguments: argparse.Namespace,
    measurements: list[Measurement],
    text: str,
    verdicts: list[Verdict],
) -> int:
    """Print the tables and the verdicts, and store them with everything measured.

    Returns:
        The exit status: 1 if `--check` was given and a bar was missed or not measured, else 0.
    """
    settings = {
        # A benchmark may have systems of its own, without settings.
        "systems": {name: asdict(SYSTEMS[name]) for name in arguments.systems if name in SYSTEMS},
        "repetitions": arguments.repetitions,
        "seconds": arguments.seconds,
        # Of the arrivals of an open loop; the other loads are regular.
        "seed": SEED,
    }
    store(
        arguments.json,
        arguments.name,
        arguments.machine | arguments.host.describe(),
        settings,
        measurements,
        f"median (range) of {arguments.repetitions} repetitions, {arguments.seconds:g} s each",
        text,
        verdicts,
    )
    return 1 if arguments.check and not all(v.holds for v in verdicts) else 0


def run_git(*arguments: str, folder: Path = ROOT) -> str | None:
    """Return what git prints in a checkout; None without git, or outside of a checkout."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def store(
    path: Path | None,
    name: str,
    machine: Mapping[str, object],
    settings: Mapping[str, object],
    measurements: Sequence[Any],
    how: str,
    text: str,
    verdicts: Sequence[Verdict] = (),
    versions: dict[str, str] | None = None,
) -> None:
    """Print a report, and write it beside the JSON file with everything measured.

    Args:
        path: Of the JSON file; None prints the report and stores nothing.
        name: Of the benchmark.
        machine: What the figures depend on.
        settings: Of the run.
        measurements: Dataclass instances; those with an `error` are listed as failed.
        how: What the figures of the tables are.
        text: The tables.
        verdicts: The bars.
        versions: Of what was measured; None for those that the measurements tell.
    """
    command = shlex.join(["python", "-m", f"benchmarks.{name}", *sys.argv[1:]])
    date = datetime.now(UTC).isoformat(timespec="seconds")
    if versions is None:
        versions = {}
        for measurement in measurements:
            versions |= measurement.versions
    failed = failures(m for m in measurements if isinstance(m, Measurement))
    lines = [
        f"{command}   {date}",
        ", ".join(f"{key} {value}" for key, value in machine.items()),
        *([", ".join(f"{key} {value}" for key, value in versions.items())] if versions else []),
        how,
        "",
        text,
        "",
        *(str(verdict) for verdict in verdicts),
        *(f"      FAILED  {line}" for line in failed),
    ]
    report = "\n".join(lines).rstrip() + "\n"
    print(report, flush=True)
    if path is None:
        return
    result = {
        "benchmark": name,
        "date": date,
        # Of the code that was measured; None outside of a checkout.
        "commit": run_git("rev-parse", "HEAD"),
        "command": command,
        "hardware": machine,
        "versions": versions,
        "settings": settings,
        "verdicts": [{**asdict(v), "holds": v.holds} for v in verdicts],
        "failures": failed,
    }
    # One line for each measurement: there may be thousands of numbers.
    head = json.dumps(result, indent=1).removesuffix("\n}")
    rows = ",\n".join(json.dumps(asdict(m)) for m in measurements)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{head},\n "measurements": [\n{rows}\n]}}\n')
    path.with_suffix(".txt").write_text(report)
