"""Simulates the scheduler in virtual time beside the exact optimum, prints tables and stores them.

Each part has its own files, `results/simulation-PART.txt` and `.json`. Every number follows from
the seeds: the same command gives the same tables on any machine.
"""

import argparse
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from time import monotonic

from benchmarks.harness import RESULTS, hardware, store
from benchmarks.simulation.cells import FIRST_SEED, RUNS, plan, run_seeds
from benchmarks.simulation.report import Result, tables, verdicts

NAME = "simulation"
SEEDS, QUICK_SEEDS = 10, 2
# Of a quick run's length: enough to see an order of magnitude.
QUICK_SCALE = 0.25


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{NAME}", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="a minute or two, for a rough answer")
    parser.add_argument("--parts", nargs="+", choices=RUNS, default=tuple(RUNS))
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
    """Simulate every cell of a part, with progress on stderr."""
    cells = plan([part])
    # The seeds of a cell share its optimum, so they stay in one process.
    tasks = [(cell, arguments.seeds, arguments.scale) for cell in cells]
    started = monotonic()
    context = get_context("spawn")
    with ProcessPoolExecutor(arguments.processes, mp_context=context) as pool:
        for number, outcomes in enumerate(pool.map(run_seeds, tasks), 1):
            seconds = monotonic() - started
            print(f"[{number}/{len(cells)}] {seconds:.0f} s  {cells[number - 1]}", file=sys.stderr)
            yield Result.of(cells[number - 1], outcomes)


def main() -> int:
    """Simulate, print, store; part by part, so that an interrupt loses only the current one."""
    arguments = parse_arguments()
    seeds = [FIRST_SEED + number for number in range(arguments.seeds)]
    settings = {"seeds": seeds, "scale": arguments.scale}
    hold = True
    for part in arguments.parts:
        machine = hardware()
        results = list(run_part(arguments, part))
        found = verdicts(results, part)
        path = arguments.folder / f"{NAME}-{part}{'-quick' * arguments.quick}.json"
        how = f"mean of {len(seeds)} seeds ± the distance of its 95 % bound on either side"
        store(path, NAME, machine, settings, results, how, tables(results), found, versions={})
        hold = hold and all(verdict.holds for verdict in found)
    return 1 if arguments.check and not hold else 0


if __name__ == "__main__":
    sys.exit(main())
