"""Answers with many numbers as JSON: arrays to bytes, in the worker or in the app.

To write 384 numbers takes orjson 5 us. A Pydantic model with a list of them takes 40 us, and
FastAPI without a response model several hundred. A model that returns `to_json(...)` for each input
does this in the worker, and the app forwards the bytes.
"""

import base64
import sys
from typing import Any


def to_json(value: Any) -> bytes:
    """Write JSON of anything that holds NumPy arrays or tensors: dicts, lists, text, numbers.

    Args:
        value: What to write. Arrays are written row by row, numbers as they are, with as many
            digits as make the same number of their dtype again; NaN and infinity become null.

    Returns:
        UTF-8.

    Raises:
        TypeError: A part of it cannot be written as JSON, or an array has another byte order than
            the machine.
        ModuleNotFoundError: orjson is not installed.
    """
    try:
        import orjson
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "fast_batcher.encoding.to_json needs orjson: pip install 'fast_batcher[json]'",
            name="orjson",
        ) from error
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    return orjson.dumps(value, default=_to_plain, option=options)


def to_base64(array: Any) -> str:
    """Write numbers as base64 of float32, least significant byte first.

    This is `encoding_format="base64"` of OpenAI's embeddings API, whose clients ask for it: a third
    of the bytes of JSON, and nothing is rounded. `numpy.frombuffer(base64.b64decode(text), "<f4")`
    reads it.

    Args:
        array: A NumPy array, a tensor, or a list of numbers, of any shape; it is written in C
            order.

    Returns:
        ASCII.

    Raises:
        TypeError: It has complex numbers, dates, texts or objects.
        ModuleNotFoundError: NumPy is not installed.
    """
    import numpy as np

    numbers = np.asarray(_to_array(array))
    if not np.can_cast(numbers.dtype, "<f4", "same_kind"):
        raise TypeError(f"to_base64: array has dtype {numbers.dtype}; give real numbers")
    return base64.b64encode(numbers.astype("<f4").tobytes()).decode("ascii")


def _to_array(value: Any) -> Any:
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return value
    tensor = value.detach().cpu()
    # NumPy has no bfloat16.
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()


def _to_plain(value: Any) -> Any:
    """What orjson can write in the place of something that it cannot."""
    array = _to_array(value)
    if array is not value and array.flags.c_contiguous and array.ndim:
        return array
    if hasattr(array, "tolist"):  # an array that is not contiguous, or without axes
        return array.tolist()
    raise TypeError(f"a {type(value).__qualname__} cannot be written as JSON")
