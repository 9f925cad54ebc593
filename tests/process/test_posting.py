"""Which way outputs take: the pipe, the outbox, or one by one; and how often they are pickled."""

import copyreg
import os
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from memory import refuse_memory
from sample_models import RefusesPickling

from fast_batcher._process.exchange import Failure, SharedOutputs
from fast_batcher._process.posting import Posting
from fast_batcher._transport.codec import RemoteFailure, describe, loads
from fast_batcher._transport.frames import Kind
from fast_batcher._transport.outbox import Outbox, OutboxWriter
from fast_batcher._transport.pickler import LEAST_SHARED
from fast_batcher.errors import TransportError

MEBI = 2**20
SIZE = 8 * MEBI
MAX_FRAME_BYTES = 4 * MEBI
LARGE = 300_000


class Post:
    """A worker's end, and the outbox that it posts into."""

    def __init__(self) -> None:
        self.outbox = Outbox(SIZE, 5000)
        self.writer = OutboxWriter(os.dup(self.outbox._fd), SIZE, 5000)
        self.posting = Posting(self.writer, MAX_FRAME_BYTES)

    def pack(self, outputs: list[Any], failures: dict[int, RemoteFailure] | None = None) -> Any:
        """The kind of the frame, and what it says."""
        packed = self.posting.pack(outputs, failures or {})
        if packed is None:
            return None, None
        kind, body = packed
        if kind is Kind.OUTPUTS:
            return kind, loads(body)
        *where, failed = loads(body)
        shared = SharedOutputs(self.outbox.find(*where), failed)
        return kind, shared.read(len(outputs))

    def close(self) -> None:
        self.outbox.close()
        self.writer.close()


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
def test_what_is_not_large_is_one_pickle(post: Post, outputs: list[Any], is_first: bool) -> None:
    if not is_first:
        post.pack([np.zeros(LARGE)])
    for _ in range(3):
        kind, got = post.pack(outputs)
        assert kind is Kind.OUTPUTS
        assert pickle.dumps(got) == pickle.dumps(outputs)
    assert post.posting.expects_large is not is_first


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
def test_what_is_large_goes_into_the_outbox(post: Post, outputs: list[Any]) -> None:
    for _ in range(3):
        kind, got = post.pack(outputs)
        assert kind is Kind.SHARED_OUTPUTS
        assert pickle.dumps(got) == pickle.dumps(pickle.loads(pickle.dumps(outputs)))
    assert post.posting.expects_large


def test_what_is_large_is_pickled_once_but_for_the_first_time(post: Post) -> None:
    counts = []
    for _ in range(3):
        counted = Counted(np.arange(LARGE))
        assert post.pack([counted])[0] is Kind.SHARED_OUTPUTS
        counts.append(counted.count)
    assert counts == [2, 1, 1]


def test_tensors_are_copied_from_where_they_are(post: Post) -> None:
    torch = pytest.importorskip("torch")
    tensors = [torch.arange(LARGE), torch.ones(LARGE).bfloat16()]
    packed = post.posting.pack(tensors, {})
    assert packed is not None
    *where, _ = loads(packed[1])
    assert where[1][1:] == [8 * LARGE, 2 * LARGE]
    got = post.outbox.find(*where).load()
    assert [one.dtype for one in got] == [torch.int64, torch.bfloat16]
    assert all(map(torch.equal, got, tensors))
    got[0] += 1  # it can be written


ROW = np.arange(LARGE // 6)


@pytest.mark.parametrize(
    "outputs",
    [
        [ROW, ROW + 1],
        list(np.arange(LARGE, dtype=">f4").reshape(2, 3, -1)),
        [np.full((), number) for number in range(3)],
        [np.empty((0, 3)), np.empty((0, 3))],
        [np.zeros(3, "V0"), np.zeros(3, "V0")],
        list(np.array([[b"a", b"bc"], [b"d", b""]])),
        list(np.zeros((2, 9000), [("a", "f8"), ("b", "i4")])),
        [np.arange(number, number + 10) for number in range(3)],
        [np.broadcast_to(ROW[:1000], (9, 1000)), np.ones((9, 1000), ROW.dtype)],
        [ROW.astype("M8[s]"), ROW.astype("M8[s]")],
        [np.array([None] * 9), np.array([1] * 9, object)],
        [np.zeros((300, 400), order="F"), np.ones((300, 400), order="F")],
        [ROW.astype("f4"), ROW.astype("f8")],
        [ROW, ROW[1:]],
        [np.zeros(9000, [("a", "f8"), ("b", "i4")]) for _ in range(2)],
    ],
    ids=range(15),
)
def test_arrays_come_as_they_are(post: Post, outputs: list[Any]) -> None:
    post.pack([ROW])
    _, got = post.pack(outputs)
    for one, sent in zip(got, outputs, strict=True):
        assert one.dtype == sent.dtype
        assert one.shape == sent.shape
        assert (one == sent).all()
        assert one.flags.writeable
        assert one.flags.f_contiguous is sent.flags.f_contiguous
    assert not np.shares_memory(got[0], got[1])


def test_a_way_of_the_models_own_to_pickle_arrays_is_taken(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    post.pack([ROW])
    monkeypatch.setitem(copyreg.dispatch_table, np.ndarray, lambda array: (int, (len(array),)))
    assert post.pack([ROW, ROW + 1])[1] == [len(ROW)] * 2


def test_arrays_that_nobody_may_write_come_so(post: Post) -> None:
    locked = ROW.copy()
    locked.flags.writeable = False
    for outputs in ([ROW, locked], [locked[:10], locked[10:20]]):
        post.pack([ROW])
        _, got = post.pack(outputs)
        assert [one.flags.writeable for one in got] == [one.flags.writeable for one in outputs]


def test_arrays_alike_are_described_once(post: Post) -> None:
    described = []
    for count in (2, 8):
        packed = post.posting.pack([ROW + number for number in range(count)], {})
        assert packed is not None
        *where, _ = loads(packed[1])
        assert where[1][1:] == [ROW.nbytes] * count
        described.append(where[1][0])
    assert described[1] - described[0] == 6  # a byte for each


def test_one_array_for_several_requests_is_copied_once(post: Post) -> None:
    post.pack([ROW])
    packed = post.posting.pack([ROW, ROW + 1, ROW], {})
    assert packed is not None
    *where, _ = loads(packed[1])
    assert where[1][1:] == [ROW.nbytes] * 2
    got = post.outbox.find(*where).load()
    assert got[0] is got[2]


def test_bytes_are_copied_from_where_they_are(post: Post) -> None:
    outputs = [b"a" * LARGE, b"short", b"b" * 5000, b"c" * 4999, bytearray(b"d" * LARGE)]
    packed = post.posting.pack(outputs, {})
    assert packed is not None
    *where, _ = loads(packed[1])
    # Those that came before it was much are in the pickle, as with other buffers.
    assert where[1][1:] == [LARGE, 5000]
    assert where[2] == [0, 1]
    assert post.outbox.find(*where).load() == outputs


def test_one_output_for_several_requests_is_copied_once(post: Post) -> None:
    raw = b"a" * LARGE
    packed = post.posting.pack([raw, b"b" * LARGE, raw, raw], {})
    assert packed is not None
    *where, _ = loads(packed[1])
    assert where[1][1:] == [LARGE, LARGE]
    assert post.outbox.find(*where).load() == [raw, b"b" * LARGE, raw, raw]


def test_errors_are_told_beside_large_outputs(post: Post) -> None:
    failures = {1: describe(ValueError("this one")), 2: describe(KeyError("and that"))}
    kind, got = post.pack([np.arange(LARGE), None, None, "small"], failures)
    assert kind is Kind.SHARED_OUTPUTS
    assert (got[0].sum(), got[3]) == (np.arange(LARGE).sum(), "small")
    errors = [one.to_error() for one in got[1:3] if isinstance(one, Failure)]
    assert isinstance(errors[0], ValueError)
    assert isinstance(errors[1], KeyError)


def test_errors_beside_small_outputs_are_told_one_by_one(post: Post) -> None:
    assert post.pack(["small", None], {1: describe(ValueError("this one"))}) == (None, None)


def test_errors_that_fill_a_frame_are_told_one_by_one(post: Post) -> None:
    failures = {number: RemoteFailure("text", "t" * MEBI, None) for number in range(1, 4)}
    assert post.pack([np.arange(LARGE), None, None, None], failures) == (None, None)
    assert post.writer._ranges.count == 0


def test_one_that_cannot_be_pickled_sends_all_of_them_one_by_one(post: Post) -> None:
    raw = bytearray(LARGE)
    outputs = [np.frombuffer(raw, np.uint8), RefusesPickling(ValueError("no"))]
    for _ in range(2):
        assert post.pack(outputs) == (None, None)
        post.posting.expects_large = True
    outputs.clear()
    raw.append(1)  # nothing is locked
    assert post.pack(["after"]) == (Kind.OUTPUTS, ["after"])


@pytest.mark.parametrize("make", [bytes, lambda size: np.zeros(size, np.uint8)])
def test_more_than_a_frame_may_have_goes_one_by_one(post: Post, make: Any) -> None:
    assert post.pack([make(MAX_FRAME_BYTES), "small"]) == (None, None)
    assert post.writer._ranges.count == 0
    assert post.pack([make(MAX_FRAME_BYTES - 1000), "small"])[0] is Kind.SHARED_OUTPUTS


def test_nothing_of_the_outputs_is_held_once_they_are_posted(post: Post) -> None:
    for raw in (bytearray(LARGE), bytearray(LARGE)):
        assert post.pack([np.frombuffer(raw, np.uint8), raw])[0] is Kind.SHARED_OUTPUTS
        raw.append(1)


def fill(post: Post) -> None:
    """Leave no room, in answers that nobody copies."""
    while post.posting.pack([np.zeros(MEBI, np.uint8)], {})[0] is Kind.SHARED_OUTPUTS:  # type: ignore[index]
        pass


@pytest.mark.parametrize("output", [b"x" * (2 * MEBI), np.zeros(2 * MEBI, np.uint8)], ids=type)
def test_what_finds_no_room_goes_through_the_pipe_and_one_warning_says_so(
    post: Post, caplog: pytest.LogCaptureFixture, output: Any
) -> None:
    fill(post)
    caplog.clear()
    post.posting._has_warned = False
    for _ in range(2):
        kind, (got,) = post.pack([output])
        assert kind is Kind.OUTPUTS
        assert bytes(got) == bytes(output)
        packed = post.posting.pack([output, None], {1: describe(ValueError("this one"))})
        assert packed is None
    (record,) = caplog.records
    assert "large outputs go through a pipe" in record.message
    assert f"of max_shared_bytes={SIZE} are taken" in record.message


def test_where_there_is_no_memory_the_pipe_is_left(
    post: Post, caplog: pytest.LogCaptureFixture
) -> None:
    refuse_memory(post.writer._fd)
    for _ in range(2):
        kind, (got,) = post.pack([np.full(LARGE, 1)])
        assert (kind, got.sum()) == (Kind.OUTPUTS, LARGE)
    (record,) = caplog.records
    assert "Bad file descriptor" in record.message
    assert post.writer._ranges.count == 0


def test_without_an_outbox_one_warning_says_why_once_it_is_wanted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    posting = Posting(OSError("no such memory"), MAX_FRAME_BYTES)
    posting.rest()
    assert posting.pack(["small"], {}) is not None
    assert not caplog.records
    counted = Counted(b"x" * LARGE)
    for _ in range(2):
        packed = posting.pack([counted], {})
        assert packed is not None
        assert packed[0] is Kind.OUTPUTS
    (record,) = caplog.records
    assert "no such memory" in record.message
    assert counted.count == 2


def test_nobody_who_wants_no_outbox_is_warned(caplog: pytest.LogCaptureFixture) -> None:
    posting = Posting(None, MAX_FRAME_BYTES)
    posting.rest()
    packed = posting.pack([np.zeros(LARGE)], {})
    assert packed is not None
    assert packed[0] is Kind.OUTPUTS
    assert posting.pack([np.zeros(LARGE), None], {1: describe(ValueError("one"))}) is None
    assert posting.most_whole == MAX_FRAME_BYTES
    assert not caplog.records


def test_an_answer_for_other_requests_is_none(post: Post) -> None:
    packed = post.posting.pack([np.zeros(LARGE)], {})
    assert packed is not None
    *where, failures = loads(packed[1])
    with pytest.raises(TransportError, match="1 outcomes came back for 2 requests"):
        SharedOutputs(post.outbox.find(*where), failures).read(2)


@pytest.mark.parametrize("failures", [5, {0: 5}, {1: describe(ValueError("of nobody"))}])
def test_an_answer_with_failures_that_are_none_is_none(post: Post, failures: Any) -> None:
    packed = post.posting.pack([np.zeros(LARGE)], {})
    assert packed is not None
    *where, _ = loads(packed[1])
    with pytest.raises(TransportError):
        SharedOutputs(post.outbox.find(*where), failures).read(1)
