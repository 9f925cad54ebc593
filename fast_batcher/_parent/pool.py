"""Pool: starts, watches, recycles, reloads, replaces and ends the workers of one batcher.

    Fleet --reconcile--> Pool --spawn, signal, reap--> WorkerHandle
      ^                   |  ^                              |
      +-- ready, lost ----+  +--------- WorkerEvents -------+

There is one pool per opening, with the records of its workers (`WorkerHandle`), by id. The fleet
(`_core/fleet.py`) decides which worker is started, replaced or ended; the pool does it.

Parent process. Everything runs on the event loop's thread, except `WorkerHandle.spawn`, which the
spawner thread runs, `stop`, which may run on any thread once the loop is closed, and the end of the
interpreter: that is the main thread, and pools whose event loop runs on another thread are ended by
that thread. The pool does not know batches: its listener decides what the loss of a worker means
for requests.
"""

import asyncio
import atexit
import functools
import itertools
import logging
import math
import os
import signal
import threading
from collections.abc import Callable, Iterable
from contextvars import Context
from typing import Protocol

from fast_batcher._core.fleet import EndWorker, Fleet, Replica
from fast_batcher._core.supervision import (
    HEARTBEAT_INTERVAL,
    Heartbeat,
    NextTry,
    Recycling,
    Restarts,
)
from fast_batcher._core.values import Order
from fast_batcher._devices import place_workers
from fast_batcher._mps import share_gpus
from fast_batcher._observers import Observers
from fast_batcher._parent.staging import JobThread, MemoryService
from fast_batcher._parent.worker_handle import BatchEvents, Exit, WorkerHandle, WorkerState
from fast_batcher._process import SIGKILL, after_fork_in_child, monotonic
from fast_batcher._shared_memory.inputs import Slabs
from fast_batcher.errors import BatcherClosedError, WorkerStartupError
from fast_batcher.model import ModelSpec, is_main_importable
from fast_batcher.observing import WorkerChange, WorkerChanged
from fast_batcher.settings import Settings

logger = logging.getLogger("fast_batcher")

# Seconds between SIGTERM and SIGKILL: enough for a handler of the model to run. With the default
# stop_timeout of 2 s a program that forgot to stop exits within 3 s.
TERMINATE_GRACE = 0.5
# Seconds after SIGKILL. A killed process is gone within milliseconds; a process in an
# uninterruptible system call (a driver, a network file system) may stay for ever.
KILL_GRACE = 5.0
# Signals to workers that have not ended by themselves, and the seconds to wait after each.
LAST_STEPS = ((signal.SIGTERM, TERMINATE_GRACE), (SIGKILL, KILL_GRACE))
# Seconds, at the end of the interpreter: a loop that has not ended its pools by then is blocked.
# Together with the steps before, a program that forgot to stop still exits within 3 s.
LOOP_GRACE = 0.5
# Remedy in the error of a worker that may have ended because it imported the program.
MAIN_GUARD = (
    ". A script that is run needs `if __name__ == '__main__':` around what it does, because the "
    "worker imports it"
)


# Makes a worker; the arguments are those of `WorkerHandle`.
MakeWorker = Callable[..., WorkerHandle]


class PoolEvents(BatchEvents, Protocol):
    """Events that a pool reports to its listener, and a question to it, on the loop's thread."""

    def worker_ready(
        self, worker: WorkerHandle, times: list[tuple[int, float]], /, *, is_restart: bool
    ) -> None:
        """Handle readiness; `times` are sizes and seconds of the warm-up batches.

        `is_restart` is whether the worker takes the place of one that was lost or recycled.
        """

    def worker_retired(self, worker_id: int, /) -> None:
        """Give a worker no more batches: it finishes those it has, and ends."""

    def worker_lost(self, worker_id: int, exit: Exit, /) -> None:
        """Handle the death of a worker that was ready."""

    def worker_failed_to_start(self, worker_id: int, error: WorkerStartupError, /) -> None:
        """Handle a worker that died or was ended before it was ready."""

    def workers_given_up(self, reason: str, seconds: float, /) -> None:
        """Handle that no worker is left, and that the next is started after `seconds`."""

    def idle_workers(self) -> list[int]:
        """Return the ids of the ready workers that have no batch."""


class Pool:
    """The workers of a batcher. Each has an id of its own, and the index of its replica."""

    def __init__(
        self,
        model_spec: ModelSpec,
        settings: Settings,
        events: PoolEvents,
        memory: MemoryService,
        observers: Observers,
        name: str,
        make_worker: MakeWorker,
    ) -> None:
        self._make_worker = make_worker
        self._settings = settings
        self._listener = events
        self._memory = memory
        self._observers = observers
        self._name, self.stop_timeout = name, settings.stop_timeout
        self.loop = asyncio.get_running_loop()
        # True once no further worker is started.
        self.is_closing = False

        budget = settings.max_restarts, settings.restart_window, settings.restart_backoff
        self.fleet = Fleet(settings.fewest_workers, model_spec, lambda: Restarts(*budget))
        # The replicas take these in turn. The devices are those of the opening, whatever the
        # program changes later.
        placements = place_workers(settings.devices, self.fleet.count, os.environ)
        self._placements = share_gpus(placements) if settings.mps else placements
        # The timer of the next start; and the future of the reload that runs.
        self._reconcile_timer: asyncio.TimerHandle | None = None
        self._reloaded: asyncio.Future[None] | None = None
        self._ids = itertools.count()
        # The record of every worker that is being started or has a process, by id.
        self.workers: dict[int, WorkerHandle] = {}
        # Done when no worker is left; None while nothing waits for it.
        self._all_dead: asyncio.Future[None] | None = None
        self._spawner = JobThread(self.loop, f"fast_batcher-spawner-{name}")

        self._recycling = Recycling(settings.max_batches_per_worker, settings.max_rss_bytes)
        # Whether `batch_answered` is to be called.
        self.recycles = self._recycling.is_wanted

        self.heartbeat = Heartbeat()
        self._heartbeat_timer: asyncio.TimerHandle | None = None

    def open(self) -> None:
        """Start every worker; the listener is told when they are ready or fail."""
        _open_pools.add(self)
        self._reconcile()
        self._heartbeat_timer = self.loop.call_later(
            HEARTBEAT_INTERVAL, self._beat, context=Context()
        )

    def alive(self) -> list[WorkerHandle]:
        """Return the workers that have a process."""
        return [worker for worker in [*self.workers.values()] if worker.is_alive]

    def _serving(self) -> list[WorkerHandle]:
        return [worker for worker in [*self.workers.values()] if worker.is_serving]

    def read_gpu_bytes(self) -> dict[int, int]:
        """Return the bytes that PyTorch has reserved on GPUs, by the index of the worker."""
        return {one.index: one.gpu_bytes for one in self._serving() if one.gpu_bytes}

    # Called by the listener.

    def replace(self, worker_id: int) -> None:
        """End a worker whose batch takes too long: SIGTERM, then SIGKILL, then another worker."""
        worker = self.workers[worker_id]
        worker.ignore()
        worker.signal(signal.SIGTERM)
        worker.set_timer(self.loop.call_later(TERMINATE_GRACE, worker.kill, context=Context()))

    def kill(self, worker_id: int) -> None:
        """Kill a worker that cannot use its device any more, and the workers that die with it."""
        worker = self.workers[worker_id]
        worker.kill()
        for other in self.fleet.find_sharers(worker):
            other.has_lost_device = True
            if other.is_serving:
                self._listener.worker_retired(other.id)
            other.kill()

    def kill_on_protocol_error(self, worker_id: int, error: Exception) -> None:
        """Kill a worker that broke the protocol, unless it is dead already."""
        worker = self.workers.get(worker_id)
        if worker is not None:
            worker.kill_on_protocol_error(error)

    def batch_answered(self, worker_id: int) -> None:
        """Count an answered batch; start a successor if the worker is due to be recycled."""
        worker = self.workers.get(worker_id)
        if worker is None:  # an observer has ended the pool
            return
        worker.batches += 1
        rss_bytes = 0 if self._settings.max_rss_bytes is None else worker.rss_bytes
        was_known = self._recycling.is_limit_too_low
        is_due = self._recycling.is_due(worker.batches, rss_bytes)
        if self._recycling.is_limit_too_low and not was_known:
            logger.warning(
                "%s has %d bytes after its first batch: max_rss_bytes=%s is below what the model "
                "needs, and replaces no worker",
                worker.title,
                rss_bytes,
                self._settings.max_rss_bytes,
            )
        replica = self.fleet.find(worker)
        if is_due and replica is not None:
            replica.is_due = True
            self._reconcile()

    def read_all(self) -> list[int]:
        """Report the answers that have arrived; return the workers of answers that arrived in part.

        Do not call it while an answer is being reported: the answer would be overwritten.
        """
        return [worker.id for worker in self._serving() if worker.read_all()]

    def find_sending(self) -> list[tuple[int, int | None]]:
        """Return the workers to which a batch is being sent, each with the batch it began last."""
        workers = [worker for worker in self._serving() if worker.is_sending()]
        return [(worker.id, worker.read_begun()) for worker in workers]

    # Called by the workers.

    def worker_placed(self, worker: WorkerHandle) -> None:
        """Limit the loading of the model from now on."""
        self._tell(worker, "started")
        self._limit_start(worker)

    def worker_loaded(self, worker: WorkerHandle, times: list[tuple[int, float]]) -> None:
        """Put a ready worker into service."""
        worker.set_timer(None)
        worker.is_serving = True
        self._tell(worker, "ready")
        is_restart = self.fleet.ready(monotonic(), worker)
        # This comes before its predecessor is retired: so a worker is ready at every moment.
        self._listener.worker_ready(worker, times, is_restart=is_restart)
        self._reconcile()

    def start_failed(self, worker: WorkerHandle, error: WorkerStartupError) -> None:
        """Kill a worker that could not be started or load its model; another is started later."""
        replica, reload = self.fleet.find(worker), self.fleet.reload
        if replica is None:
            return
        worker.set_timer(None)
        worker.kill()
        next_try = self.fleet.failed(monotonic(), worker, error)
        if reload is not None and reload.error is error and not self.is_closing:
            logger.error("%s: the reload has failed, and is undone: %s", self._name, error)
        if next_try is None and not self.is_closing:
            text = "%s: %s; the worker before it goes on"
            logger.warning(text, self._name, error, exc_info=error)
        elif not self.is_closing:
            self._listener.worker_failed_to_start(worker.id, error)
        self._follow_loss(replica, next_try)

    def worker_answers(self, worker: WorkerHandle) -> None:
        """Note that an idle worker answers."""
        self.heartbeat.answered(worker.id)

    def worker_exited(self, worker: WorkerHandle, exit: Exit) -> None:
        """Remove a dead worker, report its loss, and schedule its replacement."""
        self._remove(worker)
        worker.set_timer(None)
        if worker.has_lost_device:
            # No batch of it is to blame: one that may be computed twice counts as not begun.
            begun = None if self._settings.idempotent else exit.begun
            exit = exit._replace(is_node_lost=True, begun=begun)
        if worker.outbox is not None and worker.outbox.is_open:
            # It takes 80 ms per 200 MiB that were used.
            self._memory.run_in_thread(worker.outbox.close, lambda _: None)
        if not worker.is_serving:
            hint = "" if exit.by_signal or not is_main_importable() else MAIN_GUARD
            error = WorkerStartupError(
                f"worker {worker.index} ended with {exit.text} before it had loaded "
                f"{worker.model_spec.name}; its output on stderr may tell why{hint}"
            )
            replica = self.fleet.find(worker)
            if exit.is_node_lost and replica is not None and worker is replica.worker:
                logger.warning("%s: %s; another takes its place", self._name, error)
                self._follow_loss(replica, self.fleet.lost(monotonic(), worker))
            else:
                self.start_failed(worker, error)
            return
        worker.is_serving = False
        replica = self.fleet.find(worker)
        next_try = self.fleet.lost(monotonic(), worker)
        self.heartbeat.answered(worker.id)
        if not (self.is_closing or exit.is_clean):
            # The log already says why the parent has ended it.
            level = logging.INFO if exit.is_ours else logging.WARNING
            then = "" if replica is None else "; another takes its place"
            logger.log(level, "%s ended with %s%s", worker.title, exit.text, then)
        self._tell(worker, "lost", exit.text)
        self._listener.worker_lost(worker.id, exit)
        self._follow_loss(replica, next_try)

    def _follow_loss(self, replica: Replica | None, next_try: NextTry | None) -> None:
        """Report spent restarts, and start what takes the place of a lost worker."""
        # The listener may have ended the pool when it was told of the loss.
        if replica is not None and next_try is not None and not self.is_closing:
            self._report_if_spent(replica, next_try)
        self._reconcile()

    def _report_if_spent(self, replica: Replica, next_try: NextTry) -> None:
        """Log that a replica has spent its restarts; tell the listener if all have."""
        reason = (
            f"worker {replica.index} was restarted max_restarts={self._settings.max_restarts} "
            f"times within restart_window={self._settings.restart_window} seconds"
        )
        if next_try.is_given_up:
            text = "%s: %s; the next try is in %.3g seconds"
            logger.error(text, self._name, reason, next_try.delay)
        if self.fleet.is_given_up:
            waiting = [one for one in self.fleet.replicas.values() if one.worker is None]
            next_start = min(one.start_at for one in waiting)
            self._listener.workers_given_up(reason, max(0.0, next_start - monotonic()))

    def _remove(self, worker: WorkerHandle) -> None:
        """Remove the record of a worker that is dead, or could not be started."""
        self.workers.pop(worker.id, None)
        waiter = self._all_dead
        if not (self.workers or waiter is None or waiter.done() or waiter.get_loop().is_closed()):
            waiter.set_result(None)

    def _tell(self, worker: WorkerHandle, change: WorkerChange, exit_text: str = "") -> None:
        if self._observers.active:
            place = worker.pid, exit_text, worker.node, worker.id
            event = WorkerChanged(self._name, worker.index, change, *place)
            self._observers.tell(event)

    # Starting and replacing.

    def scale(self, settings: Settings, num_workers: int, surplus: Iterable[int] = ()) -> None:
        """Have another number of workers, in the next turn of the loop or after a reload.

        The workers in `surplus` end first.
        """
        self._settings, self.fleet.count = settings, num_workers
        for replica in [self.fleet.find(self.workers[worker_id]) for worker_id in surplus]:
            if replica is not None:
                replica.is_surplus = True
        # The caller may be an observer, or not be on the running loop.
        if not self.loop.is_closed():
            self.loop.call_soon(self._reconcile, context=Context())

    async def reload(self, model_spec: ModelSpec) -> None:
        """Replace the workers in turn; undo it and raise if a worker cannot load the model."""
        assert self._reloaded is None, "the opening allows one at a time"
        if self.is_closing:
            raise self._make_closed_error()
        self._reloaded = asyncio.get_running_loop().create_future()
        reload = self.fleet.begin_reload(model_spec)
        try:
            self._reconcile()
            await self._reloaded
            if reload.error is not None:
                raise reload.error
        finally:
            self._reloaded = self.fleet.reload = None
            self._reconcile()

    def _reconcile(self) -> None:
        """Start and end workers as the fleet decides, now and at the next moment that it names."""
        if self._reconcile_timer is not None:
            self._reconcile_timer.cancel()
        if self.is_closing:
            return
        now = monotonic()
        for action in self.fleet.reconcile(now):
            if isinstance(action, EndWorker):
                self._end(action.worker, "recycled" if action.has_successor else "removed")
            else:
                self._start(action.replica)
        reload, reloaded = self.fleet.reload, self._reloaded
        if reload is not None and reload.is_over and reloaded is not None and not reloaded.done():
            reloaded.set_result(None)
        wake_at = self.fleet.wake_at(now)
        if wake_at < math.inf:
            self._reconcile_timer = self.loop.call_later(
                wake_at - now, self._reconcile, context=Context()
            )

    def _start(self, replica: Replica) -> None:
        """Start the worker of a replica without one, or the successor of its worker."""
        if self.is_closing:  # an observer has ended the pool
            return
        slabs = self._memory.slabs
        worker = self._make_worker(
            next(self._ids),
            replica.index,
            replica.model,
            self._settings,
            self._placements[replica.index % len(self._placements)],
            slabs if isinstance(slabs, Slabs) else None,
            self,
            self._listener,
            self._name,
        )
        if replica.worker is None:
            replica.worker = worker
        else:
            replica.successor = worker
        self._limit_start(worker)
        self._spawner.run(worker.spawn, functools.partial(self._finish_spawn, worker))
        self.workers[worker.id] = worker

    def _limit_start(self, worker: WorkerHandle) -> None:
        """Give the present step of a worker's start its `start_limit` from now on."""
        timer = asyncio.get_running_loop().call_later(
            worker.start_limit, self._time_out, worker, context=Context()
        )
        worker.set_timer(timer)

    def _finish_spawn(self, worker: WorkerHandle, error: BaseException | None) -> None:
        if error is not None:
            if not isinstance(error, WorkerStartupError):
                cause = error
                error = WorkerStartupError(f"worker {worker.index} could not be started: {cause!r}")
                error.__cause__ = cause
            self.start_failed(worker, error)
            self._remove(worker)
        elif worker.is_alive:  # otherwise the pool was stopped meanwhile
            worker.attach(asyncio.get_running_loop())
            if worker.is_placed:
                self._tell(worker, "started")
            if worker.state is WorkerState.ENDING:
                worker.kill()  # `kill` was called before the process existed
            else:
                self._limit_start(worker)

    def _time_out(self, worker: WorkerHandle) -> None:
        was_attached = worker.is_attached
        self._spawner.take_outcomes()
        if worker.is_attached and not was_attached:
            # The loop was blocked since the spawn, and has sent the model only now.
            return
        if worker.is_attached:
            worker.read_all()  # READY may have arrived in time, while the loop was blocked
        if worker.state is not WorkerState.LOADING:
            return
        self.start_failed(worker, worker.make_timeout_error())

    def _end(self, worker: WorkerHandle, change: WorkerChange) -> None:
        """End a worker that has lost its place; a ready one finishes its batches."""
        if not worker.is_serving:
            worker.set_timer(None)
            worker.kill()
            return
        logger.info("%s is %s", worker.title, change)
        self._tell(worker, change)
        self._listener.worker_retired(worker.id)
        if worker.state is WorkerState.ENDING:  # it hangs, and is being ended already
            return
        # The worker reads STOP after the batches that were sent before.
        worker.ask_to_end()
        self._watch_retired(worker)

    def _watch_retired(self, worker: WorkerHandle) -> None:
        """End a retired worker that is idle and has not ended within `stop_timeout`."""
        if worker.id in self._listener.idle_workers():
            then = functools.partial(self.replace, worker.id)
        else:
            then = functools.partial(self._watch_retired, worker)
        worker.set_timer(self.loop.call_later(self._settings.stop_timeout, then, context=Context()))

    def _beat(self) -> None:
        """Ping the idle workers, and replace the workers that have not answered the last ping."""
        # The answers to the last pings may have arrived while the loop was blocked.
        self.read_all()
        serving = {worker.id: worker for worker in self._serving()}
        # Workers that were asked to end take no further orders.
        idle = [
            worker_id
            for worker_id in self._listener.idle_workers()
            if worker_id in serving and not serving[worker_id].was_asked_to_end
        ]
        to_ping, silent = self.heartbeat.tick(monotonic(), idle)
        for worker in [serving[worker_id] for worker_id in silent if worker_id in serving]:
            if worker.state is not WorkerState.ENDING:
                text = "%s is replaced: it was idle and has not answered for %g seconds"
                logger.warning(text, worker.title, HEARTBEAT_INTERVAL)
                worker.kill()
        for worker_id in to_ping:
            serving[worker_id].order(Order.PING)
        self._memory.give_back_unused()
        self._heartbeat_timer = self.loop.call_later(
            HEARTBEAT_INTERVAL, self._beat, context=Context()
        )

    # Ending.

    def abandon(self) -> None:
        """Kill every worker without waiting, and start no more."""
        self.is_closing = True
        self._cancel_timers()
        for worker in [*self.workers.values()]:
            worker.kill()

    async def aclose(self) -> None:
        """Ask the workers to end, terminate them after `stop_timeout`, and wait until they die."""
        self.is_closing = True
        self._cancel_timers()
        try:
            await self._end_workers()
            await self._memory.aclose()
        finally:
            # If the wait was cancelled, workers may be left, which are killed now.
            self.stop(0.0)

    async def _end_workers(self) -> None:
        for worker in [*self.workers.values()]:
            if worker.state is WorkerState.LOADING:
                worker.kill()  # it has no batch to finish
            else:
                worker.ask_to_end()
        await self._wait_until_dead(self.stop_timeout)
        for number, grace in LAST_STEPS:
            for worker in [*self.workers.values()]:
                worker.ignore()
                worker.signal(number)
            await self._wait_until_dead(grace)

    async def _wait_until_dead(self, seconds: float) -> None:
        if self.workers:
            if self._all_dead is None or self._all_dead.done():
                self._all_dead = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._all_dead], timeout=seconds)

    def stop(self, grace: float) -> None:
        """End without an event loop: wait `grace` seconds for the workers, then terminate them."""
        end_pools([self], grace)

    def begin_end(self) -> None:
        """Start no more workers, send nothing more, and disconnect the workers."""
        self.is_closing = True
        self._cancel_timers()
        self._spawner.hold()
        # This comes before the outboxes of the workers are closed, which the copier thread reads.
        self._memory.close()
        # New requests wait in the queue instead of being sent to a worker that is ending.
        for worker in self._serving():
            self._listener.worker_retired(worker.id)
        for worker in [*self.workers.values()]:
            worker.disconnect()

    def finish_end(self) -> None:
        """Remove the workers, which are dead, and end the threads."""
        for replica in self.fleet.replicas.values():
            replica.worker = replica.successor = None
        self._spawner.stop()
        for daemon in {placement.mps for placement in self._placements} - {None}:
            daemon.close()
        for worker in [*self.workers.values()]:
            worker.is_serving = False
            self._remove(worker)  # the last wakes an `aclose` that waits

    def _make_closed_error(self) -> BatcherClosedError:
        return BatcherClosedError(f"{self._name} was closed while it reloaded")

    def _cancel_timers(self) -> None:
        """Cancel the restarts, the heartbeat and the reload, because the pool ends."""
        reloaded = self._reloaded
        # A closed event loop gets no error.
        if not (reloaded is None or reloaded.done() or reloaded.get_loop().is_closed()):
            reloaded.set_exception(self._make_closed_error())
        for timer in (self._reconcile_timer, self._heartbeat_timer):
            if timer is not None:
                timer.cancel()
        for worker in [*self.workers.values()]:
            worker.set_timer(None)


# Pools that have not been ended. The references keep a pool whose batcher was dropped: it still has
# workers.
_open_pools: set[Pool] = set()
# In a forked copy of the process the workers are children of another.
after_fork_in_child(_open_pools.clear)


def end_pools(pools: list[Pool], grace: float) -> None:
    """End these pools together: close the pipes, SIGTERM, SIGKILL. Blocks."""
    for pool in pools:
        pool.begin_end()
    if grace:
        _reap_dead(pools, grace)
    for number, seconds in LAST_STEPS if grace else LAST_STEPS[-1:]:
        for pool in pools:
            for worker in pool.alive():
                worker.signal(number)
        _reap_dead(pools, seconds)
    for pool in pools:
        pool.finish_end()
        _open_pools.discard(pool)


def _reap_dead(pools: list[Pool], seconds: float) -> None:
    """Reap the workers that die within `seconds`; return at once when all are dead."""
    deadline = monotonic() + seconds
    for worker in [worker for pool in pools for worker in pool.alive()]:
        if worker.wait_until_dead(max(0.0, deadline - monotonic())):
            worker.reap()
            if worker.outbox is not None:
                worker.outbox.close()


@atexit.register
def end_forgotten_pools() -> None:
    """End every pool that this process has opened and not ended."""
    pools = list(_open_pools)
    grace = max((pool.stop_timeout for pool in pools), default=0.0)
    # Loops that still run here do so on daemon threads.
    running = {pool.loop for pool in pools if pool.loop.is_running()}
    endings = [
        _end_on_loop(loop, [pool for pool in pools if pool.loop is loop], grace) for loop in running
    ]
    end_pools([pool for pool in pools if pool.loop not in running], grace)
    deadline = monotonic() + grace + TERMINATE_GRACE + LOOP_GRACE
    for has_ended in endings:
        has_ended.wait(max(0.0, deadline - monotonic()))
    for pool in list(_open_pools):  # its loop is blocked, or has just stopped
        pool.is_closing = True
        for worker in pool.alive():
            worker.signal(SIGKILL)


def _end_on_loop(
    loop: asyncio.AbstractEventLoop, pools: list[Pool], grace: float
) -> threading.Event:
    """End pools on the thread of their event loop; return an event that is set afterwards.

    If this thread ended them, both threads would release a worker that has just died.
    """
    has_ended = threading.Event()

    def end() -> None:
        try:
            end_pools(pools, grace)
        finally:
            has_ended.set()

    try:
        loop.call_soon_threadsafe(end, context=Context())
    except RuntimeError:  # the loop has just been closed
        has_ended.set()
    return has_ended
