"""What does an encoder on a CPU gain from batches that are joined end to end, beside padded ones?

Texts of log-normal lengths. On a CPU the attention is computed text by text; all other layers take
the joined tokens. On a GPU: `gpu --parts lengths`, where the attention takes the offsets.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.gpu.lengths import RAGGED, TABLE, Sizes, compare
from benchmarks.gpu.part import SEED, Run
from benchmarks.gpu.report import RATE, Results
from benchmarks.harness import RESULTS, hardware, store
from benchmarks.report import Compared, Verdict

SIZES, QUICK_SIZES = Sizes(256, 2, 8, 128), Sizes(64, 2, 4, 32)
# Seconds of a measurement, and repetitions.
FULL, QUICK = (2.0, 4), (0.3, 2)
# Times the requests/s of padded batches in order of arrival.
LEAST_OVER_FIFO = 1.5


def main() -> int:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ragged")
    parser.add_argument("--quick", action="store_true", help="seconds, for a try; stores nothing")
    is_quick = parser.parse_args().quick
    machine = hardware()
    # The bare loop has as many cores as a worker beside others.
    torch.set_num_threads(1)
    seconds, repetitions = QUICK if is_quick else FULL
    results = Results("cpu")
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder, "rows")
        compare(Run("cpu", seconds, repetitions, rows), QUICK_SIZES if is_quick else SIZES)
        results.read(rows)
    (table,) = results.tables()
    gain = table.spread(results.measurements, RAGGED, "cpu", Compared(RATE, "FIFO"))
    claim = f"at least {LEAST_OVER_FIFO:g} x the requests/s of padded batches in order"
    store(
        None if is_quick else RESULTS / "ragged.json",
        "ragged",
        machine,
        {"seconds": seconds, "repetitions": repetitions, "seed": SEED, "table": TABLE},
        results.measurements,
        f"median (range) of {repetitions} repetitions, {seconds:g} s each; seed {SEED}",
        results.text(),
        [Verdict(claim, gain, at_least=LEAST_OVER_FIFO)],
        versions={"torch": torch.__version__},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
