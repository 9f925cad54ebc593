"""Batches through shared memory without a worker, and what tests ask of a batcher that has it."""

import gc
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import numpy as np
import pytest
from waits import LIMIT, assert_balance, until

from fast_batcher import DynBatcher
from fast_batcher._core.messages import Batch, Release, Request
from fast_batcher._parent.batch_sender import BatchSender
from fast_batcher._parent.input_arena import MOST_AT_ONCE
from fast_batcher._parent.shared_inputs import ReservedSend, SharedInputSender
from fast_batcher._shared_memory.layouts import view_rows
from fast_batcher._shared_memory.slabs import Slabs, SlabViews
from fast_batcher._transport.codec import loads
from fast_batcher._transport.frames import Kind
from fast_batcher._transport.loop_channel import Reservation
from fast_batcher._transport.pickler import load_items, view_parts

MEBI = 2**20
SIZE = 16 * MEBI
MAX_FRAME_BYTES = 8 * MEBI
WORKER = 3
# A batch of one that is copied at once, and one that is copied aside.
SMALL, LARGE = 300_000, MOST_AT_ONCE + 1


class Desk:
    """An sender, the slabs that it shares, and what its only worker is sent, in its order."""

    def __init__(self) -> None:
        self.slabs = Slabs(SIZE)
        # The worker: its id, its memory, and frames and places that it is sent.
        self.worker = WORKER
        self.views = SlabViews(os.dup(self.slabs._fd), SIZE)
        self.queue: list[Any] = []
        # What is to be done aside.
        self.jobs: list[tuple[Callable[[], None], Callable[[BaseException | None], None]]] = []
        # What has been, which nobody has forgotten yet.
        self.done_jobs: list[Callable[[], None]] = []
        self.refused: list[Any] = []
        self.lanes = {WORKER: ReservedSend(self._reserve, self._fill)}
        self.shared_inputs = SharedInputSender(
            lambda: self.slabs,
            self.lanes,
            lambda *job: self.jobs.append(job),
            "name",
            1000,
            MAX_FRAME_BYTES,
            8,
        )
        self.senders = {WORKER: self._send}
        self.sender = BatchSender(
            self.senders,
            MAX_FRAME_BYTES,
            1000,
            self.shared_inputs,
            lambda _, refused: self.refused.extend(refused),
            {},
        )
        self._next_id = 0

    def _send(self, kind: Kind, batch_id: int, body: bytes) -> None:
        self.queue.append((kind, batch_id, body))

    def _reserve(self) -> Reservation:
        place = Reservation()
        self.queue.append(place)
        return place

    def _fill(self, place: Reservation, frames: list[tuple[Kind, int, bytes]]) -> None:
        index = self.queue.index(place)
        self.queue[index : index + 1] = frames

    def replace_worker(self) -> None:
        """The worker is dead, and another is ready."""
        lane = self.lanes.pop(self.worker)
        del self.senders[self.worker]
        self.sender.forget(self.worker, None)
        self.worker += 1
        self.views = SlabViews(os.dup(self.slabs._fd), SIZE)
        self.queue = []
        self.lanes[self.worker] = lane._replace(reserve=self._reserve)
        self.senders[self.worker] = self._send

    def arrive(self, value: Any) -> Request:
        """A request, with a row if its input is to have one."""
        request = Request(value, None, deadline=1.0)
        rows = self.shared_inputs.rows
        # In a turn of the loop of its own.
        rows.copied = 0
        row = rows.take(value) if type(value) in rows.probes else None
        if row is not None:
            request.staged = row
        return request

    def send(self, *values: Any) -> Batch:
        """Send a batch of inputs that have no rows."""
        return self.send_requests([Request(value, None, deadline=1.0) for value in values])

    def send_requests(self, requests: list[Request]) -> Batch:
        for number, request in enumerate(requests):
            request.id = number
        batch = Batch(self._next_id, self.worker, requests, Release.FULL, 0.0, 1.0)
        self._next_id += 1
        assert self.sender.send(batch) == []
        return batch

    def run_job(self) -> None:
        """Do one job, as the pool does."""
        job, done = self.jobs.pop(0)
        self.done_jobs.append(job)
        error = None
        try:
            job()
        except OSError as caught:
            error = caught.with_traceback(None)
        done(error)

    def free(self) -> None:
        """Hear from the worker of which batches no view is left."""
        self.shared_inputs.free(self.worker, self.views.take_freed())

    @property
    def kinds(self) -> list[Kind | None]:
        return [None if isinstance(one, Reservation) else one[0] for one in self.queue]

    def read(self) -> Any:
        """The values of the batch that was sent first."""
        kind, batch_id, body = self.queue.pop(0)
        if kind is Kind.SHARED_INPUTS:
            start, length, sizes, items = loads(body)
            view = self.views.view(batch_id)[start : start + length]
            return load_items(*view_parts(view, sizes), items, lambda error: error)
        if kind is Kind.ROWS:
            memory = self.views.view(batch_id)
            runs = [
                view_rows(layout, memory, start, count)[0] for layout, start, count in loads(body)
            ]
            return [row for run in runs for row in run]
        if kind is Kind.INPUTS:
            return [loads(item) for item in loads(body)]
        assert kind is Kind.INPUT_ATOMS, kind
        return loads(body)

    def close(self) -> None:
        self.slabs.close()
        gc.collect()
        self.views.close()


@pytest.fixture
def desk() -> Iterator[Desk]:
    """One that knows that large inputs come."""
    desk = Desk()
    desk.shared_inputs.rows.enable()
    yield desk
    desk.close()


def filled(number: int, size: int = SMALL) -> Any:
    """An input of so many bytes."""
    return np.full(size, number, np.uint8)


def sums(values: list[Any]) -> list[int]:
    """What they are filled with."""
    return [int(value[0]) for value in values if value.min() == value.max()]


@asynccontextmanager
async def opened(
    model: Any, *args: Any, has_rows: bool = False, **settings: Any
) -> AsyncIterator[DynBatcher[Any, Any]]:
    """A batcher that has counted right.

    Args:
        model: Its model.
        args: The model's.
        has_rows: Whether large inputs have rows at once, and not only after the first large batch.
        settings: The batcher's.
    """
    async with DynBatcher(model, model_args=args, **settings) as batcher:
        if has_rows:
            batcher._rows.enable()
        yield batcher
        assert_balance(batcher)


def slabs_of(batcher: DynBatcher[Any, Any]) -> Slabs:
    slabs = batcher._memory.slabs
    assert isinstance(slabs, Slabs)
    return slabs


async def free(batcher: DynBatcher[Any, Any]) -> None:
    """Every slab has come back, but for those that wait for rows."""
    rows = batcher._rows
    await until(lambda: slabs_of(batcher).count == len(rows._open))


@contextmanager
def copier_held(batcher: DynBatcher[Any, Any]) -> Iterator[None]:
    """Nothing is done aside meanwhile: what is to be waits."""
    is_held, is_over = threading.Event(), threading.Event()

    def hold() -> None:
        is_held.set()
        is_over.wait(LIMIT)

    batcher._memory.run_in_thread(hold, lambda _: None)
    assert is_held.wait(LIMIT)
    try:
        yield
    finally:
        is_over.set()


async def until_copying(batcher: DynBatcher[Any, Any]) -> None:
    """Something is to be done aside; the copier is held, so it has not been done yet."""
    await until(lambda: not batcher._memory._copier._jobs.empty())


def wait_until_copied(batcher: DynBatcher[Any, Any]) -> None:
    """All that was to be done aside has been done, whether or not a loop has heard of it."""
    is_over = threading.Event()
    batcher._memory.run_in_thread(is_over.set, lambda _: None)
    assert is_over.wait(LIMIT)


@contextmanager
def no_threads() -> Iterator[None]:
    """The system has no memory for the stack of another thread."""
    before = threading.stack_size(2**46)
    try:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threading.Thread(target=lambda: None).start()
        yield
    finally:
        threading.stack_size(before)
