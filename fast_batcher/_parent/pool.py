"""Pool: starts, watches, recycles, replaces and ends the workers of one batcher.

API process. Everything runs on the event loop's thread, except `stop`, which may run on any thread
once the loop is closed, and the end of the interpreter (see `shutdown`). The pool does not know
batches: its listener decides what the loss of a worker means for requests.
"""

import asyncio
import functools
import logging
import signal
from contextvars import Context

from fast_batcher._clock import monotonic
from fast_batcher._core.supervision import HEARTBEAT_INTERVAL, MAX_BACKOFF, Heartbeat, Recycling
from fast_batcher._observers import Observers
from fast_batcher._parent.background import JobThread
from fast_batcher._parent.memory_service import MemoryService
from fast_batcher._parent.reloading import Reloading
from fast_batcher._parent.replica import Replica, make_replicas
from fast_batcher._parent.shutdown import TERMINATE_GRACE, LiveWorkers, end_pools, note_open
from fast_batcher._parent.starter import Starter, make_early_exit_error
from fast_batcher._parent.worker import Exit, PoolEvents, WorkerHandle, WorkerState
from fast_batcher._parent.worker_log import WorkerLog
from fast_batcher._parent.worker_process import WorkerProcess
from fast_batcher._shared_memory.inputs import Slabs
from fast_batcher._transport.frames import Kind
from fast_batcher.errors import BatcherClosedError, ConfigurationError, WorkerStartupError
from fast_batcher.model_spec import ModelSpec
from fast_batcher.settings import Settings

logger = logging.getLogger("fast_batcher")

# Heartbeats (a minute) after which shared memory that no batch has used is returned to the system.
# Getting it again costs some milliseconds per batch of images, which is little once a minute.
BEATS_TO_KEEP_MEMORY = 12


class Pool:
    """The `num_workers` workers of a batcher, on one event loop at a time.

    Each process has an id; `id % num_workers` is its index among the workers.

    Args:
        model_spec: The model that the workers load.
        settings: The batcher's settings.
        events: The listener.
        memory: The shared memory, which the pool closes when it ends.
        observers: Told about each worker.
        name: The batcher's name, for threads and logs.
    """

    def __init__(
        self,
        model_spec: ModelSpec,
        settings: Settings,
        events: PoolEvents,
        memory: MemoryService,
        observers: Observers,
        name: str,
    ) -> None:
        self._settings = settings
        self._events = events
        self._memory = memory
        self._log = WorkerLog(name, observers)
        self._name, self.stop_timeout = name, settings.stop_timeout
        self.loop = asyncio.get_running_loop()
        # True once no further worker is started.
        self.is_closing = False

        self._replicas = make_replicas(model_spec, settings)
        # Every worker that is being started or has a process.
        self.live = LiveWorkers()
        self._thread = JobThread(self.loop, f"fast_batcher-starter-{name}")
        self._starter = Starter(
            self._thread, settings.start_timeout, self.live, self.start_failed, self._log
        )
        # Workers by id, from READY to their death.
        self._serving: dict[int, WorkerHandle] = {}
        # Replaced workers that finish their batches, and then end.
        self._retired: set[WorkerHandle] = set()

        self._recycling = Recycling(settings.max_batches_per_worker, settings.max_rss_bytes)
        # Whether `batch_answered` is to be called.
        self.recycles = self._recycling.is_wanted
        # Earliest moment of the next recycling; later after a successor has failed to start.
        self._recycle_at = 0.0
        # The reload that runs, None without one.
        self.reloading: Reloading | None = None

        self.heartbeat = Heartbeat()
        self._heartbeat_timer: asyncio.TimerHandle | None = None
        self._beats = 0

    def open(self) -> None:
        """Start every worker; the listener is told when they are ready or fail."""
        note_open(self)
        for replica in self._replicas:
            self._start(replica)
        self._heartbeat_timer = self.loop.call_later(
            HEARTBEAT_INTERVAL, self._beat, context=Context()
        )

    def rebind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Continue on another event loop; the previous loop is closed, and its timers with it."""
        self._cancel_timers()
        self.loop = loop
        for worker in self.live.remaining():
            if worker.is_attached:
                worker.attach(loop)
            if worker.state is WorkerState.ENDING or worker in self._retired:
                worker.kill()
        self._thread.rebind(loop)
        self._memory.rebind(loop)
        for replica in self._replicas:
            # A replica with a timer has just lost its worker, in `attach` above.
            if replica.worker is None and replica.restart_timer is None:
                self._start(replica)
        for worker in self.live:
            if worker.state is WorkerState.LOADING:
                self._starter.limit(worker)
        self._heartbeat_timer = loop.call_later(HEARTBEAT_INTERVAL, self._beat, context=Context())

    # Called by the listener.

    def replace(self, worker_id: int) -> None:
        """End a worker whose batch takes too long: SIGTERM, then SIGKILL, then another worker."""
        worker = self._serving[worker_id]
        worker.ignore()
        worker.signal(signal.SIGTERM)
        worker.set_timer(self.loop.call_later(TERMINATE_GRACE, worker.kill, context=Context()))

    def kill(self, worker_id: int) -> None:
        """Kill a worker that cannot use its device any more; another takes its place."""
        self._serving[worker_id].kill()

    def kill_on_protocol_error(self, worker_id: int, error: Exception) -> None:
        """Kill a worker that broke the protocol, unless it is dead already."""
        worker = self._serving.get(worker_id)
        if worker is not None:
            worker.kill_on_protocol_error(error)

    def batch_answered(self, worker_id: int) -> None:
        """Count an answered batch; start a successor if the worker is due to be recycled."""
        worker = self._serving.get(worker_id)
        if worker is None:
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
        # One recycling at a time: the machine may have no room for two more copies of the model.
        is_free = not (self._retired or self.reloading)
        is_free = is_free and all(one.successor is None for one in self._replicas)
        replica = self._replicas[worker.index]
        if is_due and is_free and replica.worker is worker and monotonic() >= self._recycle_at:
            self._start(replica)

    def read_all(self) -> list[int]:
        """Dispatch the frames that have arrived from the ready workers.

        Do not call it while a frame is being dispatched: the frame would be overwritten.

        Returns:
            The ids of workers from which a frame has arrived in part.
        """
        return [worker.id for worker in [*self._serving.values()] if worker.read_all()]

    def find_sending(self) -> list[tuple[int, int | None]]:
        """Return the workers to which a batch is still being sent.

        Returns:
            The worker's id, and the id of the batch that it began last, None without one.
        """
        workers = [*self._serving.values()]
        return [(worker.id, worker.read_begun()) for worker in workers if worker.is_sending()]

    # Called by the workers.

    def worker_loaded(self, worker: WorkerHandle, times: list[tuple[int, float]]) -> None:
        """Put a ready worker into service; if it is a successor, retire its predecessor."""
        replica = self._replicas[worker.index]
        worker.set_timer(None)
        self._serving[worker.id] = worker
        replica.restarts.ready(monotonic())
        replica.is_given_up = False
        self._log.ready(worker)
        if worker is not replica.successor:
            self._events.worker_ready(worker, times)
            if self.reloading is not None:
                self.reloading.worker_ready(worker)
            return
        before, replica.worker, replica.successor = replica.worker, worker, None
        # In this order, so that there is a ready worker at every moment.
        self._events.worker_ready(worker, times)
        assert before is not None, "a replica has a successor only while it has a worker"
        self._retire(before)
        if self.reloading is not None:
            self.reloading.worker_ready(worker)

    def start_failed(self, worker: WorkerHandle, error: WorkerStartupError) -> None:
        """Kill a worker that could not be started or load its model, and schedule a restart."""
        replica = self._replicas[worker.index]
        if worker not in (replica.worker, replica.successor):
            return
        worker.set_timer(None)
        worker.kill()
        if worker is replica.successor:
            replica.successor = None
            if self.reloading is not None:
                self.reloading.start_failed(worker, error)
            self._recycle_at = monotonic() + MAX_BACKOFF
            logger.warning(
                "%s: %s; the worker before it goes on", self._name, error, exc_info=error
            )
            return
        replica.worker = None
        if not self.is_closing:
            if self.reloading is not None:
                self.reloading.start_failed(worker, error)
            self._events.worker_failed_to_start(worker.id, error)
            self._restart_later(replica)

    def worker_exited(self, worker: WorkerHandle, exit: Exit) -> None:
        """Remove a dead worker, report its loss, and schedule its replacement."""
        self.live.discard(worker)
        worker.set_timer(None)
        if worker.outbox is not None and worker.outbox.is_open:
            # It takes 80 ms per 200 MiB that were used.
            self._memory.run_in_thread(worker.outbox.close, lambda _: None)
        replica = self._replicas[worker.index]
        if worker in self._retired:
            self._retired.discard(worker)
            self._lose(worker, exit)
        elif worker.id in self._serving:
            replica.worker = None
            self._lose(worker, exit)
            self._restart_later(replica)
        else:
            self.start_failed(worker, make_early_exit_error(worker, exit))

    # Starting and replacing.

    async def reload(self, model_spec: ModelSpec) -> None:
        """Replace the workers, one by one, by workers with another model.

        Raises:
            WorkerStartupError: A worker could not load it; all workers have the model of before.
            BatcherClosedError: The pool was ended meanwhile.
            ConfigurationError: A reload runs.
        """
        if self.reloading is not None:
            raise ConfigurationError(f"{self._name}: a reload runs; wait for its end")
        self.reloading = Reloading(self._replicas, model_spec, self._start, self._name)
        try:
            await self.reloading.done
        finally:
            self.reloading = None

    def _start(self, replica: Replica) -> None:
        """Start the worker of a replica without one, or the successor of its worker."""
        replica.restart_timer = None
        if self.is_closing:
            return
        slabs = self._memory.slabs
        worker = WorkerProcess(
            next(replica.ids),
            replica.model_spec,
            self._settings,
            replica.placement,
            slabs if isinstance(slabs, Slabs) else None,
            self,
            self._events.frame_arrived,
            self._name,
        )
        if replica.worker is None:
            replica.worker = worker
        else:
            replica.successor = worker
        self._starter.start(worker)

    def _retire(self, worker: WorkerHandle) -> None:
        self._log.recycled(worker)
        self._retired.add(worker)
        self._events.worker_retired(worker.id)
        if worker.state is WorkerState.ENDING:  # it hangs, and is being ended already
            return
        # The worker reads STOP after the batches that were sent before.
        worker.ask_to_end()
        self._watch_retired(worker)

    def _watch_retired(self, worker: WorkerHandle) -> None:
        """End a retired worker that is idle and has not ended within `stop_timeout`."""
        if worker.id in self._events.idle_workers():
            then = functools.partial(self.replace, worker.id)
        else:
            then = functools.partial(self._watch_retired, worker)
        worker.set_timer(self.loop.call_later(self._settings.stop_timeout, then, context=Context()))

    def _lose(self, worker: WorkerHandle, exit: Exit) -> None:
        del self._serving[worker.id]
        self.heartbeat.answered(worker.id)
        self._log.lost(worker, exit, is_replaced=not (self.is_closing or exit.is_clean))
        self._events.worker_lost(worker.id, exit)

    def _restart_later(self, replica: Replica) -> None:
        # The listener may have ended the pool when it was told of the loss.
        if self.is_closing:
            return
        delay, is_given_up = replica.restarts.lost(monotonic())
        if replica.successor is not None:
            replica.worker, replica.successor = replica.successor, None
            return
        replica.restart_timer = self.loop.call_later(delay, self._start, replica, context=Context())
        reason = (
            f"worker {replica.index} was restarted max_restarts={self._settings.max_restarts} "
            f"times within restart_window={self._settings.restart_window} seconds"
        )
        if is_given_up:
            logger.error("%s: %s; the next try is in %.3g seconds", self._name, reason, delay)
            replica.is_given_up = True
        if all(one.is_given_up for one in self._replicas):
            next_try = min(one.restart_timer.when() for one in self._replicas if one.restart_timer)
            self._events.workers_given_up(reason, max(0.0, next_try - self.loop.time()))

    def _beat(self) -> None:
        """Ping the idle workers, and replace the workers that have not answered the last ping."""
        # The answers to the last pings may have arrived while the loop was blocked.
        self.read_all()
        serving = self._serving
        # Workers that were asked to end read no further frames.
        idle = [
            worker_id
            for worker_id in self._events.idle_workers()
            if worker_id in serving and not serving[worker_id].was_asked_to_end
        ]
        to_ping, silent = self.heartbeat.tick(monotonic(), idle)
        for worker in [serving[worker_id] for worker_id in silent if worker_id in serving]:
            if worker.state is not WorkerState.ENDING:
                text = "%s is replaced: it was idle and has not answered for %g seconds"
                logger.warning(text, worker.title, HEARTBEAT_INTERVAL)
                worker.kill()
        for worker_id in to_ping:
            serving[worker_id].send(Kind.PING, 0, b"")
        self._beats += 1
        if self._beats % BEATS_TO_KEEP_MEMORY == 0:
            self._memory.give_back_unused()
        self._heartbeat_timer = self.loop.call_later(
            HEARTBEAT_INTERVAL, self._beat, context=Context()
        )

    # Ending.

    def abandon(self) -> None:
        """Kill every worker without waiting, and start no more."""
        self.is_closing = True
        self._cancel_timers()
        for worker in self.live:
            worker.kill()

    async def aclose(self) -> None:
        """Ask the workers to end, terminate them after `stop_timeout`, and wait until they die."""
        self.is_closing = True
        self._cancel_timers()
        try:
            await self.live.end(self.stop_timeout)
            await self._memory.aclose()
        finally:
            # If the wait was cancelled, workers may be left, which are killed now.
            self.stop(0.0)

    def stop(self, grace: float) -> None:
        """End without an event loop: wait `grace` seconds for the workers, then terminate them."""
        end_pools([self], grace)

    def begin_end(self) -> None:
        """Start no more workers, send no more frames, and close the pipes of the workers."""
        self.is_closing = True
        self._cancel_timers()
        self._thread.hold()
        # Before the outboxes of the workers, which the copier thread reads.
        self._memory.close()
        # New requests wait in the queue instead of being sent to a worker that is ending.
        for worker_id in self._serving:
            self._events.worker_retired(worker_id)
        for worker in self.live:
            worker.disconnect()

    def finish_end(self) -> None:
        """Remove the workers, which are dead, and end the threads."""
        for replica in self._replicas:
            replica.worker = replica.successor = None
        self._retired.clear()
        self._serving.clear()
        self._thread.stop()
        # Wakes an `aclose` that waits.
        self.live.discard(*self.live)

    def _cancel_timers(self) -> None:
        """Cancel the restarts and the heartbeat; if the pool ends, the reload, too."""
        if self.reloading is not None and self.is_closing:
            self.reloading.fail(BatcherClosedError(f"{self._name} was closed while it reloaded"))
        for replica in self._replicas:
            if replica.restart_timer is not None:
                replica.restart_timer.cancel()
                replica.restart_timer = None
        if self._heartbeat_timer is not None:
            self._heartbeat_timer.cancel()
        for worker in self.live:
            worker.set_timer(None)
