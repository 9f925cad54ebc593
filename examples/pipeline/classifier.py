"""The second model: names the shape of one object. Runs in a worker process.

It scales the object to a small square and looks for the nearest of a few prototypes.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from examples.pipeline.pictures import Picture, find_ink
from fast_batcher import InferenceModel

# Objects are compared as squares of this many pixels on each side.
SIDE = 16
# Prototypes are drawn larger, and scaled as the objects are.
LAST = 255


class Classifier(InferenceModel[Picture, str]):
    """Tells ellipses, rectangles, triangles and diamonds apart, whatever their size and colour."""

    def __init__(self) -> None:
        prototypes = draw_prototypes()
        self._labels = list(prototypes)
        # One row for each label.
        self._prototypes = np.stack([to_features(one) for one in prototypes.values()])

    def infer(self, inputs: list[Picture]) -> list[str]:
        """Compare a whole batch of objects with all prototypes at once."""
        objects = np.stack([to_features(picture) for picture in inputs])
        distances = np.square(objects[:, None] - self._prototypes).sum(axis=2)
        return [self._labels[nearest] for nearest in distances.argmin(axis=1)]


def to_features(picture: Picture) -> NDArray[np.float32]:
    """Cut off the margins, scale what is left, and return its pixels as numbers of 0 to 1."""
    ink = Image.fromarray(find_ink(picture)).convert("L")
    square = ink.crop(ink.getbbox()).resize((SIDE, SIDE), Image.Resampling.BOX)
    return np.asarray(square, np.float32).ravel() / np.float32(255)


def draw_prototypes() -> dict[str, Picture]:
    """Draw one picture for each label."""
    middle = LAST // 2
    polygons = {
        "rectangle": [(0, 0), (LAST, 0), (LAST, LAST), (0, LAST)],
        "triangle": [(middle, 0), (LAST, LAST), (0, LAST)],
        "diamond": [(middle, 0), (LAST, middle), (middle, LAST), (0, middle)],
    }
    prototypes: dict[str, Any] = {}
    for label in ("ellipse", *polygons):
        paper = Image.new("RGB", (LAST + 1, LAST + 1), "white")
        pen = ImageDraw.Draw(paper)
        if label == "ellipse":
            pen.ellipse((0, 0, LAST, LAST), "black")
        else:
            pen.polygon(polygons[label], "black")
        prototypes[label] = np.asarray(paper)
    return prototypes
