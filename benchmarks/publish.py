"""Writes the README's tables from the stored results; measures nothing.

python -m benchmarks.publish          write
python -m benchmarks.publish --check  end with 1 if the README does not say what the results say
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.harness import RESULTS, ROOT
from benchmarks.payload import MIDDLE, label_of
from benchmarks.peers import CALLERS, LOADS, load_label, name_callers
from benchmarks.report import Measurement, Series, number
from benchmarks.saturation import CALLERS as SATURATION_CALLERS

README = ROOT / "README.md"
# What each table compares: each peer with its defaults and tuned, whichever is better in a row.
FAST_DYNAMIC_BATCHER = ("fast_dynamic_batcher", "fast_dynamic_batcher tuned")
COMPARED = {
    "**fast_batcher**": ("ours",),
    "fast_dynamic_batcher": FAST_DYNAMIC_BATCHER,
    "batched.aio": ("batched.aio", "batched.aio 0.1 ms"),
    "batched (thread)": ("batched thread", "batched thread 0.1 ms"),
    "async-batcher": ("async-batcher", "async-batcher 1 ms"),
    "BentoML dispatcher": ("BentoML dispatcher", "BentoML dispatcher 100 ms"),
    "Ray Serve batch": ("Ray Serve batch", "Ray Serve batch tuned"),
}
COMPARED_LARGE = {
    "**fast_batcher**": ("ours",),
    "fast_dynamic_batcher": FAST_DYNAMIC_BATCHER,
    "process pool": ("process pool",),
    "torch.multiprocessing": ("process pool of tensors",),
}
# Of these figures more is better.
MORE_IS_BETTER = {"requests_per_second", "within_50_ms"}

# A row's text, the label of the load, its callers, and the figure.
Row = tuple[str, str, int, str]


def small_inputs() -> str:
    """Make the table of small inputs."""
    last, at_80 = load_label(LOADS[-1]), load_label(0.8)
    text = "CPU of all processes, us per request, "
    rows: list[Row] = [
        (text + name_callers(callers), "full_speed", callers, "all_cpu_us") for callers in CALLERS
    ]
    rows += [
        ("A lone request at a 5 ms model, p50 ms", "lone_requests", 1, "p50_ms"),
        ("Idle, share of a core", "idle", 1, "idle_share_of_core"),
        ("Saturated, requests/s", "saturation", SATURATION_CALLERS, "requests_per_second"),
        ("Poisson arrivals at 80 % of capacity, p50 ms", at_80, 0, "p50_ms"),
        ("the same, p99 ms", at_80, 0, "p99_ms"),
        ("at 95 %: answered within 50 ms", last, 0, "within_50_ms"),
    ]
    lines = [
        "Against every batcher that runs inside an app's process, in one run on one machine. Each",
        "has its defaults or is tuned as well as we could, whichever is better in that row. Ours",
        "and the tuned make batches of 32; by default async-batcher has no limit, and BentoML",
        "takes 100. `-` is for what was not measured or was lost on the way:",
    ]
    return _table("peers", lines, COMPARED, rows)


def large_inputs() -> str:
    """Make the table of large inputs."""
    label, echo = (label_of("full_speed", MIDDLE, model) for model in ("ArrayLabel", "ArrayEcho"))
    callers = MIDDLE.count
    rows: list[Row] = [
        ("A label back, requests/s", label, callers, "requests_per_second"),
        ("the same, CPU of all processes, us per request", label, callers, "all_cpu_us"),
        ("The array back, requests/s", echo, callers, "requests_per_second"),
        ("the same, CPU of all processes, us per request", echo, callers, "all_cpu_us"),
    ]
    lines = [
        f"Images as arrays of 602 KB, from {callers} callers who ask again as soon as they are",
        "answered. fast_dynamic_batcher has its defaults or is tuned, whichever is better; the",
        "pools take one array per call:",
    ]
    return _table("payload", lines, COMPARED_LARGE, rows)


def _table(
    name: str, lines: Sequence[str], compared: dict[str, tuple[str, ...]], rows: Sequence[Row]
) -> str:
    """A row per figure, a column per library, and where the figures come from."""
    stored: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    measurements = [Measurement(**one) for one in stored["measurements"]]
    loop = measurements[0].loop
    head = ["| | " + " | ".join(compared) + " |", "|---|" + "---:|" * len(compared)]
    body = []
    for text, label, callers, figure in rows:
        best = max if figure in MORE_IS_BETTER else min
        cells = []
        for systems in compared.values():
            series = [Series.of(measurements, one, label, loop, callers) for one in systems]
            spreads = [one.spread(figure) for one in series]
            medians = [spread.median for spread in spreads if spread is not None]
            cells.append(number(best(medians)) if medians else "-")
        body.append(f"| {text} | " + " | ".join(cells) + " |")
    hardware = stored["hardware"]
    source = (
        f"{stored['date'][:10]}, {hardware['processor']}, {hardware['cores']} cores, Python "
        f"{hardware['python']}, {loop}; median of {stored['settings']['repetitions']}. "
        f"`{stored['command']}`"
    )
    return "\n".join([*lines, "", *head, *body, "", source])


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


def main() -> int:
    """Write, or compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    before = README.read_text()
    after = put(put(before, "peers", small_inputs()), "payload", large_inputs())
    if arguments.check:
        stale = "the README is stale; run `python -m benchmarks.publish`"
        print("up to date" if before == after else stale)
        return int(before != after)
    README.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
