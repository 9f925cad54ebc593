"""The first model: finds objects on white paper. Runs in a worker process.

It cuts the picture along its empty rows and columns, and each part again, until no part can be cut
(an "XY-cut", as in the analysis of printed pages).
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

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
    height, width = ink.shape
    boxes, pending = [], [Box(0, 0, width, height)]
    while pending:
        box = pending.pop()
        if min(box.right - box.left, box.bottom - box.top) < MIN_SIDE:
            continue
        parts = cut(ink, box)
        if parts == [box]:
            boxes.append(box)
        else:
            pending += parts
    return sorted(boxes, key=lambda box: (box.top, box.left))


def cut(ink: NDArray[Any], box: Box) -> list[Box]:
    """Cut a box along its empty rows, then each part along the part's empty columns."""
    inside = ink[box.top : box.bottom, box.left : box.right]
    return [
        Box(box.left + left, box.top + top, box.left + right, box.top + bottom)
        for top, bottom in find_runs(inside.any(axis=1))
        for left, right in find_runs(inside[top:bottom].any(axis=0))
    ]


def find_runs(line: ArrayLike) -> list[tuple[int, int]]:
    """Return begin and end of each run of True in a boolean array; the end is outside."""
    edges = np.flatnonzero(np.diff(line, prepend=False, append=False)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))
