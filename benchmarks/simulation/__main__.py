"""Simulates the core and the peers' policies in virtual time, prints tables and stores them.

Each part has files of its own, `results/simulation-PART.txt`, `.json` and, where it has a picture,
`.png`.
Every number follows from the seeds: the same command gives the same tables on any machine.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from time import monotonic

from benchmarks.harness import RESULTS, hardware
from benchmarks.report import Verdict
from benchmarks.simulation.cells import ALL_SYSTEMS, FIRST_SEED, RUNS, plan, run_seeds
from benchmarks.simulation.pictures import draw
from benchmarks.simulation.report import Result, tables, verdicts

NAME = "simulation"
SEEDS, QUICK_SEEDS = 10, 2
# Of a quick run's length: enough to see an order of magnitude.
QUICK_SCALE = 0.25


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{NAME}", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="minutes, for a rough answer")
    parser.add_argument("--parts", nargs="+", choices=RUNS, default=tuple(RUNS))
    parser.add_argument("--systems", nargs="+", choices=ALL_SYSTEMS, default=ALL_SYSTEMS)
    parser.add_argument("--seeds", type=int, help=f"{SEEDS}, or {QUICK_SEEDS} if quick")
    parser.add_argument("--scale", type=float, help=f"of lengths: 1, or {QUICK_SCALE} if quick")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=RESULTS, help="where the results go")
    parser.add_argument("--check", action="store_true", help="end with 1 if a bar is missed")
    arguments = parser.parse_args()
    arguments.seeds = arguments.seeds or (QUICK_SEEDS if arguments.quick else SEEDS)
    arguments.scale = arguments.scale or (QUICK_SCALE if arguments.quick else 1.0)
    return arguments


def run_part(arguments: argparse.Namespace, part: str) -> Iterator[Result]:
    """Every cell of a part, with progress on stderr."""
    cells = plan([part], arguments.systems)
    # The seeds of a cell share its optimum, so they stay in one process.
    tasks = [(cell, arguments.seeds, arguments.scale) for cell in cells]
    started = monotonic()
    context = get_context("spawn")
    with ProcessPoolExecutor(arguments.processes, mp_context=context) as pool:
        for number, outcomes in enumerate(pool.map(run_seeds, tasks), 1):
            seconds = monotonic() - started
            print(f"[{number}/{len(cells)}] {seconds:.0f} s  {cells[number - 1]}", file=sys.stderr)
            yield Result.of(cells[number - 1], outcomes)


def store(
    arguments: argparse.Namespace,
    path: Path,
    results: list[Result],
    found: list[Verdict],
    seconds: float,
) -> None:
    """Print the report, and write it below the path with everything that was counted."""
    command = shlex.join(["python", "-m", f"benchmarks.{NAME}", *sys.argv[1:]])
    date, machine = datetime.now(UTC).isoformat(timespec="seconds"), hardware()
    data = {
        "benchmark": NAME,
        "date": date,
        "command": command,
        "hardware": machine,
        "settings": {
            "seeds": [FIRST_SEED + number for number in range(arguments.seeds)],
            "scale": arguments.scale,
        },
        "verdicts": [{**asdict(v), "holds": v.holds} for v in found],
    }
    lines = [
        f"{command}   {date}",
        ", ".join(f"{key} {value}" for key, value in machine.items()),
        f"mean of {arguments.seeds} seeds ± how far its 95 % bound is on either side; "
        f"{seconds:.0f} s in {arguments.processes} processes",
        "",
        tables(results),
        "",
        *(str(verdict) for verdict in found),
    ]
    report = "\n".join(lines).rstrip() + "\n"
    print(report, flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    # One line per cell: thousands of numbers, which nobody reads one by one.
    cells = ",\n".join(json.dumps(result.as_data()) for result in results)
    head = json.dumps(data, indent=1).removesuffix("\n}")
    path.with_suffix(".json").write_text(f'{head},\n "cells": [\n{cells}\n]}}\n')
    path.with_suffix(".txt").write_text(report)


def main() -> int:
    """Simulate, print, store, draw; part by part, so that what is done is not lost."""
    arguments = parse_arguments()
    hold = True
    for part in arguments.parts:
        started = monotonic()
        results = list(run_part(arguments, part))
        found = verdicts(results, part)
        path = arguments.folder / f"{NAME}-{part}{'-quick' * arguments.quick}"
        store(arguments, path, results, found, monotonic() - started)
        draw(part, results, path.with_suffix(".png"))
        hold = hold and all(verdict.holds for verdict in found)
    return 1 if arguments.check and not hold else 0


if __name__ == "__main__":
    sys.exit(main())
