"""Batches through shared memory without a worker, and what tests ask of a batcher that has it."""

import asyncio
import gc
import os
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import numpy as np
import pytest
from openings import opening_of
from schedulers import make_request
from waits import LIMIT, assert_balance, call, outcome, turns, until

from fast_batcher import DynBatcher
from fast_batcher._core.values import Batch, Release, Request
from fast_batcher._parent.sending import BatchSender, FrameWorker
from fast_batcher._parent.staging import LARGEST_COPY_ON_LOOP, Done, Job, MemoryService
from fast_batcher._shared_memory.inputs import Slab, Slabs, SlabViews
from fast_batcher._transport.channels import Frame, Kind, Reservation
from fast_batcher._transport.pickling import loads
from fast_batcher._worker.frames import InputReader
from fast_batcher._worker.port import BatchJob
from fast_batcher.errors import BatcherError, PoisonRequestError
from fast_batcher.settings import Settings

MEBI = 2**20
SIZE = 16 * MEBI
MAX_FRAME_BYTES = 8 * MEBI
# A batch of one that the loop copies, and one that the copier thread copies.
SMALL, LARGE = 300_000, LARGEST_COPY_ON_LOOP + 1


class Worker:
    """A worker that reads frames when it is told to, and what a `BatchSender` needs of it."""

    outbox = None
    stages = 1
    is_alive = True

    def __init__(self, id: int, slabs: Slabs) -> None:
        self.id = id
        self.views = SlabViews(os.dup(slabs._fd), SIZE)
        self.leases: dict[int, list[Slab]] = {}
        # Frames that it has not read, and reservations.
        self.queue: list[Any] = []
        self._reader = InputReader(self.views)

    def send(self, kind: int, batch_id: int, body: bytes) -> None:
        assert len(body) <= MAX_FRAME_BYTES
        self.queue.append((kind, batch_id, body))

    def skip(self, batch_id: int) -> None:
        raise AssertionError("callers wait for every batch")

    def reserve(self) -> Reservation:
        reservation = Reservation()
        self.queue.append(reservation)
        return reservation

    def fill(self, reservation: Reservation, frames: Iterable[tuple[int, int, bytes]]) -> None:
        index = self.queue.index(reservation)
        self.queue[index : index + 1] = frames

    def read(self) -> list[Any]:
        """The values of the batch that was sent first."""
        kind, batch_id, body = self.queue.pop(0)
        while kind == Kind.PART:
            self._reader.keep_fragment(Frame(kind, batch_id, 0.0, body))
            kind, batch_id, body = self.queue.pop(0)
        job = BatchJob(batch_id)
        if kind == Kind.ATOMS:
            job.inputs = loads(body)
        else:
            self._reader.read(Frame(kind, batch_id, 0.0, body), job)
        assert not job.errors
        return job.inputs


class HeldMemory(MemoryService):
    """Memory whose copier thread does nothing: its jobs are kept."""

    def __init__(self) -> None:
        loop: Any = None
        super().__init__(loop, SIZE, "name")
        self.jobs: list[tuple[Job, Done]] = []

    def run_in_thread(self, job: Job, done: Done) -> None:
        self.jobs.append((job, done))


class SenderHarness:
    """A `BatchSender` with real slabs, one worker, and the jobs of the copier thread."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self.memory = HeldMemory()
        assert isinstance(self.memory.slabs, Slabs)
        self.slabs, self.jobs = self.memory.slabs, self.memory.jobs
        # The requests that turned out not to be sendable, with the reasons.
        self.refused: list[Any] = []
        settings = self.settings = Settings(
            max_frame_bytes=max_frame_bytes, shared_memory_threshold=4096, max_batch_size=8
        )
        self.workers: dict[int, Any] = {}
        self.sender = BatchSender(settings, self.memory, self.workers, "name")
        self.arena = self.sender.arena
        self._next_batch = 0
        self.worker = Worker(3, self.slabs)
        self.workers[3] = self.worker

    def inputs_unsendable(self, _: Batch, refused: list[tuple[Request, BatcherError]]) -> None:
        self.refused += refused

    def replace_worker(self) -> None:
        """The worker is dead, and another is ready."""
        self.lose_worker()
        self.worker = Worker(self.worker.id + 1, self.slabs)
        self.workers[self.worker.id] = self.worker

    def lose_worker(self, inherited: int | None = None) -> None:
        """The worker is dead; its children may view batches up to this one."""
        del self.workers[self.worker.id]
        self.worker.is_alive = False
        worker: Any = self.worker
        FrameWorker._end_leases(worker, inherited)

    def arrive(self, *values: Any) -> list[Request]:
        """A request for each value, staged if it is to be, each in a turn of the loop."""
        requests = [make_request(value, 1.0) for value in values]
        for request in requests:
            self.arena.end_turn()
            if type(request.value) in self.arena.probes:
                request.staged = self.arena.stage(request.value)
        return requests

    def batch(self, *values: Any) -> Batch:
        """Send a batch of inputs that are not staged."""
        return self.dispatch([make_request(value, 1.0) for value in values])

    def dispatch(self, requests: list[Request]) -> Batch:
        """Send a batch of requests; those whose input cannot be sent are in `refused`."""
        batch = Batch(
            self._next_batch, self.worker.id, requests, Release.FULL, 1.0, len(requests), 0.0
        )
        self._next_batch += 1
        worker: Any = self.worker
        worker.listener = self
        worker._sender, worker._settings, worker._has_costs = self.sender, self.settings, False
        FrameWorker.compute(worker, batch)
        return batch

    def run_jobs(self, count: int | None = None) -> None:
        """Do the first jobs, or all, as the copier thread does them."""
        for _ in range(len(self.jobs) if count is None else count):
            job, done = self.jobs.pop(0)
            error = None
            try:
                job()
            except OSError as caught:
                error = caught.with_traceback(None)
            done(error)

    @property
    def queue(self) -> list[Any]:
        """Frames that the worker has not read, and reservations."""
        return self.worker.queue

    @property
    def kinds(self) -> list[int | None]:
        """Of the frames that the worker has not read; None stands for a reservation."""
        return [None if isinstance(one, Reservation) else one[0] for one in self.queue]

    def read(self) -> list[Any]:
        """The values of the batch that was sent first, as the worker reads them."""
        return self.worker.read()

    def free(self, *batch_ids: int) -> None:
        """The worker says of which batches no view is left, or names these."""
        for batch_id in batch_ids or self.worker.views.take_freed():
            del self.worker.leases[batch_id]

    def close(self) -> None:
        self.slabs.close()
        gc.collect()
        self.worker.views.close()


@pytest.fixture
def harness() -> Iterator[SenderHarness]:
    """One that has been told that large inputs come."""
    harness = SenderHarness()
    harness.arena.enable()
    yield harness
    harness.close()


def filled(number: int, size: int = SMALL) -> Any:
    """An input of so many bytes."""
    return np.full(size, number, np.uint8)


def sums(values: list[Any]) -> list[int]:
    """Values of all elements of the inputs."""
    return [int(value[0]) for value in values if value.min() == value.max()]


@asynccontextmanager
async def opened(
    model: Any, *args: Any, stages: bool = False, **settings: Any
) -> AsyncIterator[DynBatcher[Any, Any]]:
    """A batcher whose counters balance at the end.

    Args:
        model: Its model.
        args: The model's.
        stages: Whether large inputs are staged at once, and not only after the first large batch.
        settings: The batcher's.
    """
    async with DynBatcher(model, model_args=args, **settings) as batcher:
        if stages:
            stage_inputs(batcher)
        yield batcher
        assert_balance(batcher)


# Settings of a batcher for `ask_amid_deaths`, and what then becomes of some of its requests.
DYING: Any = {"max_batch_size": 4, "num_workers": 2, "max_restarts": None, "restart_backoff": 0.01}
LOST = asyncio.CancelledError | PoisonRequestError


async def ask_amid_deaths(
    batcher: DynBatcher[Any, Any], values: list[Any], whereabouts: Any
) -> list[Any]:
    """Kill workers and cancel callers at random meanwhile; the outcomes.

    Args:
        batcher: The batcher.
        values: Its inputs.
        whereabouts: An input that is answered with the process id of the worker.
    """
    random = np.random.default_rng(2)
    tasks = []
    for number, value in enumerate(values):
        tasks.append(call(batcher, value))
        if number % 40 == 39:
            os.kill(await batcher.process_batched(whereabouts), 9)
        if number % 7 == 3:
            tasks[random.integers(len(tasks))].cancel()
        await turns(int(random.integers(1, 4)))
    return [await outcome(task) for task in tasks]


def stage_inputs(batcher: DynBatcher[Any, Any]) -> None:
    """Large inputs are staged from now on."""
    opening_of(batcher).sender.arena.enable()


def slabs_of(batcher: DynBatcher[Any, Any]) -> Slabs:
    slabs = opening_of(batcher).memory.slabs
    assert isinstance(slabs, Slabs)
    return slabs


def has_slabs(batcher: DynBatcher[Any, Any]) -> bool:
    return opening_of(batcher).memory.slabs is not None


def is_free(batcher: DynBatcher[Any, Any]) -> bool:
    """Whether all slabs have come back, except those that are open for more inputs."""
    return slabs_of(batcher).count == len(opening_of(batcher).memory.open_slabs)


async def free(batcher: DynBatcher[Any, Any]) -> None:
    """Wait until it `is_free`."""
    await until(lambda: is_free(batcher))


def give_back_unused(batcher: DynBatcher[Any, Any]) -> None:
    """The pool's heartbeat gives memory back that was not used for long."""
    memory = opening_of(batcher).memory
    memory.rests_at = 0.0
    memory.give_back_unused()


@contextmanager
def copier_held(batcher: DynBatcher[Any, Any]) -> Iterator[None]:
    """The copier thread does nothing meanwhile."""
    is_held, is_over = threading.Event(), threading.Event()

    def hold() -> None:
        is_held.set()
        is_over.wait(LIMIT)

    opening_of(batcher).memory.run_in_thread(hold, lambda _: None)
    assert is_held.wait(LIMIT)
    try:
        yield
    finally:
        is_over.set()


async def until_copying(batcher: DynBatcher[Any, Any]) -> None:
    """Wait until the copier thread, which is held, has a job."""
    await until(lambda: not opening_of(batcher).memory._copier._jobs.empty())


def wait_until_copied(batcher: DynBatcher[Any, Any]) -> None:
    """Wait until the copier thread has done all its jobs, whether or not a loop has heard of it."""
    is_over = threading.Event()
    opening_of(batcher).memory.run_in_thread(is_over.set, lambda _: None)
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
