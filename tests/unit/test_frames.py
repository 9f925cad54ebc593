"""Frames: whatever pieces a stream arrives in, the same frames come out, and garbage is refused."""

import random
import struct
import tracemalloc
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packed_frames import pack

from fast_batcher._transport.channels import (
    HEADER_SIZE,
    KIND_NAMES,
    MAX_JOINED,
    READ_SIZE,
    Frame,
    FrameReader,
    Kind,
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


class Source:
    """A stream that gives its data in pieces of these sizes, then the rest as it is taken."""

    def __init__(self, data: bytes, pieces: Iterable[int]) -> None:
        self.view = memoryview(data)
        self._sizes = iter(pieces)

    def recv_into(self, space: memoryview) -> int:
        count = min(next(self._sizes, len(self.view)), len(space), len(self.view))
        space[:count] = self.view[:count]
        self.view = self.view[count:]
        return count


def feed(
    data: bytes, pieces: Iterable[int] = (), max_frame_bytes: int = MAX_FRAME_BYTES
) -> list[Frame]:
    """All frames that a reader makes of the data; it must come to the end with nothing left."""
    source = Source(data, pieces)
    reader = FrameReader(max_frame_bytes, source.recv_into)
    frames = []
    while source.view:
        frame = reader.read()
        while frame is not None:
            # The body is valid only now.
            frames.append(frame._replace(body=bytes(frame.body)))
            frame = reader.next_frame() if reader.rest else None
    assert reader.rest == 0
    with pytest.raises(EOFError):
        reader.read()
    return frames


def stream(frames: list[Frame]) -> bytes:
    return b"".join(pack(f.kind, f.batch_id, bytes(f.body), f.seconds) for f in frames)


def body_of(size: int) -> bytes:
    return random.Random(size).randbytes(size)


some_frames = st.lists(
    st.builds(
        Frame,
        st.sampled_from([*KIND_NAMES]),
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
def test_frames_are_independent_of_read_sizes(frames: list[Frame], pieces: list[int]) -> None:
    assert feed(stream(frames), pieces) == frames


def header(magic: bytes = b"fbt1", kind: int = int(Kind.ITEMS), length: int = 0) -> bytes:
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
    data = stream([Frame(Kind.READY, 0, 0.0, b"")] * before) + garbage
    with pytest.raises(TransportError, match="not a message of fast_batcher"):
        feed(data)


def test_kinds_have_different_numbers() -> None:
    numbers = [number for number in vars(Kind).values() if isinstance(number, int)]
    assert len(numbers) == len(KIND_NAMES)


@pytest.mark.parametrize("length", [MAX_FRAME_BYTES + 1, 2**40, 2**63, 2**64 - 1])
def test_excessive_length_is_rejected_before_allocation(length: int) -> None:
    data = header(length=length)
    tracemalloc.start()
    try:
        with pytest.raises(TransportError, match=f"{length} bytes was announced"):
            feed(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MAX_FRAME_BYTES
