"""Pickles in parts: what stays where it is, what is copied, and that all of it comes back."""

import copyreg
import gc
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fast_batcher._transport.pickling import (
    LEAST_SHARED,
    PIECE_SIZE,
    OutOfBandPickle,
    OutOfBandPickler,
    load_items,
    view_pickle,
)

LEAST = 5000
LARGE = 300_000
# Behind it, every buffer from `LEAST` on is out of band.
FILLER = np.zeros(LARGE, np.uint8)


def make_pickler(least: int = LEAST) -> OutOfBandPickler:
    """One to which something large has come."""
    pickler = OutOfBandPickler(least)
    assert isinstance(pickler.pickle([FILLER], lambda: True), OutOfBandPickle)
    return pickler


def parts_of(*values: Any, pickler: OutOfBandPickler | None = None) -> OutOfBandPickle:
    """The parts of a large batch."""
    parts = (pickler or make_pickler()).pickle(values, lambda: True)
    assert isinstance(parts, OutOfBandPickle)
    return parts


def write(parts: OutOfBandPickle) -> bytearray:
    """A slab of them."""
    slab = bytearray(parts.size)
    for begin, piece in parts:
        slab[begin : begin + len(piece)] = piece
    return slab


def load(pickled: list[bytes] | OutOfBandPickle, slab: bytearray | None = None) -> list[Any]:
    """The values of a batch; an error stands for one that cannot be unpickled."""
    if not isinstance(pickled, OutOfBandPickle):
        return [pickle.loads(item) for item in pickled]
    memory = memoryview(write(pickled) if slab is None else slab)
    return load_items(*view_pickle(memory, pickled.sizes), pickled.items, lambda error: error)


def there_and_back(value: Any) -> Any:
    (got,) = load(make_pickler().pickle([value], lambda: True))
    return got


def addresses(parts: OutOfBandPickle, least: int = 30_000) -> set[int]:
    """Positions of the long pieces."""
    pieces = [np.frombuffer(piece, np.uint8) for _, piece in parts if len(piece) > least]
    return {piece.ctypes.data for piece in pieces}


def refuse() -> None:
    raise ValueError("no")


class Refuses:
    def __reduce__(self) -> Any:
        refuse()


class Unreadable:
    def __reduce__(self) -> Any:
        return refuse, ()


values = st.recursive(
    st.one_of(
        st.none(),
        st.integers(),
        st.text(max_size=20),
        st.builds(bytes, st.integers(0, 3 * PIECE_SIZE)),
        st.builds(bytearray, st.integers(0, 3 * PIECE_SIZE)),
        st.builds(lambda count: "é" * count, st.integers(0, 2 * PIECE_SIZE)),
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@given(values)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    assert there_and_back(value) == value
    assert there_and_back([value, FILLER])[0] == value


def test_nothing_large_is_copied_but_text() -> None:
    values: list[Any] = [np.arange(LARGE), b"x" * LARGE, bytearray(LARGE)]
    expected = {np.frombuffer(value, np.uint8).ctypes.data for value in values}
    assert addresses(parts_of(values)) == expected


def test_small_buffers_stay_in_the_stream() -> None:
    pickler = make_pickler()
    arrays = [np.full(LEAST_SHARED // 4, number, np.uint8) for number in range(6)]
    for _ in range(2):
        items = pickler.pickle(arrays[:3], lambda: True)
        assert isinstance(items, list)
        assert [one[0] for one in load(items)] == [0, 1, 2]
    parts = parts_of(arrays, pickler=pickler)
    assert parts.sizes[1:] == [LEAST_SHARED // 4] * 3
    (got,) = load(parts)
    assert [one[0] for one in got] == [0, 1, 2, 3, 4, 5]


def test_value_that_cannot_be_unpickled_fails_alone() -> None:
    arrays = [np.full(LARGE, number, np.uint8) for number in range(4)]
    first, error, last = load(parts_of(arrays[0], [arrays[1], Unreadable(), arrays[2]], arrays[3]))
    assert isinstance(error, ValueError)
    assert (first[0], last[0]) == (0, 3)


# --- locks ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_pickler_is_reusable_after_a_failure() -> None:
    pickler = make_pickler()
    raw, strided = bytearray(LARGE), bytearray(LARGE)
    array = np.frombuffer(raw, np.uint8)
    with pytest.raises(ValueError, match="no"):
        pickler.pickle([b"x" * LARGE, array, raw, Refuses()], lambda: True)
    del array
    raw.append(1)

    class Shows:
        def __reduce__(self) -> Any:
            return bytes, (pickle.PickleBuffer(raw),)

    with pytest.raises(ValueError, match="no") as kept:
        pickler.pickle([Shows(), Refuses()], lambda: True)
    raw.append(1)  # though the error is kept
    assert kept.value.__traceback__
    with pytest.raises(pickle.PicklingError, match="non-contiguous"):
        pickler.pickle([pickle.PickleBuffer(memoryview(strided)[::2])], lambda: True)
    gc.collect()
    strided.append(1)
    assert load(pickler.pickle(["after"], lambda: True)) == ["after"]


@pytest.mark.parametrize("size", [100_000, LARGE])
def test_resize_after_pickling_is_detected(size: int) -> None:
    raw = bytearray(size)

    class Resizes:
        def __reduce__(self) -> Any:
            raw.append(1)  # as another thread may
            return str, ()

    pickler = make_pickler()
    with pytest.raises(BufferError, match="resized"):
        pickler.pickle(["before", raw, Resizes()], lambda: True)
    raw.append(1)
    assert load(pickler.pickle([raw], lambda: True)) == [raw]


@pytest.mark.slow
def test_buffers_in_garbage_cycles_are_released() -> None:
    """CPython 3.11 crashes on a PickleBuffer of a view in a cycle that is collected."""

    class Holder:
        def __init__(self) -> None:
            self.view = memoryview(bytearray(LARGE))
            self.itself = self

        def __reduce__(self) -> Any:
            return bytes, (pickle.PickleBuffer(self.view),)

    pickler = make_pickler()
    for _ in range(10):
        with pytest.raises(ValueError, match="no"):
            pickler.pickle([Holder(), Refuses()], lambda: True)
        parts = parts_of(Holder(), pickler=pickler)
        gc.collect()
        assert load(parts) == [bytes(LARGE)]
        parts.release()
        gc.collect()


# --- tensors --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.mark.slow
def test_tensor_is_a_writable_view(torch: Any) -> None:
    tensor = torch.zeros(LARGE)
    parts = parts_of(tensor)
    assert len(parts.sizes) == 2
    slab = write(parts)
    load(parts, slab)[0][:] = 1.0
    assert any(slab[-100:])
    parts.release()
    tensor.resize_(2 * LARGE)


@pytest.mark.slow
def test_registered_reducers_are_used(torch: Any) -> None:
    class Odd:
        pass

    pickler = make_pickler()
    copyreg.pickle(Odd, lambda _: "odd")
    try:
        with pytest.raises(pickle.PicklingError, match="odd"):
            pickler.pickle([Odd()], lambda: True)
    finally:
        del copyreg.dispatch_table[Odd]
