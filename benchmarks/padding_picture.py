"""Draws the padding of batches in order of arrival and of ours, for docs/tuning.md.

python -m benchmarks.padding_picture
"""

from pathlib import Path
from random import Random

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.harness import ROOT
from benchmarks.simulation.loads import draw_lengths
from benchmarks.simulation.models import ENCODERS, LONGEST
from fast_batcher._core.queue import PaddedPacker
from fast_batcher._core.service_model import Shape
from fast_batcher._core.values import Request

PICTURE = ROOT / "docs" / "images" / "padding.svg"
TEXTS, MAX_BATCH_SIZE, SEED = 48, 16, 3
ENCODER = ENCODERS["large gpu"]
Batches = list[list[float]]


def plan(lengths: list[float]) -> Batches:
    """Form batches until no text is left, as the scheduler does when all have arrived."""
    packer = PaddedPacker(None)
    random = Random(SEED)
    for _ in range(200):
        size, longest = random.randint(1, MAX_BATCH_SIZE), random.uniform(4, LONGEST)
        shape = Shape(size, longest, size * longest)
        packer.times.observe(shape, ENCODER.seconds(size, longest))
    waiting = []
    for length in lengths:
        request = Request(None, None)
        request.cost = length
        waiting.append(request)
    batches = []
    while waiting:
        batch: list[Request] = []
        packer.fill(batch, waiting, MAX_BATCH_SIZE)
        batches.append([request.cost for request in batch])
        waiting = [request for request in waiting if request not in batch]
    return batches


def draw(axes: Axes, title: str, batches: Batches) -> None:
    """Draw each text as a bar as wide as its batch, with its padding in another colour."""
    at = 0
    computed = sum(len(batch) * max(batch) for batch in batches)
    real = sum(map(sum, batches))
    seconds = sum(ENCODER.seconds(len(batch), max(batch)) for batch in batches)
    for batch in batches:
        places = range(at, at + len(batch))
        axes.bar(places, [max(batch)] * len(batch), color="#f2c4a8", width=0.9)
        axes.bar(places, batch, color="#3b6ea5", width=0.9)
        at += len(batch) + 1
    axes.set_title(
        f"{title}: {len(batches)} batches, {1 - real / computed:.0%} padding, {seconds:.2f} s",
        fontsize=10,
    )
    axes.set_xticks([])
    axes.set_ylabel("tokens")


def main(path: Path = PICTURE) -> None:
    """Draw and store."""
    lengths = draw_lengths("log-normal", TEXTS, LONGEST, SEED)
    in_order = [lengths[at : at + MAX_BATCH_SIZE] for at in range(0, TEXTS, MAX_BATCH_SIZE)]
    figure = Figure(figsize=(8, 4.6))
    above, below = figure.subplots(2, 1, sharey=True)
    draw(above, "In order of arrival", in_order)
    draw(below, "With cost", plan(lengths))
    figure.tight_layout()
    with mpl.rc_context({"svg.hashsalt": "padding"}):  # the same file each time
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
