"""Transport of outputs by pipe or outbox, and the number of their picklings."""

import os
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from memory_files import refuse_memory
from models.returning import RefusesPickling

from fast_batcher._parent.sending import SharedAnswer, decode
from fast_batcher._shared_memory.outbox import OutboxReader, OutboxWriter
from fast_batcher._transport.channels import Kind
from fast_batcher._transport.pickling import (
    ATOMS,
    LEAST_SHARED,
    SerializedError,
    describe,
    dumps,
    loads,
)
from fast_batcher._worker.loop import ReplyEncoder
from fast_batcher.errors import TransportError

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
        kind, body = frames[-1]
        if kind == Kind.OUTPUT_ATOMS:
            return kind, loads(body)
        if kind == Kind.OUTPUTS:
            return kind, outcomes_in(frames)
        return kind, SharedAnswer(body, self.outbox, decode)()

    def where(self, outputs: list[Any]) -> list[Any]:
        """Place of large outputs, sizes of their parts, and so on."""
        ((kind, body),) = self.encoder.pack(outputs, {})
        assert kind == Kind.SHARED_OUTPUTS
        where: list[Any] = [*loads(body)]
        assert where.pop() == {}
        return where

    def load(self, where: list[Any]) -> list[Any]:
        return self.outbox.find(*where).load(lambda error: error)

    def close(self) -> None:
        self.outbox.close()
        self.writer.close()


def outcomes_in(frames: list[tuple[int, bytes]]) -> list[Any]:
    """Outputs, and errors where there are none."""
    assert all(len(body) <= MAX_FRAME_BYTES for _, body in frames)
    return [
        loads(item) if isinstance(item, bytes) else SerializedError(*item).to_error()
        for _, body in frames
        for item in loads(body)
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


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(
    "outputs",
    [
        ["text"],
        [1.5] * 100,
        [b"x" * 60_000] * 2,
        [np.arange(8000)] * 4,
        [b"x" * (LEAST_SHARED - 100)],
    ],
    ids=range(5),
)
def test_small_outputs_go_through_the_pipe(post: Post, outputs: list[Any], is_first: bool) -> None:
    if not is_first:
        post.pack([np.zeros(LARGE)])
    for _ in range(3):
        kind, got = post.pack(outputs)
        assert kind is (Kind.OUTPUT_ATOMS if type(outputs[0]) in ATOMS else Kind.OUTPUTS)
        assert repr(got) == repr(outputs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "outputs",
    [
        [b"x" * LARGE, "small"],
        [np.arange(LARGE), "small"],
        [np.arange(LARGE // 10) for _ in range(10)],
        [[number] for number in range(100_000)],
        [b"x" * LEAST_SHARED],
    ],
    ids=range(5),
)
def test_large_outputs_go_into_the_outbox(post: Post, outputs: list[Any]) -> None:
    for _ in range(3):
        kind, got = post.pack(outputs)
        assert kind == Kind.SHARED_OUTPUTS
        for one, sent in zip(got, outputs, strict=True):
            assert pickle.dumps(one) == pickle.dumps(pickle.loads(pickle.dumps(sent)))


ROW = np.arange(LARGE // 6)


@pytest.mark.parametrize(
    "shared", [ROW, bytearray(LARGE), {"row": ROW}, [0]], ids=["array", "raw", "dict", "list"]
)
def test_shared_output_becomes_one_object_per_request(post: Post, shared: Any) -> None:
    _, got = post.pack([shared, np.zeros(LARGE), shared, shared])
    objects = [got[0], got[2], got[3]]
    assert repr(objects) == repr([shared] * 3)
    assert len({id(one) for one in objects}) == 3
    arrays = [one["row"] if isinstance(one, dict) else one for one in objects]
    arrays[0][0] = 7
    assert [one[0] for one in arrays] == [7, 0, 0]


@pytest.mark.parametrize("is_first", [True, False])
def test_unpicklable_output_fails_alone(post: Post, is_first: bool) -> None:
    if not is_first:
        post.pack([np.zeros(LARGE)])
    raw = bytearray(LARGE)
    outputs = [np.frombuffer(raw, np.uint8), RefusesPickling(ValueError("no")), "last"]
    kind, (one, bad, last) = post.pack(outputs)
    assert kind == Kind.OUTPUTS
    assert (len(one), last) == (LARGE, "last")
    assert "cannot be pickled" in str(bad)
    outputs.clear()
    raw.append(1)  # nothing is locked
    assert post.pack(["after"]) == (Kind.OUTPUT_ATOMS, ["after"])


@pytest.mark.parametrize("make", [bytes, lambda size: np.zeros(size, np.uint8)])
def test_output_larger_than_a_frame_fails_alone(post: Post, make: Any) -> None:
    _, (large, small) = post.pack([make(MAX_FRAME_BYTES), "small"])
    assert small == "small"
    assert f"more than max_frame_bytes={MAX_FRAME_BYTES}" in str(large)
    assert post.writer._ranges.count == 0
    assert post.pack([make(MAX_FRAME_BYTES - 1000), "small"])[0] is Kind.SHARED_OUTPUTS


def test_posted_outputs_are_released(post: Post) -> None:
    for raw in (bytearray(LARGE), bytearray(LARGE)):
        assert post.pack([np.frombuffer(raw, np.uint8), raw])[0] is Kind.SHARED_OUTPUTS
        raw.append(1)


def fill(post: Post) -> None:
    """Leave no room, in answers that nobody copies."""
    while post.encoder.pack([np.zeros(MEBI, np.uint8)], {})[0][0] is Kind.SHARED_OUTPUTS:
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
        assert kind == Kind.OUTPUTS
        assert bytes(got) == bytes(output)
        _, (got, error) = post.pack([output, None], {1: describe(ValueError("this one"))})
        assert bytes(got) == bytes(output)
        assert isinstance(error, ValueError)
    (record,) = caplog.records
    assert "large outputs go through a pipe" in record.message
    assert f"of max_shared_bytes={SIZE} are taken" in record.message


def test_pipe_is_used_without_shared_memory(post: Post, caplog: pytest.LogCaptureFixture) -> None:
    refuse_memory(post.writer._fd)
    for _ in range(2):
        kind, (got,) = post.pack([np.full(LARGE, 1)])
        assert (kind, got.sum()) == (Kind.OUTPUTS, LARGE)
    (record,) = caplog.records
    assert "Bad file descriptor" in record.message
    assert post.writer._ranges.count == 0


def test_missing_outbox_is_warned_about_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    encoder = ReplyEncoder(OSError("no such memory"), MAX_FRAME_BYTES)
    encoder.give_back_unused()
    encoder.pack(["small"], {})
    assert not caplog.records
    counted = Counted(b"x" * LARGE)
    for _ in range(2):
        ((kind, _),) = encoder.pack([counted], {})
        assert kind == Kind.OUTPUTS
    (record,) = caplog.records
    assert "no such memory" in record.message
    assert counted.count == 2


@pytest.mark.parametrize("failures", [5, {0: 5}, {1: describe(ValueError("of nobody"))}])
def test_answer_with_invalid_failures_is_invalid(post: Post, failures: Any) -> None:
    body = dumps((*post.where([np.zeros(LARGE)]), failures))
    with pytest.raises(TransportError):
        SharedAnswer(body, post.outbox, decode)()
