"""Runs soaks one after the other, prints one table and stores it."""

import argparse
import asyncio
import functools
import json
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from time import monotonic
from typing import Any

import uvloop

from benchmarks.harness import RESULTS, hardware
from benchmarks.soak.kills import s1, s2
from benchmarks.soak.lives import s3, s5, s7
from benchmarks.soak.report import Findings, as_data, make_table
from benchmarks.soak.steady import s4

SCENARIOS: dict[str, Callable[[bool, int], Coroutine[Any, Any, Findings]]] = {
    "S1": s1,
    "S2": s2,
    "S3": s3,
    "S4": s4,
    "S5": s5,
    "S7": s7,
}


def main() -> int:
    """0 if every bar is met."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("scenarios", nargs="*", choices=[*SCENARIOS, []], default=[])
    parser.add_argument("--short", action="store_true", help="a short form of each")
    parser.add_argument("--seconds", type=float, help="how long S4 takes, in place of 20 minutes")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--loop", choices=("asyncio", "uvloop"), default="uvloop")
    parser.add_argument("--json", type=Path, help="where the results go, with a .txt beside it")
    arguments = parser.parse_args()
    run = uvloop.run if arguments.loop == "uvloop" else asyncio.run
    all_findings = []
    started = monotonic()
    print(f"seed {arguments.seed}, {arguments.loop}", flush=True)
    for name in arguments.scenarios or SCENARIOS:
        scenario = SCENARIOS[name]
        if scenario is s4:
            scenario = functools.partial(s4, seconds=arguments.seconds)
        all_findings.append(run(scenario(arguments.short, arguments.seed)))
    text = f"{make_table(all_findings)}\n{monotonic() - started:.0f} seconds\n"
    print(text)
    path = arguments.json or RESULTS / f"soak{'-short' * arguments.short}.json"
    data = {
        "machine": hardware(),
        "seed": arguments.seed,
        "loop": arguments.loop,
        "short": arguments.short,
        "scenarios": [as_data(findings) for findings in all_findings],
    }
    path.write_text(json.dumps(data, indent=1) + "\n")
    path.with_suffix(".txt").write_text(text)
    return 0 if all(findings.holds for findings in all_findings) else 1


if __name__ == "__main__":
    sys.exit(main())
