"""LocalSession: a session whose scheduler and workers belong to this process.

    DynBatcher --accept--> Pump --submit, poll--> Scheduler
                            | Dispatch                ^
                            v                         | batch_done
                        BatchSender ==> worker ==> Answers --settle--> callers

Runs in the API process or in the host process, on the event loop's thread. A session connects the
parts of the figure, reacts to the workers' coming and going, and closes everything in order; the
next opening makes another session. It neither queues requests (`Pump`, `Scheduler`) nor starts
processes (`Pool`).

Callbacks of the event loop run in an empty context (`contextvars`): by default they would see, and
keep, the context variables of the first caller of a turn.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fast_batcher._asyncio.answers import Answers, OutcomeReader
from fast_batcher._asyncio.binding import LoopBinding
from fast_batcher._asyncio.cost_evaluator import CostEvaluator
from fast_batcher._asyncio.ledger import Ledger, is_beyond_reach
from fast_batcher._asyncio.pump import Pump
from fast_batcher._asyncio.reports import Reports
from fast_batcher._asyncio.status import Status
from fast_batcher._core.explanation import Setup, explain
from fast_batcher._core.policy import make_policy
from fast_batcher._core.prediction import Method
from fast_batcher._core.queue import BatchPacker
from fast_batcher._core.scheduler import Scheduler
from fast_batcher._core.values import Batch, Event, Limits, Request, State
from fast_batcher._parent.pool import Pool
from fast_batcher._parent.sending import BatchSender, SenderEvents
from fast_batcher._parent.staging import MemoryService
from fast_batcher._parent.worker_process import Exit, WorkerLink
from fast_batcher._process import monotonic
from fast_batcher._transport.pickling import measure_size
from fast_batcher.errors import (
    BatcherClosedError,
    BatcherError,
    PoisonRequestError,
    WorkerLostError,
    WorkerStartupError,
)
from fast_batcher.model import ModelSpec
from fast_batcher.observing import WorkerChanged
from fast_batcher.settings import Settings
from fast_batcher.stats import BatcherStats, Explanation

logger = logging.getLogger("fast_batcher")


class ValueAccess:
    """Access of a session to the inputs and outputs of its requests.

    A host process, which must not import the types of the app, has another one.
    """

    reader = OutcomeReader()

    def open_memory(
        self, loop: asyncio.AbstractEventLoop, settings: Settings, name: str
    ) -> MemoryService:
        """Open the memory that is shared with the workers."""
        return MemoryService(loop, settings.max_shared_bytes, name)

    def make_sender(
        self, settings: Settings, memory: MemoryService, events: SenderEvents, name: str
    ) -> BatchSender:
        """Make the sender of batches."""
        return BatchSender(settings, memory, events, name)

    def make_evaluator(
        self, settings: Settings, name: str, methods: Sequence[Method]
    ) -> CostEvaluator:
        """Make the evaluator of costs and groups."""
        return CostEvaluator(settings, name, methods)


class LocalSession:
    """A `Session` with workers of its own.

    Args:
        model_spec: The model that the workers load.
        settings: The batcher's settings.
        status: The batcher's state, which the session changes, and its name.
        ledger: Settles and counts the requests.
        access: Access to inputs and outputs.
    """

    def __init__(
        self,
        model_spec: ModelSpec,
        settings: Settings,
        status: Status,
        ledger: Ledger,
        access: ValueAccess | None = None,
    ) -> None:
        access = access or ValueAccess()
        self.settings = settings
        self._status = status
        self._ledger = ledger
        name = self._name = status.name
        self.binding = LoopBinding(name)
        # Indexes of workers that were ready once: when all are in it, the batcher is open.
        self._seen_ready: set[int] = set()

        reports = self._reports = Reports(name, settings)
        methods = [Method(*one, settings.batch_limit) for one in model_spec.methods]
        self.methods: Mapping[str, Method] = {one.name: one for one in methods}
        scheduler = self.scheduler = _make_scheduler(settings, methods)
        memory = self.memory = access.open_memory(self.binding.loop, settings, name)
        pool = self.pool = Pool(model_spec, settings, self, memory, ledger.observers, name)
        sender = self.sender = access.make_sender(settings, memory, self, name)
        evaluator, loop = access.make_evaluator(settings, name, methods), self.binding.loop
        pump = self.pump = Pump(scheduler, sender, pool, ledger, evaluator, status, reports, loop)
        # As methods that pass calls on to the pump they would take 0.1 us of each call.
        self.accept, self.abandon, self.has_room = pump.accept, pump.abandon, pump.has_room
        self.raise_priority = pump.raise_priority
        self._answers = Answers(
            scheduler, ledger, pump, sender, pool, memory, reports, access.reader
        )
        # Handles a frame of a ready worker; directly, as above.
        self.frame_arrived = self._answers.take

    @property
    def load(self) -> tuple[int, int, int]:
        """Numbers of ready workers, waiting requests and running requests."""
        workers = self.scheduler.workers
        return workers.ready_count, self.scheduler.waiting, workers.running

    def read_stats(self) -> BatcherStats:
        """Return a snapshot of the counts and the load."""
        workers_ready, waiting, running = self.load
        return self._ledger.counters.snapshot(
            state=str(self._status.state),
            workers_ready=workers_ready,
            num_workers=self.settings.num_workers,
            waiting=waiting,
            running=running,
        )

    def explain(self) -> Explanation:
        """Explain the size of the recent batches."""
        settings = self.settings
        setup = Setup(
            settings.batch_limit,
            settings.num_workers,
            settings.max_batch_cost is not None,
            settings.group_by is not None,
            settings.enabled,
            self.scheduler.is_short_of_memory,
        )
        learned = self.scheduler.service.points()
        explained = explain(self._ledger.counters.list_samples(), setup, learned)
        return replace(explained, service_times=learned)

    # Opening.

    def begin(self) -> None:
        """Start the workers, which report to `worker_ready` and `worker_failed_to_start`."""
        self._status.begin()
        self._ledger.observers.watch_collector()
        self.pool.open()

    def reconfigure(self, settings: Settings) -> None:
        """Apply changed settings, which were checked before.

        Raises:
            RuntimeError: The calling thread is not that of the event loop.
        """
        self.binding.require_own_thread("reconfigure()")
        self.pump.take_arrivals(monotonic())  # which came before the change
        keeps_policy = settings.max_delay == self.settings.max_delay
        policy = None if keeps_policy else make_policy(settings.policy, settings.max_delay)
        self.settings = settings
        self.sender.arena.batch_size = settings.batch_limit
        self.scheduler.reconfigure(_limits_of(settings), policy)
        if not self.binding.loop.is_closed():
            # The waiting requests may be a full batch now, or have waited long enough.
            self.pump.run_soon()

    def allocate_input(self, dtype: Any, shape: tuple[int, ...]) -> Any:
        """Make an array in shared memory; None if the caller must make an ordinary one."""
        self.pump.run_soon()  # its run ends the arena's turn
        self.sender.arena.enable()
        return self.sender.arena.allocate(dtype, shape)

    def rebind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Continue on another event loop; the previous loop is closed.

        Callers that waited on the closed loop get no outcome.
        """
        self.binding.rebind(loop)
        self.pump.rebind(loop)
        self.pool.rebind(loop)

    # Events of the pool and of the sender.

    def worker_ready(self, worker: WorkerLink, times: list[tuple[int, float]]) -> None:
        """Give a ready worker batches; `times` are sizes and seconds of its warm-up batches."""
        self.sender.add_worker(worker)
        self._answers.add_worker(worker)
        self.scheduler.worker_ready(monotonic(), worker.id, times, worker.stages)
        index = self._reports.index(worker.id)
        reloading = self.pool.reloading
        is_reloaded = reloading is not None and reloading.is_awaited(worker.id)
        if index in self._seen_ready and not is_reloaded:
            self._ledger.counters.restarts += 1
            self._ledger.observers.tell(WorkerChanged(self._name, index, "restarted", worker.pid))
        self._seen_ready.add(index)
        if self._status.state is State.OPENING:
            if len(self._seen_ready) == self.settings.num_workers:
                self._status.move(Event.ALL_READY)
        elif self._status.state is State.BROKEN:
            self._status.recover()
        self.pump.advance(monotonic())

    def worker_lost(self, worker: int, exit: Exit) -> None:
        """Retry the requests of a dead worker, or fail them."""
        self.sender.remove_worker(worker, exit.inherited)
        self._answers.remove_worker(worker)
        running = self.scheduler.workers.batches.values()
        lost = [batch for batch in running if batch.worker == worker]
        how = f"worker {self._reports.index(worker)} ended with {exit.text}"
        if exit.begun is not None and not exit.is_ours:
            for batch in lost:
                if batch.id <= exit.begun and not batch.open_count:
                    self._ledger.note_late_error(WorkerLostError(f"{how} while it computed it"))
        self._ledger.observers.lose(lost, "worker lost")
        failed, poisonous = self.scheduler.worker_lost(
            worker, exit.taken, exit.begun, out_of_memory=exit.may_be_out_of_memory
        )
        for request in failed:
            error = WorkerLostError(f"{how} while it had this request")
            self._ledger.fail(request, error, "worker lost")
        for request in poisonous:
            text = f"{how} while it had this request, as another had before; it is not tried again"
            self._ledger.fail(request, PoisonRequestError(text), "poison request")
        self.pump.advance(monotonic())

    def worker_failed_to_start(self, worker: int, error: WorkerStartupError) -> None:
        """Break the batcher while it opens; afterwards only log, because the pool tries again."""
        if self._status.state is not State.OPENING:
            logger.warning("%s: %s; trying again", self._name, error, exc_info=error)
            return
        # If a caller waits in `open`, the error is raised there.
        if not self._status.has_waiters:
            logger.error(
                "%s: %s; calls fail until it is opened again", self._name, error, exc_info=error
            )
        self._status.fail_start(error)
        self.pool.abandon()
        self._fail_open_requests()

    def workers_given_up(self, reason: str, seconds: float) -> None:
        """Break the batcher: calls fail at once until the next try of a worker succeeds."""
        self._status.give_up(reason, seconds)
        self.pump.take_arrivals(monotonic())
        self._fail(self.scheduler.give_up())
        self.pump.notice_drained()

    def worker_retired(self, worker: int) -> None:
        """Give a worker no more batches: another has taken its place."""
        self.scheduler.workers.retire(worker)

    def inputs_unsendable(
        self, batch: Batch, unsendable: list[tuple[Request, BatcherError]]
    ) -> None:
        """Fail requests of a batch whose inputs could not be sent."""
        self.pump.withdraw(batch, unsendable)

    def idle_workers(self) -> list[int]:
        """Return the ready workers without a batch."""
        return self.scheduler.workers.idle_workers

    # Ending.

    def begin_drain(self) -> None:
        """Reject new requests, and finish the accepted ones."""
        self.pump.take_arrivals(monotonic())
        self.scheduler.begin_drain()
        if not self.binding.loop.is_closed():
            self.pump.run_soon()

    def _fail_open_requests(self) -> None:
        """Fail every request that has not been answered."""
        self.pump.take_arrivals(monotonic())
        self._ledger.observers.lose(self.scheduler.workers.all_batches(), "closed")
        self._fail(self.scheduler.close())

    def _fail(self, requests: list[Request]) -> None:
        """Fail requests because the batcher is broken or is being closed."""
        for request in requests:
            if is_beyond_reach(request):
                self._ledger.cancel(request, "event loop closed")
            else:
                error = self._status.unanswered_error()
                is_closed = isinstance(error, BatcherClosedError)
                self._ledger.fail(request, error, "closed" if is_closed else "broken")

    async def reload(self, model_spec: ModelSpec) -> None:
        """Replace the workers by workers with another model."""
        await self.pool.reload(model_spec)
        self._ledger.counters.generation += 1

    async def aclose(self) -> None:
        """Wait at most `drain_timeout` for the accepted requests, then end the workers."""
        await self.pump.wait_until_drained(self.settings.drain_timeout)
        self._fail_open_requests()
        await self.pool.aclose()

    def end(self, grace: float) -> None:
        """Close the session, and block until the workers are dead.

        Args:
            grace: Seconds that the workers may take to end by themselves.
        """
        self._ledger.observers.unwatch_collector()
        self._fail_open_requests()
        self.pump.stop()
        self.pool.stop(grace)
        if not self.binding.loop.is_closed():
            self.pump.notice_drained()


def _make_scheduler(settings: Settings, methods: Sequence[Method]) -> Scheduler:
    packer = None
    if settings.cost is not None:
        packer = BatchPacker(settings.max_batch_cost, is_padded=settings.cost_is_padded)
    return Scheduler(
        make_policy(settings.policy, settings.max_delay),
        _limits_of(settings),
        measure_size=measure_size,
        packer=packer,
        is_grouped=settings.group_by is not None,
        methods=methods,
    )


def _limits_of(settings: Settings) -> Limits:
    """Select the settings of the scheduler."""
    return Limits(
        max_batch_size=settings.batch_limit,
        max_queue_size=settings.queue_limit,
        max_queue_bytes=settings.max_queue_bytes,
        timeout=settings.timeout,
        max_latency=settings.max_latency,
        infer_timeout=settings.infer_timeout,
        idempotent=settings.idempotent,
        isolate_errors=settings.isolate_errors,
    )
