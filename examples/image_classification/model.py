"""The image classifier: a JPEG, PNG or array in, label and score out. Runs in the worker process.

The app names it as text, so that only workers import PyTorch and Pillow.
"""

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps

from examples.image_classification.prediction import SIZE, NotAnImageError, Prediction
from examples.image_classification.resnet import (
    MEAN,
    STANDARD_DEVIATION,
    classify,
    load_network,
)
from fast_batcher import InferenceModel, stack

# The published weights were evaluated like this: the shorter side scaled to 256 pixels, 224 x 224
# cut from the middle. Source: torchvision's presets.
SCALED_SIZE = 256
# What a file of some KB may unpack to, 3 bytes each: the largest of cameras that people carry.
MAX_PIXELS = 50_000_000


class ImageClassifier(InferenceModel[bytes | NDArray[np.float32], Prediction]):
    """A ResNet and what is done to an image before it.

    Args:
        arch: "resnet18", "resnet50" or "resnet101".
        weights: A file that `torch.save` wrote of a state dict, as torchvision's are; random
            weights if there is none.
        labels: A text file with one class name per line; else they are called "class 0" and so on.
        dtype: "float32", or "bfloat16" for devices that are fast with it.
    """

    def __init__(
        self,
        arch: str = "resnet50",
        weights: str | None = None,
        labels: str | None = None,
        dtype: str = "float32",
    ) -> None:
        self._network = load_network(arch, weights).to(self.device, getattr(torch, dtype))
        classes = self._network.fc.out_features
        self._labels = read_labels(labels, classes)

    def prepare(self, value: bytes | NDArray[np.float32]) -> NDArray[Any]:
        """Decode a file, in a thread of the worker; an array is the network's input already."""
        # Pillow lets go of the interpreter lock while it decodes.
        return decode(value) if isinstance(value, bytes) else value

    def infer(self, inputs: list[Any]) -> Sequence[Prediction | NotAnImageError]:
        """Classify a batch of decoded files or one of arrays."""
        # Bytes go to the device, a quarter of the floats made of them there.
        batch = to_tensor(inputs).to(self.device, non_blocking=True)
        dtype = self._network.fc.weight.dtype
        if batch.dtype == torch.uint8:  # all of them: see `group_by` where the batcher is made
            return self._classify(to_input(batch, dtype))
        return self._classify(batch.to(dtype, memory_format=torch.channels_last))

    def _classify(self, batch: torch.Tensor) -> list[Prediction | NotAnImageError]:
        scores, classes = classify(self._network, batch)
        return [
            Prediction(self._labels[index], score)
            # What JSON cannot carry either.
            if math.isfinite(score)
            else NotAnImageError("numbers that are not finite, or too large for the network")
            for index, score in zip(classes.tolist(), scores.tolist(), strict=True)
        ]

    def warmup_inputs(self) -> Sequence[bytes]:
        """A grey image before the first request, which would otherwise pay for memory and kernels.

        One, since a device is warmed by the first call of any size.
        """
        file = io.BytesIO()
        Image.new("RGB", (SIZE, SIZE), "grey").save(file, "PNG")
        return [file.getvalue()]


def read_labels(path: str | None, classes: int) -> list[str]:
    """One name per class.

    Raises:
        ValueError: The file has another number of lines than the model has classes.
    """
    if path is None:
        return [f"class {index}" for index in range(classes)]
    labels = Path(path).read_text().splitlines()
    if len(labels) != classes:
        raise ValueError(f"{path} has {len(labels)} lines for a model of {classes} classes")
    return labels


def decode(data: bytes) -> NDArray[np.uint8]:
    """Bytes of a file to pixels of shape (SIZE, SIZE, 3).

    Raises:
        NotAnImageError: The bytes are no image that can be read, or a too large one.
    """
    try:
        with Image.open(io.BytesIO(data), formats=("JPEG", "PNG")) as image:
            return read_pixels(image)
    except NotAnImageError:
        raise
    except Exception as error:  # broken bytes make decoders raise almost anything
        raise NotAnImageError("not a JPEG or PNG image that can be read") from error


def read_pixels(image: Image.Image) -> NDArray[np.uint8]:
    """Scale an image and cut out its middle.

    Raises:
        NotAnImageError: The image has too many pixels.
    """
    if image.width * image.height > MAX_PIXELS:
        raise NotAnImageError(f"an image of {image.width} x {image.height} is too large")
    # A JPEG of more than twice this size is decoded at a half, a quarter or an eighth of it, in a
    # fraction of the time; other formats ignore it.
    image.draft("RGB", (SCALED_SIZE, SCALED_SIZE))
    # Scaled to SCALED_SIZE, `bleed` of it on each side would be cut off to leave SIZE.
    bleed = (1 - SIZE / SCALED_SIZE) / 2
    resampling = Image.Resampling.BILINEAR
    return np.asarray(ImageOps.fit(image.convert("RGB"), (SIZE, SIZE), resampling, bleed))


def to_tensor(arrays: Sequence[NDArray[Any]]) -> torch.Tensor:
    """Arrays as one tensor, without a copy where they have come to lie side by side in memory."""
    return torch.from_numpy(stack(arrays))


def to_input(pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Pixels (n, h, w, 3) of 0 to 255 to what the network takes, (n, 3, h, w), channels last."""
    mean = torch.tensor(MEAN, device=pixels.device)
    deviation = torch.tensor(STANDARD_DEVIATION, device=pixels.device)
    return ((pixels / 255 - mean) / deviation).permute(0, 3, 1, 2).to(dtype)
