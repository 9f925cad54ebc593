"""Writes the README's table from the stored results of `benchmarks.http`; measures nothing.

Lists the stored results that are older than the last change of the package.

python -m benchmarks.publish          write
python -m benchmarks.publish --check  end with 1 if the README does not say what the results say
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks import http
from benchmarks.harness import RESULTS, ROOT, run_git
from benchmarks.report import Measurement, Series
from fast_batcher.stats import number

README = ROOT / "README.md"
# A column's text, the load, and the figure.
_START, _ECHO, _CLOSED, _OPEN, _LARGE = http.PUBLISHED_LOADS
COLUMNS = (
    ("echo at 32 connections: CPU us", _ECHO, http.CPU),
    ("requests/s", _ECHO, http.RATE),
    ("p99 ms", _ECHO, http.P99),
    ("5 ms model, 128 connections: % of its capacity", _CLOSED, http.OF_CAPACITY),
    ("the same at 70 % of the ideal capacity: p50 ms", _OPEN, http.P50),
    ("p99 ms", _OPEN, http.P99),
    ("602 KB at 16 connections: CPU us", _LARGE, http.CPU),
    ("memory MB", _START, "memory_mb"),
)
NAMES = {http.OURS: "**fast_batcher**", http.BY_JSON: "**fast_batcher, `JsonEndpoint`**"}
NAMES |= {http.FASTAPI: "FastAPI without a batcher", http.BARE: "an ASGI app without FastAPI"}
NAMES |= {
    http.FASTAPI_QUIET: "FastAPI without a batcher, telemetry off",
    http.JSON_QUIET: "**fast_batcher, `JsonEndpoint`, telemetry off**",
}


def over_http() -> str:
    """Make the table: a row for each system, and where the figures come from."""
    stored: dict[str, Any] = json.loads((RESULTS / "http.json").read_text())
    measurements = [Measurement(**one) for one in stored["measurements"]]
    callers = {one.scenario: one.callers for one in measurements}
    rows = ["| | " + " | ".join(text for text, _, _ in COLUMNS) + " |"]
    rows.append("|---|" + "---:|" * len(COLUMNS))
    for system in http.PUBLISHED:
        cells = []
        for _, load, figure in COLUMNS:
            series = Series.of(measurements, system, load, http.HTTP, callers[load])
            spread = series.spread(figure)
            cells.append("-" if spread is None else number(spread.median))
        rows.append(f"| {NAMES.get(system, system)} | " + " | ".join(cells) + " |")
    hardware = stored["hardware"]
    source = (
        f"{stored['date'][:10]}, {hardware['processor']}, {hardware['cores']} cores, Python "
        f"{hardware['python']}; median of {stored['settings']['repetitions']}; CPU of all "
        f"processes for each request. `{stored['command']}`"
    )
    return "\n".join([*rows, "", source])


def put(document: str, mark: str, text: str) -> str:
    """Replace what stands between the two comments of this name.

    Raises:
        ValueError: The document has no such comments.
    """
    begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if not pattern.search(document):
        raise ValueError(f"there is no {begin} ... {end}")
    return pattern.sub(lambda _: f"{begin}\n{text}\n{end}", document)


def list_outdated(results: Path = RESULTS, folder: Path = ROOT) -> list[str]:
    """Describe the stored results that were measured before the last change of the package.

    Earlier results do not name their commit, so their date counts.
    """
    found = []
    for path in sorted(results.glob("*.json")):
        stored = json.loads(path.read_text())
        commit, date = stored.get("commit"), stored["date"]
        since = [f"{commit}..HEAD"] if commit else [f"--since={date}", "HEAD"]
        count = run_git("rev-list", "--count", *since, "--", "fast_batcher", folder=folder)
        if count not in ("0", None):
            found.append(f"{path.stem}: of {date[:10]}, {count} changes of the package since")
    return found


def main() -> int:
    """Write, or compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    before = README.read_text()
    after = put(before, "http", over_http())
    if arguments.check:
        stale = "the README is stale; run `python -m benchmarks.publish`"
        print("up to date" if before == after else stale)
        return int(before != after)
    README.write_text(after)
    print("\n".join(list_outdated()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
