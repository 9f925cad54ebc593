"""Frame bodies: failures as data, parts, and the count of outputs."""

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fast_batcher._transport import pickling
from fast_batcher._transport.pickling import SerializedError
from fast_batcher.errors import MAX_ERROR_TEXT, InferenceError

# The smallest `max_frame_bytes` there is.
LEAST_MAX_FRAME_BYTES = 2**20


def raised(error: BaseException) -> BaseException:
    """The same, with a traceback."""

    def fail() -> None:
        raise error

    try:
        fail()
    except BaseException as caught:  # noqa: BLE001  any
        return caught
    raise AssertionError("fail() raises")


# --- failures -------------------------------------------------------------------------------------


def test_any_failure_fits_into_the_smallest_frame() -> None:
    """Each character takes four bytes, and there is room for a pickled exception as well."""
    failure = pickling.describe(raised(ValueError("\U0001f525" * 10**6)))
    assert len(failure.text) >= MAX_ERROR_TEXT
    full = failure._replace(pickled=b"x" * MAX_ERROR_TEXT)
    assert len(pickling.dumps(full)) <= LEAST_MAX_FRAME_BYTES
    parts = list(pickling.fragment([full] * 3, LEAST_MAX_FRAME_BYTES))
    assert all(len(part) <= LEAST_MAX_FRAME_BYTES for part in parts)


def test_unknown_exception_class_arrives_as_text() -> None:
    failure = SerializedError("GoneError: lost", "traceback", b"cno_such_module\nGoneError\n.")
    error = failure.to_error()
    assert type(error) is InferenceError
    assert str(error) == "GoneError: lost"


# --- parts ----------------------------------------------------------------------------------------

# Small frames, so that examples stay small; the rule does not know the size.
items = st.lists(
    st.one_of(
        st.binary(max_size=60),
        st.builds(
            SerializedError,
            st.text(max_size=5),
            st.text(max_size=5),
            st.none() | st.binary(max_size=9),
        ),
    ),
    max_size=12,
)


@given(items=items, max_frame_bytes=st.integers(300, 2000))
def test_parts_keep_order_and_limit(items: list[Any], max_frame_bytes: int) -> None:
    parts = list(pickling.fragment(items, max_frame_bytes))
    assert parts
    assert [item for part in parts for item in pickling.loads(part)] == items
    filled = pickling.fragment([bytes(100)] * 10, max_frame_bytes)
    assert len([*filled]) <= -(-10 // ((max_frame_bytes - 20) // 120))
    assert all(len(part) <= max_frame_bytes for part in parts)


@pytest.mark.parametrize("size", [0, 1, 255, 256, 65_535, 65_536, 2**20, 2**24])
def test_the_size_of_an_item_is_never_underestimated(size: int) -> None:
    items: list[bytes | SerializedError] = [bytes([number]) * size for number in range(3)]
    (part,) = pickling.fragment(items, 2**30)
    assert len(part) <= sum(pickling._size(item) for item in items) + pickling._ITEM_OVERHEAD


class Array(np.ndarray[Any, Any]):
    def __reduce__(self) -> Any:
        raise AssertionError("pickled")


@pytest.mark.parametrize(
    ("value", "size"),
    [
        *[(b"x" * 7, 7), (bytearray(5), 5), ("text", 4), (np.empty(75_264).view(Array), 602_112)],
        # In general it is the pickle's; what cannot be pickled has none.
        *[([1], len(pickling.dumps([1]))), (threading.Lock(), 0)],
    ],
)
def test_sizes_of_buffers_and_other_values(value: Any, size: int) -> None:
    assert pickling.measure_size(value) == size
