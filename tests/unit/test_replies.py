"""Transport of outputs by pipe or outbox, and the number of their picklings."""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from fast_batcher._shared_memory.outbox import OutboxReader, OutboxWriter
from fast_batcher._transport.channels import Kind
from fast_batcher._transport.pickling import SerializedError, describe, loads
from fast_batcher._worker.frames import ReplyEncoder

MEBI = 2**20
SIZE = 8 * MEBI
MAX_FRAME_BYTES = 4 * MEBI
LARGE = 300_000


class Post:
    """A worker's end, and the outbox that it posts into."""

    def __init__(self) -> None:
        self.outbox = OutboxReader(SIZE, 5000)
        self.writer = OutboxWriter(os.dup(self.outbox._fd), SIZE, 5000)
        self.encoder = ReplyEncoder(self.writer, MAX_FRAME_BYTES)

    def pack(self, outputs: list[Any], failures: dict[int, SerializedError] | None = None) -> Any:
        """The kind of the last frame, and what all of them say."""
        frames = self.encoder.pack(outputs, failures or {})
        return frames[-1][0], outcomes_in(frames)

    def close(self) -> None:
        self.outbox.close()
        self.writer.close()


def outcomes_in(frames: list[tuple[int, bytes]]) -> list[Any]:
    """Outputs, and errors where there are none."""
    assert all(len(body) <= MAX_FRAME_BYTES for _, body in frames)
    return [
        loads(item) if isinstance(item, bytes) else SerializedError(*item).to_error()
        for kind, body in frames
        for item in (loads(body) if kind == Kind.PART else loads(body)[0])
    ]


@pytest.fixture
def post() -> Iterator[Post]:
    post = Post()
    yield post
    post.close()


class Counted:
    """Knows how often it was pickled."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.count = 0

    def __reduce__(self) -> Any:
        self.count += 1
        return Counted, (self.value,)


def fill(post: Post) -> None:
    """Leave no room, in answers that nobody copies."""
    while post.encoder.pack([np.zeros(MEBI, np.uint8)], {})[0][0] is Kind.SHARED:
        pass


@pytest.mark.parametrize("output", [b"x" * (2 * MEBI), np.zeros(2 * MEBI, np.uint8)], ids=type)
def test_outputs_without_room_use_the_pipe(
    post: Post, caplog: pytest.LogCaptureFixture, output: Any
) -> None:
    fill(post)
    caplog.clear()
    post.encoder._has_warned = False
    for _ in range(2):
        kind, (got,) = post.pack([output])
        assert kind == Kind.ITEMS
        assert bytes(got) == bytes(output)
        _, (got, error) = post.pack([output, None], {1: describe(ValueError("this one"))})
        assert bytes(got) == bytes(output)
        assert isinstance(error, ValueError)
    (record,) = caplog.records
    assert "large outputs go through a pipe" in record.message
    assert f"of max_shared_bytes={SIZE} are taken" in record.message


def test_missing_outbox_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    encoder = ReplyEncoder(OSError("no such memory"), MAX_FRAME_BYTES)
    encoder.give_back_unused()
    encoder.pack(["small"], {})
    assert not caplog.records
    counted = Counted(b"x" * LARGE)
    for _ in range(2):
        ((kind, _),) = encoder.pack([counted], {})
        assert kind == Kind.ITEMS
    (record,) = caplog.records
    assert "no such memory" in record.message
    assert counted.count == 2
