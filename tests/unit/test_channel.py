"""Both sides of the pipes against each other: real pipes, real loops, a thread for the worker.

The loop's side must never wait, whatever the other does or does not do.
"""

import asyncio
import itertools
import multiprocessing
import os
import random
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from packed_frames import pack
from waits import LIMIT

from fast_batcher._transport.channels import (
    PIPE_SIZE,
    TURN_SIZE,
    BlockingChannel,
    Frame,
    Kind,
    LoopChannel,
    open_pipes,
)
from fast_batcher.errors import TransportError

pytestmark = pytest.mark.anyio

MEBI = 2**20
MAX_FRAME_BYTES = 64 * MEBI


class Raw:
    """The other side's file descriptors; nothing but bytes."""

    def __init__(self, source: int, sink: int) -> None:
        self._source = source
        self._sink = sink

    def __enter__(self) -> "Raw":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, data: bytes) -> None:
        """Write all of it, and wait for room."""
        while data:
            data = data[os.write(self._sink, data) :]

    def receive(self, size: int) -> bytes:
        """Read what there is, and wait for something; empty at the end."""
        return os.read(self._source, size)

    def receive_all(self, size: int) -> bytes:
        """Read exactly so much."""
        with open(os.dup(self._source), "rb") as file:
            return file.read(size)

    def close(self) -> None:
        os.close(self._source)
        os.close(self._sink)


class Ends:
    """A `LoopChannel`, what it has told, and the raw other side.

    Args:
        loop: Watches it; None leaves that to the test.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None) -> None:
        ours, self.theirs = open_pipes(multiprocessing.get_context())
        self.frames: list[tuple[int, int, bytes]] = []
        self.ends: list[Exception | None] = []
        self._changed = asyncio.Event()
        # What is done with a frame after it was noted.
        self.then: Callable[[Frame], None] = lambda frame: None
        self.channel = LoopChannel(ours, MAX_FRAME_BYTES, self._on_frame, self._on_end)
        if loop is not None:
            self.channel.attach(loop)
        self._threads: list[threading.Thread] = []

    def _on_frame(self, frame: Frame) -> None:
        self.frames.append((frame.kind, frame.batch_id, bytes(frame.body)))
        self._changed.set()
        self.then(frame)

    def _on_end(self, error: Exception | None) -> None:
        self.ends.append(error)
        self._changed.set()

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait until what was told makes this true."""
        async with asyncio.timeout(LIMIT):
            while not is_so():
                self._changed.clear()
                await self._changed.wait()

    def worker(self, run: Callable[[BlockingChannel], None]) -> threading.Thread:
        """Run the other end in a thread."""

        def work() -> None:
            channel = BlockingChannel(self.theirs, MAX_FRAME_BYTES)
            try:
                run(channel)
            finally:
                channel.close()

        thread = threading.Thread(target=work)
        self._threads.append(thread)
        thread.start()
        return thread

    def raw(self) -> Raw:
        """The other side without a channel."""
        source, sink = self.theirs
        raw = Raw(os.dup(source.fileno()), os.dup(sink.fileno()))
        source.close()
        sink.close()
        return raw

    def close(self) -> None:
        self.channel.close()
        for thread in self._threads:
            thread.join(LIMIT)
            assert not thread.is_alive()
        for end in self.theirs:
            end.close()


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    ends = Ends(asyncio.get_running_loop())
    yield ends
    ends.close()


def echo(channel: BlockingChannel) -> None:
    """Send back what comes, until the loop's end is closed."""
    while (frame := channel.receive()) is not None:
        channel.send(Kind.ITEMS, frame.batch_id, bytes(frame.body))


# Below, at and above what is joined to a header, what one read takes, and what a pipe holds.
SIZES = [0, 1, 1000, 65_535, 65_536, 65_537, 262_103, 262_104, 262_105, MEBI, 10 * MEBI]


async def test_frames_of_any_size_go_there_and_back(ends: Ends) -> None:
    ends.worker(echo)
    sizes = SIZES * 2
    random.shuffle(sizes)
    sent = [(Kind.ITEMS, number, random.randbytes(size)) for number, size in enumerate(sizes)]
    for _, batch_id, body in sent:
        ends.channel.send(Kind.ITEMS, batch_id, body)
        await ends.until(lambda: len(ends.frames) == batch_id + 1)  # noqa: B023
    assert ends.frames == sent
    ends.channel.close()
    assert ends.ends == []


async def test_end_of_peer_is_reported_once(ends: Ends) -> None:
    ends.worker(lambda channel: channel.send(Kind.READY))
    await ends.until(lambda: len(ends.ends) == 1)
    assert ends.frames == [(Kind.READY, 0, b"")]
    assert ends.ends == [None]
    ends.channel.drain()
    ends.channel.send(Kind.ITEMS, 1, b"to nobody")
    await asyncio.sleep(0)
    assert ends.ends == [None]


@pytest.mark.parametrize("size", [10, 5 * MEBI])
async def test_end_inside_a_frame_gives_no_frame(ends: Ends, size: int) -> None:
    with ends.raw() as raw:
        data = pack(Kind.ITEMS, 1, bytes(size))
        await asyncio.to_thread(raw.send, data[:-1])
    await ends.until(lambda: len(ends.ends) == 1)
    assert (ends.frames, ends.ends) == ([], [None])


@pytest.mark.parametrize("size", [10, 150_000])
async def test_frames_sent_before_death_are_read(size: int) -> None:
    """No loop watches: `drain` alone has to find it, as when a death is noticed first."""
    ends = Ends(None)
    with ends.raw() as raw:
        raw.send(pack(Kind.ITEMS, 7, bytes(size)))
    ends.channel.drain()
    assert ends.frames == [(Kind.ITEMS, 7, bytes(size))]
    assert ends.ends == [None]
    ends.close()


async def test_a_turn_of_the_loop_handles_few_frames(ends: Ends) -> None:
    """Many small frames have arrived at once; other callbacks run between them."""
    frame = pack(Kind.ITEMS, 0, bytes(100))
    count = 8 * TURN_SIZE // len(frame)
    loop = asyncio.get_running_loop()
    turns = [0]

    def begin_turn() -> None:
        if len(ends.frames) < count:
            turns.append(len(ends.frames))
            loop.call_soon(begin_turn)

    with ends.raw() as raw:
        raw.send(frame * count)
        begin_turn()
        await ends.until(lambda: len(ends.frames) == count)
    handled = [after - before for before, after in itertools.pairwise([*turns, count])]
    assert max(handled) <= TURN_SIZE // len(frame) + 1


async def test_draining_reads_what_a_pipe_holds() -> None:
    ends = Ends(None)
    frame = pack(Kind.ITEMS, 0, bytes(100))
    count = PIPE_SIZE // len(frame)
    with ends.raw() as raw:
        raw.send(frame * count)
        ends.channel.drain()
    assert len(ends.frames) == count
    ends.close()


async def test_draining_ends_beside_a_fast_sender() -> None:
    """A worker that answers each frame before the next is read must not keep the loop."""
    ends = Ends(None)
    frame = pack(Kind.PONG, 0, b"")
    with ends.raw() as raw:
        raw.send(frame)
        ends.then = lambda _: raw.send(frame)
        ends.channel.drain()
    assert len(ends.frames) == 2
    ends.close()


@pytest.mark.parametrize(
    "garbage",
    [b"nonsense" * 10, b"fbt1" + b"\x12\0\0\0" + b"\xff" * 24],
    ids=["not a frame", "endless frame"],
)
async def test_garbage_ends_the_channel_with_an_error(ends: Ends, garbage: bytes) -> None:
    with ends.raw() as raw:
        raw.send(pack(Kind.READY, 0, b"") + garbage)
        await ends.until(lambda: len(ends.ends) == 1)
        raw.send(pack(Kind.READY, 0, b""))
        for _ in range(3):
            await asyncio.sleep(0)
    assert ends.frames == [(Kind.READY, 0, b"")]
    assert [type(error) for error in ends.ends] == [TransportError]


async def test_closed_channel_delivers_no_more_frames(ends: Ends) -> None:
    ends.then = lambda frame: ends.channel.close()
    with ends.raw() as raw:
        raw.send(pack(Kind.ITEMS, 5, b"") * 3)
        await ends.until(lambda: len(ends.frames) == 1)
        await asyncio.sleep(0)
    assert len(ends.frames) == 1
    assert ends.ends == []


async def test_sending_to_a_dead_worker_does_nothing(ends: Ends) -> None:
    ends.raw().close()
    ends.channel.send(Kind.ITEMS, 1, b"small")
    ends.channel.send(Kind.ITEMS, 2, bytes(5 * MEBI))
    ends.channel.send(Kind.ITEMS, 3, b"small")
    await ends.until(lambda: len(ends.ends) == 1)


async def test_the_worker_dies_with_half_a_frame_unread(ends: Ends) -> None:
    with ends.raw() as raw:
        ends.channel.send(Kind.ITEMS, 1, bytes(5 * MEBI))
        await asyncio.sleep(0)
        raw.receive(1000)
    await ends.until(lambda: len(ends.ends) == 1)
    assert not asyncio.get_running_loop().remove_writer(ends.channel._sink)


async def test_closing_drops_unsent_frames(ends: Ends) -> None:
    with ends.raw() as raw:
        ends.channel.send(Kind.ITEMS, 1, bytes(5 * MEBI))
        ends.channel.close()
        ends.channel.close()
        ends.channel.send(Kind.ITEMS, 2, b"")
        received = 0
        while data := await asyncio.to_thread(raw.receive, MEBI):
            received += len(data)
    assert received < 5 * MEBI
    assert ends.ends == []


# --- reservations ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
async def test_frames_keep_the_order_of_reservations(ends: Ends, seed: int) -> None:
    choice = random.Random(seed)
    ends.worker(echo)
    expected: list[tuple[int, int, bytes]] = []
    open_places: list[tuple[Any, list[tuple[int, int, bytes]]]] = []

    def make_frame() -> tuple[int, int, bytes]:
        expected.append((Kind.ITEMS, len(expected), choice.randbytes(choice.choice(SIZES[:-1]))))
        return Kind.ITEMS, *expected[-1][1:]

    for _ in range(60):
        what = choice.random()
        if what < 0.4:
            ends.channel.send(*make_frame())
        elif what < 0.7:
            frames = [make_frame() for _ in range(choice.choice([0, 1, 1, 3]))]
            open_places.append((ends.channel.reserve(), frames))
        elif open_places:
            ends.channel.fill(*open_places.pop(choice.randrange(len(open_places))))
        if choice.random() < 0.3:
            await asyncio.sleep(0)
    choice.shuffle(open_places)
    for place, frames in open_places:
        ends.channel.fill(place, frames)
    await ends.until(lambda: len(ends.frames) == len(expected))
    assert ends.frames == expected


async def test_frames_for_a_dead_worker_are_dropped(ends: Ends) -> None:
    ends.channel.send(Kind.ITEMS, 1, bytes(5 * MEBI))
    place = ends.channel.reserve()
    source, _ = ends.theirs
    source.close()
    async with asyncio.timeout(LIMIT):
        while ends.channel._backlog:
            await asyncio.sleep(0)
    ends.channel.fill(place, [(Kind.ITEMS, 2, b"dropped")])
    assert ends.ends == []


# --- the worker's side ----------------------------------------------------------------------------


def blocking_pair() -> tuple[BlockingChannel, BlockingChannel]:
    one, two = open_pipes(multiprocessing.get_context())
    return BlockingChannel(one, MAX_FRAME_BYTES), BlockingChannel(two, MAX_FRAME_BYTES)


def test_worker_reads_frames_until_the_end() -> None:
    one, two = blocking_pair()
    for number in range(3):
        one.send(Kind.ITEMS, number, bytes(number), seconds=0.5)
    one.close()
    for number in range(3):
        frame = two.receive()
        assert frame is not None
        assert (frame.batch_id, bytes(frame.body), frame.seconds) == (number, bytes(number), 0.5)
    assert two.receive() is None
    assert two.receive() is None
    two.close()


def test_worker_reads_end_after_death_of_parent() -> None:
    one, two = blocking_pair()
    two.send(Kind.ITEMS, 1, b"never read")
    one.close()
    assert two.receive() is None
    with pytest.raises(OSError, match="Broken pipe"):
        two.send(Kind.ITEMS, 2, b"")
    two.close()


def test_worker_rejects_garbage() -> None:
    one, two = blocking_pair()
    # It would wait for ever without the room: nothing reads meanwhile.
    one.send_packed(b"nonsense" * (PIPE_SIZE // 8))
    with pytest.raises(TransportError):
        two.receive()
    one.close()
    two.close()
