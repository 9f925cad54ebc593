"""The first model: finds objects on white paper. Runs in a worker process.

An object is a region of connected ink. Each row of the picture is a few runs of ink; runs that
touch in adjacent rows belong to one object.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from examples.pipeline.pictures import Picture, find_ink
from fast_batcher import InferenceModel

# Objects of fewer pixels than this on one side are dust.
MIN_SIDE = 8


class Box(NamedTuple):
    """Rectangle in pixels; `right` and `bottom` are the first column and row outside of it."""

    left: int
    top: int
    right: int
    bottom: int


class Detector(InferenceModel[Picture, list[Box]]):
    """Finds the box of each object, from the top of the picture to its bottom."""

    def infer(self, inputs: list[Picture]) -> list[list[Box]]:
        """Find the objects of each picture of a batch."""
        return [find_boxes(find_ink(picture)) for picture in inputs]


def find_boxes(ink: NDArray[Any]) -> list[Box]:
    """Return the boxes of all objects, sorted by their upper left corners."""
    # An empty column behind each row, so that no run goes on in the next row. Runs are positions in
    # all rows one after the other.
    row_length = ink.shape[1] + 1
    rows = np.pad(ink, ((0, 0), (0, 1)))
    edges = np.flatnonzero(np.diff(rows.ravel(), prepend=False))
    starts, stops = edges[::2], edges[1::2]
    boxes: dict[int, Box] = {}
    for run, region in enumerate(join_runs(starts, stops, row_length)):
        top, left = divmod(int(starts[run]), row_length)
        box = Box(left, top, left + int(stops[run] - starts[run]), top + 1)
        boxes[region] = enclose(box, boxes.get(region, box))
    return sorted(
        (box for box in boxes.values() if is_object(box)), key=lambda box: (box.top, box.left)
    )


def join_runs(starts: NDArray[Any], stops: NDArray[Any], row_length: int) -> list[int]:
    """Return the region of each run: the number of one of its runs (a union-find)."""
    regions = list(range(len(starts)))

    def find(run: int) -> int:
        while regions[run] != run:
            regions[run] = regions[regions[run]]
            run = regions[run]
        return run

    # The runs that touch a run from below are neighbours in the list: the first one that ends
    # behind its start, and so on until one begins behind its end.
    first_below = np.searchsorted(stops, starts + row_length, side="right").tolist()
    end_below = np.searchsorted(starts, stops + row_length).tolist()
    for run, below in enumerate(zip(first_below, end_below, strict=True)):
        for other in range(*below):
            regions[find(other)] = find(run)
    return [find(run) for run in range(len(regions))]


def enclose(one: Box, other: Box) -> Box:
    """Return the smallest box that has both inside."""
    return Box(
        min(one.left, other.left),
        min(one.top, other.top),
        max(one.right, other.right),
        max(one.bottom, other.bottom),
    )


def is_object(box: Box) -> bool:
    """Return whether a box is larger than dust."""
    return min(box.right - box.left, box.bottom - box.top) >= MIN_SIDE
