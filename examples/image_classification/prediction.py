"""What the app and its model tell each other. Imported on both sides, so it needs nothing heavy."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Prediction:
    """The likeliest class of an image."""

    label: str
    # Its share of the softmax, 0 to 1.
    score: float


class NotAnImageError(ValueError):
    """The bytes are no JPEG or PNG image that can be read, or one that is too large to be."""
