"""Runs scenarios one after the other, each in a fresh process, prints one table and stores it."""

import argparse
import json
import traceback
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic

from benchmarks.harness import RESULTS, hardware
from benchmarks.soak.report import Findings, as_data, make_table
from benchmarks.soak.scenarios import SCENARIOS, USUAL, run_afresh


def store(arguments: argparse.Namespace, all_findings: list[Findings], seconds: float) -> None:
    """Write the findings so far as JSON, and the table beside it as text."""
    path = arguments.json or RESULTS / f"soak{'-short' * arguments.short}.json"
    date, machine = datetime.now(UTC).isoformat(timespec="seconds"), hardware()
    data = {
        "date": date,
        "machine": machine,
        "seed": arguments.seed,
        "loop": arguments.loop,
        "short": arguments.short,
        "seconds": round(seconds),
        "scenarios": [as_data(findings) for findings in all_findings],
    }
    path.write_text(json.dumps(data, indent=1) + "\n")
    described = ", ".join(f"{key} {value}" for key, value in machine.items())
    head = f"seed {arguments.seed}, {arguments.loop}, {date}, {seconds:.0f} s\n{described}"
    path.with_suffix(".txt").write_text(f"{head}\n\n{make_table(all_findings)}\n")


def main() -> int:
    """Run what the command line names; return 0 if every bar is met."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("scenarios", nargs="*", choices=[*SCENARIOS, []], default=[])
    parser.add_argument("--short", action="store_true", help="a short form of each")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--loop", choices=("asyncio", "uvloop"), default="uvloop")
    parser.add_argument("--json", type=Path, help="where the results go, with a .txt beside it")
    arguments = parser.parse_args()
    all_findings = []
    started = monotonic()
    print(f"seed {arguments.seed}, {arguments.loop}", flush=True)
    for name in arguments.scenarios or USUAL:
        try:
            findings = run_afresh(name, arguments.short, arguments.seed, arguments.loop)
        except Exception as error:  # noqa: BLE001  the other scenarios' findings must not be lost
            traceback.print_exc()
            findings = Findings(name)
            findings.check("ended", repr(error), "without an error", holds=False)
        all_findings.append(findings)
        store(arguments, all_findings, monotonic() - started)
    print(make_table(all_findings))
    return 0 if all(findings.holds for findings in all_findings) else 1
