"""Run all pairs, or one case again.

python -m pairing SEED [SECONDS [name=value&name=value | "kind of fault"] ...]
                                                all cases of a seed, but for combinations and
                                                faults that are known
python -m pairing SEED shrink name=value ...    one case; other values are ordinary
"""

# A program: it prints.
# ruff: noqa: T201

import json
import sys
import time
from collections import Counter

from pairing.covering import cover, pairs_of
from pairing.dimensions import (
    DEFAULTS,
    NO_MEANING,
    REFUSED_LATE,
    THREE_WAY,
    Case,
    Choice,
    find_refused,
)
from pairing.runs import perform
from pairing.shrinking import shrink, values_that_matter


def main() -> None:
    seed = int(sys.argv[1])
    if sys.argv[2:3] == ["shrink"]:
        show_one(DEFAULTS | dict(part.split("=") for part in sys.argv[3:]), seed)
        return
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 1e9
    blocked = [read_choices(text) for text in sys.argv[3:] if "=" in text]
    run_all(seed, seconds, blocked, {text for text in sys.argv[3:] if "=" not in text})


def read_choices(text: str) -> frozenset[Choice]:
    """Read `name=value&name=value`."""
    choices = (part.partition("=") for part in text.split("&"))
    return frozenset((name, value) for name, _, value in choices)


def run_all(seed: int, seconds: float, blocked: list[frozenset[Choice]], ignored: set[str]) -> None:
    excluded = {**find_refused(), **NO_MEANING, **REFUSED_LATE, **dict.fromkeys(blocked, "known")}
    cases, impossible = cover(excluded, seed, three_way=THREE_WAY)
    began, calls, ran = time.monotonic(), 0, 0
    seen: Counter[frozenset[Choice]] = Counter()
    print(f"seed {seed}: {len(cases)} cases, {len(impossible)} pairs are impossible", flush=True)
    found = Counter[str]()
    for number, case in enumerate(cases):
        if time.monotonic() - began > seconds:
            break
        report = perform(case, seed * 1000 + number)
        calls, ran = calls + report.calls, ran + 1
        seen.update(pairs_of(case))
        found.update(report.kinds)
        if report.kinds - ignored:
            print(
                f"WRONG {seed * 1000 + number} {json.dumps(values_that_matter(case))}", flush=True
            )
            firsts = {fault.partition(":")[0]: fault for fault in reversed(report.faults)}
            for fault in firsts.values():
                print(f"    {len(report.faults)}: {fault[:300]}", flush=True)
    twice = sum(count > 1 for count in seen.values())
    print(
        f"{ran} runs, {calls} calls, {time.monotonic() - began:.0f} s; "
        f"{len(seen)} pairs, {twice} of them twice; faults {dict(found)}"
    )


def show_one(case: Case, seed: int) -> None:
    report = perform(case, seed)
    print(
        f"{report.calls} calls, {report.seconds:.1f} s, {dict(report.ends)}",
        *report.faults[:5],
        sep="\n",
    )
    if report.faults:
        kind = report.faults[0].partition(":")[0]
        case = shrink(case, lambda simpler: kind in perform(simpler, seed).kinds)
        print(f"WRONG {kind}: {values_that_matter(case)}")


if __name__ == "__main__":
    main()
