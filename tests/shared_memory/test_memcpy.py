"""Copying memory by its address."""

from typing import Any

import numpy as np
import pytest

from fast_batcher._shared_memory.memcpy import Move, move, move_held, move_piece

SIZE = 100_000


@pytest.mark.parametrize("by", [move, move_held], ids=["aside", "held"])
def test_every_byte_is_copied_and_no_other(by: Move) -> None:
    source = np.random.default_rng(0).integers(0, 255, SIZE, np.uint8)
    target = np.zeros(SIZE + 2, np.uint8)
    by(target.ctypes.data + 1, source.ctypes.data, SIZE)
    assert np.array_equal(target[1:-1], source)
    assert target[0] == target[-1] == 0


@pytest.mark.parametrize(
    "piece", [b"bytes", memoryview(b"read-only"), memoryview(bytearray(b"bytearray"))]
)
def test_a_buffer_is_copied(piece: Any) -> None:
    target = np.zeros(len(piece) + 1, np.uint8)
    move_piece(target.ctypes.data, piece)
    assert target.tobytes() == bytes(piece) + b"\0"


def test_a_buffer_cannot_be_resized_while_it_is_copied() -> None:
    view = memoryview(bytearray(SIZE))

    def release(*_: int) -> None:
        with pytest.raises(BufferError):
            view.release()

    move_piece(0, view, release)
    view.release()


def test_what_does_not_lie_in_one_piece_is_an_error() -> None:
    with pytest.raises(BufferError):
        move_piece(0, memoryview(bytes(SIZE))[::2])
