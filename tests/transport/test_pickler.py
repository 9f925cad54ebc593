"""Pickles in parts: what stays where it is, what is copied, and that all of it comes back."""

import array
import copyreg
import gc
import pickle
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fast_batcher._transport import pickler as pickler_module
from fast_batcher._transport.pickler import (
    LEAST_BUFFER,
    LEAST_SHARED,
    PIECE_SIZE,
    Parts,
    PartsPickler,
    load_items,
    view_parts,
)

LEAST = 5000
LARGE = 300_000


def make_pickler(least: int = LEAST) -> PartsPickler:
    """One to which something large has come."""
    pickler = PartsPickler(least)
    assert pickler.learn_buffers()
    return pickler


def parts_of(value: Any, least: int = LEAST) -> Parts:
    """Those of a batch of one."""
    pickler = make_pickler(least)
    pickler.dump([value])
    return pickler.take_parts()


def write(parts: Parts) -> bytearray:
    """A slab of them."""
    slab = bytearray(parts.size)
    for begin, piece in parts:
        slab[begin : begin + len(piece)] = piece
    return slab


def load_all(slab: bytearray, parts: Parts) -> list[Any]:
    """The values of a batch; an error stands for one that cannot be unpickled."""
    return load_items(*view_parts(memoryview(slab), parts.sizes), parts.items, lambda error: error)


def load(slab: bytearray, parts: Parts) -> Any:
    (value,) = load_all(slab, parts)
    return value


def there_and_back(value: Any, least: int = LEAST) -> Any:
    parts = parts_of(value, least)
    slab = write(parts)
    parts.release()
    return load(slab, parts)


class Refuses:
    def __reduce__(self) -> Any:
        raise ValueError("no")


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


# What comes behind it is out of band from `LEAST` on.
FILLER = np.zeros(LARGE, np.uint8)

ARRAYS: dict[str, Any] = {
    "C": np.arange(60_000.0).reshape(200, 300),
    "Fortran": np.asfortranarray(np.arange(60_000.0).reshape(200, 300)),
    "part": np.arange(60_000.0).reshape(200, 300)[::2, 10:100],
    "reversed": np.arange(60_000)[::-1],
    "small": np.arange(10),
    "empty": np.zeros((0, 5)),
    "scalar": np.array(3.5),
    "records": np.zeros(5000, dtype=[("a", "i4"), ("b", "f8")]),
    "dates": np.arange("2000-01", "2900-01", dtype="datetime64[D]"),
    "text": np.array(["abc"] * 5000),
    "objects": np.array([None, "a", 3] * 1000, dtype=object),
    "big endian": np.arange(5000, dtype=">i4"),
    "half": np.arange(50_000, dtype=np.float16),
    "masked": np.ma.masked_equal(np.arange(5000), 3),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_comes_back_as_it_was(name: str) -> None:
    sent = ARRAYS[name]
    _, got = there_and_back([FILLER, sent])
    assert type(got) is type(sent)
    assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
    assert np.array_equal(got, sent)
    assert got.flags.writeable


def test_an_array_that_cannot_be_written_arrives_so() -> None:
    sent = np.arange(5000)
    sent.flags.writeable = False
    assert not there_and_back([FILLER, sent])[1].flags.writeable


def test_what_has_buffers_inside_comes_back() -> None:
    images = [np.full((100, 100), number, np.float32) for number in range(3)]
    value = {"images": [FILLER, *images], "raw": b"x" * LARGE, "array": array.array("d", [1.0])}
    got = there_and_back(value)
    assert [image.sum() for image in got["images"]] == [0, 0, 10_000, 20_000]
    assert got["raw"] == b"x" * LARGE
    assert got["array"].tolist() == [1.0]


def test_nothing_large_is_copied_but_text() -> None:
    values: list[Any] = [np.arange(LARGE), b"x" * LARGE, bytearray(LARGE)]
    addresses = {
        np.frombuffer(piece, np.uint8).ctypes.data
        for _, piece in parts_of(values)
        if len(piece) > 30_000
    }
    expected = [np.frombuffer(value, np.uint8).ctypes.data for value in values]
    assert addresses == set(expected)


def test_text_outlives_what_it_was_made_from() -> None:

    class Text:
        def __reduce__(self) -> Any:
            return str, ("é" * LARGE,)

    parts = parts_of([Text() for _ in range(5)])
    gc.collect()
    filler = [bytes([255]) * 2 * LARGE for _ in range(20)]
    assert load(write(parts), parts) == ["é" * LARGE] * 5
    assert filler


def test_arrays_arrive_as_views_and_bytes_as_copies() -> None:
    parts = parts_of([np.zeros(LARGE, np.uint8), b"a" * LARGE])
    slab = write(parts)
    array, raw = load(slab, parts)
    slab[:] = b"z" * len(slab)
    assert bytes(array) == b"z" * LARGE
    assert raw == b"a" * LARGE
    array[:] = 7
    assert 7 in slab


@pytest.mark.parametrize("least", [1, 5000, 10 * PIECE_SIZE])
def test_a_buffer_shorter_than_asked_for_is_in_the_stream(least: int) -> None:
    sizes = [LARGE, 100, LEAST_BUFFER - 1, LEAST_BUFFER, 4999, 5000, PIECE_SIZE - 1, PIECE_SIZE]
    arrays = [np.full(size, number, np.uint8) for number, size in enumerate(sizes)]
    parts = parts_of(arrays, least)
    real_least = min(max(least, LEAST_BUFFER), PIECE_SIZE)
    assert parts.sizes[1:] == [size for size in sizes if size >= real_least]
    for got, sent in zip(load(write(parts), parts), arrays, strict=True):
        assert np.array_equal(got, sent)


def test_buffers_are_in_the_stream_until_there_is_enough_to_share() -> None:
    pickler = make_pickler()
    arrays = [np.full(LEAST_SHARED // 4, number, np.uint8) for number in range(6)]
    for _ in range(2):
        pickler.dump(arrays[:3])
        assert not pickler.has_enough()
        assert [pickle.loads(item)[0] for item in pickler.take_items()] == [0, 1, 2]
    pickler.dump([arrays])
    parts = pickler.take_parts()
    assert parts.sizes[1:] == [LEAST_SHARED // 4] * 3
    got = load(write(parts), parts)
    assert [one[0] for one in got] == [0, 1, 2, 3, 4, 5]


def test_what_is_in_the_stream_is_not_copied_either() -> None:
    arrays = [np.arange(LEAST_SHARED // 24), np.arange(LEAST_SHARED // 24), np.arange(LARGE)]
    parts = parts_of(arrays)
    assert len(parts.sizes) == 2
    addresses = {
        np.frombuffer(piece, np.uint8).ctypes.data for _, piece in parts if len(piece) > PIECE_SIZE
    }
    assert addresses == {one.ctypes.data for one in arrays}
    arrays[0][0] = 7
    got = load(write(parts), parts)
    assert [one.tolist() for one in got] == [one.tolist() for one in arrays]


def test_all_buffers_are_in_the_stream_until_something_large_has_come() -> None:
    pickler = PartsPickler(LEAST)
    values = [np.arange(LARGE), np.arange(LARGE)]
    pickler.dump(values)
    assert pickler.has_enough()
    assert np.array_equal([pickle.loads(item) for item in pickler.take_items()], values)


@pytest.mark.parametrize("is_large", [False, True])
def test_values_share_nothing_but_what_one_of_them_has_twice(is_large: bool) -> None:
    shared = np.zeros(LARGE if is_large else 10, np.uint8)
    pickler = make_pickler()
    pickler.dump([[shared, shared], {"also": shared}, shared])
    if is_large:
        parts = pickler.take_parts()
        # Each has a buffer of its own.
        assert parts.sizes[1:] == [LARGE] * 3
        (one, same), other, third = load_all(write(parts), parts)
    else:
        (one, same), other, third = map(pickle.loads, pickler.take_items())
    assert one is same
    one += 1
    other["also"] += 2
    assert [value[0] for value in (one, other["also"], third)] == [1, 2, 0]


def test_a_value_that_cannot_be_unpickled_harms_no_other() -> None:
    arrays = [np.full(LARGE, number, np.uint8) for number in range(4)]
    pickler = make_pickler()
    pickler.dump([arrays[0], [arrays[1], Unreadable(), arrays[2]], arrays[3]])
    parts = pickler.take_parts()
    first, error, last = load_all(write(parts), parts)
    assert isinstance(error, ValueError)
    assert (first[0], last[0]) == (0, 3)


class Unreadable:
    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise ValueError("not here")


def test_after_a_failure_it_begins_anew_and_nothing_is_locked() -> None:
    pickler = make_pickler()
    raw = bytearray(LARGE)
    array = np.frombuffer(raw, np.uint8)
    with pytest.raises(ValueError, match="no"):
        pickler.dump([b"x" * LARGE, array, raw, Refuses()])
    del array
    pickler.renew()
    raw.append(1)
    pickler.dump(["after"])
    (item,) = pickler.take_items()
    assert pickle.loads(item) == "after"


def test_a_buffer_that_is_not_contiguous_cannot_be_pickled_and_is_not_locked() -> None:
    raw = bytearray(LARGE)
    pickler = make_pickler()
    with pytest.raises(pickle.PicklingError, match="non-contiguous"):
        pickler.dump([pickle.PickleBuffer(memoryview(raw)[::2])])
    pickler.renew()
    gc.collect()
    raw.append(1)


def test_what_is_locked_is_locked_until_release() -> None:
    raw, more = bytearray(LARGE), bytearray(LARGE)
    parts = parts_of([raw, pickle.PickleBuffer(more)])
    for locked in (raw, more):
        with pytest.raises(BufferError):
            locked.append(1)
    parts.release()
    parts.release()
    raw.append(1)
    more.append(1)


@pytest.mark.parametrize("size", [100_000, LARGE])
def test_what_was_resized_since_it_was_pickled_is_noticed(size: int) -> None:
    pickler = make_pickler()
    raw = bytearray(size)
    pickler.dump(["before", raw, "after"])
    raw.append(1)
    take = pickler.take_parts if pickler.has_enough() else pickler.take_items
    with pytest.raises(BufferError, match="resized"):
        take()
    pickler.renew()
    raw.append(1)
    pickler.dump([raw])
    parts = pickler.take_parts()
    assert load(write(parts), parts) == raw


def test_buffers_in_a_cycle_of_garbage_do_no_harm() -> None:
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
            pickler.dump([Holder(), Refuses()])
        pickler.renew()
        pickler.dump([Holder()])
        parts = pickler.take_parts()
        gc.collect()
        assert load(write(parts), parts) == bytes(LARGE)
        parts.release()
        gc.collect()


# --- tensors --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


def make_tensors(torch: Any) -> dict[str, Any]:
    plain = torch.arange(60_000.0).reshape(200, 300)
    with_note = plain.clone()
    with_note.note = "mine"
    return {
        "plain": plain,
        "half": plain.to(torch.bfloat16),
        "whole numbers": plain.to(torch.int64),
        "flags": plain > 100,
        "complex": torch.complex(plain, plain),
        "conjugated": torch.complex(plain, plain).conj(),
        "part": plain[::2, 5:100],
        "channels last": torch.zeros(2, 3, 40, 50).to(memory_format=torch.channels_last),
        "with gradient": plain.clone().requires_grad_(),
        "sparse": plain.to_sparse(),
        "small": plain[0, :3].clone(),
        "without axes": torch.tensor(1.5),
        "with an attribute": with_note,
        "parameter": torch.nn.Parameter(plain.clone()),
    }


# The others are pickled as torch does it.
OUT_OF_BAND = {"plain", "half", "whole numbers", "flags", "complex", "parameter"}


@pytest.mark.slow
def test_tensors_come_back_as_they_were(torch: Any) -> None:
    pickler = make_pickler()
    assert not pickler.learn_buffers()
    for name, sent in make_tensors(torch).items():
        pickler.dump([[FILLER, sent]])
        parts = pickler.take_parts()
        assert (len(parts.sizes) == 3) == (name in OUT_OF_BAND), name
        _, got = load(write(parts), parts)
        assert type(got) is type(sent)
        assert (got.dtype, got.shape, got.stride()) == (sent.dtype, sent.shape, sent.stride()) or (
            name in ("sparse", "part")
        ), name
        assert torch.equal(got.to_dense(), sent.to_dense()), name
        assert got.requires_grad == sent.requires_grad
        assert vars(got) == vars(sent)


@pytest.mark.slow
def test_a_tensor_is_a_view_that_can_be_written(torch: Any) -> None:
    parts = parts_of(torch.zeros(LARGE))
    slab = write(parts)
    load(slab, parts)[:] = 1.0
    assert any(slab[-100:])


@pytest.mark.slow
def test_a_tensor_can_be_resized_afterwards(torch: Any) -> None:
    tensor = torch.zeros(LARGE)
    parts = parts_of(tensor)
    assert len(parts.sizes) == 2
    parts.release()
    tensor.resize_(2 * LARGE)


@pytest.mark.slow
def test_what_is_registered_for_pickling_is_still_used(torch: Any) -> None:
    class Odd:
        pass

    pickler = make_pickler()
    copyreg.pickle(Odd, lambda _: "odd")
    try:
        with pytest.raises(pickle.PicklingError, match="odd"):
            pickler.dump([Odd()])
    finally:
        del copyreg.dispatch_table[Odd]


def test_tensors_are_learnt_once_there_is_torch(
    monkeypatch: pytest.MonkeyPatch, torch: Any
) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    pickler = make_pickler()
    assert not pickler.learn_buffers()
    # As it is while somebody imports it.
    monkeypatch.setitem(sys.modules, "torch", pickler_module)
    assert not pickler.learn_buffers()
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert pickler.learn_buffers()
    assert not pickler.learn_buffers()
