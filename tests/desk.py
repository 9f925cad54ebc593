"""Batches through shared memory without a worker, and what tests ask of a batcher that has it."""

import gc
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from waits import assert_balance, until

from fast_batcher import DynBatcher
from fast_batcher._core.messages import Batch, Release, Request
from fast_batcher._process.exchange import Exchange
from fast_batcher._process.input_rows import MOST_AT_ONCE
from fast_batcher._process.sharing import Lane, Sharing
from fast_batcher._transport.channel import Place
from fast_batcher._transport.codec import loads
from fast_batcher._transport.frames import Kind
from fast_batcher._transport.layouts import view_rows
from fast_batcher._transport.pickler import load
from fast_batcher._transport.slabs import Slabs, SlabViews

MEBI = 2**20
SIZE = 16 * MEBI
MAX_FRAME_BYTES = 8 * MEBI
WORKER = 3
# A batch of one that is copied at once, and one that is copied aside.
SMALL, LARGE = 300_000, MOST_AT_ONCE + 1


class Desk:
    """An exchange, the slabs that it shares, and what its only worker is sent, in its order."""

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
        self.lanes = {WORKER: Lane(self._reserve, self._fill)}
        self.sharing = Sharing(
            lambda: self.slabs,
            self.lanes,
            lambda *job: self.jobs.append(job),
            "name",
            1000,
            MAX_FRAME_BYTES,
            8,
        )
        self.senders = {WORKER: self._send}
        self.exchange = Exchange(
            self.senders,
            MAX_FRAME_BYTES,
            1000,
            self.sharing,
            lambda _, refused: self.refused.extend(refused),
            {},
        )
        self._next_id = 0

    def _send(self, kind: Kind, batch_id: int, body: bytes) -> None:
        self.queue.append((kind, batch_id, body))

    def _reserve(self) -> Place:
        place = Place()
        self.queue.append(place)
        return place

    def _fill(self, place: Place, frames: list[tuple[Kind, int, bytes]]) -> None:
        index = self.queue.index(place)
        self.queue[index : index + 1] = frames

    def replace_worker(self) -> None:
        """The worker is dead, and another is ready."""
        lane = self.lanes.pop(self.worker)
        del self.senders[self.worker]
        self.exchange.forget(self.worker, None)
        self.worker += 1
        self.views = SlabViews(os.dup(self.slabs._fd), SIZE)
        self.queue = []
        self.lanes[self.worker] = lane._replace(reserve=self._reserve)
        self.senders[self.worker] = self._send

    def arrive(self, value: Any) -> Request:
        """A request, with a row if its input is to have one."""
        request = Request(value, None, deadline=1.0)
        rows = self.sharing.rows
        # In a turn of the loop of its own.
        rows.copied = 0
        row = rows.take(value) if type(value) in rows.looks else None
        if row is not None:
            request.row = row
        return request

    def send(self, *values: Any) -> Batch:
        """Send a batch of inputs that have no rows."""
        return self.send_requests([Request(value, None, deadline=1.0) for value in values])

    def send_requests(self, requests: list[Request]) -> Batch:
        for number, request in enumerate(requests):
            request.id = number
        batch = Batch(self._next_id, self.worker, requests, Release.FULL, 0.0, 1.0)
        self._next_id += 1
        assert self.exchange.send(batch) == []
        return batch

    def run_job(self) -> None:
        """Do one job, as the pool does."""
        job, done = self.jobs.pop(0)
        self.done_jobs.append(job)
        error = None
        try:
            job()
        except OSError as caught:
            error = caught
        done(error)

    def free(self) -> None:
        """Hear from the worker of which batches no view is left."""
        self.sharing.free(self.worker, self.views.take_freed())

    @property
    def kinds(self) -> list[Kind | None]:
        return [None if isinstance(one, Place) else one[0] for one in self.queue]

    def read(self) -> Any:
        """The values of the batch that was sent first."""
        kind, batch_id, body = self.queue.pop(0)
        if kind is Kind.SHARED_INPUTS:
            start, length, sizes = loads(body)
            return load(self.views.view(batch_id)[start : start + length], sizes)
        if kind is Kind.ROWS:
            memory = self.views.view(batch_id)
            runs = [
                view_rows(layout, memory, start, count)[0] for layout, start, count in loads(body)
            ]
            return [row for run in runs for row in run]
        if kind is Kind.INPUT_ITEMS:
            return [loads(item) for item in loads(body)]
        assert kind is Kind.INPUTS
        return loads(body)

    def refuse_memory(self) -> None:
        read_only = os.open(f"/proc/self/fd/{self.slabs._fd}", os.O_RDONLY)
        os.dup2(read_only, self.slabs._fd)
        os.close(read_only)

    def close(self) -> None:
        self.slabs.close()
        gc.collect()
        self.views.close()


@asynccontextmanager
async def opened(model: Any, *args: Any, **settings: Any) -> AsyncIterator[DynBatcher[Any, Any]]:
    async with DynBatcher(model, model_args=args, **settings) as batcher:
        yield batcher
        assert_balance(batcher)


def slabs_of(batcher: DynBatcher[Any, Any]) -> Slabs:
    slabs = batcher._pool.slabs
    assert isinstance(slabs, Slabs)
    return slabs


async def free(batcher: DynBatcher[Any, Any]) -> None:
    """Every slab has come back, but for those that wait for rows."""
    rows = batcher._rows
    await until(lambda: slabs_of(batcher).count == len(rows._open))
