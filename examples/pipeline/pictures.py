"""Pictures as arrays. The API process decodes them; the models look for ink on them."""

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

# Height, width and the three colours, 0 to 255.
Picture = NDArray[np.uint8]

# A file of a few KB can decode to any size. This many pixels are an array of 12 MB.
MAX_PIXELS = 4_000_000
# A pixel is ink if one of its colours is darker than this. JPEG makes white paper slightly grey.
DARKEST_PAPER = 200


class NotAPictureError(ValueError):
    """Raised for bytes that are not a JPEG or PNG image, or are one with too many pixels."""


def decode(file: bytes) -> Picture:
    """Decode a JPEG or PNG file.

    Raises:
        NotAPictureError: The bytes are not such a file, or the picture is too large.
    """
    try:
        with Image.open(io.BytesIO(file), formats=("JPEG", "PNG")) as image:
            # The size is in the file's header; pixels are decoded only by `convert`.
            is_small = image.width * image.height <= MAX_PIXELS
            picture = np.asarray(image.convert("RGB")) if is_small else None
    except Exception:  # noqa: BLE001  broken bytes make decoders raise almost anything
        raise NotAPictureError("not a JPEG or PNG file that can be decoded") from None
    if picture is None:
        raise NotAPictureError(f"a picture may have at most {MAX_PIXELS} pixels")
    return picture


def find_ink(picture: Picture) -> NDArray[Any]:
    """Return a boolean array of the picture's height and width: True where something is drawn."""
    ink: NDArray[Any] = picture.min(axis=2) < DARKEST_PAPER
    return ink
