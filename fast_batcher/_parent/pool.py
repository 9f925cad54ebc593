"""The workers of one batcher: started, watched, replaced and ended. Parent process.

Everything runs on the event loop's thread, but for `WorkerProcess.spawn`, which the starter thread
runs, and `stop`, which may run on any thread once the loop is closed. The pool knows processes and
frames; what a batch is, and what its loss means, is the batcher's business.
"""

import asyncio
import atexit
import contextlib
import functools
import logging
import os
import queue
import select
import signal
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from fast_batcher._clock import monotonic
from fast_batcher._core.heartbeat import INTERVAL, Heartbeat
from fast_batcher._core.recycling import Recycling
from fast_batcher._core.restarts import MAX_DELAY, Restarts
from fast_batcher._parent.worker_process import WorkerProcess
from fast_batcher._shared_memory.outbox_reader import OutboxReader
from fast_batcher._shared_memory.slabs import Slabs
from fast_batcher._transport import codec
from fast_batcher._transport.codec import RemoteFailure
from fast_batcher._transport.frames import Frame, Kind, read_times
from fast_batcher.errors import RemoteTraceback, TransportError, WorkerStartupError
from fast_batcher.model_spec import ModelSpec
from fast_batcher.settings import Settings

logger = logging.getLogger("fast_batcher")

# Between SIGTERM and SIGKILL: enough for a handler of the model to run. With the default
# stop_timeout of 2 s a program that forgot to stop exits within 3 s.
TERMINATE_GRACE = 0.5
# A killed process is gone within milliseconds; one in an uninterruptible system call (a driver, a
# network file system) may never be, and is not worth waiting for.
KILL_GRACE = 5.0
# Shared memory that no batch has used for so many heartbeats, a minute, goes back to the system.
# Getting it again costs some milliseconds per batch of images, which is nothing once a minute.
BEATS_TO_KEEP_MEMORY = 12
# At the end of the interpreter: a loop that has not ended its pools so long after it should have is
# blocked. Together with the steps before, a program that forgot to stop still exits within 3 s.
LOOP_GRACE = 0.5
# Between two looks whether a loop still runs: one that stops tells no other thread.
LOOK_INTERVAL = 0.01
_LAST_STEPS = ((signal.SIGTERM, TERMINATE_GRACE), (signal.SIGKILL, KILL_GRACE))


class PoolEvents(Protocol):
    """What a pool tells its batcher, and asks it, on the loop's thread. Workers go by their id."""

    def worker_ready(self, worker: int, times: list[tuple[int, float]]) -> None:
        """A worker has loaded its model; sizes and seconds of the batches of its warm-up."""

    def worker_retired(self, worker: int) -> None:
        """A worker is to get nothing more: another has taken its place."""

    def worker_lost(self, worker: int, exit: "Exit") -> None:
        """A worker that was ready is dead."""

    def worker_failed_to_start(self, worker: int, error: WorkerStartupError) -> None:
        """A worker died or was ended before it was ready."""

    def workers_given_up(self, reason: str, seconds: float) -> None:
        """No worker is left, and none is started for so many seconds."""

    def frame_arrived(self, worker: int, frame: Frame) -> None:
        """A ready worker has answered; an exception means that it talks nonsense."""

    def idle_workers(self) -> list[int]:
        """The ready workers that have nothing to do."""


class Exit(NamedTuple):
    """How a worker ended, and what it had in hand."""

    # "exit code 3", "signal 9 (SIGKILL)".
    text: str
    # Nobody of us has killed it, and somebody has: on Linux that is what memory's end looks like.
    may_be_out_of_memory: bool
    # Ids of the batches that it had read and begun last, None if there is none.
    taken: int | None
    begun: int | None
    # Id of the last batch of whose inputs children of it may have views, None if there is none.
    inherited: int | None


class Pool:
    """`num_workers` worker processes and the thread that starts them.

    A process has an id of its own; `id % num_workers` is its place among the workers.

    Args:
        model: What the workers load.
        settings: The batcher's settings.
        events: Who is told.
        name: The batcher's name, for threads and logs.
    """

    def __init__(self, model: ModelSpec, settings: Settings, events: PoolEvents, name: str) -> None:
        self._model = model
        self._settings = settings
        self._events = events
        self._name = name
        self.stop_timeout = settings.stop_timeout
        # The process whose children the workers are; a forked copy of it leaves them alone.
        self.owner_pid = 0
        self._starter = _JobThread(f"fast_batcher-starter-{name}")
        # The live handle at each place; absent while it waits for its replacement.
        self._handles: dict[int, WorkerProcess] = {}
        # One that loads its model to take the place of a worker that still serves.
        self._successor: WorkerProcess | None = None
        # Those whose place has been taken: they finish what they have, and end.
        self._retired: set[WorkerProcess] = set()
        # Handles whose process has been ended by us and is not dead yet.
        self._leaving: set[WorkerProcess] = set()
        # Handles that the starter thread has or will get to.
        self._starting: set[WorkerProcess] = set()
        # Outcomes of starts that the loop has not looked at yet. Kept here, so that one that comes
        # while a loop is being closed is there for the next.
        self._spawned: deque[tuple[WorkerProcess, BaseException | None]] = deque()
        # Ready handles by id, and how to send a frame (kind, batch id, body) to each without
        # waiting.
        self._serving: dict[int, WorkerProcess] = {}
        self.senders: dict[int, Callable[[Kind, int, bytes], None]] = {}
        # Memory in which large inputs reach all of them, or why there is none; None before `open`,
        # and if there is to be none.
        self.slabs: Slabs | OSError | None = None
        # Copies both; what has been copied, or done otherwise there, waits for the loop here.
        self._copier = _JobThread(f"fast_batcher-copier-{name}")
        self._done_jobs: deque[tuple[_Done, BaseException | None]] = deque()
        self._beats = 0
        # Processes started at each place.
        self._generations = [0] * settings.num_workers
        self._restarts = [
            Restarts(settings.max_restarts, settings.restart_window, settings.restart_backoff)
            for _ in range(settings.num_workers)
        ]
        self._restart_timers: dict[int, asyncio.TimerHandle] = {}
        # Places whose restart budget is spent, until they have a ready worker again.
        self._given_up: set[int] = set()
        # Whether `batch_answered` is to be called.
        self._recycling = Recycling(settings.max_batches_per_worker, settings.max_rss_bytes)
        self.recycles = self._recycling.is_wanted
        # No worker is recycled before this moment: the last try has failed.
        self._recycle_at = 0.0
        self._heartbeat = Heartbeat()
        self._heartbeat_timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        # The thread of that loop.
        self._thread_id = 0
        self._is_closing = False
        self._all_dead: asyncio.Future[None] | None = None
        # Waited for by every `aclose` that is under way.
        self._slabs_closed: asyncio.Future[None] | None = None

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start every worker; what comes of it is told through the events."""
        self._loop, self._thread_id = loop, threading.get_ident()
        self.owner_pid = os.getpid()
        _open_pools.add(self)
        if self._settings.max_shared_bytes:
            try:
                self.slabs = Slabs(self._settings.max_shared_bytes)
            except OSError as error:
                # Not its frames, which hold this pool.
                self.slabs = error.with_traceback(None)
        for index in range(self._settings.num_workers):
            self._start(index)
        self._heartbeat_timer = loop.call_later(INTERVAL, self._beat)

    def rebind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Go on with another loop; the one before is closed, and its timers with it."""
        self._cancel_timers()
        self._loop, self._thread_id = loop, threading.get_ident()
        for handle in self.remaining():
            if handle.is_attached:
                handle.attach(loop)
            if handle.is_ending or handle in self._retired:
                handle.kill()
        self._take_spawned()
        self._take_done_jobs()
        for index in range(self._settings.num_workers):
            # A place with a timer has just been found empty.
            if index not in self._handles and index not in self._restart_timers:
                self._restart(index)
        for handle in self._everybody():
            if self._is_wanted(handle) and not handle.is_ready:
                self._limit_start(handle)
        self._heartbeat_timer = loop.call_later(INTERVAL, self._beat)

    def link(self, worker: int) -> WorkerProcess:
        """A ready worker, to which batches may be sent."""
        return self._serving[worker]

    def replace(self, worker: int) -> None:
        """End a worker whose batch takes too long: SIGTERM, then SIGKILL, then another worker."""
        handle = self._serving[worker]
        handle.ignore()
        handle.signal(signal.SIGTERM)
        assert self._loop is not None, "a worker is ready only on a loop"
        handle.set_timer(self._loop.call_later(TERMINATE_GRACE, handle.kill))

    def kill(self, worker: int) -> None:
        """End a worker that is of no use at once; another takes its place."""
        self._serving[worker].kill()

    def kill_on_protocol_error(self, worker: int, error: Exception) -> None:
        """The same of one that has talked nonsense, unless it is lost already."""
        handle = self._serving.get(worker)
        if handle is not None:
            handle.kill_on_protocol_error(error)

    def batch_answered(self, worker: int) -> None:
        """Count a batch; if the worker is due, begin to replace it."""
        handle = self._serving.get(worker)
        if handle is None:
            return
        handle.batches += 1
        rss_bytes = 0 if self._settings.max_rss_bytes is None else handle.rss_bytes
        was_known = self._recycling.is_limit_too_low
        is_due = self._recycling.is_due(handle.batches, rss_bytes)
        if self._recycling.is_limit_too_low and not was_known:
            logger.warning(
                "%s: worker %d (pid %s) has %d bytes after its first batch: max_rss_bytes=%s is "
                "below what the model needs, and replaces nobody",
                self._name,
                handle.index,
                handle.pid,
                rss_bytes,
                self._settings.max_rss_bytes,
            )
        # One at a time: two copies of each model may be more than the machine has room for.
        is_free = self._successor is None and not self._retired and not self._is_closing
        is_current = self._handles.get(handle.index) is handle
        if is_due and is_free and is_current and monotonic() >= self._recycle_at:
            self._successor = self._make(handle.index)
            self._load(self._successor)

    def run_in_thread(self, job: "_Job", done: "_Done") -> None:
        """Do a job on a thread of its own, and then call `done` with its error or None here.

        Jobs are done one after the other. A pool that is ended forgets those it has not begun, and
        calls nothing any more.
        """
        try:
            self._copier.run(job, functools.partial(self._done_in_thread, done))
        except RuntimeError:  # the system has no thread for us: better late than never
            self._done_in_thread(done, _run(job))

    def read_all(self) -> list[int]:
        """Hand on what the ready workers have said by now.

        Not while a frame is handed on: it would be written over.

        Returns:
            Those of whom the rest of a frame is coming.
        """
        return [handle.id for handle in [*self._serving.values()] if handle.read_all()]

    def find_sending(self) -> list[tuple[int, int | None]]:
        """Ready workers to which a batch is still being sent, and the one that each began last."""
        handles = [*self._serving.values()]
        return [(handle.id, handle.read_begun()) for handle in handles if handle.is_sending()]

    def answered_ping(self, worker: int) -> None:
        """A worker has said PONG."""
        self._heartbeat.answered(worker)

    def abandon(self) -> None:
        """Kill every worker without waiting, and start no other."""
        self._is_closing = True
        self._cancel_timers()
        for handle in self.remaining():
            handle.kill()

    async def aclose(self) -> None:
        """Ask the workers to end, then make them; returns when they are dead."""
        self._is_closing = True
        self._cancel_timers()
        try:
            for handle in self.remaining():
                if handle.is_ready:
                    handle.ask_to_end()
                else:
                    handle.kill()  # it is loading: there is nothing to finish
            await self._wait_until_dead(self._settings.stop_timeout)
            for number, grace in _LAST_STEPS:
                for handle in self.remaining():
                    handle.ignore()
                    handle.signal(number)
                await self._wait_until_dead(grace)
            await self._close_slabs()
        finally:
            # After a cancelled wait there may be workers left; no more waiting then.
            self.stop(0.0)

    async def _close_slabs(self) -> None:
        """Give the shared memory back on the copier thread: 80 ms per 200 MiB that were used."""
        if (
            self._slabs_closed is None
            and isinstance(self.slabs, Slabs)
            and not self.slabs.is_closed
        ):
            self._slabs_closed = asyncio.get_running_loop().create_future()
            self.run_in_thread(self.slabs.close, functools.partial(_wake, self._slabs_closed))
        if self._slabs_closed is not None:
            # `finish_end` wakes it too: after that the copier thread does nothing.
            await asyncio.wait([self._slabs_closed])

    def stop(self, grace: float) -> None:
        """End without a loop: waits `grace` seconds for the workers to end by themselves."""
        _end([self], grace)

    # What handles tell.

    def frame_arrived(self, handle: WorkerProcess, frame: Frame) -> None:
        """Learn from a worker that is not ready yet how the start went."""
        if frame.kind is Kind.READY:
            self._serve_with(handle, read_times(frame.body))
        elif frame.kind is Kind.STARTUP_FAILED:
            failure = RemoteFailure(*codec.loads(frame.body))
            error = WorkerStartupError(
                f"worker {handle.index} could not load {self._model.name}: {failure.text}"
            )
            error.__cause__ = RemoteTraceback(failure.traceback)
            self._give_up_start(handle, error)
        else:
            raise TransportError(f"a worker that is not ready sent {frame.kind.name}")

    def worker_exited(self, handle: WorkerProcess) -> None:
        """A process is dead: tell what that means, and see to its replacement."""
        self._leaving.discard(handle)
        handle.set_timer(None)
        if isinstance(handle.outbox, OutboxReader) and handle.outbox.is_open:
            # 80 ms per 200 MiB that were used.
            self.run_in_thread(handle.outbox.close, lambda _: None)
        if handle is self._successor or self._handles.get(handle.index) is handle:
            if handle.is_ready:
                del self._handles[handle.index]
                self._lose(handle)
                self._restart_later(handle.index)
            else:
                self._give_up_start(handle, self._died_loading(handle))
        elif handle in self._retired:
            self._retired.discard(handle)
            self._lose(handle)
        self._notice_all_dead()

    # Starting and replacing.

    def _start(self, index: int) -> None:
        self._handles[index] = self._make(index)
        self._load(self._handles[index])

    def _make(self, index: int) -> WorkerProcess:
        worker = self._generations[index] * self._settings.num_workers + index
        self._generations[index] += 1
        slabs = self.slabs if isinstance(self.slabs, Slabs) else None
        return WorkerProcess(worker, index, self._model, self._settings, slabs, self)

    def _load(self, handle: WorkerProcess) -> None:
        self._limit_start(handle)
        self._starting.add(handle)
        self._starter.run(handle.spawn, functools.partial(self._spawned_in_thread, handle))

    def _limit_start(self, handle: WorkerProcess) -> None:
        assert self._loop is not None, "set by open"
        timeout = self._settings.start_timeout
        handle.set_timer(self._loop.call_later(timeout, self._start_timed_out, handle))

    def _spawned_in_thread(self, handle: WorkerProcess, error: BaseException | None) -> None:
        """On the starter thread: pass the word to whichever loop there is now."""
        assert self._loop is not None, "set by open"
        self._spawned.append((handle, error))
        with contextlib.suppress(RuntimeError):  # that loop is closed; the next one looks itself
            self._loop.call_soon_threadsafe(self._take_spawned)

    def _take_spawned(self) -> None:
        while self._spawned:
            self._finish_spawn(*self._spawned.popleft())

    def _done_in_thread(self, done: "_Done", error: BaseException | None) -> None:
        """On the copier thread: pass the word to whichever loop there is now."""
        assert self._loop is not None, "set by open"
        self._done_jobs.append((done, error))
        with contextlib.suppress(RuntimeError):  # that loop is closed; the next one looks itself
            self._loop.call_soon_threadsafe(self._take_done_jobs)

    def _take_done_jobs(self) -> None:
        while self._done_jobs:
            done, error = self._done_jobs.popleft()
            done(error)

    def _finish_spawn(self, handle: WorkerProcess, error: BaseException | None) -> None:
        assert self._loop is not None, "set by open"
        self._starting.discard(handle)
        if error is not None:
            startup_error = WorkerStartupError(
                f"worker {handle.index} could not be started: {error!r}"
            )
            startup_error.__cause__ = error
            self._give_up_start(handle, startup_error)
            self._notice_all_dead()
        elif handle.is_alive:  # else stop() has been here
            handle.attach(self._loop)
            self._limit_start(handle)
            if self._is_closing or not self._is_wanted(handle):
                self._leaving.add(handle)
                handle.kill()

    def _is_wanted(self, handle: WorkerProcess) -> bool:
        return handle is self._successor or self._handles.get(handle.index) is handle

    def _serve_with(self, handle: WorkerProcess, times: list[tuple[int, float]]) -> None:
        index = handle.index
        handle.is_ready = True
        handle.set_timer(None)
        self._serving[handle.id] = handle
        self.senders[handle.id] = handle.send
        handle.deliver_to(functools.partial(self._events.frame_arrived, handle.id))
        self._restarts[index].ready(monotonic())
        self._given_up.discard(index)
        logger.info("%s: worker %d (pid %s) is ready", self._name, index, handle.pid)
        if handle is self._successor:
            self._successor = None
            before = self._handles[index]
            self._handles[index] = handle
            # Ready first, so that at no moment there is nobody.
            self._events.worker_ready(handle.id, times)
            self._retire(before)
        else:
            self._events.worker_ready(handle.id, times)

    def _retire(self, handle: WorkerProcess) -> None:
        logger.info("%s: worker %d (pid %s) is recycled", self._name, handle.index, handle.pid)
        self._retired.add(handle)
        self._events.worker_retired(handle.id)
        if handle.is_ending:  # it hangs, and is being ended already
            return
        # It reads this behind the batches that it has been given.
        handle.ask_to_end()
        self._watch_retired(handle)

    def _watch_retired(self, handle: WorkerProcess) -> None:
        """It may take its time for what it has, but not for its end."""
        assert self._loop is not None, "a worker is ready only on a loop"
        if handle.id in self._events.idle_workers():
            then = functools.partial(self.replace, handle.id)
        else:
            then = functools.partial(self._watch_retired, handle)
        handle.set_timer(self._loop.call_later(self._settings.stop_timeout, then))

    def _start_timed_out(self, handle: WorkerProcess) -> None:
        was_attached = handle.is_attached
        self._take_spawned()
        if handle.is_attached and not was_attached:
            # The loop was blocked since it was spawned, and it learns only now what to load.
            return
        if handle.is_attached:  # it may have been ready in time, and the loop was blocked
            handle.read_all()
        if handle.is_ready:
            return
        self._give_up_start(
            handle,
            WorkerStartupError(
                f"worker {handle.index} did not load {self._model.name} within start_timeout="
                f"{self._settings.start_timeout} seconds and was ended; raise start_timeout if the "
                "model needs longer"
            ),
        )

    def _give_up_start(self, handle: WorkerProcess, error: WorkerStartupError) -> None:
        if not self._is_wanted(handle):
            return
        handle.set_timer(None)
        if handle.is_alive:
            self._leaving.add(handle)
            handle.kill()
        if handle is self._successor:
            self._successor = None
            self._recycle_at = monotonic() + MAX_DELAY
            logger.warning(
                "%s: %s; the worker before it goes on", self._name, error, exc_info=error
            )
            return
        del self._handles[handle.index]
        if not self._is_closing:
            self._events.worker_failed_to_start(handle.id, error)
            self._restart_later(handle.index)

    def _died_loading(self, handle: WorkerProcess) -> WorkerStartupError:
        return WorkerStartupError(
            f"worker {handle.index} ended with {handle.exit_text} before it had loaded "
            f"{self._model.name}; its output on stderr may tell why. A script that is run needs "
            "`if __name__ == '__main__':` around what it does, because the worker imports it"
        )

    def _lose(self, handle: WorkerProcess) -> None:
        del self._serving[handle.id]
        del self.senders[handle.id]
        self._heartbeat.answered(handle.id)
        is_expected = self._is_closing or (handle.exit_code == 0 and handle.was_asked_to_end)
        is_ours = handle.is_ending and not handle.has_hung_up
        if not is_expected:
            # Whoever decided to end it has logged why.
            logger.log(
                logging.INFO if is_ours else logging.WARNING,
                "%s: worker %d (pid %s) ended with %s; another takes its place",
                self._name,
                handle.index,
                handle.pid,
                handle.exit_text,
            )
        is_killed = handle.exit_code == -signal.SIGKILL and not is_ours
        exit = Exit(handle.exit_text, is_killed, handle.taken, handle.begun, handle.inherited)
        self._events.worker_lost(handle.id, exit)

    def _restart_later(self, index: int) -> None:
        # The batcher may have answered the event by ending the pool.
        if self._is_closing:
            return
        assert self._loop is not None, "set by open"
        delay, is_given_up = self._restarts[index].lost(monotonic())
        if self._successor is not None and self._successor.index == index:
            self._handles[index], self._successor = self._successor, None
            return
        self._restart_timers[index] = self._loop.call_later(delay, self._restart, index)
        reason = (
            f"worker {index} was restarted max_restarts={self._settings.max_restarts} times within "
            f"restart_window={self._settings.restart_window} seconds"
        )
        if is_given_up:
            logger.error("%s: %s; the next try is in %.3g seconds", self._name, reason, delay)
            self._given_up.add(index)
        if len(self._given_up) == self._settings.num_workers:
            next_try = min(timer.when() for timer in self._restart_timers.values())
            self._events.workers_given_up(reason, max(0.0, next_try - self._loop.time()))

    def _restart(self, index: int) -> None:
        self._restart_timers.pop(index, None)
        if not self._is_closing:
            self._start(index)

    def _beat(self) -> None:
        """Ping the idle workers, and replace those that have not answered the last ping."""
        assert self._loop is not None, "set by open"
        self.read_all()  # the answers to the last pings may be there, and the loop was blocked
        # Those that have been asked to end read nothing more.
        idle = [
            worker
            for worker in self._events.idle_workers()
            if worker in self._serving and not self._serving[worker].was_asked_to_end
        ]
        to_ping, silent = self._heartbeat.tick(monotonic(), idle)
        for worker in silent:
            handle = self._serving.get(worker)
            if handle is not None and not handle.is_ending:
                logger.warning(
                    "%s: worker %d (pid %s) is replaced: it was idle and has not answered for "
                    "%g seconds",
                    self._name,
                    handle.index,
                    handle.pid,
                    INTERVAL,
                )
                handle.kill()
        for worker in to_ping:
            self.senders[worker](Kind.PING, 0, b"")
        self._beats += 1
        if self._beats % BEATS_TO_KEEP_MEMORY == 0 and isinstance(self.slabs, Slabs):
            self._give_back_memory(self.slabs)
        self._heartbeat_timer = self._loop.call_later(INTERVAL, self._beat)

    def _give_back_memory(self, slabs: Slabs) -> None:
        """Begin to give back what has not been used since the last call of this."""
        unused = slabs.take_unused()
        if unused is not None:
            self.run_in_thread(
                functools.partial(slabs.punch, unused), lambda _: slabs.mark_uncommitted(unused)
            )

    # Ending.

    def remaining(self) -> list[WorkerProcess]:
        """The workers that live."""
        return [handle for handle in self._everybody() if handle.is_alive]

    def _everybody(self) -> set[WorkerProcess]:
        handles = {*self._handles.values(), *self._retired, *self._leaving, *self._starting}
        return handles if self._successor is None else {*handles, self._successor}

    async def _wait_until_dead(self, seconds: float) -> None:
        if self.remaining() or self._starting:
            if self._all_dead is None or self._all_dead.done():
                self._all_dead = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._all_dead], timeout=seconds)

    def _notice_all_dead(self) -> None:
        is_awaited = self._all_dead is not None and not self._all_dead.done()
        if is_awaited and not self.remaining() and not self._starting:
            assert self._all_dead is not None
            self._all_dead.set_result(None)

    def _cancel_timers(self) -> None:
        for timer in self._restart_timers.values():
            timer.cancel()
        self._restart_timers.clear()
        if self._heartbeat_timer is not None:
            self._heartbeat_timer.cancel()
        for handle in self._everybody():
            handle.set_timer(None)

    # At the end of the interpreter.

    @property
    def foreign_loop(self) -> asyncio.AbstractEventLoop | None:
        """The loop, if it runs in another thread than the caller's. Any thread."""
        loop = self._loop
        if loop is None or self._thread_id == threading.get_ident() or not loop.is_running():
            return None
        return loop

    def retire_all(self) -> None:
        """Let the batcher send nothing more: calls that come now wait, and see no worker die."""
        for worker in self._serving:
            self._events.worker_retired(worker)

    def kill_beside_loop(self) -> None:
        """Kill every worker, and change nothing that the loop uses. Any thread."""
        self._is_closing = True
        for handle in self.remaining():
            handle.signal(signal.SIGKILL)

    # The steps of `_end`, which ends several pools at once.

    def begin_end(self) -> None:
        """Start nothing more, and close the pipes: the workers end when they notice."""
        self._is_closing = True
        self._cancel_timers()
        self._starter.hold()
        self._copier.hold()
        for handle in self.remaining():
            handle.disconnect()

    def finish_end(self) -> None:
        """Forget the workers, which are dead, and end the threads."""
        self._handles.clear()
        self._successor = None
        self._retired.clear()
        self._leaving.clear()
        self._starting.clear()
        self._serving.clear()
        self.senders.clear()
        self._starter.stop()
        self._copier.stop()
        self._done_jobs.clear()
        if isinstance(self.slabs, Slabs):
            self.slabs.close()
        # Nothing else ends the wait of an `aclose` now.
        for waiter in (self._all_dead, self._slabs_closed):
            if waiter is not None and not waiter.get_loop().is_closed():
                _wake(waiter)
        _open_pools.discard(self)


def _wake(waiter: "asyncio.Future[None]", _: object = None) -> None:
    if not waiter.done():
        waiter.set_result(None)


class _JobThread:
    """A thread that does one job after the other; there is none before the first job.

    Two things are not the event loop's: copying what is large, and starting worker processes, which
    takes milliseconds. And that must be a thread that lives as long as the workers: on Linux the
    kernel ends them when the *thread* that forked them ends.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[tuple[_Job, _Done] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        # Held while a job is being done, and to forbid it.
        self._lock = threading.Lock()
        self._is_held = False

    def run(self, job: "_Job", done: "_Done" = lambda _: None) -> None:
        """Call `job` and then `done`, with its error or None, on the thread."""
        if self._thread is None:
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            thread.start()  # may raise: there is no thread then
            self._thread = thread
        self._jobs.put((job, done))

    def hold(self) -> None:
        """From the return of this call on nothing is done any more."""
        with self._lock:
            self._is_held = True

    def stop(self) -> None:
        """End the thread; workers that it has started are dead by now."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Wait for a job and do it; a method of its own, so that nothing of it is kept after it."""
        next_one = self._jobs.get()
        if next_one is None:
            return False
        job, done = next_one
        with self._lock:
            if self._is_held:
                return True
            error = _run(job)
        done(error)
        return True


_Job = Callable[[], None]
_Done = Callable[[BaseException | None], None]


def _run(job: _Job) -> BaseException | None:
    """Do it; its error, which the loop has to hear of."""
    try:
        job()
    except BaseException as error:  # noqa: BLE001  of any kind
        # Its frames hold the pipes of a start that failed.
        return error.with_traceback(None)
    return None


# Pools that have not been ended, for the end of the interpreter. They are held here: a pool whose
# batcher was dropped has workers all the same, and they are to end as those of any other do.
_open_pools: set[Pool] = set()


def _end(pools: list[Pool], grace: float) -> None:
    """End these pools together, blocking: ask, SIGTERM, SIGKILL; without grace only the last."""
    for pool in pools:
        pool.begin_end()
    steps = [(None, grace), *_LAST_STEPS] if grace else [_LAST_STEPS[-1]]
    for number, wait in steps:
        handles = [handle for pool in pools for handle in pool.remaining()]
        if number is not None:
            for handle in handles:
                handle.signal(number)
        _reap_dead(handles, wait)
    for pool in pools:
        pool.finish_end()


def _reap_dead(handles: list[WorkerProcess], seconds: float) -> None:
    """Wait up to so many seconds for these processes to die."""
    deadline = monotonic() + seconds
    poller = select.poll()
    waiting = {handle.death_fd: handle for handle in handles}
    for fd in waiting:
        poller.register(fd, select.POLLIN)
    while waiting:
        ready = poller.poll(max(0.0, deadline - monotonic()) * 1000)
        if not ready:
            return
        for fd, _ in ready:
            poller.unregister(fd)
            handle = waiting.pop(fd)
            handle.reap()
            handle.close_outbox()


@atexit.register
def _end_forgotten_pools() -> None:
    # In a forked copy of this process the workers are somebody else's.
    mine = [pool for pool in list(_open_pools) if pool.owner_pid == os.getpid()]
    if not mine:
        return
    grace = max(pool.stop_timeout for pool in mine)
    here: list[Pool] = []
    elsewhere: dict[asyncio.AbstractEventLoop, list[Pool]] = {}
    for pool in mine:
        loop = pool.foreign_loop
        (here if loop is None else elsewhere.setdefault(loop, [])).append(pool)
    endings = [
        (loop, pools, _begin_end_on(loop, pools, grace)) for loop, pools in elsewhere.items()
    ]
    if here:
        _end(here, grace)
    deadline = monotonic() + grace + TERMINATE_GRACE + LOOP_GRACE
    for loop, pools, ended in endings:
        _finish_end_on(loop, pools, ended, deadline, grace)


def _begin_end_on(
    loop: asyncio.AbstractEventLoop, pools: list[Pool], grace: float
) -> threading.Event:
    """Have pools ended by the thread of their loop: a daemon thread, which runs on at the end.

    If this thread ended them, both would release a worker that has just died.

    Returns:
        Set once they have been ended.
    """
    ended = threading.Event()

    def end() -> None:
        try:
            for pool in pools:
                pool.retire_all()
            _end(pools, grace)
        finally:
            ended.set()

    with contextlib.suppress(RuntimeError):  # the loop has just been closed
        loop.call_soon_threadsafe(end)
    return ended


def _finish_end_on(
    loop: asyncio.AbstractEventLoop,
    pools: list[Pool],
    ended: threading.Event,
    deadline: float,
    grace: float,
) -> None:
    """Wait until the thread of a loop has ended its pools; end them here if it does not."""
    while not ended.wait(LOOK_INTERVAL):
        if not loop.is_running():
            _end(pools, grace)
            return
        if monotonic() >= deadline:
            for pool in pools:
                pool.kill_beside_loop()
            return
