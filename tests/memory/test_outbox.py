"""Memory in which answers are left: what is read is as it was written, and its reader's own."""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from forks import fork, status_of
from memory_files import memory_of, refuse_memory

from fast_batcher._shared_memory import outbox as outboxes
from fast_batcher._shared_memory.outbox import (
    RESTS_TO_KEEP_MEMORY,
    Answer,
    OutboxReader,
    OutboxWriter,
)
from fast_batcher._shared_memory.ranges import RELEASING_SIZE, copy_releasing
from fast_batcher._transport.pickling import OutOfBandPickle, OutOfBandPickler
from fast_batcher._transport.progress import open_passed
from fast_batcher.errors import TransportError

MEBI = 2**20
SIZE = 8 * MEBI
LEAST = 5000
LARGE = 300_000


@pytest.fixture
def outbox() -> Iterator[OutboxReader]:
    outbox = OutboxReader(SIZE, LEAST)
    yield outbox
    outbox.close()


@pytest.fixture
def writer(outbox: OutboxReader) -> Iterator[OutboxWriter]:
    """The other side, in this process."""
    writer = OutboxWriter(os.dup(outbox._fd), SIZE, LEAST)
    yield writer
    writer.close()


def parts_of(value: Any) -> OutOfBandPickle:
    """Those of an answer to one request."""
    pickled = OutOfBandPickler(LEAST).pickle([value], lambda: True)
    assert isinstance(pickled, OutOfBandPickle)
    return pickled


def load(answer: Answer) -> Any:
    """The output; an error stands for one that cannot be unpickled."""
    (output,) = answer.load(lambda error: error)
    return output


def left(
    writer: OutboxWriter, value: Any
) -> tuple[int, list[int], list[int], list[tuple[int, int]]]:
    """Where a value has been left, the sizes of its parts, which are read-only, and its items."""
    parts = parts_of(value)
    start = writer.put(parts)
    assert start is not None
    frozen = parts.find_frozen()
    parts.release()
    return start, parts.sizes, frozen, parts.items


def left_answer(outbox: OutboxReader, writer: OutboxWriter, value: Any) -> Answer:
    return outbox.find(*left(writer, value))


def test_other_threads_run_while_large_buffers_are_copied(
    outbox: OutboxReader, writer: OutboxWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large buffers are copied without the lock; whether a thread runs then is chance."""
    releasing: list[tuple[type, int]] = []

    def note(kind: Any, part: memoryview) -> Any:
        releasing.append((kind, part.nbytes))
        return copy_releasing(kind, part)

    monkeypatch.setattr(outboxes, "copy_releasing", note)
    value = [bytearray(LARGE), bytearray(RELEASING_SIZE), bytearray(RELEASING_SIZE - 1)]
    arrays = [np.frombuffer(one, np.uint8) for one in value]
    arrays.append(np.frombuffer(bytes(LARGE), np.uint8))
    answer = left_answer(outbox, writer, arrays)
    answer.copy(releases_gil=True)
    answer.copy(releases_gil=True)
    assert load(answer)[3].tobytes() == bytes(LARGE)
    assert releasing == [(bytearray, LARGE), (bytearray, RELEASING_SIZE), (bytes, LARGE)]


def test_an_answer_outlives_the_worker_and_the_outbox() -> None:
    outbox = OutboxReader(SIZE, LEAST)
    writer = OutboxWriter(os.dup(outbox._fd), SIZE, LEAST)
    was_used = outbox.is_used
    answer = left_answer(outbox, writer, np.full(LARGE, 5))
    writer.close()
    assert (was_used, outbox.is_used) == (False, True)
    outbox.close()
    assert not outbox.is_open
    assert load(answer).sum() == 5 * LARGE
    with pytest.raises(TransportError):
        outbox.find(0, [10], [], [(10, 0)])


def test_outbox_recovers_from_refused_memory(outbox: OutboxReader, writer: OutboxWriter) -> None:
    load(left_answer(outbox, writer, np.zeros(LARGE)))
    refuse_memory(writer._fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        writer.put(parts_of([np.zeros(LARGE), np.zeros(LARGE)]))
    assert writer._ranges.count == 0
    assert load(left_answer(outbox, writer, np.ones(LARGE))).sum() == LARGE
    for _ in range(2 * RESTS_TO_KEEP_MEMORY):
        writer.rest()
    assert writer._ranges.count == 0


def test_unused_memory_returns_to_the_system(outbox: OutboxReader, writer: OutboxWriter) -> None:
    load(left_answer(outbox, writer, np.zeros(LARGE)))
    for _ in range(RESTS_TO_KEEP_MEMORY):  # it has been used since the last time
        assert memory_of(outbox._fd)
        writer.rest()
    for _ in range(RESTS_TO_KEEP_MEMORY):
        assert memory_of(outbox._fd)
        writer.rest()
    assert memory_of(outbox._fd) == 0
    assert load(left_answer(outbox, writer, np.ones(LARGE))).sum() == LARGE


def test_unmappable_outbox_reports_the_reason(outbox: OutboxReader) -> None:
    class Duplicate:
        """A descriptor in the other process, as `multiprocessing` passes it."""

        def detach(self) -> int:
            # One that may only be read cannot be mapped to be written.
            return os.open(f"/proc/self/fd/{outbox._fd}", os.O_RDONLY)

    error = open_passed(OutboxWriter, Duplicate(), SIZE, LEAST)
    assert isinstance(error, PermissionError)
    assert error.__traceback__ is None


@pytest.mark.slow
def test_forked_app_releases_its_copy(outbox: OutboxReader, writer: OutboxWriter) -> None:
    left(writer, np.zeros(LARGE))
    assert status_of(fork(lambda: outbox.is_open)) == 0
    assert outbox.is_open
