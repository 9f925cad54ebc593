"""Messages between the app and its model. Both sides import this module, so it imports little."""

from dataclasses import dataclass

# Pixels on each side of what the network sees. Source: the published weights' evaluation.
SIZE = 224
# An image that is the network's input already: channels, height, width. As float32, 602112 bytes.
ARRAY_SHAPE = (3, SIZE, SIZE)


@dataclass(frozen=True)
class Prediction:
    """The likeliest class of an image."""

    label: str
    # Its share of the softmax, 0 to 1.
    score: float


class NotAnImageError(ValueError):
    """Bytes that are no JPEG or PNG image that can be read, or numbers that give no class."""
