"""Frames: whatever pieces a stream arrives in, the same frames come out, and garbage is refused."""

import random
import struct
import tracemalloc
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fast_batcher._transport.frames import (
    HEADER_SIZE,
    MAX_JOINED,
    READ_SIZE,
    Frame,
    FrameReader,
    Kind,
    pack,
)
from fast_batcher.errors import TransportError

MAX_FRAME_BYTES = 2**20
# Every size at which the reader takes another path, and its neighbours.
EDGES = sorted(
    {
        edge + offset
        for edge in (0, HEADER_SIZE, MAX_JOINED, READ_SIZE - HEADER_SIZE, READ_SIZE, 2 * READ_SIZE)
        for offset in (-1, 0, 1)
        if edge + offset >= 0
    }
)


def feed(reader: FrameReader, data: bytes, pieces: Iterable[int]) -> list[Frame]:
    """Let the reader have the data in pieces of these sizes, then the rest as it takes it."""
    frames = []
    sizes = iter(pieces)
    view = memoryview(data)
    while view:
        count = min(next(sizes, len(view)), len(reader.space), len(view))
        reader.space[:count] = view[:count]
        view = view[count:]
        frame = reader.received(count)
        while frame is not None:
            # The body is valid only now.
            frames.append(frame._replace(body=bytes(frame.body)))
            frame = reader.next_frame() if reader.rest else None
    return frames


def stream(frames: list[Frame]) -> bytes:
    return b"".join(
        part
        for frame in frames
        for part in pack(frame.kind, frame.batch_id, bytes(frame.body), frame.seconds)
    )


def body_of(size: int) -> bytes:
    return random.Random(size).randbytes(size)


some_frames = st.lists(
    st.builds(
        Frame,
        st.sampled_from(Kind),
        st.integers(0, 2**64 - 1),
        st.floats(allow_nan=False),
        st.one_of(
            st.binary(max_size=40),
            st.sampled_from(EDGES).map(body_of),
            st.integers(0, 3 * READ_SIZE).map(body_of),
        ),
    ),
    max_size=8,
)
some_pieces = st.lists(
    st.one_of(st.integers(1, 64), st.sampled_from([*EDGES[1:], HEADER_SIZE]), st.integers(1, 2**20))
)


@given(frames=some_frames, pieces=some_pieces)
def test_any_pieces_of_any_frames_give_the_same_frames(
    frames: list[Frame], pieces: list[int]
) -> None:
    reader = FrameReader(MAX_FRAME_BYTES)
    assert feed(reader, stream(frames), pieces) == frames
    assert reader.rest == 0


@pytest.mark.parametrize("size", [0, 1, HEADER_SIZE])
def test_small_frames_may_be_cut_anywhere(size: int) -> None:
    frames = [Frame(Kind.INPUTS, number, 0.5, body_of(size + number)) for number in range(3)]
    data = stream(frames)
    for cut in range(1, len(data)):
        assert feed(FrameReader(MAX_FRAME_BYTES), data, [cut]) == frames


def test_frames_byte_by_byte() -> None:
    frames = [Frame(Kind.OUTPUTS, number, 0.25 * number, body_of(number)) for number in range(9)]
    data = stream(frames)
    assert feed(FrameReader(MAX_FRAME_BYTES), data, [1] * len(data)) == frames


def test_every_kind_and_the_largest_numbers_pass() -> None:
    frames = [Frame(kind, 2**64 - 1, 1e308, b"") for kind in Kind]
    assert feed(FrameReader(MAX_FRAME_BYTES), stream(frames), []) == frames


def test_a_small_body_is_joined_to_its_header_and_a_large_one_is_not_copied() -> None:
    assert len(pack(Kind.INPUTS, 1, body_of(MAX_JOINED))) == 1
    header, body = pack(Kind.INPUTS, 1, large := body_of(MAX_JOINED + 1))
    assert len(header) == HEADER_SIZE
    assert body is large


def test_a_body_as_long_as_it_may_be_is_accepted_and_one_byte_more_is_not() -> None:
    limit = 2 * READ_SIZE
    frame = Frame(Kind.INPUTS, 1, 0.0, body_of(limit))
    assert feed(FrameReader(limit), stream([frame]), []) == [frame]
    with pytest.raises(TransportError, match=f"{limit + 1} bytes.*max_frame_bytes={limit}"):
        feed(FrameReader(limit), stream([frame._replace(body=body_of(limit + 1))]), [])


def header(magic: bytes = b"fbt1", kind: int = int(Kind.OUTPUTS), length: int = 0) -> bytes:
    return struct.pack("<4sIQQd", magic, kind, length, 1, 0.0)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\0" * HEADER_SIZE,
        b"Traceback (most recent call last):\n",
        header(magic=b"fbt2"),
        header(kind=0),
        header(kind=99),
        header(kind=2**32 - 1),
    ],
)
@pytest.mark.parametrize("before", [0, 1])
def test_garbage_is_refused(garbage: bytes, before: int) -> None:
    reader = FrameReader(MAX_FRAME_BYTES)
    data = stream([Frame(Kind.READY, 0, 0.0, b"")] * before) + garbage
    with pytest.raises(TransportError, match="not a message of ours"):
        feed(reader, data, [])


@pytest.mark.parametrize("length", [MAX_FRAME_BYTES + 1, 2**40, 2**63, 2**64 - 1])
def test_a_length_beyond_the_limit_is_refused_before_anything_is_allocated(length: int) -> None:
    reader = FrameReader(MAX_FRAME_BYTES)
    data = header(length=length)
    tracemalloc.start()
    try:
        with pytest.raises(TransportError, match=f"{length} bytes was announced"):
            feed(reader, data, [])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MAX_FRAME_BYTES


def test_half_a_header_is_no_frame_yet() -> None:
    reader = FrameReader(MAX_FRAME_BYTES)
    data = stream([Frame(Kind.READY, 0, 0.0, b"")])
    assert feed(reader, data[:-1], []) == []
    assert reader.rest == HEADER_SIZE - 1
    assert len(feed(reader, data[-1:], [])) == 1
